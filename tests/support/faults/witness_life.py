"""A random life of a member's folder, on real files: what was acknowledged is written down.

The parts of a writer without its event loop: the store, the state in it, exports, retention.
"""

from __future__ import annotations

import atexit
import random
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from cometmq.format import record
from cometmq.format.batch import BatchLimits
from cometmq.member.config import MemberConfig
from cometmq.member.read.records import read_mended_message
from cometmq.member.state.exports import Exporter
from cometmq.member.state.opening import Opened, open_writer
from cometmq.member.state.statelog import append_now, keep_from
from cometmq.messaging import rocketmq_tables
from cometmq.messaging.changes import Change
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.state import BrokerState, change_records
from cometmq.messaging.topics import is_system
from cometmq.model import FlushMode, Position, TopicConfig
from cometmq.store.base import BaseStore
from cometmq.store.writer import MessageStore
from tests.compat.golden import GOLDEN, STORES
from tests.compat.listing import INDEX, QUEUE_FILE_BYTES
from tests.support.stores.small_stores import HOST, WallClock, encoded

LOG_FILE_BYTES = 16 * 1024  # as the golden stores
BEGAN_MS = 1_800_000_000_000  # after the golden stores
TOPICS = ("orders", "rare", "audit")


@dataclass(frozen=True, slots=True)
class Message:
    """What was acknowledged. ``synced``: by a sync before the answer."""

    topic: str
    queue_id: int
    queue_offset: int
    generation: int
    log_offset: int
    body: bytes
    tag: str
    keys: tuple[str, ...]
    synced: bool = True

    @property
    def place(self) -> tuple[str, int, int]:
        return self.topic, self.queue_id, self.queue_offset


def config_of(root: Path) -> MemberConfig:
    """Small files, so that a short life rolls over several times."""
    return MemberConfig(
        store_path=root,
        mapped_file_size_commit_log=LOG_FILE_BYTES,
        mapped_file_size_consume_queue=QUEUE_FILE_BYTES,
        max_hash_slot_num=INDEX.hash_slots,
        max_index_num=INDEX.entries,
    )


@cache
def rocketmq_folder(name: str) -> Path:
    """A folder that RocketMQ wrote, unpacked once."""
    target = Path(mkdtemp(prefix="witness-"))
    atexit.register(shutil.rmtree, target)
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(target, filter="data")
    return target / "store"


class Life:
    """Everything from ``rng``. ``topics`` and ``messages`` are what readers may count on."""

    def __init__(self, root: Path, rng: random.Random, began_ms: int = BEGAN_MS) -> None:
        self.root = root
        self.rng = rng
        self.clock = WallClock(began_ms)
        self.messages: dict[tuple[str, int, int], Message] = {}
        self.positions: list[Message] = []  # all that ever had a place in a queue
        self.topics: dict[str, int] = {}  # how many queues each has
        self.epoch = 0  # the highest of all
        self.sure_end = 0  # the log was synced up to here
        self.was_rocketmqs = False
        self.older: Path | None = None  # a copy of the folder from the middle of the life
        self._opened: Opened | None = None
        self._number = 0
        self._syncs = rng.random() < 0.7  # every send, before it is answered

    # --- the frame --------------------------------------------------------------------------------

    def play(self) -> None:
        """From nothing, or a folder of RocketMQ's, to the last stop."""
        if self.rng.random() < 0.15:
            self._begin_as_rocketmq()
        else:
            self._start()
        acts: list[Callable[[], None]] = [
            *[self._send] * 12,
            *[self._sync] * 2,
            *[self._sync_queues] * 3,
            *[self._index] * 2,
            *[self._commit] * 3,
            *[self._put_topic] * 2,
            self._drop_topic,
            self._put_group,
            *[self._export] * 2,
            self._copy_state,
            self._retain,
            self._prepare,
            self._restart,
            self._photograph,
        ]
        for act in self.rng.choices(acts, k=self.rng.choice([3, 15, 40, 70])):
            self.clock.now_ms += self.rng.choice([0, 1, 300])
            act()
        self._stop()

    def _begin_as_rocketmq(self) -> None:
        name = self.rng.choice(sorted(STORES))
        shutil.copytree(rocketmq_folder(name), self.root, dirs_exist_ok=True)
        self.was_rocketmqs = True
        self._start()
        self.topics = {
            t.name: t.write_queue_count for t in self._state.topics if not is_system(t.name)
        }
        for topic, queue_id in self._store.queues():
            if topic in self.topics:
                generation = self._state.generations.of(topic, queue_id).current
                for offset in range(*self._store.queue_bounds(topic, queue_id)):
                    found = read(self._store, topic, queue_id, offset)
                    self._acknowledge(found, generation)

    @property
    def _store(self) -> MessageStore:
        assert self._opened is not None
        return self._opened.store

    @property
    def _state(self) -> BrokerState:
        assert self._opened is not None
        return self._opened.state

    def _start(self) -> None:
        self._opened = start(self.root, self.clock)
        self.epoch = self._store.epoch

    def _stop(self) -> None:
        assert self._opened is not None
        if self.rng.random() < 0.5:
            self._write_offsets()
            self._export()
            self._store.close()
            self.sure_end = self._store.appended_offset
        else:
            self.sure_end = self._store.flushed_offset
            self._store.abandon()
        self._opened = None

    def _restart(self) -> None:
        self._stop()
        self._start()

    def acknowledged(self) -> list[Message]:
        return [replace(m, synced=m.log_offset < self.sure_end) for m in self.messages.values()]

    # --- acts -------------------------------------------------------------------------------------

    def _send(self) -> None:
        if not self.topics:
            return self._put_topic()
        topic = self.rng.choice(sorted(self.topics))
        queue_id = self.rng.randrange(self.topics[topic])
        tag = self.rng.choice(["", "red", "blue"])
        sent = []
        for _ in range(self.rng.choice([1, 1, 2, 5])):
            self._number += 1
            size = self.rng.choice([0, 20, 300, 900, 2500])
            keys = f"k{self._number} all" if self.rng.random() < 0.5 else ""
            sent.append((b"%d " % self._number + self.rng.randbytes(size), keys))
        records = b"".join(encoded(topic, queue_id, b, tag, keys) for b, keys in sent)
        done = self._store.append(
            records, [(topic, queue_id, len(sent))], born_host=HOST, store_host=HOST
        )
        if self._syncs:
            self._store.flush_log()
        [first] = done.queue_offsets
        generation = self._state.generations.of(topic, queue_id).current
        for offset in range(first, first + len(sent)):
            self._acknowledge(read(self._store, topic, queue_id, offset), generation)

    def _acknowledge(self, found: record.Record, generation: int) -> None:
        message = Message(
            found.topic,
            found.queue_id,
            found.queue_offset,
            generation,
            found.log_offset,
            found.body,
            found.tag,
            tuple(found.keys),
        )
        self.messages[message.place] = message
        self.positions.append(message)

    def _change(self, *changes: Change) -> None:
        append_now(self._store, change_records(changes), HOST, self.clock.now_ms)
        for change in changes:
            self._state.apply(change)

    def _put_topic(self) -> None:
        name, count = self.rng.choice(TOPICS), self.rng.randint(1, 3)
        if self.topics.get(name, 0) < count:
            self._change(
                self._state.plan_topic(TopicConfig(name, count, count, flush_mode=FlushMode.SYNC))
            )
            self.topics[name] = count

    def _drop_topic(self) -> None:
        if self.topics:
            name = self.rng.choice(sorted(self.topics))
            self._change(self._state.plan_drop(name))
            self._store.drop_topic(name)
            del self.topics[name]
            self.messages = {p: m for p, m in self.messages.items() if m.topic != name}

    def _put_group(self) -> None:
        self._change(self._state.plan_group(GroupSettings(self.rng.choice(["g1", "g2"]))))

    def _commit(self) -> None:
        if self.messages:
            topic, queue_id, offset = self.rng.choice(sorted(self.messages))
            history = self._state.generations.of(topic, queue_id)
            place = Position(history.current, offset)
            self._state.offsets.commit("g1", (topic, queue_id), place, history, offset + 1)
            self._write_offsets()

    def _write_offsets(self) -> None:
        while (change := self._state.plan_offsets()) is not None:
            append_now(self._store, change_records([change]), HOST, self.clock.now_ms)
            self._state.offsets.written(change.commits)

    def _copy_state(self) -> None:
        def next_offset(topic: str, queue_id: int) -> int:
            return self._store.queue_bounds(topic, queue_id)[1]

        copy = self._state.snapshot_records(next_offset_of=next_offset)
        append_now(self._store, copy, HOST, self.clock.now_ms)

    def _export(self) -> None:
        mark = rocketmq_tables.SnapshotMark(self._store.epoch, self._store.appended_offset)
        written = rocketmq_tables.export(self._state, mark, self.clock.now_ms)
        Exporter(self.root / "config").write(written)

    def _retain(self) -> None:
        """The oldest log files go, as far as the state's copies let them."""
        self._copy_state()
        self._copy_state()
        self._sync_queues()
        keep = keep_from(self._store)
        old = [file for file in self._store.cleaner.log_files() if file.end <= keep]
        if old:
            going = old[: self.rng.randint(1, len(old))]
            self._store.cleaner.forget_before(going[-1].end)
            for _ in going:
                self._store.cleaner.remove_first()
            self._store.cleaner.remove_spare_files()
            start = self._store.min_offset
            self.messages = {p: m for p, m in self.messages.items() if m.log_offset >= start}

    def _sync(self) -> None:
        self._store.flush_log()

    def _sync_queues(self) -> None:
        self._store.flush_log()
        self._store.flush_queues()

    def _index(self) -> None:
        while self._store.index_some():
            pass

    def _prepare(self) -> None:
        self._store.prepare_next_file()

    def _photograph(self) -> None:
        if self.older is None:
            self.older = self.root.with_name(f"{self.root.name}-older")
            shutil.copytree(self.root, self.older)


def start(root: Path, clock: WallClock) -> Opened:
    """As a broker opens its folder."""
    return open_writer(config_of(root), BatchLimits(), HOST, clock)


def read(store: BaseStore, topic: str, queue_id: int, queue_offset: int) -> record.Record:
    """One message, as a consumer gets it. StoreDamaged: it is told that it is lost. LookupError:
    nothing is said of it.
    """
    low, high = store.queue_bounds(topic, queue_id)
    if not low <= queue_offset < high:
        raise LookupError(f"the queue goes from {low} to {high}")
    return record.decode(read_mended_message(store, (topic, queue_id), queue_offset))

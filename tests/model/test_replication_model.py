"""A writer and its follower, chunk by chunk, through cuts, crashes and power cuts of either.

The real stores, the real handshake, state and visibility; only the wire is left out. After every
catching up the two logs are the same bytes, with the same queues and the same state. Before that
the follower shows nothing that the writer does not show.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock
from zlib import crc32

import pytest
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cometmq.errors import MessageNotFound, StoreFailed
from cometmq.format.batch import BatchLimits
from cometmq.member.state.follower import FollowerStorage, cut
from cometmq.member.state.opening import can_lead, open_copy, open_writer
from cometmq.member.state.statelog import encode_record
from cometmq.member.storage.authority import SoleWriter
from cometmq.member.storage.flusher import FlushPolicy
from cometmq.member.storage.member_storage import MemberStorage, Segment
from cometmq.messaging.changes import Change
from cometmq.messaging.state import STATE_QUEUE_ID, STATE_TOPIC, change_records
from cometmq.model import TopicConfig
from cometmq.replication.follower import LogView, Plan, owned, plan, start_of_copy
from cometmq.replication.watermarks import DurabilityClass
from cometmq.store.base import BaseStore
from cometmq.store.disk.files import OsFiles
from tests.support.cluster.broker import config_for
from tests.support.stores.small_stores import HOST, WallClock, encoded

T = TypeVar("T")

# What a disk loses is up to the model, so memory will do, and is faster.
FOLDERS = "/dev/shm" if Path("/dev/shm").is_dir() else None
LOG_FILE_BYTES = 64 * 1024
POLICY = FlushPolicy()
TOPICS = ["A", "B", "C"]


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that has nothing to wait for."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("it waits")


class WriterAndFollower(RuleBasedStateMachine):
    """``ends``: where batches of the writer end that may be lost in a power cut."""

    writer: MemberStorage
    copy: FollowerStorage

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="replication-model-", dir=FOLDERS))
        self.clock = WallClock()
        self.boots = 1
        self.count = 0
        self.ends: list[int] = []
        self.connected = False
        self.opened = False
        self.folders = ["first", "second"]  # the writer's, the follower's
        self.boot_id = mock.patch.object(OsFiles, "boot_id", self.boot)
        self.boot_id.start()

    def boot(self) -> str:
        return f"boot-{self.boots}"

    @initialize()
    def begin(self) -> None:
        self.open_writer()
        self.open_copy()
        self.opened = True
        self.put_topic("A", 2)
        self.put_topic("B", 1)

    # --- the two ------------------------------------------------------------------------------

    def config(self, name: str) -> Any:
        return config_for(
            self.folder / name,
            mapped_file_size_commit_log=LOG_FILE_BYTES,
            mapped_file_size_consume_queue=140,
            max_hash_slot_num=4,
            max_index_num=8,
        )

    def open_writer(self, follower: FollowerStorage | None = None, floor: int = 0) -> None:
        config = self.config(self.folders[0])
        store = None if follower is None else follower.store
        found = open_writer(
            config, BatchLimits(), HOST, self.clock, epoch_floor=floor, follower=store
        )
        self.state = found.state
        self.writer = MemberStorage(found.store, POLICY, self.clock, SoleWriter())
        self.ends = []

    def open_copy(self) -> None:
        found = open_copy(self.config(self.folders[1]), self.clock)
        self.copied = found.state.state
        self.copy = FollowerStorage(found.store, found.state, POLICY, self.clock)
        self.connected = False

    # --- what the writer does -----------------------------------------------------------------

    def append(self, topic: str, queue_id: int, records: bytes, count: int) -> None:
        segment = Segment(topic, queue_id, count, DurabilityClass.ASYNC)
        ticket = self.writer.append(records, [segment], born_host=HOST, store_host=HOST)
        self.ends.append(ticket.appended.end_offset)

    def append_change(self, change: Change) -> None:
        for record in change_records([change]):
            data = encode_record(record, HOST, self.clock.wall_ms())
            self.append(STATE_TOPIC, STATE_QUEUE_ID, data, 1)

    @rule()
    def flush_writer(self) -> None:
        self.writer._synced(self.writer.store.flush_log(), 0.0)
        self.ends = []

    @rule()
    def flush_writers_queues(self) -> None:
        self.flush_writer()
        self.writer.store.flush_queues()

    @rule(topic=st.sampled_from(TOPICS), queues=st.integers(1, 3))
    def put_topic(self, topic: str, queues: int) -> None:
        change = self.state.plan_topic(TopicConfig(topic, queues, queues))
        self.append_change(change)
        self.flush_writer()
        self.state.apply(change)

    @precondition(lambda self: len(self.state.topics) > 0)
    @rule(number=st.integers(0, 2), reaches_the_disk=st.booleans(), copied=st.booleans())
    def drop_topic(self, number: int, reaches_the_disk: bool, copied: bool) -> None:
        """Not reaching the disk: the machine stops in between, and the follower may know more."""
        topics = [config.name for config in self.state.topics]
        topic = topics[number % len(topics)]
        change = self.state.plan_drop(topic)
        if copied:  # so that there is something to lose
            self.append(topic, 0, encoded(topic, 0, b"something"), 1)
            self.flush_writer()
        self.append_change(change)
        if copied:
            self.follow(chunk_bytes=30_000, chunks=1_000)
        if reaches_the_disk:
            self.flush_writer()
            self.state.apply(change)
            self.writer.drop_topic(topic)
        else:
            self.power_cut(0.0, copied=False)

    @precondition(lambda self: len(self.state.topics) > 0)
    @rule(
        number=st.integers(0, 2),
        queue=st.integers(0, 2),
        sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    )
    def send(self, number: int, queue: int, sizes: list[int]) -> None:
        configs = list(self.state.topics)
        config = configs[number % len(configs)]
        queue_id = queue % config.write_queue_count
        bodies = [b"%d/%d:" % (self.count, n) + bytes(size) for n, size in enumerate(sizes)]
        self.count += 1
        records = b"".join(encoded(config.name, queue_id, body) for body in bodies)
        self.append(config.name, queue_id, records, len(bodies))

    @rule(ms=st.integers(0, 10_000))
    def time_passes(self, ms: int) -> None:
        self.clock.now_ms += ms

    @rule()
    def writer_is_killed(self) -> None:
        self.writer.end_threads()
        self.writer.store.abandon()
        self.open_writer()
        self.connected = False

    @rule()
    def writer_restarts(self) -> None:
        self.writer.close()
        self.open_writer()
        self.connected = False

    @rule(keep=st.floats(0, 1), copied=st.booleans())
    def power_cut(self, keep: float, copied: bool) -> None:
        """The writer's machine stops: some of what was not synced is gone, but the follower may
        have it.
        """
        if copied:
            for config in self.state.topics:
                self.append(config.name, 0, encoded(config.name, 0, b"soon gone"), 1)
            self.follow(chunk_bytes=30_000, chunks=1_000)
        store = self.writer.store
        lost = [store.flushed_offset, *(end for end in self.ends if end > store.flushed_offset)]
        end = lost[int(keep * (len(lost) - 1))]
        event(f"power cut loses {'something' if end < store.appended_offset else 'nothing'}")
        self.writer.end_threads()
        store.abandon()
        erase(self.folder / self.folders[0] / "store" / "commitlog", end)
        self.boots += 1
        self.open_writer()
        self.connected = False

    # --- what the follower does ---------------------------------------------------------------

    @rule(chunk_bytes=st.integers(1, 30_000), chunks=st.integers(0, 20))
    def follow(self, chunk_bytes: int, chunks: int) -> None:
        """Copy a few chunks, after the handshake where one is due."""
        while not self.connected:
            self.handshake()
        source, target = self.writer.store, self.copy.store
        for _ in range(chunks):
            chunk = source.read_chunk(target.appended_offset, chunk_bytes)
            if chunk is None:
                return
            at_once(self.copy.copy(target.appended_offset, chunk.data))
            assert target.appended_offset == chunk.next_offset

    def handshake(self) -> None:
        store = self.copy.store
        offset, last = store.last_record()
        end = store.appended_offset
        view = LogView(owned(store.epochs, end), store.min_offset, end, offset, crc32(last))
        source = self.writer.store
        ours = LogView(tuple(source.epochs), source.min_offset, source.appended_offset)
        start = start_of_copy(ours, view, lambda at: crc_at(source, at))
        decision = plan(view, start)
        event(f"handshake: {decision.name}")
        if decision is Plan.COPY:
            store.adopt_epochs(source.epochs)
            self.connected = True
            return
        self.copy.end_threads()
        if decision is Plan.CUT:
            cut(store, start)
            event(f"cut: {'all' if store.appended_offset == 0 else 'a tail'}")
        else:
            store.reset_to(start)
        self.copy.close()
        self.open_copy()

    @rule()
    def hear_positions(self) -> None:
        if self.connected:
            self.copy.raise_marks(self.writer.shown, 0)

    @rule()
    def flush_copy(self) -> None:
        self.copy._synced(self.copy.store.flush_log(), 0.0)

    @rule()
    def flush_copys_queues(self) -> None:
        self.flush_copy()
        self.copy.store.flush_queues()

    @rule()
    def connection_breaks(self) -> None:
        self.connected = False

    @rule()
    def follower_restarts(self) -> None:
        self.copy.close()
        self.open_copy()

    @rule(power=st.booleans())
    def follower_dies(self, power: bool) -> None:
        store = self.copy.store
        self.copy.end_threads()
        store.abandon()
        if power:
            erase(self.folder / self.folders[1] / "store" / "commitlog", store.flushed_offset)
            self.boots += 1
        self.open_copy()

    @rule(first_catches_up=st.booleans(), writer_dies=st.booleans())
    def follower_leads(self, first_catches_up: bool, writer_dies: bool) -> None:
        """It goes on with its open store. The writer before comes back as a follower."""
        if first_catches_up:
            self.catch_up()
        before, after = self.writer, self.copy
        if writer_dies:
            before.end_threads()
            before.store.abandon()
        else:
            before.close()
        after.end_threads()
        self.folders.reverse()
        keys = set(after.store.queues()) - {(STATE_TOPIC, STATE_QUEUE_ID)}
        bounds = {key: after.store.queue_bounds(*key) for key in keys}
        end = after.store.appended_offset
        assert can_lead(self.config(self.folders[0]), after.store)
        self.open_writer(after, before.store.epoch)
        assert self.writer.store.epoch > before.store.epoch
        assert self.writer.store.epochs[-1] == (self.writer.store.epoch, end)
        assert {key: self.writer.store.queue_bounds(*key) for key in keys} == bounds
        with pytest.raises(StoreFailed):
            after.store.flush_log()
        self.open_copy()

    @rule()
    def catch_up(self) -> None:
        self.follow(chunk_bytes=30_000, chunks=10_000)
        self.flush_writer()
        self.flush_copy()
        self.hear_positions()
        assert logs_equal(self.writer.store, self.copy.store)
        keys = {
            key for key in self.writer.store.queues() if self.writer.store.queue_bounds(*key)[1]
        }
        for key in keys:
            assert self.copy.bounds(key) == self.writer.bounds(key), key
        assert list(self.copied.as_changes()) == list(self.state.as_changes())
        self.copied.validate()

    # --- what always holds --------------------------------------------------------------------

    @invariant()
    def positions_are_in_order(self) -> None:
        if self.opened:
            self.writer.validate()
            self.copy.validate()

    @invariant()
    def nothing_is_shown_that_the_writer_does_not_show(self) -> None:
        if not self.opened or not self.connected:
            return
        assert self.copy.store.appended_offset <= self.writer.store.appended_offset
        self.copy.store.validate()
        self.writer.store.validate()
        for topic, queue_id in self.copy.store.queues():
            if self.copied.generations.find(topic, queue_id) == self.state.generations.find(
                topic, queue_id
            ):
                _, readable, appended = self.copy.bounds((topic, queue_id))
                assert readable <= appended
                assert readable <= self.writer.bounds((topic, queue_id))[1]

    def teardown(self) -> None:
        try:
            if self.opened:
                self.catch_up()
                self.writer.close()
                self.copy.close()
        finally:
            self.boot_id.stop()
            shutil.rmtree(self.folder)


def crc_at(store: BaseStore, offset: int) -> int | None:
    try:
        return crc32(store.read_record(offset))
    except MessageNotFound:
        return None


def pieces(store: BaseStore, start: int) -> Iterator[bytes]:
    while piece := store.read_raw(start, LOG_FILE_BYTES):
        start += len(piece)
        yield piece


def logs_equal(writer: BaseStore, copy: BaseStore) -> bool:
    assert copy.appended_offset == writer.appended_offset
    assert copy.min_offset == writer.min_offset == 0
    return b"".join(pieces(writer, 0)) == b"".join(pieces(copy, 0))


def erase(folder: Path, end: int) -> None:
    """Let a log end there, as if what is behind had never reached the disk."""
    for path in folder.iterdir():
        start = int(path.name)
        keep = min(max(0, end - start), LOG_FILE_BYTES)
        with path.open("r+b") as file:
            file.seek(keep)
            file.write(bytes(LOG_FILE_BYTES - keep))


TestWriterAndFollower = WriterAndFollower.TestCase

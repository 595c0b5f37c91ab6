"""A store that has filled its volume to the last byte starts again, and makes room by its rules.

The volume is simulated, or a tmpfs. Nothing removes what is old while it fills, as when much comes
between two looks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from cometmq.errors import DiskFull
from cometmq.format.batch import BatchLimits
from cometmq.member.config import MemberConfig
from cometmq.member.state.opening import Opened, open_writer
from cometmq.member.state.retention import Retention
from cometmq.member.state.statelog import append_now
from cometmq.member.storage.authority import SoleWriter
from cometmq.member.storage.flusher import FlushPolicy
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.changes import Change
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.state import change_records
from cometmq.model import Position, TopicConfig
from cometmq.store.disk.files import Files, OsFiles
from cometmq.store.retention import RetentionRules
from tests.support.faults import tally
from tests.support.stores.disk_model import DiskModel
from tests.support.stores.simulated_files import SimulatedFiles
from tests.support.stores.small_disk import small_disk
from tests.support.stores.small_stores import HOST, WallClock, encoded, read_queue

MIB = 1024 * 1024
STARTS = 3
BATCH_MAX = 5

NewFiles = Callable[[], Files]


class Member:
    """A writer's folder on a volume of its own; ``files`` makes what each life sees of it."""

    def __init__(self, root: Path, files: NewFiles, rng: random.Random) -> None:
        self.rng = rng
        self.clock = WallClock()
        self.sent: dict[tuple[str, int], list[bytes]] = {}
        self.config = MemberConfig(
            store_path=root,
            mapped_file_size_commit_log=rng.choice([128, 512]) * 1024,
            mapped_file_size_consume_queue=2000,
            max_hash_slot_num=250,
            max_index_num=1000,
        )
        self._files = files
        self._full_for = ""

    def start(self) -> Opened:
        with patch("cometmq.store.writer.OsFiles", lambda *_: self._files()):
            return open_writer(self.config, BatchLimits(), HOST, self.clock)

    def grow_state(self, opened: Opened) -> None:
        """Topics, groups and commits, none of them for messages."""
        state, changes = opened.state, list[Change]()
        for number in range(self.rng.choice([0, 30, 300])):
            changes += [state.plan_topic(TopicConfig(f"topic-{number}", 2, 2))]
            changes += [state.plan_group(GroupSettings(f"group-{number}"))]
            for change in changes[-2:]:
                state.apply(change)
            history = state.generations.of(f"topic-{number}", 0)
            place = Position(history.current, 0)
            state.offsets.commit(f"group-{number}", (f"topic-{number}", 0), place, history, 0)
        for topic in ("a", "b", "c"):
            changes += [state.plan_topic(TopicConfig(topic, 1, 1))]
            state.apply(changes[-1])
            self.sent[topic, 0] = []
        append_now(opened.store, change_records(changes), HOST, self.clock.now_ms)
        self._look(opened)

    def fill(self, opened: Opened) -> None:
        """Send until the disk takes not even the smallest message any more."""
        store = opened.store
        for size_max in (20_000, 2_000, 0):
            refused = 0
            while refused < 3:
                self.clock.now_ms += 10
                try:
                    self._send(opened, size_max)
                    with suppress(DiskFull):
                        store.prepare_next_file()
                    if self.rng.random() < 0.2:
                        store.flush_log()
                        store.flush_queues()
                    store.index_some()
                except DiskFull:
                    refused += 1

    def _send(self, opened: Opened, size_max: int) -> None:
        topic = self.rng.choice(["a", "b", "c"])
        bodies = [
            self.rng.randbytes(self.rng.randint(0, size_max))
            for _ in range(self.rng.randint(1, BATCH_MAX))
        ]
        records = b"".join(encoded(topic, 0, body, keys=f"{len(body)}") for body in bodies)
        opened.store.append(records, [(topic, 0, len(bodies))], born_host=HOST, store_host=HOST)
        self.sent[topic, 0] += bodies

    def stop(self, opened: Opened) -> None:
        """SIGTERM, or SIGKILL."""
        if self.rng.random() < 0.5:
            tally.count("full volumes: SIGKILL")
            opened.store.abandon()
        else:
            tally.count("full volumes: SIGTERM")
            try:
                opened.store.close()
            except DiskFull:
                tally.count("full volumes: a stop that could not be in order")

    def must_have_everything(self, opened: Opened) -> None:
        for (topic, queue_id), bodies in self.sent.items():
            found = [one.body for one in read_queue(opened.store, topic, queue_id)]
            low, _ = opened.store.queue_bounds(topic, queue_id)
            assert found == bodies[low:]

    def must_make_room(self, opened: Opened) -> None:
        """What is oldest goes by the rules, and sends are taken again."""
        before = opened.store.min_offset
        for _ in range(10):
            self._look(opened)
        assert opened.store.min_offset > before, "the oldest files have gone"
        for _ in range(20):
            self._send(opened, 2_000)

    def _look(self, opened: Opened) -> None:
        async def look() -> None:
            policy = FlushPolicy(interval_s=0.5, least_bytes=0, thorough_s=10.0)
            storage = MemberStorage(opened.store, policy, self.clock, SoleWriter())
            storage.note_no_space()

            def write_snapshot() -> None:
                copy = opened.state.snapshot_records()
                append_now(opened.store, copy, HOST, self.clock.now_ms)

            rules = RetentionRules(delete_hours=frozenset())
            retention = Retention(
                storage, opened.state, rules, self.clock, pause_s=0.0, write_snapshot=write_snapshot
            )
            await retention.look()
            retention.close()
            storage.end_threads()

        opened.store.flush_log()
        opened.store.flush_queues()
        asyncio.run(look())


def take_the_rest(files: Files, path: Path) -> None:
    """Too little for a log file may be left."""
    file = files.create(path, 0)
    with suppress(DiskFull):
        for at in range(0, MIB, 4096):
            file.pwrite(bytes(4096), at)
    file.close()
    assert files.usage(path.parent).free_bytes == 0


def must_start_again(root: Path, files: NewFiles, rng: random.Random) -> None:
    member = Member(root, files, rng)
    opened = member.start()
    member.grow_state(opened)
    member.fill(opened)
    take_the_rest(files(), root / "core")
    member.stop(opened)
    for _ in range(STARTS):
        opened = member.start()
        member.must_have_everything(opened)
        member.stop(opened)
    opened = member.start()
    member.must_have_everything(opened)
    member.must_make_room(opened)
    member.must_have_everything(opened)
    opened.store.close()
    tally.count("full volumes: filled, started, emptied")


def on_a_simulated_volume(root: Path, rng: random.Random) -> None:
    disk, size = DiskModel(rng), rng.choice([3, 5, 8]) * MIB
    must_start_again(root, lambda: SimulatedFiles(root, disk, volume_bytes=size), rng)


@pytest.mark.parametrize("number", range(3))
def test_a_full_volume(tmp_path: Path, number: int) -> None:
    on_a_simulated_volume(tmp_path, random.Random(number))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 180, 45))
def test_many_full_volumes(tmp_path: Path, first: int, seed: int) -> None:
    for number in range(first, first + 45):
        root = tmp_path / str(number)
        root.mkdir()
        on_a_simulated_volume(root, random.Random(seed + number))


@pytest.mark.slow
def test_full_volumes_of_the_kernels(tmp_path: Path, rng: random.Random) -> None:
    for number in range(20):
        with small_disk(tmp_path / str(number), rng.choice([3, 5, 8]) * MIB) as disk:
            must_start_again(disk / "store", OsFiles, rng)

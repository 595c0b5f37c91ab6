"""The store against a dictionary of lists: whatever happens, both hold the same messages."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from cometmq.errors import BodyChecksumMismatch, DiskFull
from cometmq.store.engine import MessageStore, StoreOptions
from tests.support.stores import (
    HOST,
    Deletions,
    FaultyFiles,
    WallClock,
    append,
    bodies,
    encoded,
    open_store,
)

OPTIONS = StoreOptions(commit_log_file_bytes=64 * 1024, consume_queue_file_bytes=20 * 7)
QUEUES = [("A", 0), ("A", 1), ("%RETRY%g", 0), ("B", 12)]

runs = st.lists(
    st.tuples(
        st.sampled_from(QUEUES),
        st.lists(st.integers(0, 3000), min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=5,
)


class StoreAndModel(RuleBasedStateMachine):
    """``model`` holds the bodies of every queue, ``epochs`` counts the openings."""

    store: MessageStore

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.clock = WallClock()
        self.model: dict[tuple[str, int], list[bytes]] = {}
        self.machine_boots = 1
        self.openings = 0
        self.count = 0

    @initialize()
    def first_opening(self) -> None:
        self.open(clean=True)

    def open(self, *, clean: bool) -> None:
        self.files = FaultyFiles(boot=f"boot-{self.machine_boots}")
        self.store = open_store(
            self.folder, OPTIONS, clock=self.clock, files=self.files, observer=Deletions()
        )
        self.openings += 1
        assert self.store.epoch == self.openings
        assert self.store.clean_start == clean
        assert self.store.flushed_offset == self.store.appended_offset
        self.read_all()

    # --- what happens -----------------------------------------------------------------------------

    @rule(wanted=runs)
    def append(self, wanted: list[tuple[tuple[str, int], list[int]]]) -> None:
        batch = [(topic, queue, self.fresh(sizes)) for (topic, queue), sizes in wanted]
        expected = []
        for topic, queue, fresh in batch:
            held = self.model.setdefault((topic, queue), [])
            expected.append(len(held))
            held += fresh
        end = self.store.appended_offset
        appended = append(self.store, *batch)
        assert appended.queue_offsets == expected
        assert appended.log_offset >= end
        assert appended.end_offset == self.store.appended_offset

    def fresh(self, sizes: list[int]) -> list[bytes]:
        self.count += 1
        return [b"%d/%d/" % (self.count, number) + bytes(size) for number, size in enumerate(sizes)]

    @rule()
    def append_something_forged(self) -> None:
        records = bytearray(encoded("A", 0, b"good") + encoded("A", 0, b"forged"))
        records[8] ^= 1
        with pytest.raises(BodyChecksumMismatch):
            self.store.append(bytes(records), [("A", 0, 2)], born_host=HOST, store_host=HOST)

    @rule(room=st.integers(0, 500))
    def append_on_a_full_disk(self, room: int) -> None:
        self.files.room = room
        with pytest.raises(DiskFull):
            append(self.store, ("A", 0, [bytes(3000)]))
        self.files.room = None

    @rule(topic=st.sampled_from(["A", "B"]))
    def delete_a_topic(self, topic: str) -> None:
        """A record of topic S tells recovery of the deletion."""
        append(self.store, ("S", 0, [topic.encode()]))
        self.model.setdefault(("S", 0), []).append(topic.encode())
        self.store.drop_topic(topic)
        self.model = {key: held for key, held in self.model.items() if key[0] != topic}

    @rule(ms=st.integers(-5000, 5000))
    def time_passes_or_jumps(self, ms: int) -> None:
        self.clock.now_ms += ms

    @rule()
    def flush_the_log(self) -> None:
        assert self.store.flush_log() == self.store.appended_offset

    @rule()
    def flush_the_queues(self) -> None:
        self.store.flush_queues()

    @rule()
    def build_a_file(self) -> None:
        self.store.prepare_next_file()
        assert not self.store.next_file_wanted

    @rule()
    def close_and_open(self) -> None:
        self.store.close()
        self.open(clean=True)

    @rule(reboot=st.booleans())
    def die_and_open(self, reboot: bool) -> None:
        """``reboot``: another kernel, but the old one had written everything before it stopped."""
        self.store.abandon()
        self.machine_boots += reboot
        self.open(clean=False)

    @precondition(lambda self: self.model)
    @rule()
    def die_closed(self) -> None:
        self.store.close()
        self.machine_boots += 1
        self.open(clean=True)

    # --- what always holds ------------------------------------------------------------------------

    def read_all(self) -> None:
        for (topic, queue), expected in self.model.items():
            assert bodies(self.store, topic, queue) == expected

    @invariant()
    def bounds_and_newest_messages_agree(self) -> None:
        if not self.openings:
            return
        assert set(self.store.queues()) == set(self.model)
        for (topic, queue), expected in self.model.items():
            assert self.store.queue_bounds(topic, queue) == (0, len(expected))
            assert bodies(self.store, topic, queue, len(expected) - 1) == expected[-1:]

    @invariant()
    def positions_are_in_order(self) -> None:
        if self.openings:
            assert 0 <= self.store.flushed_offset <= self.store.appended_offset
            assert self.store.dispatched_offset == self.store.appended_offset

    def teardown(self) -> None:
        if self.openings:
            self.read_all()
            self.store.abandon()
        shutil.rmtree(self.folder)


TestStoreAndModel = StoreAndModel.TestCase

"""The store against a list of messages: whatever happens, both hold the same ones.

The disk is simulated, so that processes die and machines lose their power at any call; hypothesis
chooses what happens and when.
"""

from __future__ import annotations

import functools
import logging
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec

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
from cometmq.format import queueunit, taghash
from cometmq.format.indexfile import Sizes
from cometmq.store.queries import Boundary, offset_by_time
from cometmq.store.writer import MessageStore, StoreOptions
from tests.support.stores.disk_model import DiskModel
from tests.support.stores.ledger import Ledger, Message
from tests.support.stores.simulated_files import Fault, Gone, Kind, SimulatedFiles
from tests.support.stores.small_stores import (
    HOST,
    Deletions,
    WallClock,
    append,
    encoded,
    find_by_key,
    read_queue,
)

OPTIONS = StoreOptions(16 * 1024, 20 * 7, index_sizes=Sizes(hash_slots=4, entries=30))
QUEUES = [("A", 0), ("A", 1), ("%RETRY%g", 0), ("B", 12)]
TAGS = ["", "red", "blue"]
KEYS = ["", "k1", "k2", "k1 k3"]

P = ParamSpec("P")

runs = st.lists(
    st.tuples(
        st.sampled_from(QUEUES),
        st.lists(st.integers(0, 600), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=3,
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Recovery speaks of each of thousands of crashes."""
    caplog.set_level(logging.CRITICAL)


def mortal(
    act: Callable[Concatenate[StoreAndModel, P], None],
) -> Callable[Concatenate[StoreAndModel, P], None]:
    """The process may end in the middle of ``act``; then another takes over."""

    @functools.wraps(act)
    def done(machine: StoreAndModel, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            act(machine, *args, **kwargs)
        except Gone:
            machine.take_over()

    return done


class StoreAndModel(RuleBasedStateMachine):
    """``ledger`` is the model; ``tags`` tells the tag of each body (no two are alike)."""

    store: MessageStore

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="store-model-"))
        self.clock = WallClock()
        self.ledger = Ledger()
        self.tags: dict[bytes, str] = {}
        self.fault = Fault()
        self.boots = 1
        self.epoch = 0
        self.count = 0

    @initialize(seed=st.integers(0, 2**32))
    def first_opening(self, seed: int) -> None:
        self.disk = DiskModel(random.Random(seed))
        self.open()
        assert self.store.clean_start

    def open(self) -> None:
        boot = f"boot-{self.boots}"
        self.files = SimulatedFiles(self.folder, self.disk, boot=boot, fault=self.fault)
        self.store = MessageStore.open(
            self.folder, OPTIONS, clock=self.clock, files=self.files, observer=Deletions()
        )
        assert self.store.epoch > self.epoch
        self.epoch = self.store.epoch

    def take_over(self) -> None:
        """After an end that was not in order, which ``fault`` tells of."""
        self.store.abandon()
        power_cut = self.fault.kind is Kind.POWER_CUT
        self.fault = Fault()
        if power_cut:
            self.disk.cut()
            self.boots += 1
        self.open()
        self.ledger.recovered(self.store, power_cut=power_cut)

    # --- what is written --------------------------------------------------------------------------

    @rule(wanted=runs, tag=st.sampled_from(TAGS), keys=st.sampled_from(KEYS))
    @mortal
    def append(self, wanted: list[tuple[tuple[str, int], list[int]]], tag: str, keys: str) -> None:
        batch = [(topic, queue, self.fresh(sizes, tag)) for (topic, queue), sizes in wanted]
        queues = self.ledger.queues()
        expected = []
        for topic, queue, fresh in batch:
            held = queues.setdefault((topic, queue), [])
            expected.append(len(held))
            held += [Message(topic, queue, body) for body in fresh]
        self.ledger.asks(batch, keys)
        appended = append(self.store, *batch, tag=tag, keys=keys)
        self.ledger.stored(appended.end_offset)
        assert appended.queue_offsets == expected
        assert appended.end_offset == self.store.appended_offset

    def fresh(self, sizes: list[int], tag: str) -> list[bytes]:
        self.count += 1
        found = [b"%d/%d/" % (self.count, at) + bytes(size) for at, size in enumerate(sizes)]
        self.tags.update(dict.fromkeys(found, tag))
        return found

    @rule()
    @mortal
    def append_something_forged(self) -> None:
        records = bytearray(encoded("A", 0, b"good") + encoded("A", 0, b"forged"))
        records[8] ^= 1
        with pytest.raises(BodyChecksumMismatch):
            self.store.append(bytes(records), [("A", 0, 2)], born_host=HOST, store_host=HOST)

    @precondition(lambda self: not self.fault.at)
    @rule(calls=st.integers(1, 6))
    def append_where_a_call_finds_no_room(self, calls: int) -> None:
        """For the log, for units of a queue, for a file that has to be made."""
        self.fault.kind, self.fault.at = Kind.ENOSPC, self.fault.calls + calls
        run = ("A", 0, self.fresh([50], ""))
        self.ledger.asks([run])
        try:
            self.ledger.stored(append(self.store, run).end_offset)
        except DiskFull:
            self.ledger.refused()
        self.fault.at = 0

    @rule(topic=st.sampled_from(["A", "B"]))
    @mortal
    def delete_a_topic(self, topic: str) -> None:
        """A record of topic S tells recovery of the deletion; it is on the disk before."""
        run = ("S", 0, [topic.encode()])
        self.ledger.asks([run])
        self.ledger.stored(append(self.store, run).end_offset)
        self.ledger.flushed(self.store.flush_log())
        self.store.drop_topic(topic)

    @rule(ms=st.integers(-5000, 5000))
    def time_passes_or_jumps(self, ms: int) -> None:
        self.clock.now_ms += ms
        self.disk.write_back()

    # --- what threads do beside -------------------------------------------------------------------

    @rule()
    @mortal
    def flush_the_log(self) -> None:
        position = self.store.flush_log()
        assert position == self.store.appended_offset
        self.ledger.flushed(position)

    @rule()
    @mortal
    def flush_the_queues(self) -> None:
        """A member at rest leaves it out, so there must be nothing to do then."""
        checkpoint = self.store._opened.checkpoint
        waited, before = self.store.queues_wait, checkpoint._file.current
        self.store.flush_queues()
        assert waited or checkpoint._file.current == before

    @rule()
    @mortal
    def build_a_file(self) -> None:
        self.store.prepare_next_file()
        assert not self.store.next_file_wanted

    @rule()
    @mortal
    def index_a_piece(self) -> None:
        self.store.index_some()

    @rule(count=st.integers(1, 3))
    @mortal
    def remove_the_oldest(self, count: int) -> None:
        """Retention: log files first, then what stands behind them."""
        cleaner = self.store.cleaner
        going = cleaner.log_files()[:count]
        while going and not self.leaves_something(going[-1].end):
            going.pop()
        if going:
            self.ledger.removed(going[-1].end)
            cleaner.forget_before(going[-1].end)
        for _ in going:
            cleaner.remove_first()
        cleaner.remove_spare_files()

    def leaves_something(self, log_start: int) -> bool:
        """Whether each queue keeps a message that stays whatever comes. Where a queue goes on that
        has none, a store that makes its queues anew is told by the state, which there is none of.
        """
        gone = sum(end <= log_start for end in self.ledger.ends)
        staying = self.ledger.messages[gone : self.ledger.promised]
        going = {(m.topic, m.queue_id) for m in self.ledger.messages[:gone]}
        return going & set(self.ledger.queues()) <= {(m.topic, m.queue_id) for m in staying}

    # --- how it ends ------------------------------------------------------------------------------

    @rule()
    @mortal
    def close_and_open(self) -> None:
        end = self.store.appended_offset
        self.store.close()
        self.ledger.flushed(end)
        self.open()
        assert self.store.clean_start
        self.ledger.check(self.store)

    @rule(kind=st.sampled_from([Kind.DEATH, Kind.POWER_CUT]))
    def end_now(self, kind: Kind) -> None:
        self.fault.kind = kind
        self.take_over()
        assert not self.store.clean_start

    @rule(kind=st.sampled_from([Kind.DEATH, Kind.POWER_CUT]), calls=st.integers(1, 60))
    def end_soon(self, kind: Kind, calls: int) -> None:
        """In the middle of one of the next rules."""
        self.fault.kind, self.fault.at = kind, self.fault.calls + calls

    # --- what is asked ----------------------------------------------------------------------------

    @rule(key=st.sampled_from(QUEUES), tag=st.sampled_from(TAGS))
    @mortal
    def filter_by_tag(self, key: tuple[str, int], tag: str) -> None:
        """The units' hashes choose the messages of a tag; no two of these tags have the same."""
        low, end = self.store.queue_bounds(*key)
        code, found, at = taghash.tags_code(tag.encode()), [], low
        while at < end:
            units = self.store.read_units(*key, at, 5)
            found += [s for *s, its_code in queueunit.iterate(units) if its_code == code]
            at += len(units) // queueunit.UNIT_BYTES
        bodies = [encoded_body(self.store.read_records([(at, size)])) for at, size in found]
        held = self.ledger.queues().get(key, [])
        assert bodies == [m.body for m in held if m and self.tags[m.body] == tag]

    @rule(key=st.sampled_from(["k1", "k2", "k3"]), topic=st.sampled_from(["A", "B"]))
    @mortal
    def find_what_has_a_key(self, key: str, topic: str) -> None:
        self.ledger.flushed(self.store.flush_log())  # only what is on the disk gets there
        while self.store.index_some():
            pass
        held = self.ledger.messages[self.ledger.gone :]
        named = [m.body for m in held if m.topic == topic and key in m.keys.split()]
        found = [one.message.body for one in find_by_key(self.store, topic, key)]
        assert found == named[::-1]

    @rule(key=st.sampled_from(QUEUES), ms=st.integers(-20_000, 20_000))
    @mortal
    def find_what_was_stored_at_a_time(self, key: tuple[str, int], ms: int) -> None:
        wanted = WallClock().now_ms + ms
        bounds = self.store.queue_bounds(*key)
        times = [r.store_time_ms for r in read_queue(self.store, *key)]
        lower = bounds[0] + sum(time < wanted for time in times)
        upper = max(bounds[0], bounds[0] + sum(time <= wanted for time in times) - 1)
        assert offset_by_time(self.store, key, bounds, wanted, Boundary.LOWER) == lower
        assert offset_by_time(self.store, key, bounds, wanted, Boundary.UPPER) == upper

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    @mortal
    def bounds_and_newest_messages_agree(self) -> None:
        if not self.epoch:
            return
        for key, held in self.ledger.queues().items():
            low = sum(message is None for message in held)
            assert self.store.queue_bounds(*key) == (low, len(held)), key
            newest = [m.body for m in held[low:][-1:] if m]
            assert [r.body for r in read_queue(self.store, *key, len(held) - 1)] == newest

    @invariant()
    def the_store_keeps_its_invariants(self) -> None:
        if self.epoch:
            self.store.validate()

    def teardown(self) -> None:
        if self.epoch:
            self.fault.kind, self.fault.at = Kind.POWER_CUT, 0
            self.take_over()
            self.ledger.check_index(self.store)
            self.store.abandon()
        shutil.rmtree(self.folder)


def encoded_body(raw: bytes) -> bytes:
    body_bytes = int.from_bytes(raw[84:88], "big")
    return raw[88 : 88 + body_bytes]


TestStoreAndModel = StoreAndModel.TestCase

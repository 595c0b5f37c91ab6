"""Transactions against a dictionary: random halves, ends, checks, clocks, crashes and orderly stops
of one writer.

A half is never seen before it is committed, a committed one is seen once, each orphan is checked
and never before its time, and no crash loses one: whatever the log's end has kept.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate, islice
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from prometheus_client import CollectorRegistry

from cometmq.errors import (
    AnswersUnread,
    CometError,
    DiskFull,
    NoPermission,
    TopicNotFound,
    TransactionEnded,
    TransactionNotFound,
)
from cometmq.format import halves, queueunit, record
from cometmq.format.halves import GIVEN_UP_TOPIC, HALF_TOPIC, HalfForm
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.search import Finder
from cometmq.member.relay import RelayWriter
from cometmq.messaging.half_runs import EndedHalf, EndedRun, HalfRun
from cometmq.messaging.transaction_checks import CheckBoard
from cometmq.messaging.transactions import CheckRules, HalfProgress, HalfTable, Resolution
from cometmq.model import FlushMode, TopicConfig
from services.broker.sending.produce import Claim, ProduceHandler, ProducePolicy
from services.broker.transactions.checks import REFUSED_MAX, RETRY_S, CheckStream, TransactionChecks
from services.broker.transactions.ends import TOGETHER_MIN, TransactionService
from services.broker.transactions.names import End, EndRun, HalfName
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import HOST, WallClock
from tests.support.waiting import until

COMMIT, ROLLBACK, UNKNOWN = Resolution.COMMIT, Resolution.ROLLBACK, Resolution.UNKNOWN
RULES = CheckRules(immunity_s=6.0, interval_s=30.0, checks_max=3)
GROUPS = ("P", "Q")


# --- the pure table and board ---------------------------------------------------------------------


async def enough_room(_size_bytes: int) -> None:
    """A producer that reads what it is asked."""


class Asking(RuleBasedStateMachine):
    """Halves of two groups, members that come and go, and a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 100.0
        self.table = HalfTable()
        self.board = CheckBoard(self.table, RULES)
        self.open: dict[int, str] = {}  # the model: open halves and their groups
        self.asked_s: dict[int, list[float]] = {}  # when each was asked about
        self.stored_s: dict[int, float] = {}
        self.members: dict[int, str] = {}
        self.owed: dict[int, int] = {}  # half → member that owes the answer
        self.left: set[int] = set()  # halves whose member left before it answered
        self.next_offset, self.next_member = 0, 1

    @rule(group=st.sampled_from(GROUPS), count=st.integers(1, 5))
    def send(self, group: str, count: int) -> None:
        for _ in range(count):
            offset = self.next_offset
            self.table.add(offset, (offset * 100, 90, group), self.now_s + RULES.immunity_s)
            self.open[offset], self.stored_s[offset] = group, self.now_s
            self.asked_s[offset] = []
            self.next_offset += 1

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.open:
            self._end(data.draw(st.sampled_from(sorted(self.open))))

    def _end(self, offset: int) -> None:
        group = self.open.pop(offset)
        self.owed.pop(offset, None)
        self.table.close(offset, EndedHalf(offset * 100, group))
        self.board.closed([offset], group)
        self.table.told(offset + 1, [offset])

    @rule(group=st.sampled_from(GROUPS))
    def join(self, group: str) -> None:
        self.board.join(group, self.next_member)
        self.members[self.next_member] = group
        self.next_member += 1

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.members:
            member = data.draw(st.sampled_from(sorted(self.members)))
            self.board.leave(self.members.pop(member), member)
            self.left |= {half for half, one in self.owed.items() if one == member}
            self.owed = {half: one for half, one in self.owed.items() if one != member}

    @rule(seconds=st.sampled_from([0.3, 5.0, 6.5, 31.0, 100.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        while self.board.look(self.now_s):
            pass
        for offset in self.board.given_up:
            assert len(self.asked_s[offset]) == RULES.checks_max, "given up and not asked"
            assert self.asked_s[offset][-1] + RULES.interval_s <= self.now_s
            self._end(offset)
        self.board.given_up = []
        for ask in self.board.asks(self.now_s):
            for offset in ask.offsets:
                assert self.open[offset] == self.members[ask.member]
                assert self.now_s >= self.stored_s[offset] + RULES.immunity_s, "too early"
                last_s = self.asked_s[offset][-1] if self.asked_s[offset] else float("-inf")
                assert offset in self.left or self.now_s >= last_s + RULES.interval_s
                self.left.discard(offset)
                self.asked_s[offset].append(self.now_s)
                self.owed[offset] = ask.member
        for offset, group in self.open.items():  # every orphan was asked about
            is_due = self.stored_s[offset] + RULES.immunity_s + 1 <= self.now_s
            if group in self.members.values() and is_due:
                assert self.asked_s[offset], offset
                late_s = self.now_s - self.asked_s[offset][-1]
                assert late_s < RULES.interval_s + 1, "nobody answers, and nobody else is asked"

    @rule(data=st.data())
    def does_not_know(self, data: st.DataObject) -> None:
        if self.owed:
            offset = data.draw(st.sampled_from(sorted(self.owed)))
            assert self.board.is_asked(offset, self.owed[offset])
            assert not self.board.is_asked(offset, 10_000)
            self.board.unknown(offset)
            del self.owed[offset]

    @invariant()
    def holds(self) -> None:
        self.table.validate()
        self.board.validate()
        assert len(self.table) == len(self.open)
        assert self.table.floors[0] == min(self.open, default=self.next_offset)
        for offset, asked in self.asked_s.items():
            if offset in self.open:
                assert self.table.checks_of(offset) == len(asked)
            assert len(asked) <= RULES.checks_max


TestAsking = Asking.TestCase


def test_a_half_whose_member_left_has_one_time_and_is_given_up_once() -> None:
    table = HalfTable()
    board = CheckBoard(table, CheckRules(immunity_s=6.0, interval_s=30.0, checks_max=2))
    table.add(0, (0, 90, "P"), 6.0)
    board.join("P", 1)
    board.join("P", 2)
    board.look(6.0)
    [first] = board.asks(6.0)
    board.leave("P", first.member)
    [second] = board.asks(20.0)
    assert second.member != first.member
    board.unknown(0)
    board.look(36.0)  # the time of the first ask
    assert not board.given_up
    board.look(1_000.0)
    assert board.given_up == [0]


def test_many_steps_become_few_and_no_half_is_given_up_early() -> None:
    table = HalfTable()
    for offset in range(30_000):
        table.add(offset, (offset, 1, "P"), 0.0)
        for _ in range(1 + offset % 2):
            table.asked([offset], 30.0)
    progress = table.progress
    assert 0 < len(progress.checks) <= 8_192
    for offset in range(30_000):
        assert 1 <= progress.checks_of(offset) <= table.checks_of(offset)
    assert progress.checks_of(30_001) == 0


def test_checks_are_gathered_in_pieces_while_halves_are_asked_about() -> None:
    table = HalfTable()
    for offset in range(100_000):
        table.add(offset, (offset, 1, "P"), 0.0)
    table.asked(range(0, 100_000), 30.0)
    pieces = 0
    for _ in table.count_checks():
        pieces += 1
        table.asked(range(1_000 * pieces), 60.0)
        table.close(50_000 + pieces, EndedHalf(50_000 + pieces, "P"))
    assert pieces > 4
    for offset in (0, 999, 1_000, 99_999):  # what came meanwhile may be missing
        assert 1 <= table.progress.checks_of(offset) <= table.checks_of(offset)
    for _ in table.count_checks():
        pass
    assert table.progress.checks_of(0) == table.checks_of(0) > 2
    table.validate()
    assert list(table.count_checks()) == []


def test_entries_of_ended_halves_are_forgotten_in_time() -> None:
    table = HalfTable()
    most = 0
    for offset in range(150_000):
        before = table._dues.count
        table.add(offset, (offset, 1, "P"), 3_600.0 + offset % 7)
        assert before - table._dues.count <= 1_024, "few are looked through at a time"
        table.close(offset, EndedHalf(offset, "P"))
        most = max(most, table._dues.count)
        table.validate() if offset % 30_000 == 0 else None
    assert most <= 90_000
    table.validate()


def test_entries_are_forgotten_while_others_are_open_and_come_due() -> None:
    """What is open is looked at when its time comes, wherever its entry was moved to."""
    source = random.Random(1)
    table = HalfTable()
    model: dict[int, float] = {}
    for first in range(0, 300_000, 500):
        due_s = float(source.randrange(first // 1_000, first // 1_000 + 400))
        table.add_run(halves_of(first, 500), due_s)
        model |= dict.fromkeys(range(first, first + 500), due_s)
        ended = {at: EndedHalf(at, "P") for at in range(first, first + 500) if at % 50}
        table.close_all(ended)
        for at in ended:
            del model[at]
        now_s = first / 1_000
        while found := table.take_due(now_s, 1_000):
            for at in found:
                assert model.pop(at) <= now_s
        assert min(model.values(), default=now_s + 1) > now_s
    assert table._dues.count <= 2 * len(table) + 100_000
    table.validate()


def test_halves_that_ended_among_open_ones_come_in_pieces_from_the_last_on() -> None:
    table = HalfTable()
    table.add_run(halves_of(0, 50_000), 6.0)
    ended = {at: EndedHalf(at, "P") for at in range(50_000) if at % 3}
    table.close_all(ended)
    pieces = list(table.ended_among_open(10_000))
    assert len(pieces) > 1
    assert [at for piece in pieces for at in piece] == sorted(ended, reverse=True)[:10_000]
    assert sum(map(len, table.ended_among_open(100_000))) == len(ended)


def halves_of(first: int, count: int) -> HalfRun:
    """Halves of one byte each."""
    return HalfRun(first, array("q", range(first, first + count)), first + count, "P")


def test_halves_of_runs_end_in_any_order_and_few_left_take_few_bytes() -> None:
    source = random.Random(7)
    table = HalfTable()
    is_open = set(range(4_000))
    for first, count in ((0, 1_000), (1_000, 10), (1_010, 2_990)):
        table.add_run(halves_of(first, count), 6.0)
    while is_open:
        first = source.choice(sorted(is_open))
        count = source.randrange(1, 200)
        wanted = set(range(first, first + count))
        run = table.find_run(first, count)
        if run is None:
            wanted &= is_open
            table.close_all({at: EndedHalf(at, "P") for at in sorted(wanted)})
        else:
            assert wanted <= is_open
            places = array("q", range(first, first + count))
            table.close_run(EndedRun(first, places, "P", "T", 0, first, places))
            assert table.ended(first + count - 1) == EndedHalf(
                first + count - 1, "P", "T", 0, first + count - 1, first + count - 1
            )
        is_open -= wanted
        table.validate()
        assert len(table) == len(is_open)
        assert table.below(4_000, 10_000) == sorted(is_open)
        assert {half for _, half, _ in table.open_halves(0, 9_999)} == {
            (at, 1, "P") for at in is_open
        }
    assert table.floors[0] == 4_000


# --- a writer -------------------------------------------------------------------------------------


class Parts:
    """What takes and ends halves in one life of the writer."""

    def __init__(self, member: Member, clock: WallClock) -> None:
        self.member = member
        metrics = MemberMetrics(CollectorRegistry(), "c", "g")
        policy = ProducePolicy(1 << 30, False, TopicConfig(""), 30.0, 30.0)
        self.produce = ProduceHandler(member.storage, member.keeper, policy, HOST, metrics, clock)
        relays = RelayWriter(member.storage, member.state.topics, HOST, metrics)
        finder = Finder(member.reader)
        self.service = TransactionService(
            member.storage, member.keeper, relays, finder, metrics, RULES, clock
        )
        self.checks = TransactionChecks(self.service, member.storage, metrics, clock)


async def end_run(parts: Parts, names: Sequence[HalfName], how: Resolution) -> list[EndedHalf]:
    """What becomes of halves by one end for all of them."""
    run = EndRun(names[0], array("q", [name.log_offset for name in names]), how)
    [outcomes] = await parts.service.end_runs("P", [run])
    found: list[EndedHalf] = []
    for one in outcomes:
        assert not isinstance(one, CometError), one
        found += map(one.at, one.offsets) if isinstance(one, EndedRun) else [one]
    return found


class Story:
    """What became of each half, by its transaction id."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.clock = WallClock()
        self.open: dict[str, HalfName] = {}
        self.committed: set[str] = set()
        self.gone: set[str] = set()  # rolled back, or given up
        self.count = 0
        # Behind the properties of a half; without it each is looked at alone.
        self.separators = ["\x02", "\x02", ""]

    async def send(self, parts: Parts) -> None:
        queue_id, count = self.source.randrange(2), self.source.choice([1, 1, 3, 40, 150])
        prefix = halves.prefix(HalfForm("P"), "T", queue_id)
        ids = [f"{self.count + n:08X}" for n in range(count)]
        self.count += count
        ends = [self.source.choice(self.separators) for _ in ids]
        if count > TOGETHER_MIN and self.source.random() < 0.7:
            ends = ["\x02"] * count
        records = [
            encoded(
                HALF_TOPIC, 0, one.encode(), properties=prefix + f"UNIQ_KEY\x01{one}{end}".encode()
            )
            for one, end in zip(ids, ends, strict=True)
        ]
        claim = Claim("T", queue_id, count, 0, True, HalfForm("P"))
        accepted = await parts.produce.take(b"".join(records), [claim], HOST)
        appended = accepted.ticket.appended
        at = appended.log_offset
        for number, (one, data) in enumerate(zip(ids, records, strict=True)):
            self.open[one] = HalfName(appended.queue_offsets[0] + number, at, one)
            at += len(data)

    async def end(self, parts: Parts, answering: CheckStream | None = None) -> None:
        """Some ends, some of them twice, some of them opposite to what became of the half."""
        if not self.open:
            return
        count = self.source.choice([5, 5, 40])
        names = self.source.sample(sorted(self.open), min(len(self.open), count))
        wanted = [self.source.choice([COMMIT, ROLLBACK]) for _ in names]
        ends = [End(self.open[n], how) for n, how in zip(names, wanted, strict=True)]
        if answering is not None:
            await parts.checks.answered(answering, ends)
            return
        answers = await parts.service.end("P", ends)
        for name, end, answer in zip(names, ends, answers, strict=True):
            assert isinstance(answer, EndedHalf), answer
            assert answer.is_committed == (end.resolution is COMMIT)
            (self.committed if answer.is_committed else self.gone).add(name)
        assert await parts.service.end("P", ends) == answers
        opposite = [End(e.half, ROLLBACK if e.resolution is COMMIT else COMMIT) for e in ends]
        refused = await parts.service.end("P", opposite)
        assert {type(one) for one in refused} == {TransactionEnded}
        for name in names:
            del self.open[name]

    async def end_run(self, parts: Parts) -> None:
        """One end for halves that follow each other, which were stored together or not."""
        if not self.open:
            return
        names = [self.source.choice(sorted(self.open))]
        while (after := f"{int(names[-1], 16) + 1:08X}") in self.open and len(names) < 500:
            names.append(after)
        how = self.source.choice([COMMIT, ROLLBACK])
        found = await end_run(parts, [self.open[name] for name in names], how)
        assert {one.is_committed for one in found} == {how is COMMIT}
        assert await parts.service.end("P", [End(self.open[n], how) for n in names]) == found
        assert await end_run(parts, [self.open[name] for name in names], how) == found
        for name in names:
            (self.committed if how is COMMIT else self.gone).add(name)
            del self.open[name]

    async def check(self, parts: Parts) -> None:
        """A producer that knows all asks for what is due, and answers some of it."""
        stream = parts.checks.join("P", "c")
        now_s = self.clock.monotonic_s()
        while parts.checks._board.look(now_s):
            pass
        await parts.checks._give_up()
        for ask in list(parts.checks._board.asks(now_s)):
            async for some in parts.checks.read(ask.offsets, enough_room):
                ends = []
                for one in some:
                    assert one.half == self.open[one.half.transaction_id]
                    ends.append(End(one.half, self.source.choice([COMMIT, ROLLBACK, UNKNOWN])))
                await parts.checks.answered(stream, ends)
        parts.checks.leave(stream)

    def see(self, member: Member) -> None:
        """Takes over what the log says, and compares it with what is known."""
        seen = [one.unique_id for q in range(2) for one in _records(member, "T", q)]
        assert len(seen) == len(set(seen)), "committed twice"
        given_up = {one.unique_id for one in _records(member, GIVEN_UP_TOPIC, 0)}
        assert self.committed <= set(seen)
        assert not self.gone & set(seen)
        for name in set(seen) & self.open.keys():  # by an answer to a check
            self.committed.add(name)
            del self.open[name]
        table = member.state.halves
        for name in [n for n, one in self.open.items() if table.find(one.half_offset) is None]:
            assert name in given_up or table.ended(self.open[name].half_offset) is not None
            self.gone.add(name)
            del self.open[name]
        assert self.committed == set(seen)
        assert len(table) == len(self.open), "a half is lost, or open again"
        for one in self.open.values():
            half = table.find(one.half_offset)
            assert half is not None
            assert half[0] == one.log_offset
        table.validate()


def _records(member: Member, topic: str, queue_id: int) -> list[record.Record]:
    low, high = member.store.queue_bounds(topic, queue_id)
    found = []
    for offset in range(low, high):
        unit = member.store.read_units(topic, queue_id, offset, 1)
        found.append(record.decode(member.store.read_records([queueunit.unit_at(unit, 0)[:2]])))
    return found


@asynccontextmanager
async def life(
    folder: Path, clock: WallClock, *, clean: bool
) -> AsyncIterator[tuple[Member, Parts]]:
    async with living_member(folder, clean=clean, clock=clock) as member:
        await member.put("T", 2)
        yield member, Parts(member, clock)
        await member.on_disk()
        if clean:
            member.keeper.write_progress(clock.monotonic_s())


@pytest.mark.parametrize("seed", range(10))
async def test_each_half_ends_once_whatever_ends_the_writer(tmp_path: Path, seed: int) -> None:
    story = Story(random.Random(seed))
    source = story.source
    for _ in range(5):
        async with life(tmp_path / "s", story.clock, clean=source.random() < 0.4) as (
            member,
            parts,
        ):
            story.see(member)
            for _ in range(source.randrange(2, 14)):
                match source.randrange(6):
                    case 0 | 1:
                        await story.send(parts)
                    case 2:
                        await story.end(parts)
                    case 5:
                        await story.end_run(parts)
                    case 3:
                        story.clock.now_ms += source.choice([100, 7_000, 31_000])
                        await story.check(parts)
                    case _:
                        if source.random() < 0.3:
                            member.keeper.write_progress(story.clock.monotonic_s())
                story.see(member)
    async with life(tmp_path / "s", story.clock, clean=True) as (member, parts):
        story.see(member)
        while story.open:
            await story.end(parts)
        assert member.state.halves.progress.floor == story.count
    assert story.committed
    assert story.gone


@pytest.mark.parametrize("kept", range(4))
@pytest.mark.parametrize("separator", ["\x02", ""])
async def test_a_crash_inside_the_append_of_an_end_ends_each_half_once(
    tmp_path: Path, kept: int, separator: str
) -> None:
    """The log keeps some of the records that one call made: the op record comes last."""
    clock = WallClock()
    story = Story(random.Random(1))
    story.separators = [separator]
    async with life(tmp_path / "s", clock, clean=True) as (member, parts):
        while len(story.open) < 4:
            await story.send(parts)
        oldest, *names = sorted(story.open)[:4]  # the oldest stays open: all others are read again
        member.keeper.write_progress(clock.monotonic_s())
    async with life(tmp_path / "s", clock, clean=False) as (member, parts):
        ends = [End(story.open[name], COMMIT) for name in names]
        await member.on_disk()
        shutil.copytree(tmp_path / "s", tmp_path / "cut")  # the queues of before
        answers = await parts.service.end("P", ends)
        await member.on_disk()
        places = [one.log_offset for one in answers if isinstance(one, EndedHalf)]
        [*_, op] = _records(member, halves.OP_TOPIC, 0)
        cut = [*places, op.log_offset][kept]
        assert sorted(places) == places
        assert places[-1] < op.log_offset
    log = Path("store", "commitlog")
    shutil.copytree(tmp_path / "s" / log, tmp_path / "cut" / log, dirs_exist_ok=True)
    _cut_log(tmp_path / "cut" / "store", cut)
    async with life(tmp_path / "cut", clock, clean=True) as (member, parts):
        seen = [one.unique_id for q in range(2) for one in _records(member, "T", q)]
        assert sorted(seen) == names[:kept]
        is_open = [member.state.halves.find(story.open[name].half_offset) for name in names]
        assert [one is None for one in is_open] == [number < kept for number in range(3)]
        again = await parts.service.end("P", ends)
        assert all(isinstance(one, EndedHalf) and one.is_committed for one in again), again
    async with life(tmp_path / "cut", clock, clean=True) as (member, parts):
        seen = [one.unique_id for q in range(2) for one in _records(member, "T", q)]
        assert sorted(seen) == names
        assert not any(member.state.halves.find(story.open[n].half_offset) for n in names)
        assert member.state.halves.find(story.open[oldest].half_offset) is not None


async def test_an_append_has_as_few_op_records_as_list_its_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "OP_BODY_BYTES_MAX", 100)
    async with life(tmp_path / "s", WallClock(), clean=True) as (member, parts):
        names = await send_together(parts, 100)
        await parts.service.end_runs("P", [run_of(names)])
        ops = _records(member, halves.OP_TOPIC, 0)
        assert [len(op.body) for op in ops] == [88, 98, 98, 2]
        assert [op.queue_offset for op in ops] == [0, 1, 2, 3]
        listed = [offset for op in ops for offset in halves.ended_halves(op.body)]
        assert listed == list(range(100))


@pytest.mark.parametrize("kept", [0, 40, 100])
async def test_a_crash_inside_the_append_of_a_run_ends_each_half_once(
    tmp_path: Path, kept: int
) -> None:
    """Halves that were stored together end with one append, which the log may keep in part."""
    clock = WallClock()
    folder = tmp_path / "s"
    async with life(folder, clock, clean=True) as (member, parts):
        names = await send_together(parts, 100)
        member.keeper.write_progress(clock.monotonic_s())
        await member.on_disk()
        shutil.copytree(folder, tmp_path / "cut")  # the queues of before
        [outcomes] = await parts.service.end_runs("P", [run_of(names)])
        [ended] = outcomes
        assert isinstance(ended, EndedRun)
        assert ended.offsets == range(100)
        [op, *_] = _records(member, halves.OP_TOPIC, 0)
        assert halves.ended_halves(op.body) == list(range(100))
        await member.on_disk()
        cut = [*ended.log_offsets, op.log_offset][kept]
    log = Path("store", "commitlog")
    shutil.copytree(folder / log, tmp_path / "cut" / log, dirs_exist_ok=True)
    _cut_log(tmp_path / "cut" / "store", cut)
    async with life(tmp_path / "cut", clock, clean=True) as (member, parts):
        assert len(member.state.halves) == 100 - kept
        again = await end_run(parts, names, COMMIT)
        assert all(one.is_committed for one in again)
        seen = [one.unique_id for one in _records(member, "T", 1)]
        assert seen == [name.transaction_id for name in names]


async def send_together(parts: Parts, count: int, body: bytes = b"x") -> list[HalfName]:
    """Halves for queue 1 of T, of one batch."""
    prefix = halves.prefix(HalfForm("P"), "T", 1)
    records = [
        encoded(HALF_TOPIC, 0, body, properties=prefix + f"UNIQ_KEY\x01{n:08X}\x02".encode())
        for n in range(count)
    ]
    claim = Claim("T", 1, count, 0, True, HalfForm("P"))
    appended = (await parts.produce.take(b"".join(records), [claim], HOST)).ticket.appended
    starts = accumulate(map(len, records), initial=appended.log_offset)
    first = appended.queue_offsets[0]
    return [HalfName(first + n, place, f"{n:08X}") for n, place in enumerate(islice(starts, count))]


def run_of(names: Sequence[HalfName]) -> EndRun:
    return EndRun(names[0], array("q", [name.log_offset for name in names]), COMMIT)


async def test_a_run_with_a_wrong_name_ends_nothing_of_others(tmp_path: Path) -> None:
    clock = WallClock()
    async with life(tmp_path / "s", clock, clean=True) as (member, parts):
        names = await send_together(parts, 200)
        [answers] = await parts.service.end_runs("Q", [run_of(names[:100])])
        assert {type(one) for one in answers} == {NoPermission}
        moved = run_of(names[:100])
        moved.log_offsets[70] += 1
        [answers] = await parts.service.end_runs("P", [moved])
        assert isinstance(answers[70], TransactionNotFound)
        assert len(member.state.halves) == 101
        other_id = run_of([names[100]._replace(transaction_id="00000065"), *names[101:]])
        [answers] = await parts.service.end_runs("P", [other_id])
        assert {type(one) for one in answers} == {TransactionNotFound}
        assert len(member.state.halves) == 101
        assert len(_records(member, "T", 1)) == 99


async def test_a_large_run_ends_in_pieces_that_fit_an_append(tmp_path: Path) -> None:
    clock = WallClock()
    async with life(tmp_path / "s", clock, clean=True) as (member, parts):
        names = await send_together(parts, 200, bytes(900))
        [outcomes] = await parts.service.end_runs("P", [run_of(names)])
        assert len(outcomes) > 1
        assert all(isinstance(one, EndedRun) for one in outcomes)
        seen = [one.unique_id for one in _records(member, "T", 1)]
        assert seen == [name.transaction_id for name in names]
        assert len(member.state.halves) == 0


async def test_notes_of_dropped_topics_are_as_many_as_topics(tmp_path: Path) -> None:
    """However many topics come and go while a half is open."""
    clock = WallClock()
    async with life(tmp_path / "s", clock, clean=True) as (member, parts):
        await send_together(parts, 1)
        for number in range(20):
            await member.put(f"T{number}", 1)
            await member.keeper.drop_topic(f"T{number}")
        assert member.state.halves.dropped == {}
        await member.put("T0", 1)
        assert member.state.halves.dropped == {"T0": 1}
    async with life(tmp_path / "s", clock, clean=True) as (member, _):
        assert member.state.halves.dropped == {"T0": 1}


def _cut_log(folder: Path, log_offset: int) -> None:
    """Zeros from there on, as after a crash that lost what was not synced."""
    for file in sorted((folder / "commitlog").iterdir()):
        start, size = int(file.name), file.stat().st_size
        if start + size > log_offset:
            with file.open("r+b") as opened:
                opened.seek(max(0, log_offset - start))
                opened.write(bytes(size - max(0, log_offset - start)))


async def test_a_damaged_half_stops_no_other_one(tmp_path: Path) -> None:
    clock = WallClock()
    story = Story(random.Random(2))
    async with life(tmp_path / "s", clock, clean=True) as (member, parts):
        while len(story.open) < 3:
            await story.send(parts)
        names = sorted(story.open)[:3]
        bad = story.open[names[1]]
        _flip(tmp_path / "s" / "store", bad.log_offset + 4)  # no record begins there any more
        clock.now_ms += 7_000
        stream = parts.checks.join("P", "c")
        parts.checks._board.look(clock.monotonic_s())
        offsets = [o for ask in parts.checks._board.asks(clock.monotonic_s()) for o in ask.offsets]
        read = parts.checks.read(offsets, enough_room)
        asked = [one.half async for some in read for one in some]
        parts.checks.leave(stream)
        assert {story.open[names[0]], story.open[names[2]]} <= set(asked)
        assert bad not in asked
        assert member.state.halves.find(bad.half_offset) is None
        good = [
            End(story.open[names[0]], COMMIT),
            End(bad, COMMIT),
            End(story.open[names[2]], COMMIT),
        ]
        answers = await parts.service.end("P", good)
        assert isinstance(answers[1], TransactionEnded)
        assert isinstance(answers[0], EndedHalf)
        assert isinstance(answers[2], EndedHalf)


async def test_a_half_of_a_deleted_topic_is_not_committed_into_a_new_one(tmp_path: Path) -> None:
    """Also after a crash; it can be rolled back, and it hinders nothing else."""
    clock = WallClock()
    story = Story(random.Random(5))
    async with life(tmp_path / "s", clock, clean=False) as (member, parts):
        while len(story.open) < 60:
            await story.send(parts)
        old = sorted(story.open)
        await member.on_disk()
        await member.keeper.drop_topic("T")
        await member.put("T", 2)
        while len(story.open) < len(old) + 40:
            await story.send(parts)
        new = sorted(story.open.keys() - set(old))
        both = [
            End(story.open[name], COMMIT) for pair in zip(old, new, strict=False) for name in pair
        ]
        answers = await parts.service.end("P", both)
        assert {type(one) for one in answers[::2]} == {TopicNotFound}
        assert all(isinstance(one, EndedHalf) and one.is_committed for one in answers[1::2])
        taken = {end.half.transaction_id for end in both[1::2]}
    async with life(tmp_path / "s", clock, clean=True) as (member, parts):
        assert {one.unique_id for q in range(2) for one in _records(member, "T", q)} == taken
        again = await parts.service.end("P", [End(story.open[name], COMMIT) for name in old])
        assert {type(one) for one in again} == {TopicNotFound}
        await parts.service.giving_up.give_up(
            [story.open[name].half_offset for name in old[:5]], "test"
        )
        rest = [End(story.open[name], ROLLBACK) for name in old[5:]]
        rolled_back = await parts.service.end("P", rest)
        assert all(isinstance(one, EndedHalf) and not one.is_committed for one in rolled_back)
        assert member.state.halves.dropped
        left = [End(story.open[name], COMMIT) for name in new if name not in taken]
        assert not left or all(
            isinstance(one, EndedHalf) for one in await parts.service.end("P", left)
        )
        assert member.state.halves.progress.floor == story.count
        assert not member.state.halves.dropped, "all halves of then have ended"
    async with life(tmp_path / "s", clock, clean=True) as (member, parts):
        assert not member.state.halves.dropped
        assert len(member.state.halves) == 0


def _flip(folder: Path, log_offset: int) -> None:
    for file in (folder / "commitlog").iterdir():
        start, size = int(file.name), file.stat().st_size
        if start <= log_offset < start + size:
            with file.open("r+b") as opened:
                opened.seek(log_offset - start)
                byte = opened.read(1)[0]
                opened.seek(log_offset - start)
                opened.write(bytes([byte ^ 0xFF]))


async def test_halves_are_given_up_before_their_log_goes(tmp_path: Path) -> None:
    clock = WallClock()
    story = Story(random.Random(3))
    async with life(tmp_path / "s", clock, clean=True) as (member, parts):
        while len(story.open) < 50:
            await story.send(parts)
        ordered = sorted(story.open.values(), key=lambda one: one.log_offset)
        border = ordered[20].log_offset
        await parts.service.giving_up.leave(border)
        given_up = [one.unique_id for one in _records(member, GIVEN_UP_TOPIC, 0)]
        assert given_up == [one.transaction_id for one in ordered[:20]]
        assert len(member.state.halves) == len(ordered) - 20
        oldest = member.state.halves.oldest
        assert oldest is not None
        assert oldest[0] == border


async def test_an_end_that_comes_again_waits_until_the_first_is_safe(tmp_path: Path) -> None:
    """A crash may still take the first one back."""
    story = Story(random.Random(1))
    async with life(tmp_path / "s", story.clock, clean=True) as (member, parts):
        await member.put("T", 2, FlushMode.SYNC)
        await story.send(parts)
        [name] = list(story.open.values())[:1]
        end = [End(name, COMMIT)]
        member.set_authority.allowed = False
        first = asyncio.create_task(parts.service.end("P", end))
        await until(lambda: member.state.halves.find(name.half_offset) is None)
        again = asyncio.create_task(parts.service.end("P", end))
        await member.on_disk_alone()
        for _ in range(100):
            await asyncio.sleep(0)
        assert not first.done()
        assert not again.done()
        member.set_authority.allowed = True
        member.storage.settle()
        assert await again == await first


async def test_halves_are_given_up_later_while_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_self: RelayWriter, _relayed: object) -> None:
        raise DiskFull("no room")

    story = Story(random.Random(3))
    async with life(tmp_path / "s", story.clock, clean=True) as (member, parts):
        await story.send(parts)
        offsets = sorted(one.half_offset for one in story.open.values())
        parts.service.board.given_up = list(offsets)
        with monkeypatch.context() as patch:
            patch.setattr(RelayWriter, "append", full)
            await parts.checks._give_up()
        assert len(member.state.halves) == len(offsets)
        due_s = story.clock.monotonic_s() + RULES.immunity_s + 2 * RETRY_S
        parts.service.board.given_up = member.state.halves.take_due(due_s, 1_000)
        await parts.checks._give_up()
        assert not len(member.state.halves)


async def test_a_producer_that_answers_without_reading_is_not_read(tmp_path: Path) -> None:
    """What is refused would else be kept without bound."""
    clock = WallClock()
    async with life(tmp_path / "s", clock, clean=True) as (_, parts):
        stream = parts.checks.join("P", "c")
        ends = [End(HalfName(offset, 0, "x"), COMMIT) for offset in range(1_000)]

        async def flood() -> None:
            for _ in range(50):
                await parts.checks.answered(stream, ends)

        flooding = asyncio.create_task(flood())
        for _ in range(200):
            await asyncio.sleep(0)
        assert not flooding.done()
        assert len(stream._refused) <= REFUSED_MAX
        count = 0
        async for _, refused in stream.outgoing(enough_room):
            count += len(refused)
            if count == 50_000:
                break
        await flooding
        parts.checks.leave(stream)


async def test_no_record_is_read_before_there_is_room_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that never reads would else cost a batch of records a stream."""
    story = Story(random.Random(4))
    async with life(tmp_path / "s", story.clock, clean=True) as (_, parts):
        await story.send(parts)
        sizes: list[int] = []

        async def no_room(size_bytes: int) -> None:
            sizes.append(size_bytes)
            raise AnswersUnread("no room")

        monkeypatch.setattr(TransactionChecks, "_raw", None)
        offsets = [one.half_offset for one in story.open.values()]
        with pytest.raises(AnswersUnread):
            await anext(parts.checks.read(offsets, no_room))
        table = parts.service.table
        assert sizes == [sum(half[1] for at in offsets if (half := table.find(at)))]


async def test_progress_tells_a_follower_nothing_but_itself(tmp_path: Path) -> None:
    table = HalfTable()
    table.restore(HalfProgress(5, 2, ((9, 3),)))
    assert table.progress == HalfProgress(5, 2, ((9, 3),))
    assert not table.has_unwritten
    assert len(table) == 0
    await asyncio.sleep(0)

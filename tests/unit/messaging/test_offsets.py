"""Committed offsets: forward only, never beyond what was readable, never lost on the way."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cometmq.errors import OffsetInvalid, PositionFenced
from cometmq.messaging.generations import History
from cometmq.messaging.offsets import CommittedOffset, OffsetTable, batched
from cometmq.model import Position

QUEUE = ("orders", 0)
FRESH = History(((4, 0),))
CRASHED = FRESH.raised(6, 500)


def committed(table: OffsetTable, position: Position, history: History = FRESH) -> Position:
    return table.commit("billing", QUEUE, position, history, readable_max=1000)


def test_a_commit_is_kept_and_answered() -> None:
    table = OffsetTable()
    assert committed(table, Position(4, 30)) == Position(4, 30)
    assert table.get("billing", QUEUE) == Position(4, 30)
    assert table.get("billing", ("orders", 1)) is None
    assert table.get("other", QUEUE) is None


def test_an_older_commit_is_answered_with_the_kept_one() -> None:
    table = OffsetTable()
    committed(table, Position(4, 30))
    assert committed(table, Position(4, 20)) == Position(4, 30)
    assert committed(table, Position(0, 10)) == Position(4, 30)


@pytest.mark.parametrize("generation", [0, 4])
def test_a_commit_is_cut_off_at_the_readable_maximum(generation: int) -> None:
    assert committed(OffsetTable(), Position(generation, 10**15)) == Position(4, 1000)


def test_a_negative_offset_is_refused() -> None:
    with pytest.raises(OffsetInvalid):
        committed(OffsetTable(), Position(0, -1))


def test_a_fenced_commit_changes_nothing() -> None:
    table = OffsetTable()
    committed(table, Position(4, 900))
    with pytest.raises(PositionFenced):
        committed(table, Position(4, 600), CRASHED)
    assert table.get("billing", QUEUE) == Position(4, 900)


def test_after_a_crash_the_group_may_go_on_below_what_it_had() -> None:
    table = OffsetTable()
    committed(table, Position(4, 900))
    assert committed(table, Position(6, 510), CRASHED) == Position(6, 510)


def test_after_a_crash_what_still_stands_is_not_given_up() -> None:
    table = OffsetTable()
    committed(table, Position(4, 900))
    assert committed(table, Position(6, 20), CRASHED) == Position(6, 500)


def test_forgetting_a_topic_or_a_group() -> None:
    table = OffsetTable()
    for group in ("a", "b"):
        for topic in ("orders", "bills"):
            table.commit(group, (topic, 0), Position(4, 1), FRESH, 10)
    table.forget_topic("orders")
    assert [(c.group, c.topic) for c in table] == [("a", "bills"), ("b", "bills")]
    table.forget_group("a")
    table.forget_group("unknown")
    assert [(c.group, c.topic) for c in table] == [("b", "bills")]
    assert list(table.unwritten()) == list(table)
    assert table.of_group("b") == {("bills", 0): Position(4, 1)}


def test_restoring_goes_forward_only() -> None:
    table = OffsetTable()
    for position in (Position(4, 30), Position(4, 20), Position(6, 10), Position(4, 90)):
        table.restore(CommittedOffset("billing", *QUEUE, position))
    assert table.get("billing", QUEUE) == Position(6, 10)
    assert list(table.unwritten()) == []


def test_runs_fit_a_record_and_lose_nothing() -> None:
    commits = [CommittedOffset("g" * 255, "t" * 127, n, Position(1, n)) for n in range(50)]
    runs = list(batched(commits, 2000))
    assert [c for run in runs for c in run] == commits
    assert all(len(run) == 4 for run in runs[:-1])
    assert [len(run) for run in batched(commits[:2], 1)] == [1, 1]
    assert list(batched([], 1)) == []


@pytest.mark.parametrize("seed", range(20))
def test_which_topics_a_group_reads(seed: int) -> None:
    """Against what it has committed, through everything that adds and removes positions."""
    source, table = random.Random(seed), OffsetTable()
    for _ in range(200):
        group, topic, queue_id = source.choice("gh"), source.choice("tuv"), source.randrange(3)
        commit = CommittedOffset(group, topic, queue_id, Position(4, source.randrange(9)))
        match source.randrange(6):
            case 0:
                table.forget_topic(topic)
            case 1:
                table.forget_group(group)
            case 2:
                table.reset(commit)
            case 3:
                table.restore(commit)
            case _:
                table.commit(group, (topic, queue_id), commit.position, FRESH, 1000)
        for name in "gh":
            found = {topic for topic in "tuv" if table.reads(name, topic)}
            assert found == {topic for topic, _ in table.of_group(name)}


class OffsetsMachine(RuleBasedStateMachine):
    """One queue, one group, with crashes; a second table is rebuilt from what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.table = OffsetTable()
        self.rebuilt = OffsetTable()
        self.history = FRESH
        self.readable = 0

    @rule(more=st.integers(1, 50))
    def produce(self, more: int) -> None:
        self.readable += more

    @rule(generation=st.sampled_from([0, 3, 4, 5, 6, 7, 8, 9]), offset=st.integers(0, 300))
    def commit(self, generation: int, offset: int) -> None:
        before = self.table.get("g", QUEUE)
        position = Position(generation, offset)
        try:
            kept = self.table.commit("g", QUEUE, position, self.history, self.readable)
        except PositionFenced:
            assert self.table.get("g", QUEUE) == before
            return
        assert kept == self.table.get("g", QUEUE)
        assert kept.generation == self.history.current
        assert before is None or kept >= before
        assert kept.offset <= max(self.readable, before.offset if before else 0)
        assert kept.offset >= min(offset, self.readable)

    @precondition(lambda self: self.history.current < 12)
    @rule()
    def crash(self) -> None:
        self.history = self.history.raised(self.history.current + 1, self.readable)

    @rule(accepted=st.booleans())
    def write(self, accepted: bool) -> None:
        commits = tuple(self.table.unwritten())
        if accepted:
            self.table.written(commits)
            for commit in commits:
                self.rebuilt.restore(commit)

    @rule(offset=st.integers(0, 300))
    def commit_while_writing(self, offset: int) -> None:
        commits = tuple(self.table.unwritten())
        self.table.commit("g", QUEUE, Position(0, offset), self.history, self.readable)
        self.table.written(commits)
        for commit in commits:
            self.rebuilt.restore(commit)

    @invariant()
    def the_log_and_what_waits_for_it_are_everything(self) -> None:
        both = OffsetTable()
        for commit in (*self.rebuilt, *self.table.unwritten()):
            both.restore(commit)
        assert list(both) == list(self.table)


TestOffsets = OffsetsMachine.TestCase

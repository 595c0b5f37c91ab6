from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cometmq.client.reading.progress import Progress, Run
from cometmq.model import Position


def progress(start: int = 0) -> Progress:
    return Progress(Position(1, start))


def test_without_messages_the_start_is_committable() -> None:
    assert progress(7).committable == Position(1, 7)


def test_the_lowest_unfinished_message_holds_the_commit() -> None:
    window = progress()
    run = window.add([0, 1, 2, 3], Position(1, 4), 100)
    window.finish(run, 1, 4)
    assert window.committable == Position(1, 0)
    window.finish(run, 0, 1)
    assert window.committable == Position(1, 4)
    assert (window.count, window.bytes_count) == (0, 0)


def test_messages_that_the_filter_left_out_are_passed() -> None:
    window = progress()
    window.add([], Position(1, 50), 0)
    assert window.committable == Position(1, 50)
    run = window.add([60, 70], Position(1, 80), 10)
    window.finish(run, 0, 1)
    assert window.committable == Position(1, 70)


def test_a_later_run_waits_for_an_earlier_one() -> None:
    window = progress()
    first = window.add([0, 1], Position(1, 2), 10)
    second = window.add([2, 3], Position(2, 4), 10)
    window.finish(second, 0, 2)
    assert (window.committable, window.count, window.bytes_count) == (Position(1, 0), 2, 20)
    window.finish(first, 0, 2)
    assert window.committable == Position(2, 4)


def test_finishing_twice_counts_once() -> None:
    window = progress()
    run = window.add([0, 1, 2], Position(1, 3), 10)
    for _ in range(3):
        window.finish(run, 0, 2)
    assert (window.count, window.committable) == (1, Position(1, 2))


def test_a_fence_drops_what_lies_above_and_keeps_what_lies_below() -> None:
    window = progress()
    run = window.add([0, 1, 2, 3], Position(1, 4), 10)
    window.rewind(Position(2, 2))
    assert (window.count, window.next_position, window.committable) == (
        2,
        Position(2, 2),
        Position(1, 0),
    )
    window.finish(run, 0, 4)
    assert window.committable == Position(2, 2)


def test_a_jump_forward_waits_for_what_is_in_work() -> None:
    window = progress()
    run = window.add([0, 1], Position(1, 2), 10)
    window.rewind(Position(1, 100))
    assert (window.committable, window.span) == (Position(1, 0), 100)
    window.finish(run, 0, 2)
    assert (window.committable, window.span) == (Position(1, 100), 0)


class AgainstASet(RuleBasedStateMachine):
    """The model: a set of unfinished offsets, and where reading goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.window = progress()
        self.unfinished: set[int] = set()
        self.next = 0
        self.runs: list[Run] = []

    @rule(gaps=st.lists(st.integers(0, 3), max_size=8), rest=st.integers(0, 3))
    def add(self, gaps: list[int], rest: int) -> None:
        offsets, at = [], self.next
        for gap in gaps:
            at += gap
            offsets.append(at)
            at += 1
        self.next = at + rest
        self.runs.append(self.window.add(offsets, Position(1, self.next), len(offsets)))
        self.unfinished.update(offsets)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from(self.runs))
        start = data.draw(st.integers(0, len(run.offsets)))
        stop = data.draw(st.integers(start, len(run.offsets)))
        if all(offset < self.next for offset in run.offsets[start:stop]):
            self.unfinished.difference_update(run.offsets[start:stop])
            self.window.finish(run, start, stop)

    @rule(to=st.integers(0, 100))
    def rewind(self, to: int) -> None:
        self.window.rewind(Position(1, to))
        self.unfinished = {offset for offset in self.unfinished if offset < to}
        self.next = to
        self.runs.clear()  # what was cut must not be finished in the model by offset

    @invariant()
    def agrees(self) -> None:
        lowest = min(self.unfinished, default=self.next)
        assert self.window.count == len(self.unfinished)
        assert self.window.next_position.offset == self.next
        if self.unfinished:
            assert self.window.committable.offset == lowest


TestAgainstASet = AgainstASet.TestCase

"""Acks, visibility and readable maxima, the last against a list that is searched from the start."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cometmq.model import FlushMode, QueueKey, ReplicationMode
from cometmq.replication.watermarks import (
    DurabilityClass,
    FollowerWatermarks,
    HighWatermarks,
    ReadableMaxima,
    Watermarks,
    union,
)

ASYNC, FLUSHED = DurabilityClass.ASYNC, DurabilityClass.FLUSHED
REPLICATED, REPLICATED_FLUSHED = DurabilityClass.REPLICATED, DurabilityClass.REPLICATED_FLUSHED
CLASSES = (ASYNC, FLUSHED, REPLICATED, REPLICATED_FLUSHED, FLUSHED | REPLICATED)
QUEUE = ("orders", 0)


def test_class_follows_the_topics_modes() -> None:
    of, none = DurabilityClass.of, ReplicationMode.ASYNC
    assert of(FlushMode.ASYNC, none) is ASYNC
    assert of(FlushMode.SYNC, none) is FLUSHED
    assert of(FlushMode.ASYNC, ReplicationMode.APPENDED) is REPLICATED
    assert of(FlushMode.SYNC, ReplicationMode.FLUSHED) == FLUSHED | REPLICATED_FLUSHED


def test_a_batch_demands_what_any_of_its_segments_demands() -> None:
    assert union([]) is ASYNC
    assert union([ASYNC, FLUSHED]) is FLUSHED
    assert union([FLUSHED, REPLICATED, ASYNC]) == FLUSHED | REPLICATED


def test_asynchronous_topics_are_acknowledged_when_appended_and_seen_when_flushed() -> None:
    watermarks = Watermarks(appended=300, flushed=100)
    assert (watermarks.ack(ASYNC), watermarks.visible(ASYNC)) == (300, 100)
    assert (watermarks.ack(FLUSHED), watermarks.visible(FLUSHED)) == (100, 100)


def test_other_classes_are_acknowledged_and_seen_at_the_least_of_what_they_demand() -> None:
    watermarks = Watermarks(appended=300, flushed=100)
    watermarks.advance_replicated(200, 80)
    for demands, position in [
        (REPLICATED, 200),
        (REPLICATED | FLUSHED, 100),
        (REPLICATED_FLUSHED, 80),
        (REPLICATED_FLUSHED | FLUSHED, 80),
    ]:
        assert watermarks.ack(demands) == watermarks.visible(demands) == position


def test_a_member_that_joins_with_less_takes_nothing_back() -> None:
    watermarks = Watermarks(appended=300, flushed=100)
    watermarks.advance_replicated(200, 80)
    watermarks.advance_replicated(150, 90)
    assert watermarks.marks == HighWatermarks(100, 200, 90)


@pytest.mark.parametrize(("replicated", "replicated_flushed"), [(301, 0), (50, 60), (200, 101)])
def test_nobody_has_more_than_the_writer(replicated: int, replicated_flushed: int) -> None:
    with pytest.raises(AssertionError):
        Watermarks(appended=300, flushed=100).advance_replicated(replicated, replicated_flushed)


@pytest.mark.parametrize(("appended", "flushed"), [(99, 50), (100, 49), (100, 101)])
def test_positions_neither_go_back_nor_overtake(appended: int, flushed: int) -> None:
    watermarks = Watermarks(appended=100, flushed=50)

    def move() -> None:
        watermarks.append_to(appended)
        watermarks.flush_to(flushed)

    with pytest.raises(AssertionError):
        move()


def test_what_was_recovered_is_readable_at_once() -> None:
    maxima = ReadableMaxima({QUEUE: 7})
    assert maxima.readable(QUEUE) == 7
    assert maxima.readable(("orders", 1)) == 0


def test_an_advance_names_each_queue_once_with_its_newest_maximum() -> None:
    maxima = ReadableMaxima()
    for end, maximum in ((100, 1), (200, 2), (300, 3)):
        maxima.push(ASYNC, end, QUEUE, maximum)
    assert maxima.advance(Watermarks(300, 299)) == [(QUEUE, 2)]
    assert maxima.advance(Watermarks(300, 299)) == []
    assert maxima.advance(Watermarks(300, 300)) == [(QUEUE, 3)]


def test_a_deleted_topics_records_do_not_raise_its_successor() -> None:
    maxima = ReadableMaxima({QUEUE: 5})
    maxima.push(ASYNC, 100, QUEUE, 6)
    maxima.push(ASYNC, 100, ("other", 0), 1)
    maxima.forget_topic("orders")
    maxima.push(ASYNC, 200, QUEUE, 1)
    assert maxima.advance(Watermarks(200, 150)) == [(("other", 0), 1)]
    assert maxima.readable(QUEUE) == 0
    assert maxima.advance(Watermarks(200, 200)) == [(QUEUE, 1)]


class SplitVisibility(Watermarks):
    """Classes whose visible positions differ, as replication will make them."""

    def visible(self, demands: DurabilityClass) -> int:
        return self.flushed if demands else self.appended


def test_a_queue_that_changed_its_class_waits_for_what_is_older() -> None:
    maxima = ReadableMaxima()
    maxima.push(FLUSHED, 100, QUEUE, 1)
    maxima.push(ASYNC, 200, QUEUE, 2)
    assert maxima.advance(SplitVisibility(200, 99)) == []
    assert maxima.advance(SplitVisibility(200, 100)) == [(QUEUE, 1)]
    assert maxima.advance(SplitVisibility(200, 200)) == [(QUEUE, 2)]
    maxima.push(ASYNC, 300, QUEUE, 3)
    assert maxima.advance(SplitVisibility(300, 200)) == [(QUEUE, 3)]


def test_an_asynchronous_record_waits_for_the_disk_also_before_one_that_was_copied() -> None:
    maxima = ReadableMaxima()
    maxima.push(ASYNC, 100, QUEUE, 1)
    maxima.push(REPLICATED, 200, QUEUE, 2)
    maxima.push(ASYNC, 300, QUEUE, 3)
    assert maxima.advance(HighWatermarks(flushed=99, replicated=300)) == []
    assert maxima.advance(HighWatermarks(flushed=100, replicated=300)) == [(QUEUE, 1)]
    assert maxima.advance(HighWatermarks(flushed=299, replicated=300)) == [(QUEUE, 2)]
    assert maxima.advance(HighWatermarks(flushed=300, replicated=300)) == [(QUEUE, 3)]


class MaximaMachine(RuleBasedStateMachine):
    """The naive twin keeps every record and looks through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.maxima = ReadableMaxima()
        self.watermarks = Watermarks()
        self.log: list[tuple[DurabilityClass, int, QueueKey]] = []  # class, end, queue
        self.seen: dict[QueueKey, int] = {}

    @rule(queue_id=st.integers(0, 2), demands=st.sampled_from(CLASSES))
    def append(self, queue_id: int, demands: DurabilityClass) -> None:
        key = ("orders", queue_id)
        end = self.watermarks.appended + 10
        self.log.append((demands, end, key))
        self.maxima.push(demands, end, key, sum(k == key for _, _, k in self.log))
        self.watermarks.append_to(end)

    @rule(share=st.floats(0, 1))
    def flush(self, share: float) -> None:
        span = self.watermarks.appended - self.watermarks.flushed
        self.watermarks.flush_to(self.watermarks.flushed + int(span * share))

    @rule(share=st.floats(0, 1), flushed_share=st.floats(0, 1))
    def copy(self, share: float, flushed_share: float) -> None:
        replicated = int(self.watermarks.appended * share)
        flushed = int(min(replicated, self.watermarks.flushed) * flushed_share)
        self.watermarks.advance_replicated(replicated, flushed)

    @rule()
    def advance(self) -> None:
        before = dict(self.seen)
        moved = self.maxima.advance(self.watermarks)
        self.seen.update(moved)
        assert len(dict(moved)) == len(moved)
        assert all(before.get(key, 0) < maximum for key, maximum in moved)
        for key in self.keys():
            # Never more than the classes show; and no less, but for queues that changed their
            # class, which may wait until all is on every disk.
            assert self.seen.get(key, 0) <= self.naive(key)
            if self.of_one_class(key) or min(self.watermarks.marks) == self.watermarks.appended:
                assert self.seen.get(key, 0) == self.naive(key)

    def of_one_class(self, key: QueueKey) -> bool:
        return len({demands for demands, _, k in self.log if k == key}) == 1

    def keys(self) -> set[QueueKey]:
        return {key for _, _, key in self.log}

    def naive(self, key: QueueKey) -> int:
        """Records of the queue before the first one that its class does not yet show."""
        count = 0
        for demands, end, _ in (entry for entry in self.log if entry[2] == key):
            if end > self.watermarks.visible(demands):
                break
            count += 1
        return count

    @invariant()
    def readable_is_what_was_announced(self) -> None:
        assert all(self.maxima.readable(key) == self.seen.get(key, 0) for key in self.keys())


TestReadableMaxima = MaximaMachine.TestCase


class TestCopyWatermarks:
    def test_a_copy_shows_what_the_writer_shows_and_what_is_on_its_own_disk(self) -> None:
        marks = FollowerWatermarks(100, 100)
        assert marks.visible(ASYNC) == 0, "nothing is known before the writer tells"
        marks.raise_to(HighWatermarks(80, 60, 50))
        assert [marks.visible(d) for d in (ASYNC, FLUSHED, REPLICATED, REPLICATED_FLUSHED)] == [
            80,
            80,
            60,
            50,
        ]
        assert marks.announced_position == marks.announced_on_disk == marks.most_visible == 80
        marks.raise_to(HighWatermarks(80, 90, 50))
        assert (marks.announced_position, marks.announced_on_disk) == (90, 80)
        marks.append_to(200)
        marks.raise_to(HighWatermarks(200, 200, 200))
        assert marks.visible(FLUSHED) == marks.most_visible == 100
        marks.flush_to(150)
        assert marks.visible(REPLICATED_FLUSHED) == 150

    def test_what_was_told_of_bytes_that_never_came_is_not_said_of_others(self) -> None:
        marks = FollowerWatermarks(100, 100)
        marks.raise_to(HighWatermarks(180, 170, 90))
        marks.agreed()
        marks.append_to(200)
        marks.flush_to(200)
        assert (marks.visible(ASYNC), marks.visible(REPLICATED_FLUSHED)) == (100, 90)

    def test_what_a_writer_has_shown_of_it_is_known(self) -> None:
        marks = FollowerWatermarks(100, 60)
        assert marks.shown == (0, 0, 0)
        marks.raise_to(HighWatermarks(180, 90, 70))
        assert marks.shown == (100, 90, 70), "no more than is here"

    def test_a_writer_that_begins_anew_takes_nothing_back(self) -> None:
        marks = FollowerWatermarks(100, 100)
        marks.raise_to(HighWatermarks(80, 70, 70))
        marks.raise_to(HighWatermarks(50, 75, 50))
        assert marks.visible(ASYNC) == 80
        assert marks.visible(REPLICATED) == 75

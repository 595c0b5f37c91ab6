from __future__ import annotations

from pathlib import Path

from cometmq.store.log.commitlog import Span
from cometmq.store.recovery.checkpointer import RecoveryPointWriter
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import append, open_store


def marker_of(store: MessageStore) -> RecoveryPointWriter:
    return RecoveryPointWriter(store._log, store._dispatcher)


def grow(store: MessageStore, marker: RecoveryPointWriter) -> int:
    """One more message, then a look; returns the end."""
    append(store, ("A", 0, [b"x"]))
    marker.sample(store._last_span)
    return store.appended_offset


def test_what_is_not_on_the_disk_is_not_marked(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    marker = marker_of(store)
    end = grow(store, marker)
    assert marker.mark_below(end - 1) is None
    mark = marker.mark_below(end)
    assert mark is not None
    assert mark.holds(store._log.segments)
    assert (mark.end, mark.tally) == (end, (1, 1))
    store.abandon()


def test_marks_go_on_where_the_disk_is_always_behind(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    marker = marker_of(store)
    ends, marked = list[int](), []
    for step in range(20):
        ends.append(grow(store, marker))
        mark = marker.mark_below(ends[step - 4] if step >= 4 else 0)
        marked += [] if mark is None else [mark.end]
    assert len(marked) >= 4
    assert marked == sorted(set(marked))
    assert set(marked) <= set(ends)
    store.abandon()


def test_an_empty_log_has_nothing_to_mark(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    marker = marker_of(store)
    marker.sample(store._last_span)
    assert marker.mark_below(100) is None
    store.abandon()


def test_a_sample_is_worth_nothing_once_a_topic_went_or_the_log_is_cut(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    marker = marker_of(store)
    append(store, ("B", 0, [b"x"]))
    end = grow(store, marker)
    store.drop_topic("B")
    assert marker.mark_below(end) is None
    end = grow(store, marker)
    marker.forget()
    assert marker.mark_below(end) is None
    store.abandon()


def test_a_writer_that_is_seen_in_between_is_not_sampled(tmp_path: Path) -> None:
    """The last record is there already and not counted, or moves while one looks."""
    store = open_store(tmp_path)
    marker = marker_of(store)
    append(store, ("A", 0, [b"x"]))
    offset, size = store._last_span()
    marker.sample(lambda: (offset + size, size))
    spans = iter([(offset, size), (offset + size, size)])

    def moving() -> Span:
        return next(spans)

    marker.sample(moving)
    assert marker.mark_below(10**9) is None
    store.abandon()


def test_a_store_at_rest_has_nothing_to_flush(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for step in (lambda: append(store, ("A", 0, [b"x"])), store.flush_log):
        step()
        assert store.queues_wait
        store.flush_queues()
        assert not store.queues_wait
    store.drop_topic("A")
    assert store.queues_wait
    store.abandon()

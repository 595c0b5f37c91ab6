from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.format import queueunit
from cometmq.format.scan import QueueRun, Run
from cometmq.store.disk.files import OsFiles
from cometmq.store.layout import StorePaths
from cometmq.store.log.scan import Stretch
from cometmq.store.log.units import LOST_TOPIC
from cometmq.store.queues.dispatch import Dispatcher
from cometmq.store.recovery.replay import LastRecord, Loss, OutOfStep, Replay
from tests.support.stores.small_stores import Deletions, encoded

SIZE = 100


@pytest.fixture
def dispatcher(tmp_path: Path) -> Dispatcher:
    return Dispatcher(StorePaths(tmp_path), OsFiles(), 16 * queueunit.UNIT_BYTES)


def run(at: int, *queues: tuple[str, int, int, int], time_ms: int = 5) -> Stretch:
    """Records from ``at`` on; queues: (topic, queue id, first queue offset, count)."""
    found, place = [], at
    for topic, queue_id, first, count in queues:
        units = b"".join(queueunit.pack(place + n * SIZE, SIZE, 0) for n in range(count))
        found.append(QueueRun(topic, queue_id, first, units))
        place += count * SIZE
    total = (place - at) // SIZE
    return Stretch(at, place, Run(place - at, total, SIZE, time_ms, time_ms, False, found))


def units_of(dispatcher: Dispatcher, topic: str, queue_id: int) -> list[tuple[int, int]]:
    queue = dispatcher.find(topic, queue_id)
    assert queue is not None
    found = queue.read_units(queue.min_offset, 100, nowait=False)
    return [(log_offset, size) for log_offset, size, _ in queueunit.iterate(found)]


def test_runs_of_a_queue_are_put_together(dispatcher: Dispatcher) -> None:
    settled: list[tuple[str, int, int, int]] = []
    replay = Replay(dispatcher, None, lambda *told: settled.append(told))
    replay.take(run(0, ("B", 0, 0, 2), ("A", 1, 0, 1)))
    replay.take(run(300, ("B", 0, 2, 1), time_ms=4))
    assert dispatcher.find("B", 0) is not None
    assert dispatcher.get("B", 0).next_offset == 0, "nothing is settled yet"
    replay.dispatch_held()
    assert units_of(dispatcher, "B", 0) == [(0, SIZE), (100, SIZE), (300, SIZE)]
    assert settled == [("A", 1, 300, 1), ("B", 0, 400, 3)], "in the order of the log"
    assert replay.last == LastRecord(300, SIZE, 5)
    assert replay.record_count == 4


def test_a_queue_without_messages_may_begin_late(dispatcher: Dispatcher) -> None:
    replay = Replay(dispatcher, None)
    replay.take(run(500, ("A", 0, 7, 2)))
    replay.dispatch_held()
    queue = dispatcher.get("A", 0)
    assert (queue.min_offset, queue.next_offset) == (7, 9)
    dispatcher.reached((700, 1))
    _, tally = dispatcher.tallied
    assert (tally.queue_count, tally.unit_count) == (1, 9)


def test_a_queue_that_counts_from_0_again_is_another_one(dispatcher: Dispatcher) -> None:
    replay = Replay(dispatcher, None)
    replay.take(run(0, ("A", 0, 0, 3)))
    replay.take(run(300, ("A", 0, 0, 1)))
    replay.dispatch_held()
    assert units_of(dispatcher, "A", 0) == [(300, SIZE)]


@pytest.mark.parametrize("offset", [1, 4])
def test_any_other_offset_is_out_of_step(dispatcher: Dispatcher, offset: int) -> None:
    replay = Replay(dispatcher, None)
    replay.take(run(0, ("A", 0, 0, 3)))
    with pytest.raises(OutOfStep, match=f"300 of the log is message {offset} .* next is 3"):
        replay.take(run(300, ("A", 0, offset, 1)))


def test_a_stray_that_says_it_is_the_missing_message_is_named(dispatcher: Dispatcher) -> None:
    """Not the good record behind it."""
    replay = Replay(dispatcher, None)
    replay.take(run(0, ("A", 0, 0, 3), ("B", 0, 3, 1)))
    with pytest.raises(OutOfStep, match=r"400 of the log .* record at 300, .* of B") as found:
        replay.take(run(400, ("A", 0, 4, 1)))
    assert (found.value.start, found.value.end) == (300, 400)


def test_what_damage_took_leaves_its_place_in_the_queue(dispatcher: Dispatcher) -> None:
    replay = Replay(dispatcher, None)
    replay.take(run(0, ("A", 0, 0, 1), ("B", 0, 0, 1)))
    replay.pass_over(200, 600)
    replay.take(run(600, ("A", 0, 3, 1), ("B", 0, 1, 1)))
    replay.dispatch_held()
    lost = (200, queueunit.LOST_SIZE)
    assert units_of(dispatcher, "A", 0) == [(0, SIZE), lost, lost, (600, SIZE)]
    assert units_of(dispatcher, "B", 0) == [(100, SIZE), (700, SIZE)]
    assert replay.losses == [Loss("A", 0, 1, 2, 200)]


def test_a_place_that_was_written_off_explains_a_gap_as_well(dispatcher: Dispatcher) -> None:
    replay = Replay(dispatcher, None)
    replay.take(run(0, ("A", 0, 0, 1)))
    written_off = Stretch(100, 400, Run(300, 1, 300, 5, 5, False, []), LOST_TOPIC, b"bytes")
    replay.take(written_off)
    replay.take(run(400, ("A", 0, 2, 1)))
    replay.dispatch_held()
    assert replay.losses == [Loss("A", 0, 1, 1, 100)]


def test_a_re_created_queue_whose_beginning_was_lost_goes_on(dispatcher: Dispatcher) -> None:
    replay = Replay(dispatcher, None)
    replay.take(run(0, ("A", 0, 0, 5)))
    replay.pass_over(500, 900)
    replay.take(run(900, ("A", 0, 2, 1)))
    replay.dispatch_held()
    queue = dispatcher.get("A", 0)
    assert (queue.min_offset, queue.next_offset) == (2, 3)
    assert replay.losses == [Loss("A", 0, 0, 2, 500)]


@pytest.mark.parametrize(
    ("is_from_first", "losses"), [(True, [Loss("B", 0, 0, 2, 100)]), (False, [])]
)
def test_first_messages_are_lost_where_none_went_with_log_files(
    dispatcher: Dispatcher, is_from_first: bool, losses: list[Loss]
) -> None:
    replay = Replay(dispatcher, None, is_from_first=is_from_first)
    replay.take(run(0, ("A", 0, 0, 1)))
    replay.pass_over(100, 100 + 3 * 91)
    replay.take(run(500, ("B", 0, 2, 1), ("C", 0, 2, 1)))
    replay.dispatch_held()
    assert replay.losses == losses, "of C there was no room for two"
    queue = dispatcher.get("B", 0)
    assert (queue.min_offset, queue.next_offset) == (2, 3)


@pytest.mark.parametrize("offset", [1, 7, 2**31])
def test_damage_explains_no_more_than_it_can_have_held(dispatcher: Dispatcher, offset: int) -> None:
    """A queue offset has no checksum: one flipped bit must not cost what is not damaged."""
    replay = Replay(dispatcher, None)
    replay.take(run(0, ("A", 0, 0, 4)))
    replay.pass_over(400, 400 + 91)
    with pytest.raises(OutOfStep, match=f"message {offset} of queue 0"):
        replay.take(run(500, ("A", 0, offset, 1)))
    assert dispatcher.get("A", 0).next_offset == 4, "nothing is thrown away"


def test_an_observer_hears_of_its_topics_when_all_before_is_settled(
    dispatcher: Dispatcher,
) -> None:
    observer = Deletions()
    replay = Replay(dispatcher, observer)
    replay.take(run(0, ("A", 0, 0, 2)))
    deletion = run(200, ("S", 0, 0, 1))
    replay.take(deletion._replace(topic="S", apart=_deletion_of("A", 200)))
    replay.take(run(300, ("A", 0, 0, 1)))
    replay.dispatch_held()
    assert observer.seen == [b"A"]
    assert units_of(dispatcher, "A", 0) == [(300, SIZE)]
    assert not replay.deleted_what_was_gone


def test_a_deletion_of_what_is_gone_is_remembered(dispatcher: Dispatcher) -> None:
    replay = Replay(dispatcher, Deletions())
    deletion = run(200, ("S", 0, 0, 1))
    replay.take(deletion._replace(topic="S", apart=_deletion_of("gone", 200)))
    assert replay.deleted_what_was_gone


def _deletion_of(topic: str, log_offset: int) -> bytes:
    sent = encoded("S", 0, topic.encode())
    return sent[:28] + log_offset.to_bytes(8, "big") + sent[36:]

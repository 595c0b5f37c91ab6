from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cometmq.format import delayed, queueunit, record
from cometmq.messaging.delay import DelayProgress, LevelDrops, LevelProgress, Now
from tests.support.stores.small_stores import START_MS
from tests.unit.format.test_batch import make

LEVEL = 3  # 10 s


def units(*due_ms: int) -> bytes:
    return b"".join(queueunit.pack(1, 100, due) for due in due_ms)


@given(
    st.lists(st.integers(0, 30_000), max_size=20).map(sorted),
    st.lists(st.integers(0, 20_000), min_size=1, max_size=12),
)
def test_a_message_is_delivered_in_order_never_early_and_in_time(
    stored_ms: list[int], steps_ms: list[int]
) -> None:
    """With a steady clock: all that is due at each look, and nothing else."""
    delay_ms = delayed.delay_ms(LEVEL)
    dues = [stored + delay_ms for stored in stored_ms]
    level, now_ms = LevelProgress(LEVEL, 0), 0
    for step_ms in steps_ms:
        now_ms += step_ms
        end = sum(stored <= now_ms for stored in stored_ms)
        while True:
            waiting = dues[level.offset : end][:4]
            count, wait_s = level.due_count(units(*waiting), end, Now(now_ms, now_ms / 1000))
            level.delivered(count)
            if not count:
                break
        assert level.offset == sum(due <= now_ms for due in dues)
        if level.offset < end:
            assert 0 < wait_s <= (dues[level.offset] - now_ms) / 1000


def test_a_clock_that_goes_back_delays_a_message_by_its_level_at_most_twice() -> None:
    level = LevelProgress(LEVEL, 0)
    due = units(START_MS + 10_000)
    gone_back = START_MS - 86_400_000
    assert level.due_count(due, 1, Now(START_MS, 100.0)) == (0, 10.0)
    assert level.due_count(due, 1, Now(gone_back, 101.0)) == (0, 9.0)
    assert level.due_count(due, 1, Now(gone_back, 110.0)) == (1, 0.0)
    level.delivered(1)
    count, wait_s = level.due_count(due, 2, Now(gone_back, 111.0))
    assert (count, wait_s) == (0, 10.0)
    assert level.due_count(due, 2, Now(gone_back, 121.0))[0] == 1


def test_a_progress_beyond_the_end_of_its_queue_begins_at_the_end() -> None:
    progress = DelayProgress({1: 70, 2: 5, 99: 3}, lambda level: 10 * level)
    assert progress.offsets == {1: 10, 2: 5}
    progress.reached(delayed.queue_id_of(2), 4)  # was known
    progress.reached(delayed.queue_id_of(2), 8)
    progress.reached(400, 8)  # no queue of a level
    assert progress.offsets == {1: 10, 2: 9}


def test_messages_of_a_deleted_topic_are_known_until_their_levels_have_passed_them() -> None:
    drops = LevelDrops()
    drops.drop_older("T", {1: 10, 3: 5})
    level_1, level_2 = delayed.queue_id_of(1), delayed.queue_id_of(2)
    assert drops.is_dropped("T", level_1, 9)
    for topic, queue_id, offset in (("T", level_1, 10), ("T", level_2, 0), ("U", level_1, 9)):
        assert not drops.is_dropped(topic, queue_id, offset)
    drops.reached({1: 10, 3: 4})
    assert drops.dropped == {"T": {3: 5}}
    drops.limit(lambda _level: 2)  # others get the offsets from there on
    assert drops.dropped == {"T": {3: 2}}
    drops.reached({3: 2})
    assert not drops.dropped


def test_a_target_is_read_as_any_program_may_have_written_it() -> None:
    def of(raw: bytes) -> tuple[str, int] | None:
        return delayed.target_of(record.decode(make(raw=raw)).raw_properties)

    assert of(delayed.prefix(3, "T", 7)) == ("T", 7)
    assert of(b"REAL_QID\x012\x02a\x01b\x02REAL_TOPIC\x01T") == ("T", 2)
    for wrong in (b"", b"REAL_TOPIC\x01T", b"REAL_QID\x012", b"REAL_TOPIC\x01T\x02REAL_QID\x01-1"):
        assert of(wrong) is None
    assert of(b"REAL_TOPIC\x01T\x02REAL_QID\x01" + b"9" * 5000) is None

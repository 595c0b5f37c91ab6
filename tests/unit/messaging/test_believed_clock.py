"""Which time it is for messages that wait, while the wall clock may be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.messaging.believed_clock import JUMP_MS, PROMISE_MS_MAX, BelievedClock

BOOTED_MS = 1_800_000_000_000  # when the machine booted
HOUR_MS = 3_600_000
MINUTE_MS = 60_000
TO_2030_MS = 1_893_456_000_000 - BOOTED_MS
TO_SECONDS_MS = BOOTED_MS // 1000 - BOOTED_MS  # seconds were taken for milliseconds
WRONG_MS = (20_000, 600_000, HOUR_MS, TO_2030_MS, -20_000, -600_000, -HOUR_MS, TO_SECONDS_MS)


def look(clock: BelievedClock, up_ms: int, wrong_ms: int = 0) -> int:
    """How wrong the time is by which messages are due."""
    clock.look(BOOTED_MS + up_ms + wrong_ms, up_ms)
    return clock.due_ms - BOOTED_MS - up_ms


def now_wrong(clock: BelievedClock, up_ms: int) -> int:
    """The same of the time from which delays count, as of the last look."""
    return clock.now_ms - BOOTED_MS - up_ms


def test_a_jump_forward_is_believed_after_a_minute_in_which_the_clock_goes_on() -> None:
    clock = BelievedClock()
    assert look(clock, HOUR_MS) == 0
    assert look(clock, HOUR_MS + 1_000, HOUR_MS) == 0
    assert look(clock, HOUR_MS + MINUTE_MS, HOUR_MS) == 0
    assert look(clock, HOUR_MS + MINUTE_MS + 1_000, HOUR_MS) == HOUR_MS
    assert (clock.forward_count, clock.back_count) == (1, 0)


def test_a_jump_that_is_taken_back_was_never_believed() -> None:
    clock = BelievedClock()
    wrong = {0: 0, 1: HOUR_MS, 40: HOUR_MS, 50: 2 * HOUR_MS, 100: 2 * HOUR_MS, 105: 0, 200: 0}
    for up_s, wrong_ms in wrong.items():
        assert look(clock, HOUR_MS + 1_000 * up_s, wrong_ms) == 0
        assert now_wrong(clock, HOUR_MS + 1_000 * up_s) == 0
    assert (clock.forward_count, clock.back_count) == (2, 0)


def test_a_jump_back_is_believed_at_once() -> None:
    clock = BelievedClock()
    assert look(clock, HOUR_MS) == 0
    assert look(clock, HOUR_MS + 10, -HOUR_MS) == -HOUR_MS
    assert (clock.forward_count, clock.back_count) == (0, 1)


@pytest.mark.parametrize("step_ms", [900, 9_900, 10_000])
def test_many_small_steps_forward_are_a_jump(step_ms: int) -> None:
    """Six of them within 3 s: each was believed, and messages came a minute early."""
    clock = BelievedClock()
    look(clock, HOUR_MS)
    for number in range(1, 7):
        assert look(clock, HOUR_MS + 500 * number, step_ms * number) <= JUMP_MS
    assert look(clock, HOUR_MS + 70_000, 6 * step_ms) == 6 * step_ms


@given(st.lists(st.tuples(st.integers(0, 900), st.integers(0, 20_000)), max_size=60))
def test_the_sum_of_the_steps_that_are_believed_at_once_is_bound(
    steps: list[tuple[int, int]],
) -> None:
    clock, up_ms, wrong_ms = BelievedClock(), HOUR_MS, 0
    look(clock, up_ms)
    for step_ms, forward_ms in steps:
        up_ms, wrong_ms = up_ms + step_ms, wrong_ms + forward_ms
        assert look(clock, up_ms, wrong_ms) <= JUMP_MS


@given(st.lists(st.tuples(st.integers(60_000, 90_000), st.integers(-999, 999))))
def test_a_clock_that_is_corrected_a_little_is_followed(steps: list[tuple[int, int]]) -> None:
    clock, up_ms, wrong_ms = BelievedClock(), HOUR_MS, 0
    look(clock, up_ms)
    for step_ms, correction_ms in steps:
        up_ms, wrong_ms = up_ms + step_ms, wrong_ms + correction_ms
        look(clock, up_ms - 1, wrong_ms - correction_ms)
        assert look(clock, up_ms, wrong_ms) == wrong_ms
    assert clock.forward_count == 0


@pytest.mark.parametrize("wrong_ms", WRONG_MS)
@pytest.mark.parametrize("wrong_s", [5, 40, 90, 600])
@pytest.mark.parametrize("delay_ms", [1_000, 30_000, 100_000, 1_800_000])
def test_a_delay_is_never_early_and_late_by_the_error_that_was_believed(
    wrong_ms: int, wrong_s: int, delay_ms: int
) -> None:
    """The clock is wrong for some time. A message is sent every second, all along and after."""
    clock = BelievedClock()
    waiting: list[tuple[int, int]] = []  # when it was sent, when it is due
    worst_ms = 0
    for up_s in range(3_600, 3_600 + wrong_s + delay_ms // 1000 + 4_000, 5):
        up_ms = up_s * 1_000
        is_wrong = 0 <= up_s - 3_620 < wrong_s
        look(clock, up_ms, wrong_ms if is_wrong else 0)
        for sent_ms, due_ms in [one for one in waiting if one[1] <= clock.due_ms]:
            assert up_ms >= sent_ms + delay_ms, "early"
            worst_ms = max(worst_ms, up_ms - sent_ms - delay_ms)
            waiting.remove((sent_ms, due_ms))
        if up_s < 3_620 + wrong_s + 300:
            waiting.append((up_ms, clock.now_ms + delay_ms))
            clock.promise(delay_ms, up_ms)
    assert worst_ms <= abs(wrong_ms) + 5_000
    if wrong_ms > 0 and wrong_s < 60:
        assert worst_ms <= 5_000, "it was not believed"
    if wrong_ms < PROMISE_MS_MAX:
        assert not waiting, "late for longer than the clock was wrong"


def test_what_is_sent_after_a_short_jump_is_not_late() -> None:
    clock = BelievedClock()
    look(clock, HOUR_MS)
    look(clock, HOUR_MS + 20_000, 600_000)
    look(clock, HOUR_MS + 60_000)
    assert now_wrong(clock, HOUR_MS + 60_000) == 0


def test_delays_of_many_clocks_are_kept_in_a_few_numbers() -> None:
    clock = BelievedClock()
    for number in range(100):
        look(clock, HOUR_MS + number, -10_000 * number)
        clock.promise(MINUTE_MS, HOUR_MS + number)
    assert look(clock, HOUR_MS + 100) == -990_000, "no delay is shortened"
    assert look(clock, HOUR_MS + 100 + MINUTE_MS) == 0


def test_the_clock_of_a_machine_that_has_just_booted_is_compared_with_the_log() -> None:
    """It is an hour ahead until the machine has asked for the time."""
    clock = BelievedClock(stored_ms=BOOTED_MS - 30_000)
    late_ms = look(clock, 20_000, HOUR_MS)
    assert late_ms == -50_000, "the time of the log's end"
    assert look(clock, 50_000, HOUR_MS) == late_ms, "from there it goes on"
    assert look(clock, 55_000, 0) == late_ms, "less wrong than before, and still ahead"
    assert clock.forward_count == 2
    assert look(clock, 55_000 + MINUTE_MS, 0) == 0


def test_a_machine_that_has_been_up_for_a_minute_has_its_clock_set() -> None:
    clock = BelievedClock(stored_ms=BOOTED_MS - HOUR_MS)
    assert look(clock, 20_000) == -HOUR_MS - 20_000
    assert look(clock, MINUTE_MS) == 0, "since the boot, not since the first look"


@pytest.mark.parametrize(
    ("up_ms", "stored_ms"),
    [
        (MINUTE_MS, BOOTED_MS - HOUR_MS),  # a long stop of the process
        (20_000, BOOTED_MS + 19_500),  # the log tells much the same
        (20_000, BOOTED_MS + HOUR_MS),  # a jump back
        (20_000, 0),  # a new store
    ],
)
def test_a_first_clock_is_believed_else(up_ms: int, stored_ms: int) -> None:
    clock = BelievedClock(stored_ms)
    assert look(clock, up_ms) == 0
    assert (clock.forward_count, clock.back_count) == (0, 0)

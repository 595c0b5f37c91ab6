"""Which time it is for messages that wait, while the wall clock may be wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.messaging.believed_clock import BelievedClock

BOOTED_MS = 1_800_000_000_000  # when the machine booted
HOUR_MS = 3_600_000
MINUTE_MS = 60_000


def look(clock: BelievedClock, up_ms: int, wrong_ms: int = 0) -> int:
    """How wrong the believed time is."""
    return clock.now_ms(BOOTED_MS + up_ms + wrong_ms, up_ms) - BOOTED_MS - up_ms


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
    assert (clock.forward_count, clock.back_count) == (2, 0)


def test_a_jump_back_is_believed_at_once() -> None:
    clock = BelievedClock()
    assert look(clock, HOUR_MS) == 0
    assert look(clock, HOUR_MS + 10, -HOUR_MS) == -HOUR_MS
    assert (clock.forward_count, clock.back_count) == (0, 1)


@given(st.lists(st.tuples(st.integers(0, 90_000), st.integers(-9_999, 9_999))))
def test_a_clock_that_is_corrected_by_seconds_is_followed(steps: list[tuple[int, int]]) -> None:
    clock, up_ms, wrong_ms = BelievedClock(), HOUR_MS, 0
    for step_ms, correction_ms in steps:
        up_ms, wrong_ms = up_ms + step_ms, wrong_ms + correction_ms
        assert look(clock, up_ms, wrong_ms) == wrong_ms
    assert clock.forward_count == 0


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
        (20_000, BOOTED_MS + 11_000),  # the log tells much the same
        (20_000, BOOTED_MS + HOUR_MS),  # a jump back
        (20_000, 0),  # a new store
    ],
)
def test_a_first_clock_is_believed_else(up_ms: int, stored_ms: int) -> None:
    clock = BelievedClock(stored_ms)
    assert look(clock, up_ms) == 0
    assert (clock.forward_count, clock.back_count) == (0, 0)

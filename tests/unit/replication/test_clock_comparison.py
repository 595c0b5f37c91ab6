"""Which clock is wrong, by what others show."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.replication.clock_comparison import (
    CLOCKS_MAX,
    DAY_MS,
    FORGOTTEN_MS,
    KEPT_MS,
    ClockComparison,
    Verdict,
)

TRUE_MS = 1_800_000_000_000  # the right time, less the time since the boot
UP_MS = 3_600_000
HOUR_MS = 3_600_000
WRONG_MS = (20_000, 600_000, HOUR_MS, 4 * 365 * DAY_MS, -20_000, -600_000, -HOUR_MS)


def showing(*wrong_ms: int, up_ms: int = UP_MS) -> ClockComparison:
    """Other clocks, each wrong by so much."""
    found = ClockComparison()
    for number, ms in enumerate(wrong_ms):
        found.note(f"member {number}", up_ms, up_ms, TRUE_MS + up_ms + ms)
    return found


def wrong(comparison: ClockComparison, own_ms: int, stored_ms: int = 0) -> int | None:
    """How wrong most clocks are, beside an own one that is wrong by so much."""
    verdict = comparison.verdict(TRUE_MS + own_ms, UP_MS, stored_ms)
    return None if verdict is None else verdict.offset_ms - TRUE_MS


@given(
    st.integers(-10_000, 10_000_000),
    st.integers(0, 5_000),
    st.integers(0, 5_000),
)
def test_the_error_covers_the_truth(ahead_ms: int, there_ms: int, back_ms: int) -> None:
    """Whatever way took how long, the offset is as the clocks differ, within the error."""
    comparison = ClockComparison()
    asked_ms = UP_MS
    read_ms = asked_ms + there_ms
    comparison.note("a", asked_ms, read_ms + back_ms, TRUE_MS + read_ms + ahead_ms)
    reading = comparison.readings["a"]
    assert abs(reading.offset_ms - TRUE_MS - ahead_ms) <= reading.error_ms


def test_the_best_of_the_last_readings_counts_until_the_clock_is_another() -> None:
    comparison = ClockComparison()
    comparison.note("a", UP_MS, UP_MS + 2, TRUE_MS + UP_MS + 1)
    comparison.note("a", UP_MS + 100, UP_MS + 600, TRUE_MS + UP_MS + 500)
    assert comparison.readings["a"].error_ms == 1
    comparison.note("a", UP_MS + 700, UP_MS + 900, TRUE_MS + UP_MS + 800 + 20_000)
    assert comparison.readings["a"].offset_ms == TRUE_MS + 20_000, "it has jumped"
    later_ms = UP_MS + 900 + KEPT_MS
    comparison.note("a", later_ms - 1_000, later_ms, TRUE_MS + later_ms + 20_000)
    assert comparison.readings["a"].error_ms == 500, "an old one counts no more"
    comparison.note("a", UP_MS + 50, UP_MS, TRUE_MS)
    assert comparison.readings["a"].error_ms == 500, "an answer before its question"


@pytest.mark.parametrize("wrong_ms", WRONG_MS)
def test_most_clocks_are_right(wrong_ms: int) -> None:
    """One that is wrong, the own or another, changes nothing."""
    assert wrong(showing(0, 0), wrong_ms) == 0
    assert wrong(showing(0, wrong_ms), 0) == 0
    assert wrong(showing(0, 0, wrong_ms), 0) == 0
    assert wrong(showing(0, 0, 0), wrong_ms) == 0


@pytest.mark.parametrize("wrong_ms", WRONG_MS)
def test_of_two_the_lower_counts_so_that_nothing_is_early(wrong_ms: int) -> None:
    assert wrong(showing(0), wrong_ms) == min(0, wrong_ms)
    assert wrong(showing(wrong_ms), 0) == min(0, wrong_ms)
    assert wrong(showing(wrong_ms, wrong_ms), 0) == wrong_ms, "two against one"
    assert wrong(showing(0, wrong_ms, wrong_ms), 0) == min(0, wrong_ms)


def test_a_single_clock_far_behind_the_log_does_not_count() -> None:
    """Else all that waits would wait for years."""
    stored_ms = TRUE_MS + UP_MS - 1_000
    assert wrong(showing(-2 * DAY_MS), 0, stored_ms) == 0
    assert wrong(showing(0), -2 * DAY_MS, stored_ms) == 0
    assert wrong(showing(-HOUR_MS), 0, stored_ms) == -HOUR_MS


@pytest.mark.parametrize("theirs_ms", [-(2**63), 0, 1_800_000_000, 2**62, 2**63 - 1])
def test_a_clock_of_another_century_does_not_count(theirs_ms: int) -> None:
    """Seconds that were taken for milliseconds, and what anybody may send."""
    comparison = showing(0)
    comparison.note("member 0", UP_MS, UP_MS, theirs_ms)
    comparison.note("member 1", UP_MS, UP_MS, theirs_ms)
    assert wrong(comparison, 0) == 0
    assert list(comparison.readings) == ["member 0"]


def test_clocks_are_forgotten_and_bound() -> None:
    comparison = showing(0)
    assert comparison.verdict(TRUE_MS, UP_MS + FORGOTTEN_MS) is None
    assert ClockComparison().verdict(TRUE_MS, UP_MS) is None
    for number in range(2 * CLOCKS_MAX):
        comparison.note(f"namesrv {number}", UP_MS, UP_MS, TRUE_MS)
    assert len(comparison.readings) == CLOCKS_MAX
    assert f"namesrv {2 * CLOCKS_MAX - 1}" in comparison.readings


def test_a_reading_grows_less_certain() -> None:
    verdict = showing(-600_000).verdict(TRUE_MS, UP_MS + HOUR_MS)
    assert verdict == Verdict(TRUE_MS - 600_000, 360)


def test_a_process_knows_what_the_one_before_knew() -> None:
    before = showing(0, 600_000)
    after = ClockComparison({name: list(one) for name, one in before.readings.items()})
    assert after.readings == before.readings

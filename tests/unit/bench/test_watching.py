"""Rates and pauses of a producer that is watched."""

from __future__ import annotations

from bench.watching import Acks, rate, silence

LINES = [
    Acks(first_s=10.00, last_s=10.02, acked=10),
    Acks(first_s=10.03, last_s=10.05, acked=20),
    Acks(first_s=17.25, last_s=17.26, acked=21),
    Acks(first_s=17.90, last_s=18.00, acked=51),
]


def test_a_rate_counts_what_came_between_two_times() -> None:
    assert rate(LINES, 10.25, 18.25) == (51 - 20) / 8.0
    assert rate(LINES, 11.0, 17.0) == 0.0


def test_the_longest_silence_that_ends_after_a_time() -> None:
    assert silence(LINES, 10.06) == (10.05, 17.25)
    assert silence(LINES, 17.3) == (17.26, 17.90)


def test_a_silence_that_lasts_is_none() -> None:
    assert silence(LINES, 18.0) is None
    assert silence([], 0.0) is None

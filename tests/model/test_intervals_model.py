"""Intervals against a set of numbers."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cometmq.messaging.intervals import Interval, add_interval, holds_any

RUNS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), max_size=40)


@given(RUNS, st.integers(1, 6))
def test_intervals_are_the_set_of_what_was_added_and_of_gaps_that_had_to_close(
    runs: list[tuple[int, int]], most: int
) -> None:
    intervals: list[Interval] = []
    added: set[int] = set()
    for first, count in runs:
        before = [number for one in intervals for number in range(*one)]
        intervals = add_interval(intervals, first, first + count, most)
        added.update(range(first, first + count))
        held = {number for one in intervals for number in range(*one)}
        assert len(intervals) <= most
        assert all(one.first < one.end for one in intervals)
        assert all(a.end < b.first for a, b in pairwise(intervals))
        assert held >= added
        wanted = _closed({*before, *range(first, first + count)}, most)
        assert held == wanted
        for start in range(0, 70, 7):
            some = set(range(start, start + 7))
            assert holds_any(intervals, start, start + 7) == bool(held & some)


def _closed(numbers: set[int], most: int) -> set[int]:
    """With the lowest gaps closed, until there are so few intervals."""
    while True:
        gaps = [n for n in sorted(numbers) if n + 1 not in numbers and n != max(numbers)]
        if len(gaps) < most:
            return numbers
        above = gaps[0] + 1
        while above not in numbers:
            numbers = numbers | {above}
            above += 1

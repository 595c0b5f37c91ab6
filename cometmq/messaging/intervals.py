"""Sets of numbers as intervals that rise and neither touch nor overlap: counters that are stored,
dead letters that were sent again. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Interval(NamedTuple):
    """The numbers from ``first`` to before ``end``."""

    first: int
    end: int


def add_interval(intervals: list[Interval], first: int, end: int, most: int) -> list[Interval]:
    """The intervals with ``first`` to before ``end``; the list itself may be changed. Above
    ``most`` the lowest gap closes: what it holds counts as there.
    """
    assert first < end
    if intervals and intervals[-1].end == first:  # as nearly always
        intervals[-1] = Interval(intervals[-1].first, end)
        return intervals
    below = [one for one in intervals if one.end < first]
    above = [one for one in intervals if one.first > end]
    touched = intervals[len(below) : len(intervals) - len(above)]
    new = Interval(
        min([first, *(one.first for one in touched)]), max([end, *(one.end for one in touched)])
    )
    result = [*below, new, *above]
    while len(result) > most:
        result[:2] = [Interval(result[0].first, result[1].end)]
    return result


def holds_any(intervals: Iterable[Interval], first: int, end: int) -> bool:
    """Whether any number from ``first`` to before ``end`` is in them."""
    return any(one.first < end and first < one.end for one in intervals)

"""When to look at which open half messages again. Pure: the time is a parameter."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from heapq import heappop, heappush

STALE_MAX = 65_536  # entries of halves that have ended, beside twice the open ones
LOOK_MAX = 20_000  # entries of one look, some milliseconds
SWEPT_AT_ONCE = 1_024  # entries that are looked through for halves that have ended
SWEPT_PER_ENTRY = 4  # so many for each new one: more than come

_NO_ENTRIES = array("q")


class DueHalves:
    """Entries by the second of the monotonic clock. Those of halves that are not in ``opened`` any
    more stay until their second comes, or there are too many.
    """

    def __init__(self, opened: Collection[int]) -> None:
        self.count = 0  # of entries
        self._opened = opened
        self._due: dict[int, array[int]] = {}
        self._seconds: list[int] = []  # a heap
        self._to_sweep: list[int] = []  # seconds; the last one up to the entry `_swept`
        self._swept = 0
        self._sweep_left = 0  # entries that may be looked through

    def add(self, offsets: Sequence[int], at_s: float) -> None:
        """Look at open halves then."""
        second = math.ceil(at_s)
        bucket = self._due.get(second)
        if bucket is None:
            bucket = self._due[second] = array("q")
            heappush(self._seconds, second)
        bucket.extend(offsets)
        self.count += len(offsets)
        if self.count > 2 * len(self._opened) + STALE_MAX:
            self._sweep_left += SWEPT_PER_ENTRY * len(offsets)
            while self._sweep_left >= SWEPT_AT_ONCE:
                self._sweep()

    def take(self, now_s: float, count_max: int) -> list[int]:
        """Open halves to be looked at now, at most so many: none of them comes again before it is
        added again.
        """
        found: list[int] = []
        left = LOOK_MAX
        while left and self._seconds and self._seconds[0] <= now_s and len(found) < count_max:
            bucket = self._due[self._seconds[0]]
            count = min(len(bucket), left, count_max - len(found))
            piece = bucket[len(bucket) - count :]
            del bucket[len(bucket) - count :]
            left -= count
            self.count -= count
            found += filter(self._opened.__contains__, piece)
            if not bucket:
                del self._due[heappop(self._seconds)]
        found.sort()
        return found

    @property
    def next_s(self) -> float | None:
        """When :meth:`take` may find something; None: there are no entries."""
        return self._seconds[0] if self._seconds else None

    def _sweep(self) -> None:
        """Forget entries of halves that have ended, among the next few: more than half of all are
        of such halves.
        """
        if not self._to_sweep:
            self._to_sweep = list(self._due)
        bucket = self._due.get(self._to_sweep[-1], _NO_ENTRIES)
        piece = slice(self._swept, self._swept + SWEPT_AT_ONCE)
        before = bucket[piece]
        if not before:
            self._to_sweep.pop()
            self._swept = 0
            self._sweep_left -= 1
            return
        kept = array("q", filter(self._opened.__contains__, before))
        bucket[piece] = kept
        self._swept += len(kept)
        self.count -= len(before) - len(kept)
        self._sweep_left -= len(before)

    def validate(self) -> None:
        """Asserts what must hold; for tests."""
        assert self._due.keys() == set(self._seconds)
        assert self.count == sum(map(len, self._due.values()))

"""Times at which something happens to holds, the earliest first. Pure."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from services.pullhold.model import Hold, HoldState

STALE_MAX = 1_024  # entries above twice the number of holds: then the ended ones are swept out


class Deadlines:
    """A heap. A hold that ends stays in it until its time comes or the heap is swept."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Hold]] = []
        self._numbers = itertools.count()  # holds of the same time in the order in which they came

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, when_s: float, hold: Hold, hold_count: int) -> None:
        """``hold_count``: holds that have not ended."""
        heapq.heappush(self._heap, (when_s, next(self._numbers), hold))
        if len(self._heap) > 2 * hold_count + STALE_MAX:
            self._heap = [e for e in self._heap if e[2].state is not HoldState.DONE]
            heapq.heapify(self._heap)

    def next_s(self) -> float | None:
        """The earliest time; None: there is none."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> Iterator[Hold]:
        """The holds whose time has come and that have not ended."""
        while self._heap and self._heap[0][0] <= now_s:
            hold = heapq.heappop(self._heap)[2]
            if hold.state is not HoldState.DONE:
                yield hold

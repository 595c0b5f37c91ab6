"""Ends of many waits by one timer: a timer of the event loop for each request would cost more than
its other bookkeeping.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import TimerHandle
from collections.abc import Callable
from typing import Generic, TypeVar

SWEEP_COUNT_MIN = 1_024  # of those that wait or have ended, before the ended ones are swept out

K = TypeVar("K")


class Deadlines(Generic[K]):
    """Calls ``expire`` with what still waits, by ``is_waiting``, when its time is over. Belongs to
    the event loop.
    """

    def __init__(self, is_waiting: Callable[[K], bool], expire: Callable[[K], None]) -> None:
        self._is_waiting = is_waiting
        self._expire = expire
        self._heap: list[tuple[float, int, K]] = []
        self._numbers = itertools.count()  # of those with the same time the first one is first
        self._timer: TimerHandle | None = None
        self._sweep_count = SWEEP_COUNT_MIN

    def __len__(self) -> int:
        """Those that wait, and some that have ended."""
        return len(self._heap)

    def add(self, one: K, after_s: float) -> None:
        """Its time is over after so long."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + after_s
        if len(self._heap) >= self._sweep_count:
            self._sweep()
        heapq.heappush(self._heap, (at_s, next(self._numbers), one))
        if self._timer is None or at_s < self._timer.when():
            self._set(loop, at_s)

    def _sweep(self) -> None:
        self._heap = [entry for entry in self._heap if self._is_waiting(entry[2])]
        heapq.heapify(self._heap)
        self._sweep_count = max(SWEEP_COUNT_MIN, 2 * len(self._heap))

    def _set(self, loop: asyncio.AbstractEventLoop, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(at_s, self._look)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        while self._heap:
            at_s, _, one = self._heap[0]
            is_waiting = self._is_waiting(one)
            if is_waiting and at_s > now_s:
                self._set(loop, at_s)
                return
            heapq.heappop(self._heap)
            if is_waiting:
                self._expire(one)

    def close(self) -> None:
        """Nothing expires any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._heap.clear()

"""When the machine itself gave a core no time: what no process on it can be blamed for.

``python -m bench.standstills`` has one thread for each core, before all other threads where that is
allowed. It sleeps for 2 ms at a time; a sleep that is GAP_MS longer says that the core stood still:
the hypervisor ran something else. At a line on its standard input it says how many, and each.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from bench.processes import Child, say

SLEEP_S = 0.002
GAP_MS = 5.0


class Span(Protocol):
    """Times are CLOCK_MONOTONIC's."""

    @property
    def begin_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...


class Standstill(NamedTuple):
    """Times are CLOCK_MONOTONIC's."""

    begin_ns: int
    end_ns: int


class Standstills:
    """A process that watches, from the start of the block to its end; then ``found`` is known."""

    def __enter__(self) -> Self:
        self._watcher = Child("bench.standstills")
        self.pid = self._watcher.pid
        self.found: list[Standstill] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        with self._watcher as watcher:
            watcher.tell("stop")
            lines = (watcher.read() for _ in range(int(watcher.read()["count"])))
            self.found = [Standstill(int(one["begin_ns"]), int(one["end_ns"])) for one in lines]


def overlap_ns(one: Span, other: Span) -> int:
    """How long both were at once; 0 or less: they were not."""
    return min(one.end_ns, other.end_ns) - max(one.begin_ns, other.begin_ns)


def _watch(core: int, stop: threading.Event, found: list[Standstill]) -> None:
    os.sched_setaffinity(0, {core})
    with suppress(PermissionError):  # then the gaps of busy cores count, too
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    before_ns = time.monotonic_ns()
    while not stop.is_set():
        time.sleep(SLEEP_S)
        now_ns = time.monotonic_ns()
        if now_ns - before_ns > SLEEP_S * 1e9 + GAP_MS * 1e6:
            found.append(Standstill(before_ns, now_ns))
        before_ns = now_ns


def main() -> None:
    stop, found = threading.Event(), list[Standstill]()
    threads = [
        threading.Thread(target=_watch, args=(core, stop, found))
        for core in os.sched_getaffinity(0)
    ]
    for one in threads:
        one.start()
    sys.stdin.readline()
    stop.set()
    for one in threads:
        one.join()
    say({"count": len(found)})
    for begin_ns, end_ns in sorted(found):
        say({"begin_ns": begin_ns, "end_ns": end_ns})


if __name__ == "__main__":
    main()

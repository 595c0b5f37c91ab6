"""When the machine itself gave a core no time: what no process on it can be blamed for.

``python -m bench.standstills`` has one thread for each core, before all other threads where that is
allowed. It sleeps for 2 ms at a time; a sleep that is GAP_MS longer says that the core stood still:
the hypervisor ran something else. At the end of its standard input it says all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import NamedTuple, Self

SLEEP_S = 0.002
GAP_MS = 5.0
STOP_S_MAX = 10.0


class Standstill(NamedTuple):
    """Times are CLOCK_MONOTONIC's."""

    begin_ns: int
    end_ns: int


class Standstills:
    """A process that watches, from the start of the block to its end; then ``found`` is known."""

    def __enter__(self) -> Self:
        command = [sys.executable, "-P", "-m", "bench.standstills"]
        pipe = subprocess.PIPE
        self._watcher = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.found: list[Standstill] = []
        return self

    @property
    def pid(self) -> int:
        return self._watcher.pid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            text, _unused = self._watcher.communicate("", timeout=STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._watcher.kill()
            raise
        self.found = [Standstill(*one) for one in json.loads(text)]


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
    sys.stdin.read()
    stop.set()
    for one in threads:
        one.join()
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()

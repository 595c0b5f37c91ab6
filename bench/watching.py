"""A steady producer, watched while it runs: how fast, and when it stood still."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

from bench.processes import Child

STARTED_S_MAX = 30.0
POLL_S = 0.01


class Acks(NamedTuple):
    """A line of the producer. Times are seconds since 1970."""

    first_s: float
    last_s: float
    acked: int  # messages so far


class Watch:
    """Collects the lines of a ``bench.steady`` in a thread."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self.pid = child.pid
        self._lines: list[Acks] = []
        threading.Thread(target=self._collect, daemon=True).start()

    def _collect(self) -> None:
        try:
            while True:
                line = self._child.read()
                if "acked" in line:
                    first_s, last_s = float(line["first_s"]), float(line["last_s"])
                    self._lines.append(Acks(first_s, last_s, int(line["acked"])))
        except (RuntimeError, ValueError):  # it has ended, or is being ended
            return

    def rate(self, from_s: float, to_s: float) -> float:
        """Acknowledgements a second between two times."""
        return rate(self._lines, from_s, to_s)

    def silence(self, after_s: float) -> tuple[float, float] | None:
        """See :func:`silence`."""
        return silence(self._lines, after_s)

    def wait_for_ack(self, after_s: float, seconds_max: float) -> None:
        """Until a message is acknowledged later than that. TimeoutError."""
        deadline_s = time.monotonic() + seconds_max
        while not self._lines or self._lines[-1].last_s < after_s:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing was acknowledged for {seconds_max:.0f} s")
            time.sleep(POLL_S)


def rate(lines: Sequence[Acks], from_s: float, to_s: float) -> float:
    """Acknowledgements a second between two times, to a line's length."""

    def acked_at(at_s: float) -> int:
        index = bisect_left(lines, at_s, key=lambda line: line.last_s)
        return lines[index - 1].acked if index else 0

    return (acked_at(to_s) - acked_at(from_s)) / (to_s - from_s)


def silence(lines: Sequence[Acks], after_s: float) -> tuple[float, float] | None:
    """The longest time without an acknowledgement that ends after ``after_s``: the last before it,
    the first after it; None when nothing has come since.
    """
    found: tuple[float, float] | None = None
    for before, line in pairwise(lines):
        gap = before.last_s, line.first_s
        if line.first_s > after_s and (found is None or gap[1] - gap[0] > found[1] - found[0]):
            found = gap
    return found


@contextmanager
def producing(namesrv: str, topic: str, **options: str | int | float) -> Iterator[Watch]:
    """A steady producer whose messages are acknowledged already."""
    with Child("bench.steady", namesrv=namesrv, topic=topic, **options) as child:
        child.read()
        watch = Watch(child)
        watch.wait_for_ack(0.0, STARTED_S_MAX)
        yield watch

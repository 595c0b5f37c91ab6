"""Counts of the messages of a client, by topic, and per second of the last minute. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

WINDOW_S = 60.0
MARK_S = 10.0  # between two marks
TOPICS_MAX = 1_000  # of more, those that come later are counted together, under no name
_MARKS = round(WINDOW_S / MARK_S)


class Tally:
    """Of one topic, since the client began. Counted where messages pass: plain numbers."""

    __slots__ = ("busy_ns", "calls", "done", "failed", "pulled")

    def __init__(self) -> None:
        self.pulled = 0
        self.done = 0
        self.failed = 0
        self.calls = 0  # of the listener, that have ended
        self.busy_ns = 0  # that these took


class _Counts(NamedTuple):
    pulled: int = 0
    done: int = 0
    failed: int = 0
    calls: int = 0
    busy_ns: int = 0


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one topic: messages per second, and the mean time of a listener call; 0: none ended."""

    topic: str
    pulled: float
    done: float
    failed: float
    process_ms: float


class Rates:
    """``now_s`` is of a clock that only rises. :meth:`mark` is called each ``MARK_S``."""

    def __init__(self) -> None:
        self._tallies: dict[str, Tally] = {}
        # The counts at moments of the last minute, the oldest first.
        self._marks: deque[tuple[float, dict[str, _Counts]]] = deque(maxlen=_MARKS)

    def of(self, topic: str) -> Tally:
        """The counts of a topic."""
        tally = self._tallies.get(topic)
        if tally is None:
            topic = topic if len(self._tallies) < TOPICS_MAX else ""
            tally = self._tallies.setdefault(topic, Tally())
        return tally

    def mark(self, now_s: float) -> None:
        """Remember the counts of this moment."""
        self._marks.append((now_s, self._counts()))

    def _counts(self) -> dict[str, _Counts]:
        return {
            topic: _Counts(one.pulled, one.done, one.failed, one.calls, one.busy_ns)
            for topic, one in self._tallies.items()
        }

    def window_s(self, now_s: float) -> float:
        """The time that :meth:`per_second` is of; 0: nothing was marked yet."""
        return now_s - self._marks[0][0] if self._marks else 0.0

    def per_second(self, now_s: float) -> list[Rate]:
        """Of each topic, in order; since the oldest mark."""
        window_s = self.window_s(now_s)
        if window_s <= 0:
            return []
        before = self._marks[0][1]
        rates = []
        for topic, counts in sorted(self._counts().items()):
            old = before.get(topic, _Counts())
            calls, busy_ms = counts.calls - old.calls, (counts.busy_ns - old.busy_ns) / 1e6
            rates.append(
                Rate(
                    topic,
                    (counts.pulled - old.pulled) / window_s,
                    (counts.done - old.done) / window_s,
                    (counts.failed - old.failed) / window_s,
                    busy_ms / calls if calls else 0.0,
                )
            )
        return rates

"""What the job counts about arrivals: how many, when, how late. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable

from examples.roundtrip.spool import Arrival


class Tally:
    """Latencies are kept as a count for each millisecond, store times as the set of milliseconds,
    so that sizes do not grow with the number of messages.

    ``latencies_count`` is False while messages wait on purpose.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_ms = 0  # 0: nothing came yet
        self.last_ms = 0
        self.latencies_count = True
        self._latencies: Counter[int] = Counter()
        self._stored_ms: defaultdict[str, set[int]] = defaultdict(set)  # by broker group

    def add(self, arrivals: Iterable[Arrival]) -> None:
        """Arrivals of one consumer; those of several may come in any order."""
        received: list[int] = []
        for arrival in arrivals:
            received.append(arrival.received_ms)
            self._stored_ms[arrival.broker_group].add(arrival.stored_ms)
            if self.latencies_count:
                # Two processes of one machine read the same clock, but it may be set back.
                self._latencies[max(arrival.received_ms - arrival.born_ms, 0)] += 1
        if received:
            self.count += len(received)
            self.first_ms = min(min(received), self.first_ms or received[0])
            self.last_ms = max(max(received), self.last_ms)

    def latency_ms(self, fraction: float) -> int:
        """The smallest latency that at least ``fraction`` of the counted arrivals did not exceed;
        0 when there were none.
        """
        assert 0 < fraction <= 1
        below, count = 0, self._latencies.total()
        for latency_ms in sorted(self._latencies):
            below += self._latencies[latency_ms]
            if below >= fraction * count:
                return latency_ms
        return 0

    def stored_after(self, broker_group: str, at_ms: int) -> bool:
        """Whether a message has come that the group stored later than that."""
        return any(stored_ms > at_ms for stored_ms in self._stored_ms[broker_group])

    def pause_ms(self, broker_group: str, from_ms: int, to_ms: int) -> int | None:
        """The longest time without a store in the group that overlaps ``from_ms`` to ``to_ms``;
        None when nothing was stored before or nothing after it.
        """
        times = sorted(self._stored_ms[broker_group])
        first, last = bisect_right(times, from_ms) - 1, bisect_right(times, to_ms)
        if first < 0 or last == len(times):
            return None
        return max(times[n + 1] - times[n] for n in range(first, last))

    @property
    def seconds(self) -> float:
        """From the first arrival to the last."""
        return (self.last_ms - self.first_ms) / 1000

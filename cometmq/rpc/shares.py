"""What one address may have of something: so many at a time, or so many over time. Pure; the time
is passed in.

An address is a machine, however many connections it opens: else a client at its limit would open
one more. What is full for one address is not full for the others.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager

from cometmq.errors import LimitExceeded

# Of those that have made something lately; above it new ones share a bucket.
ADDRESSES_MAX = 10_000
_OTHERS = ""


def address_of(peer: str) -> str:
    """The address in gRPC's peer text: ``ipv4:10.0.0.1:4711`` → ``10.0.0.1``."""
    text = host_and_port(peer)
    return text.rpartition(":")[0] or text


def host_and_port(peer: str) -> str:
    """Host and port in gRPC's peer text: ``ipv4:10.0.0.1:4711`` → ``10.0.0.1:4711``."""
    kind, _, rest = peer.partition(":")
    return urllib.parse.unquote(rest) if kind in ("ipv4", "ipv6") else kind


class Shares:
    """Things that addresses hold. ``what`` and ``option`` are for the refusal."""

    def __init__(self, each_max: int, what: str, option: str) -> None:
        self._each_max = each_max
        self._what = what
        self._option = option
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        """Addresses that hold something."""
        return len(self._counts)

    def take(self, address: str, count: int = 1) -> None:
        """Count ``count`` more of an address. LimitExceeded: then nothing has changed."""
        self.check(address, count)
        if count:
            self._counts[address] = self._counts.get(address, 0) + count

    def check(self, address: str, count: int = 1) -> None:
        """Whether there is room for so many more. LimitExceeded."""
        if self._counts.get(address, 0) + count > self._each_max:
            raise LimitExceeded(
                f"{address} has its {self._each_max} {self._what} here ({self._option})"
            )

    def give_back(self, address: str, count: int = 1) -> None:
        """Count ``count`` fewer of an address."""
        left = self._counts.get(address, 0) - count
        assert left >= 0, (self._what, left)
        if left:
            self._counts[address] = left
        else:
            self._counts.pop(address, None)

    @contextmanager
    def held(self, address: str) -> Iterator[None]:
        """One, as long as the block lasts. LimitExceeded."""
        self.take(address)
        try:
            yield
        finally:
            self.give_back(address)


class Buckets:
    """Things that addresses make, which stay: ``burst_max`` at once, then one each ``interval_s``.
    ``what`` and ``options`` are for the refusal.
    """

    def __init__(self, burst_max: int, interval_s: float, what: str, options: str) -> None:
        self._burst_max = burst_max
        self._interval_s = interval_s
        self._what = what
        self._options = options
        self._full_at_s: dict[str, float] = {}  # when an address may make all at once again

    def __len__(self) -> int:
        return len(self._full_at_s)

    def take(self, address: str, now_s: float) -> None:
        """The address makes one more. LimitExceeded: it may not yet."""
        address = self._bucket(address, now_s)
        full_at_s = max(self._full_at_s.get(address, now_s), now_s) + self._interval_s
        if full_at_s - now_s > self._burst_max * self._interval_s + self._interval_s / 1e6:
            raise LimitExceeded(
                f"{address or 'this address'} has made its {self._burst_max} {self._what}, and may "
                f"make one each {self._interval_s:g} s ({self._options})"
            )
        self._full_at_s[address] = full_at_s

    def _bucket(self, address: str, now_s: float) -> str:
        if address in self._full_at_s or len(self._full_at_s) < ADDRESSES_MAX:
            return address
        # A bucket that is full again needs no entry.
        self._full_at_s = {a: s for a, s in self._full_at_s.items() if s > now_s}
        return address if len(self._full_at_s) < ADDRESSES_MAX else _OTHERS

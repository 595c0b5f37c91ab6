"""The leases of a group in one queue.

Between the floor and the next offset a message is either in one lease, or done. A lease holds
messages that one member received together, until its time comes: then they are visible again. The
floor is the group's committed offset: all messages before it are done.

Invariants (:meth:`QueueLeases.validate`): a message is in at most one lease; all messages of leases
lie between the floor and the next offset; a message that is done is in no lease for ever.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cometmq.messaging.pop.masks import shifted

OPEN_MAX = 65_536  # messages of a queue that a group may have and has not acknowledged
_STALE_MAX = 64  # entries of a heap above twice the number of leases


@dataclass(slots=True)
class Lease:
    """Messages that nobody else gets before ``visible_ms``. ``mask``: those that are not done, bit
    0 for ``first``. ``attempt``: how often they were delivered; 0: not yet, they wait for others.
    """

    number: int
    first: int
    mask: int
    visible_ms: int
    attempt: int

    @property
    def end(self) -> int:
        return self.first + self.mask.bit_length()

    @property
    def count(self) -> int:
        return self.mask.bit_count()

    def part(self, first: int, mask: int) -> int:
        """Which of these messages the lease has; bit 0 is its ``first``."""
        return shifted(mask, first, self.first) & self.mask


class Given(NamedTuple):
    """Messages come into a lease: new ones, or (``source`` above 0) out of another lease."""

    number: int
    source: int
    first: int
    mask: int
    visible_ms: int
    attempt: int


class Done(NamedTuple):
    """Messages of a lease are done; ``mask`` 0: all that it has."""

    number: int
    first: int = 0
    mask: int = 0


class QueueLeases:
    """One group in one queue."""

    def __init__(self, next_offset: int) -> None:
        self.next_offset = next_offset  # below it each message was given to a lease, or is done
        self.open_count = 0
        self._leases: dict[int, Lease] = {}
        self._order: list[tuple[int, int]] = []  # (first, number) of each lease, sorted
        self._times: list[tuple[int, int]] = []  # a heap of (visible_ms, number); some are stale
        self._width_max = 0  # of the masks of all leases that there were

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        """The leases, in the order in which they were made."""
        return iter(self._leases.values())

    @property
    def floor(self) -> int:
        """All messages before it are done."""
        return self._order[0][0] if self._order else self.next_offset

    def find(self, number: int) -> Lease | None:
        """The lease of this number; None: all its messages are done, or in other leases."""
        return self._leases.get(number)

    def oldest_visible(self, now_ms: int) -> Lease | None:
        """The lease whose time came first; None: none has come."""
        lease = self._earliest()
        return lease if lease is not None and lease.visible_ms <= now_ms else None

    @property
    def next_visible_ms(self) -> int | None:
        """When messages come back that are not acknowledged; None: there are none."""
        lease = self._earliest()
        return lease.visible_ms if lease is not None else None

    def _earliest(self) -> Lease | None:
        while self._times:
            visible_ms, number = self._times[0]
            lease = self._leases.get(number)
            if lease is not None and lease.visible_ms == visible_ms:
                return lease
            heapq.heappop(self._times)
        return None

    def is_done(self, first: int, mask: int) -> bool:
        """Whether all these messages are done."""
        end = first + mask.bit_length()
        low = bisect_left(self._order, (first - self._width_max, 0))
        high = bisect_left(self._order, (end, 0))
        near = (self._leases[number] for _, number in self._order[low:high])
        return end <= self.next_offset and not any(one.part(first, mask) for one in near)

    def give(self, given: Given) -> Lease:
        """Put messages into a lease of its own."""
        assert given.mask & 1, "a lease begins with a message"
        if given.source and (source := self._leases.get(given.source)) is not None:
            self._take(source, source.part(given.first, given.mask))
        lease = Lease(given.number, given.first, given.mask, given.visible_ms, given.attempt)
        self._leases[lease.number] = lease
        self.open_count += lease.count
        self.next_offset = max(self.next_offset, lease.end)
        self._width_max = max(self._width_max, lease.end - lease.first)
        insort(self._order, (lease.first, lease.number))
        self._note_time(lease)
        return lease

    def finish(self, done: Done) -> int:
        """These messages are done; how many were not before."""
        lease = self._leases.get(done.number)
        if lease is None:
            return 0
        part = lease.part(done.first, done.mask) if done.mask else lease.mask
        self._take(lease, part)
        return part.bit_count()

    def skip_to(self, next_offset: int) -> None:
        """Nobody of the group wants the messages before ``next_offset`` that are in no lease."""
        self.next_offset = max(self.next_offset, next_offset)

    def cut(self, start: int) -> None:
        """From ``start`` on the queue has other messages now."""
        if start >= self.next_offset:
            return
        self.next_offset = start
        for lease in list(self._leases.values()):
            kept = lease.mask & ((1 << max(0, start - lease.first)) - 1)
            self._take(lease, lease.mask & ~kept)

    def _take(self, lease: Lease, part: int) -> None:
        if not part:
            return
        self.open_count -= part.bit_count()
        lease.mask &= ~part
        if lease.mask & 1:
            return
        place = bisect_left(self._order, (lease.first, lease.number))
        assert self._order[place][1] == lease.number
        del self._order[place]
        if not lease.mask:
            del self._leases[lease.number]
            return
        gap = (lease.mask & -lease.mask).bit_length() - 1
        lease.first += gap
        lease.mask >>= gap
        insort(self._order, (lease.first, lease.number))

    def _note_time(self, lease: Lease) -> None:
        heapq.heappush(self._times, (lease.visible_ms, lease.number))
        if len(self._times) > 2 * len(self._leases) + _STALE_MAX:
            self._times = [(one.visible_ms, one.number) for one in self._leases.values()]
            heapq.heapify(self._times)

    def validate(self) -> None:
        """Asserts the invariants; for tests."""
        seen = 0
        base = self.floor
        for lease in self._leases.values():
            bits = shifted(lease.mask, lease.first, base)
            assert lease.mask & 1
            assert base <= lease.first <= lease.end <= self.next_offset, (lease, base)
            assert not seen & bits, lease
            seen |= bits
        assert seen.bit_count() == self.open_count
        assert base == min((one.first for one in self), default=self.next_offset)
        times = [one.visible_ms for one in self]
        assert self.next_visible_ms == min(times, default=None)

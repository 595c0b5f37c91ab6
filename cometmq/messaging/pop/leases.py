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

from cometmq.messaging.pop.masks import shifted, spans_of

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
        self.last_number = 0  # of all leases that there were: numbers rise
        self.open_count = 0
        self._leases: dict[int, Lease] = {}
        self._order: list[tuple[int, int]] = []  # (first, number) of each lease, sorted
        # Heaps of (visible_ms, number), some stale: leases whose time comes, and has come.
        self._coming: list[tuple[int, int]] = []
        self._visible: list[tuple[int, int]] = []
        self._looked_ms = 0  # leases whose time was up to then are in `_visible`
        self._returned_count = 0  # messages whose time is over, not announced yet
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
        """The lease whose time came first; None: none has come. The time never goes back."""
        self._look(now_ms)
        return self._first(self._visible)

    @property
    def next_visible_ms(self) -> int | None:
        """When messages come back that are not acknowledged; None: there are none."""
        firsts = (self._first(self._visible), self._first(self._coming))
        return min((one.visible_ms for one in firsts if one is not None), default=None)

    def next_return_ms(self, now_ms: int) -> int | None:
        """When the next time of a lease comes; None: all have come."""
        self._look(now_ms)
        lease = self._first(self._coming)
        return None if lease is None else lease.visible_ms

    def take_returned(self, now_ms: int) -> int:
        """How many messages' time came since the last call: they may be received again."""
        self._look(now_ms)
        count, self._returned_count = self._returned_count, 0
        return count

    def _look(self, now_ms: int) -> None:
        self._looked_ms = max(self._looked_ms, now_ms)
        while self._coming and self._coming[0][0] <= now_ms:
            entry = heapq.heappop(self._coming)
            if (lease := self._current(entry)) is not None:
                heapq.heappush(self._visible, entry)
                self._returned_count += lease.count

    def _first(self, heap: list[tuple[int, int]]) -> Lease | None:
        while heap:
            if (lease := self._current(heap[0])) is not None:
                return lease
            heapq.heappop(heap)
        return None

    def _current(self, entry: tuple[int, int]) -> Lease | None:
        """The lease that an entry of a heap is of; None: it is stale."""
        lease = self._leases.get(entry[1])
        return lease if lease is not None and lease.visible_ms == entry[0] else None

    def is_done(self, first: int, mask: int) -> bool:
        """Whether all these messages are done."""
        end = first + mask.bit_length()
        low = bisect_left(self._order, (first - self._width_max, 0))
        high = bisect_left(self._order, (end, 0))
        near = (self._leases[number] for _, number in self._order[low:high])
        return end <= self.next_offset and not any(one.part(first, mask) for one in near)

    def next_open(self, offset: int) -> tuple[int, int]:
        """The next message from ``offset`` on that is not done, and the first one behind it that
        is; 0: none is. What lies below the floor is not looked at.
        """
        if offset < self.floor:
            return offset, self.floor
        later = [
            (max(first, offset), first + count)
            for lease in self
            for first, count in spans_of(lease.mask, lease.first)
            if first + count > offset
        ]
        later.sort()
        if not later:
            return max(offset, self.next_offset), 0
        start, end = later[0]
        for first, behind in later[1:]:
            if first != end:
                break
            end = behind
        return start, 0 if end == self.next_offset else end

    def give(self, given: Given) -> Lease:
        """Put messages into a lease of its own."""
        assert given.mask & 1, "a lease begins with a message"
        assert given.number > self.last_number, (given.number, self.last_number)
        if given.source and (source := self._leases.get(given.source)) is not None:
            self._take(source, source.part(given.first, given.mask))
        lease = Lease(given.number, given.first, given.mask, given.visible_ms, given.attempt)
        self._leases[lease.number] = lease
        self.last_number = lease.number
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
        is_coming = lease.visible_ms > self._looked_ms
        heap = self._coming if is_coming else self._visible
        heapq.heappush(heap, (lease.visible_ms, lease.number))
        if len(heap) > 2 * len(self._leases) + _STALE_MAX:
            heap[:] = [entry for entry in heap if self._current(entry) is not None]
            heapq.heapify(heap)

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

"""Order by message group: the next message of a sharding key is delivered when the one before is
done. Messages of other keys go on; those without a key wait for nobody. Pure.

The keys are read from the records. They are known in memory only: a new writer reads those of the
messages that members have, at most :data:`ORDERED_OPEN_MAX` of a queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cometmq.messaging.pop.leases import Lease, QueueLeases
from cometmq.messaging.pop.masks import offsets_of

ORDERED_OPEN_MAX = 4_096  # messages of a queue that are delivered, or wait for others
NO_KEY = b""
_FORGET_MIN = 1_024  # keys of messages that are done, before they are looked for


@dataclass(frozen=True, slots=True)
class Split:
    """New messages that are delivered, and that wait: masks from ``first`` on."""

    first: int
    taken: int
    waiting: int


class QueueKeys:
    """The sharding keys of the messages that a group has in a queue."""

    def __init__(self) -> None:
        self._keys: dict[int, bytes] = {}

    def missing(self, queue: QueueLeases) -> list[int]:
        """Messages in leases whose key is not known, at most ``ORDERED_OPEN_MAX``."""
        self._forget(queue)
        return [offset for offset in _open(queue) if offset not in self._keys]

    def learn(self, keys: Iterable[tuple[int, bytes]]) -> None:
        """Keys by offset."""
        self._keys.update(keys)

    def blocked(self, queue: QueueLeases, now_ms: int) -> set[bytes]:
        """Keys of which a member has a message."""
        busy = (lease for lease in queue if lease.visible_ms > now_ms)
        return {self._keys[offset] for lease in busy for offset in _offsets(lease)} - {NO_KEY}

    def open(self, queue: QueueLeases) -> set[bytes]:
        """Keys of which a message is not done."""
        return {self._keys[offset] for offset in _open(queue)} - {NO_KEY}

    def take_visible(
        self, queue: QueueLeases, now_ms: int, blocked: set[bytes], count: int
    ) -> list[tuple[Lease, list[int]]]:
        """The visible messages that may be delivered, in order of the queue, by their lease. The
        keys of all that are visible are blocked then.
        """
        visible = [lease for lease in queue if lease.visible_ms <= now_ms]
        places = [(offset, lease) for lease in visible for offset in _offsets(lease)]
        places.sort(key=lambda place: place[0])
        taken: dict[int, tuple[Lease, list[int]]] = {}
        for offset, lease in places:
            key = self._keys[offset]
            if key not in blocked and count > 0:
                taken.setdefault(lease.number, (lease, []))[1].append(offset)
                count -= 1
            if key != NO_KEY:
                blocked.add(key)
        return list(taken.values())

    def split_new(
        self, new: Iterable[tuple[int, bytes]], blocked: set[bytes], count: int
    ) -> Split | None:
        """Which of these new messages, in order of the queue, are delivered, and which wait. Those
        behind the last one that is delivered are left alone.
        """
        first, taken, waiting = -1, 0, 0
        for offset, key in new:
            if count <= 0:
                break
            first = offset if first < 0 else first
            bit = 1 << (offset - first)
            if key in blocked:
                waiting |= bit
            else:
                taken |= bit
                count -= 1
            if key != NO_KEY:
                blocked.add(key)
            self._keys[offset] = key
        return Split(first, taken, waiting) if first >= 0 else None

    def _forget(self, queue: QueueLeases) -> None:
        if len(self._keys) > 2 * queue.open_count + _FORGET_MIN:
            still = set(_open(queue))
            self._keys = {offset: key for offset, key in self._keys.items() if offset in still}


def _offsets(lease: Lease) -> Iterator[int]:
    return offsets_of(lease.mask, lease.first)


def _open(queue: QueueLeases) -> Iterator[int]:
    for lease in queue:
        yield from _offsets(lease)

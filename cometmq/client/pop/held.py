"""The messages that a simple consumer has received and that are not done, each with its lease."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from cometmq.client.pop.calls import Lease
from cometmq.client.received import ReceivedMessage
from cometmq.model import QueueRef
from cometmq.v1 import broker_pb2

FORGOTTEN_MIN = 1_024  # messages held before those whose time is over are looked for


class LeasePart(NamedTuple):
    """The messages of a lease that are not done, by their first queue offset and their number."""

    lease: Lease
    first: int
    message_count: int


class HeldMessages:
    """Messages whose time is over stay for a while: an acknowledgement may still be in time."""

    def __init__(self) -> None:
        self._queues: defaultdict[QueueRef, dict[int, Lease]] = defaultdict(dict)
        self._forget_at = FORGOTTEN_MIN  # so many messages held

    def add(self, lease: Lease, messages: Iterable[ReceivedMessage]) -> None:
        """These messages of the lease were received."""
        offsets = [message.queue_offset for message in messages]
        self._queues[lease.queue].update(dict.fromkeys(offsets, lease))

    def of_queue(self, queue: QueueRef) -> Mapping[int, Lease]:
        """The leases of a queue's messages, by queue offset."""
        return self._queues.get(queue, {})

    def find(self, message: ReceivedMessage) -> Lease | None:
        """The lease of a message; None: this consumer has not got it, or no longer."""
        return self.of_queue(message.queue).get(message.queue_offset)

    def move(self, old: Lease, new: Lease, item: broker_pb2.AckItem) -> None:
        """These messages have another lease now, unless they were received again meanwhile."""
        held = self._queues[old.queue]
        for offset in range(item.first_offset, item.first_offset + item.count):
            if held.get(offset) in (None, old):
                held[offset] = new

    def remove(self, lease: Lease, item: broker_pb2.AckItem) -> None:
        """These messages are done, or others may have them."""
        held = self._queues[lease.queue]
        for offset in range(item.first_offset, item.first_offset + item.count):
            if held.get(offset) is lease:  # not a newer one
                del held[offset]

    def parts(self, now_s: float) -> Iterator[LeasePart]:
        """The leases whose time is not over."""
        for held in self._queues.values():
            offsets_of: defaultdict[Lease, list[int]] = defaultdict(list)
            for offset, lease in held.items():
                offsets_of[lease].append(offset)
            for lease, offsets in offsets_of.items():
                if lease.until_s > now_s:
                    yield LeasePart(lease, min(offsets), len(offsets))

    def forget_old(self, now_s: float) -> None:
        """Drops messages whose time is over, when there are many: others may have them."""
        if sum(map(len, self._queues.values())) < self._forget_at:
            return
        for queue, held in list(self._queues.items()):
            left = {offset: lease for offset, lease in held.items() if lease.until_s >= now_s}
            if left:
                self._queues[queue] = left
            else:
                del self._queues[queue]
        self._forget_at = max(FORGOTTEN_MIN, 2 * sum(map(len, self._queues.values())))

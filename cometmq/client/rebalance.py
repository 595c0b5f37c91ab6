"""Which member of a consumer group reads which queues. Every member computes the same answer from
the same lists, by RocketMQ's strategies and in RocketMQ's order: members by name, queues by topic,
broker group and number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from hashlib import md5
from types import MappingProxyType

from cometmq.model import QueueRef

VIRTUAL_NODES = 10  # of a member on the ring, RocketMQ's default


class Allocation(Enum):
    """How the members of a group divide the queues of a topic. Members that differ all use
    AVERAGE.
    """

    AVERAGE = "average"  # one contiguous range each
    CIRCLE = "circle"  # in turn
    CONSISTENT_HASH = "consistent_hash"  # few queues move when a member comes or goes
    STICKY = "sticky"  # the same number each, and as few as possible move


def allocate(
    strategy: Allocation,
    client_id: str,
    members: Collection[str],
    queues: Collection[QueueRef],
    held: Mapping[str, Collection[QueueRef]] = MappingProxyType({}),
) -> list[QueueRef]:
    """The queues of ``client_id``, in order. A client that is not a member gets nothing. ``held``:
    what members read now, for STICKY.
    """
    ordered_members = sorted(set(members))
    if client_id not in ordered_members:
        return []
    ordered = sorted(set(queues), key=lambda queue: (queue.topic, queue.broker_group, queue))
    index, count = ordered_members.index(client_id), len(ordered_members)
    if strategy is Allocation.CIRCLE:
        return ordered[index::count]
    if strategy is Allocation.CONSISTENT_HASH:
        owners = _owners_by_hash(ordered_members, ordered)
        return [queue for queue, owner in zip(ordered, owners, strict=True) if owner == client_id]
    if strategy is Allocation.STICKY:
        sticky = _sticky_owners(ordered_members, ordered, held)
        return [queue for queue in ordered if sticky[queue] == client_id]
    share, rest = divmod(len(ordered), count)
    start = index * share + min(index, rest)
    return ordered[start : start + share + (index < rest)]


def _sticky_owners(
    members: Sequence[str],
    queues: Sequence[QueueRef],
    held: Mapping[str, Collection[QueueRef]],
) -> dict[QueueRef, str]:
    """Each member keeps what it reads, up to its share; who reads most gets the larger shares."""
    known = set(queues)
    mine = {member: known.intersection(held.get(member, ())) for member in members}
    by_load = sorted(members, key=lambda member: (-len(mine[member]), member))
    share, rest = divmod(len(queues), len(members))
    room = {member: share + (place < rest) for place, member in enumerate(by_load)}
    owners: dict[QueueRef, str] = {}
    for queue in queues:
        keeper = next((m for m in members if room[m] and queue in mine[m]), None)
        if keeper is not None:
            owners[queue] = keeper
            room[keeper] -= 1
    takers = iter([member for member in by_load for _ in range(room[member])])
    return owners | {queue: next(takers) for queue in queues if queue not in owners}


def _owners_by_hash(members: Sequence[str], queues: Iterable[QueueRef]) -> Iterable[str]:
    """The owner of each queue: the member with the next virtual node on the ring."""
    ring = {_ring_hash(f"{name}-{n}"): name for name in members for n in range(VIRTUAL_NODES)}
    nodes = sorted(ring)
    for queue in queues:
        key = (
            f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_group}, "
            f"queueId={queue.queue_id}]"
        )
        yield ring[nodes[bisect_left(nodes, _ring_hash(key)) % len(nodes)]]


def _ring_hash(key: str) -> int:
    """The first four bytes of the MD5 digest, as RocketMQ has it."""
    return int.from_bytes(md5(key.encode(), usedforsecurity=False).digest()[:4])


def allocate_topics(
    strategy: Allocation,
    client_id: str,
    queues_by_topic: Mapping[str, Collection[QueueRef]],
    members_by_topic: Mapping[str, Iterable[str]],
    held: Mapping[str, Collection[QueueRef]] = MappingProxyType({}),
) -> set[QueueRef]:
    """The queues of ``client_id`` over all its topics: each topic is divided among the members that
    read it.
    """
    mine: set[QueueRef] = set()
    for topic, queues in queues_by_topic.items():
        members = list(members_by_topic.get(topic, ()))
        mine.update(allocate(strategy, client_id, members, queues, held))
    return mine

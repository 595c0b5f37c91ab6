"""Which member of a consumer group reads which queues. Every member computes the same answer from
the same lists, by RocketMQ's strategies and in RocketMQ's order: members by name, queues by topic,
broker group and number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from hashlib import blake2b, md5
from types import MappingProxyType
from typing import Protocol

from cometmq.client.names import check_queues
from cometmq.errors import ConfigInvalid
from cometmq.model import QueueRef

LABEL_LENGTH_MAX = 64
VIRTUAL_NODES = 10  # of a member on the ring, RocketMQ's default
RINGS_KEPT_MAX = 16

Held = Mapping[str, Collection[QueueRef]]  # what members read now, by client id
RoomOf = Callable[[str], str]


class Strategy(Protocol):
    """How the members of a group divide the queues of a topic: one of :class:`Allocation`, or an
    object like :class:`ByConfig`, or one of your own. All members need the same one.
    """

    @property
    def label(self) -> str:
        """At most 64 printable characters, sent to the other members. Members whose labels differ
        all use AVERAGE.
        """

    def divide(
        self, client_id: str, members: Sequence[str], queues: Sequence[QueueRef], held: Held
    ) -> list[QueueRef]:
        """The queues of ``client_id``, which is one of the members. Members and queues are sorted,
        none comes twice.
        """


class Allocation(Enum):
    """How the members of a group divide the queues of a topic. Members that differ all use
    AVERAGE.
    """

    AVERAGE = "average"  # one contiguous range each
    CIRCLE = "circle"  # in turn
    CONSISTENT_HASH = "consistent_hash"  # few queues move when a member comes or goes
    STICKY = "sticky"  # the same number each, and as few as possible move

    @property
    def label(self) -> str:
        return str(self.value)

    def divide(
        self, client_id: str, members: Sequence[str], queues: Sequence[QueueRef], held: Held
    ) -> list[QueueRef]:
        index, count = members.index(client_id), len(members)
        if self is Allocation.CIRCLE:
            return list(queues[index::count])
        if self is Allocation.CONSISTENT_HASH:
            owners = _owners_by_hash(tuple(members), queues)
            return [
                queue for queue, owner in zip(queues, owners, strict=True) if owner == client_id
            ]
        if self is Allocation.STICKY:
            sticky = _sticky_owners(members, queues, held)
            return [queue for queue in queues if sticky[queue] == client_id]
        share, rest = divmod(len(queues), count)
        start = index * share + min(index, rest)
        return list(queues[start : start + share + (index < rest)])


@dataclass(frozen=True, slots=True)
class ByConfig:
    """This member reads these queues, with any others in the group (RocketMQ's
    AllocateMessageQueueByConfig). A queue in the lists of several members is read by the first of
    them, by client id. Queues in no list, or in several, are logged by the members.
    """

    queues: Collection[QueueRef]

    def __post_init__(self) -> None:
        object.__setattr__(self, "queues", tuple(check_queues(self.queues)))

    @property
    def label(self) -> str:
        return "config"

    def divide(
        self, client_id: str, members: Sequence[str], queues: Sequence[QueueRef], held: Held
    ) -> list[QueueRef]:
        there = set(queues)
        return [queue for queue in self.queues if queue in there]


def room_in_name(name: str) -> str:
    """The room of ``room@name``; a name without ``@`` is a room of its own."""
    return name.partition("@")[0]


@dataclass(frozen=True, slots=True)
class ByMachineRoom:
    """Averagely, the queues of broker groups named ``room@name`` in these rooms. Queues in other
    rooms are read by nobody, and logged (RocketMQ's AllocateMessageQueueByMachineRoom).
    """

    rooms: Collection[str]

    def __post_init__(self) -> None:
        if isinstance(self.rooms, str) or not all(isinstance(room, str) for room in self.rooms):
            raise ConfigInvalid(f"ByMachineRoom gets names of rooms, not {self.rooms!r:.80}.")
        object.__setattr__(self, "rooms", frozenset(self.rooms))

    @property
    def label(self) -> str:
        return _label("machine_room " + ",".join(sorted(self.rooms)))

    def divide(
        self, client_id: str, members: Sequence[str], queues: Sequence[QueueRef], held: Held
    ) -> list[QueueRef]:
        inside = [queue for queue in queues if self._has(queue.broker_group)]
        share, rest = divmod(len(inside), len(members))
        index = members.index(client_id)
        mine = inside[index * share : (index + 1) * share]
        return mine + inside[len(members) * share :][index : index + (index < rest)]

    def _has(self, broker_group: str) -> bool:
        # As Java splits: empty parts at the end do not count.
        parts = broker_group.rstrip("@").split("@")
        return len(parts) == 2 and parts[0] in self.rooms


@dataclass(frozen=True, slots=True)
class MachineRoomNearby:
    """Members read the queues of their own machine room, divided by ``strategy``. Queues of a room
    without members are divided among all (RocketMQ's AllocateMachineRoomNearby).

    ``broker_room`` and ``client_room`` tell the room of a broker group and of a client id, the same
    at all members. Without them it is what stands before the ``@``.
    """

    strategy: Strategy = Allocation.AVERAGE
    broker_room: RoomOf = field(default=room_in_name)
    client_room: RoomOf = field(default=room_in_name)

    def __post_init__(self) -> None:
        if not is_strategy(self.strategy):
            raise ConfigInvalid(f"MachineRoomNearby: {self.strategy!r:.80} divides no queues.")

    @property
    def label(self) -> str:
        return _label(f"nearby {self.strategy.label}")

    def divide(
        self, client_id: str, members: Sequence[str], queues: Sequence[QueueRef], held: Held
    ) -> list[QueueRef]:
        queues_in: dict[str, list[QueueRef]] = {}
        for queue in queues:
            queues_in.setdefault(self.broker_room(queue.broker_group), []).append(queue)
        members_in: dict[str, list[str]] = {}
        for member in members:
            members_in.setdefault(self.client_room(member), []).append(member)
        room = self.client_room(client_id)
        beside = queues_in.pop(room, [])
        mine = self.strategy.divide(client_id, members_in[room], beside, held) if beside else []
        for orphaned in sorted(queues_in.keys() - members_in.keys()):
            mine = mine + self.strategy.divide(client_id, members, queues_in[orphaned], held)
        return mine


def is_strategy(value: object) -> bool:
    """Whether it divides queues, as :class:`Strategy` says."""
    return isinstance(getattr(value, "label", None), str) and callable(
        getattr(value, "divide", None)
    )


def _label(text: str) -> str:
    """A long one is cut, and stays different from others."""
    if len(text) <= LABEL_LENGTH_MAX:
        return text
    digest = blake2b(text.encode(), digest_size=8).hexdigest()
    return f"{text[: LABEL_LENGTH_MAX - len(digest) - 1]} {digest}"


def allocate(
    strategy: Strategy,
    client_id: str,
    members: Collection[str],
    queues: Collection[QueueRef],
    held: Held = MappingProxyType({}),
) -> list[QueueRef]:
    """The queues of ``client_id``. A client that is not a member gets nothing. ``held``: what
    members read now, for STICKY.
    """
    ordered_members = sorted(set(members))
    if client_id not in ordered_members:
        return []
    return strategy.divide(client_id, ordered_members, in_order(queues), held)


def in_order(queues: Collection[QueueRef]) -> list[QueueRef]:
    """The queues in RocketMQ's order, each once."""
    return sorted(set(queues), key=lambda one: (one.topic, one.broker_group, one.queue_id))


def _sticky_owners(
    members: Sequence[str], queues: Sequence[QueueRef], held: Held
) -> dict[QueueRef, str]:
    """Each member keeps what it reads, up to its share; who reads most gets the larger shares."""
    known = set(queues)
    mine = {member: known.intersection(held.get(member, ())) for member in members}
    by_load = sorted(members, key=lambda member: (-len(mine[member]), member))
    share, rest = divmod(len(queues), len(members))
    room = {member: share + (place < rest) for place, member in enumerate(by_load)}
    holders: dict[QueueRef, list[str]] = {}
    for member in members:
        for queue in mine[member]:
            holders.setdefault(queue, []).append(member)
    owners: dict[QueueRef, str] = {}
    for queue in queues:
        keeper = next((member for member in holders.get(queue, ()) if room[member]), None)
        if keeper is not None:
            owners[queue] = keeper
            room[keeper] -= 1
    takers = iter([member for member in by_load for _ in range(room[member])])
    return owners | {queue: next(takers) for queue in queues if queue not in owners}


def _owners_by_hash(members: tuple[str, ...], queues: Iterable[QueueRef]) -> Iterable[str]:
    """The owner of each queue: the member with the next virtual node on the ring."""
    nodes, owners = _ring(members)
    for queue in queues:
        key = (
            f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_group}, "
            f"queueId={queue.queue_id}]"
        )
        yield owners[bisect_left(nodes, _ring_hash(key)) % len(nodes)]


@lru_cache(RINGS_KEPT_MAX)  # most topics of a group have the same members
def _ring(members: tuple[str, ...]) -> tuple[list[int], list[str]]:
    """The members' virtual nodes in order, and the member of each."""
    ring = {_ring_hash(f"{name}-{n}"): name for name in members for n in range(VIRTUAL_NODES)}
    nodes = sorted(ring)
    return nodes, [ring[node] for node in nodes]


def _ring_hash(key: str) -> int:
    """The first four bytes of the MD5 digest, as RocketMQ has it."""
    return int.from_bytes(md5(key.encode(), usedforsecurity=False).digest()[:4])


def allocate_topics(
    strategy: Strategy,
    client_id: str,
    queues_by_topic: Mapping[str, Sequence[QueueRef]],
    members_by_topic: Mapping[str, Iterable[str]],
    held: Held = MappingProxyType({}),
) -> set[QueueRef]:
    """The queues of ``client_id`` over all its topics: each topic is divided among the members that
    read it. The queues of a topic are :func:`in_order`.
    """
    mine: set[QueueRef] = set()
    for topic, queues in queues_by_topic.items():
        members = sorted(set(members_by_topic.get(topic, ())))
        if client_id in members:
            mine.update(strategy.divide(client_id, members, queues, held))
    return mine

"""A topic's route as a client reads it. Pure functions over a name server's messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain, zip_longest

from cometmq.model import PERMISSION_READ, PERMISSION_WRITE, QueueRef
from cometmq.v1 import common_pb2, namesrv_pb2

AUTO_CREATE_TOPIC = "TBW102"  # a broker that creates topics on demand registers it
AUTO_CREATE_QUEUES_MAX = 4


def writer_address(group: namesrv_pb2.GroupRoute) -> str | None:
    """host:port of the group's live writer."""
    for member in group.members:
        if member.role == common_pb2.MEMBER_ROLE_WRITER:
            return member.address
    return None


def writers(route: namesrv_pb2.TopicRoute) -> dict[str, str]:
    """The live writers' addresses by broker group."""
    found = {group.broker_group: writer_address(group) for group in route.groups}
    return {group: address for group, address in found.items() if address is not None}


def with_groups(
    route: namesrv_pb2.TopicRoute, groups: Iterable[namesrv_pb2.GroupRoute]
) -> namesrv_pb2.TopicRoute:
    """The route and these broker groups, by name."""
    every = sorted([*route.groups, *groups], key=lambda group: group.broker_group)
    return namesrv_pb2.TopicRoute(topic=route.topic, groups=every, order=route.order)


def is_ordered(route: namesrv_pb2.TopicRoute) -> bool:
    """Whether a message waits for its broker group instead of going to another one."""
    return bool(route.order) or any(group.topic.is_ordered for group in route.groups)


def with_order_of(
    route: namesrv_pb2.TopicRoute, known: namesrv_pb2.TopicRoute | None
) -> namesrv_pb2.TopicRoute:
    """The route, with the queues that were known of an ordered topic: a name server that has lost
    them, or has not heard of them, must not change the queue of a key.
    """
    if known is None or route.order or not known.order or not _stays_ordered(route):
        return route
    return namesrv_pb2.TopicRoute(topic=route.topic, groups=route.groups, order=known.order)


def _stays_ordered(route: namesrv_pb2.TopicRoute) -> bool:
    return not route.groups or any(group.topic.is_ordered for group in route.groups)


def with_members(
    route: namesrv_pb2.TopicRoute, broker_group: str, members: Iterable[namesrv_pb2.Member]
) -> namesrv_pb2.TopicRoute:
    """The route, where the broker group, which it names, has these members."""
    known = next(group for group in route.groups if group.broker_group == broker_group)
    others = (group for group in route.groups if group is not known)
    changed = namesrv_pb2.GroupRoute(broker_group=broker_group, topic=known.topic, members=members)
    rest = namesrv_pb2.TopicRoute(topic=route.topic, groups=others, order=route.order)
    return with_groups(rest, [changed])


def by_their_own_words(
    known: Iterable[namesrv_pb2.Member], described: Iterable[namesrv_pb2.Member]
) -> list[namesrv_pb2.Member]:
    """A group's members, by id: each as it describes itself, or as it was known.
    Of writers the newest epoch counts: the others were deposed.
    """
    found = {member.member_id: member for member in (*known, *described)}
    newest = max((m.epoch for m in found.values() if _writes(m)), default=0)
    return [
        found[number]
        for number in sorted(found)
        if not _writes(found[number]) or found[number].epoch == newest
    ]


def _writes(member: namesrv_pb2.Member) -> bool:
    return member.role == common_pb2.MEMBER_ROLE_WRITER


def cluster(route: namesrv_pb2.TopicRoute) -> str:
    """The cluster of the brokers that serve the topic; empty while nobody does."""
    return next((member.cluster for group in route.groups for member in group.members), "")


def writable_queues(route: namesrv_pb2.TopicRoute) -> list[QueueRef]:
    """Queues that can be sent to now, taking turns between broker groups: a0 b0 a1 b1 … Of an
    ordered topic whose queues are fixed only these.
    """
    fixed = {entry.broker_group: entry.queue_count for entry in route.order}
    return _take_turns(
        [
            QueueRef(route.topic, n, group.broker_group)
            for n in range(_limited(group, fixed) if fixed else group.topic.write_queue_count)
        ]
        for group in route.groups
        if group.topic.permission & PERMISSION_WRITE and writer_address(group) is not None
    )


def _limited(group: namesrv_pb2.GroupRoute, fixed: Mapping[str, int]) -> int:
    return min(group.topic.write_queue_count, fixed.get(group.broker_group, 0))


def queues_in_order(route: namesrv_pb2.TopicRoute) -> list[QueueRef]:
    """Queues that may be sent to, in RocketMQ's order: by broker group and number. Those of a group
    without a live writer too, which has one again soon. Of an ordered topic whose queues are fixed
    exactly these, also of a group that is not in the route.
    """
    if route.order:
        return [
            QueueRef(route.topic, n, entry.broker_group)
            for entry in route.order
            for n in range(entry.queue_count)
        ]
    return [
        QueueRef(route.topic, n, group.broker_group)
        for group in sorted(route.groups, key=lambda group: group.broker_group)
        if group.topic.permission & PERMISSION_WRITE
        for n in range(group.topic.write_queue_count)
    ]


def auto_created_queues(topic: str, queues: Iterable[QueueRef]) -> list[QueueRef]:
    """Queues for a topic that the first message creates, by the queues of
    :data:`AUTO_CREATE_TOPIC`.
    """
    few = [queue for queue in queues if queue.queue_id < AUTO_CREATE_QUEUES_MAX]
    return [QueueRef(topic, queue.queue_id, queue.broker_group) for queue in few]


def readable_queues(route: namesrv_pb2.TopicRoute) -> list[QueueRef]:
    """Queues that a group has to read, sorted. A group without a live writer keeps its queues: it
    may come back.
    """
    numbers = sorted(
        (n, group.broker_group)
        for group in route.groups
        if group.topic.permission & PERMISSION_READ
        for n in range(group.topic.read_queue_count)
    )
    return [QueueRef(route.topic, n, broker_group) for n, broker_group in numbers]


def _take_turns(groups: Iterable[list[QueueRef]]) -> list[QueueRef]:
    return [queue for queue in chain.from_iterable(zip_longest(*groups)) if queue is not None]

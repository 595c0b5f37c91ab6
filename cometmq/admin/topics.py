"""Changes of existing topics: settings, order, fewer queues; a preview of queue allocation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from cometmq.admin import ops, topic_order
from cometmq.admin.connection import Connection, Writers, call, each_that_knows
from cometmq.admin.views import AllocatedQueueView, CreatedTopicView, ShrunkTopicView
from cometmq.errors import GroupNotFound, InvalidRequest, TopicNotFound
from cometmq.messaging.order import OrderedQueues
from cometmq.v1 import broker_pb2, common_pb2

ALLOCATIONS = ("average", "circle", "consistent_hash", "sticky")  # values of client.Allocation
LOOK_AGAIN_S = 1.0
DESCRIBED_AT_ONCE_MAX = 32  # groups


async def _described(
    connection: Connection, name: str, broker_groups: tuple[str, ...] = ()
) -> dict[str, broker_pb2.DescribeTopicResponse]:
    """The topic at each broker group that has it. TopicNotFound when none does."""
    request = broker_pb2.DescribeTopicRequest(topic=name)
    return await each_that_knows(
        await connection.writers(broker_groups),
        lambda m: call(m.internal_address, connection.admin(m).DescribeTopic, request),
        TopicNotFound(f"no broker group has a topic {name}"),
    )


async def update_topic(
    connection: Connection,
    wanted: common_pb2.TopicConfig,
    broker_groups: tuple[str, ...] = (),
    order: Sequence[OrderedQueues] | None = None,
    send_quota: broker_pb2.Quota | None = None,
) -> list[CreatedTopicView]:
    """Change those settings of a topic that are given, on the broker groups that have it. Raises as
    :func:`ops.create_topic`, and TopicNotFound when none of them does.
    """
    writers = await connection.writers(broker_groups)
    there = await _described(connection, wanted.name, broker_groups)
    having = {group: member for group, member in writers.items() if group in there}
    return await ops.put_topic(connection, having, wanted, order, send_quota)


async def set_order(
    connection: Connection, name: str, queues: Sequence[OrderedQueues]
) -> list[CreatedTopicView]:
    """Make the topic ordered with exactly these queues; without any it is not ordered any more.
    InvalidRequest for more queues than a broker group has for writers.
    """
    there = await _described(connection, name)
    for group, count in queues:
        has = there[group].topic.write_queue_count if group in there else count
        if count > has:
            raise InvalidRequest(f"order: {group} has {has} queues for writers, not {count}")
    wanted = common_pb2.TopicConfig(name=name, is_ordered=bool(queues))
    return await update_topic(connection, wanted, order=queues)


# --- fewer queues -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Shrink:
    """A topic that is to have ``queue_count`` queues on each of ``broker_groups`` (all: empty)."""

    topic: str
    queue_count: int
    broker_groups: tuple[str, ...] = ()


async def shrink_topic(
    connection: Connection,
    shrink: Shrink,
    *,
    timeout_s: float | None = None,
    on_wait: Callable[[list[ShrunkTopicView]], None] = lambda _views: None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> list[ShrunkTopicView]:
    """Take queues away from a topic without losing a message: producers stop writing them, every
    consumer group reads them to their ends, then consumers stop reading them.

    Returns when that is done, or after ``timeout_s`` with the groups that are behind in
    ``waiting``; another call continues. ``on_wait`` gets the same views after each look.
    InvalidRequest when the topic has fewer queues. Members of a broadcasting group keep their
    offsets themselves, so their lag is not seen.
    """
    there = await _described(connection, shrink.topic, shrink.broker_groups)
    for group, described in there.items():
        has = max(described.topic.read_queue_count, described.topic.write_queue_count)
        if has < shrink.queue_count:
            raise InvalidRequest(f"queues: {shrink.topic} has {has} on {group}")
    writers = await connection.writers(tuple(there))
    await _lower_order(connection, shrink, there)
    await ops.put_topic(
        connection,
        writers,
        common_pb2.TopicConfig(name=shrink.topic, write_queue_count=shrink.queue_count),
    )
    loop = asyncio.get_running_loop()
    ends_s = None if timeout_s is None else loop.time() + timeout_s
    behind: set[str] | None = None  # groups that were; None: each has to be looked at
    while True:
        views = await _look(connection, shrink, writers, behind)
        waiting = {group for view in views for group in view.waiting}
        if not waiting and behind is None:
            break
        # A group that begins to consume meanwhile is found when all others have come to the ends.
        behind = waiting or None
        if waiting:
            on_wait(views)
            if ends_s is not None and loop.time() >= ends_s:
                return views
            await sleep(LOOK_AGAIN_S)
    await ops.put_topic(
        connection,
        writers,
        common_pb2.TopicConfig(name=shrink.topic, read_queue_count=shrink.queue_count),
    )
    return await _look(connection, shrink, writers, set())


async def _lower_order(
    connection: Connection, shrink: Shrink, there: Mapping[str, broker_pb2.DescribeTopicResponse]
) -> None:
    """Send the keys of an ordered topic to the queues that stay, before the others are closed."""
    before = await topic_order.known(connection, shrink.topic)
    after = [
        OrderedQueues(group, min(count, shrink.queue_count) if group in there else count)
        for group, count in before
    ]
    if after != before:
        await topic_order.fix(connection, shrink.topic, after)


async def _look(
    connection: Connection, shrink: Shrink, writers: Writers, groups: set[str] | None
) -> list[ShrunkTopicView]:
    """The topic now, and those of ``groups``, None: of all, that have messages left in the queues
    that go.
    """
    there = await _described(connection, shrink.topic, tuple(writers))
    going = {
        (broker_group, queue.queue_id): queue
        for broker_group, described in there.items()
        for queue in described.queues
        if shrink.queue_count <= queue.queue_id < described.topic.read_queue_count
        and queue.appended_offset > queue.min_offset
    }
    waiting: dict[str, dict[str, int]] = {broker_group: {} for broker_group in there}
    if going and groups is None:
        groups = {view.group for view in await ops.list_groups(connection)}
    for name in sorted(groups or ()) if going else ():
        for broker_group, count in (await _lags(connection, shrink.topic, name, going)).items():
            waiting[broker_group][name] = count
    return [
        ShrunkTopicView(
            shrink.topic,
            broker_group,
            described.topic.read_queue_count,
            described.topic.write_queue_count,
            waiting[broker_group],
        )
        for broker_group, described in there.items()
    ]


async def _lags(
    connection: Connection,
    topic: str,
    group: str,
    going: Mapping[tuple[str, int], broker_pb2.QueueStatus],
) -> dict[str, int]:
    """By broker group: how many messages of these queues the consumer group has not consumed."""
    try:
        progress = await ops.group_progress(connection, group, topic=topic)
    except GroupNotFound:  # deleted meanwhile
        return {}
    if not progress.queues:
        return {}  # it does not consume this topic
    committed = {(row.broker_group, row.queue_id): row.committed_offset for row in progress.queues}
    lags: dict[str, int] = {}
    for key, queue in going.items():
        reached = max(committed.get(key) or 0, queue.min_offset)
        if queue.appended_offset > reached:
            lags[key[0]] = lags.get(key[0], 0) + queue.appended_offset - reached
    return lags


# --- preview of queue allocation ----------------------------------------------------------------


async def allocate_queues(
    connection: Connection, name: str, client_ids: Sequence[str], strategy: str
) -> list[AllocatedQueueView]:
    """Which of these clients would read which queue of a topic, as the members of a group.
    ``strategy``: one of ALLOCATIONS.
    """
    # Here, because no other command wants the SDK, whose import takes 0.1 s.
    from cometmq.client.cluster.routing import readable_queues
    from cometmq.client.group.rebalance import Allocation, allocate

    queues = readable_queues(await connection.route(name))
    return [
        AllocatedQueueView(client_id, name, queue.broker_group, queue.queue_id)
        for client_id in sorted(set(client_ids))
        for queue in allocate(Allocation(strategy), client_id, client_ids, queues)
    ]

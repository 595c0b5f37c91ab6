"""The fixed queues of ordered topics, which all name servers keep."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.admin.connection import Connection
from cometmq.admin.views import OrderView
from cometmq.errors import TopicNotFound
from cometmq.messaging import order
from cometmq.messaging.order import OrderedQueues
from cometmq.v1 import common_pb2, namesrv_pb2


async def show(connection: Connection, name: str) -> list[OrderView]:
    """What each name server has; empty: the topic's queues are not fixed."""
    request = namesrv_pb2.ListValuesRequest(namespace=order.NAMESPACE)
    answers = await connection.ask_namesrvs(lambda stub: stub.ListValues, request)
    return [
        OrderView(name, address, entry.broker_group, entry.queue_count)
        for address, answer in answers.items()
        if name in answer.values
        for entry in order.parse(answer.values[name])
    ]


def doubt(views: Sequence[OrderView]) -> str:
    """Name servers that differ, in words; empty: they do not. One that has nothing has no row."""
    lists: dict[str, list[tuple[str, int]]] = {}
    for view in views:
        lists.setdefault(view.namesrv, []).append((view.broker_group, view.queue_count))
    known = list(lists.values())
    return "name servers differ: set the order again" if any(k != known[0] for k in known) else ""


async def fix(connection: Connection, name: str, queues: Sequence[OrderedQueues]) -> None:
    """Let these be the topic's queues, at all name servers. InvalidRequest, PeerUnavailable."""
    value = order.text_of(queues)
    request = namesrv_pb2.PutValueRequest(namespace=order.NAMESPACE, key=name, value=value)
    await connection.ask_namesrvs(lambda stub: stub.PutValue, request)


async def forget(connection: Connection, name: str) -> None:
    """Let the topic's queues be those of its route."""
    request = namesrv_pb2.DeleteValueRequest(namespace=order.NAMESPACE, key=name)
    await connection.ask_namesrvs(lambda stub: stub.DeleteValue, request)


async def known(connection: Connection, name: str) -> list[OrderedQueues]:
    """The fixed queues by the first name server that answers; empty: there are none."""
    try:
        route = await connection.route(name)
    except TopicNotFound:
        return []
    return [OrderedQueues(entry.broker_group, entry.queue_count) for entry in route.order]


async def follow(
    connection: Connection,
    topics: Sequence[common_pb2.TopicConfig],
    wanted: Sequence[OrderedQueues] | None = None,
    *,
    rebuild: bool = False,
) -> None:
    """After a change of a topic, as its broker groups answered: fix the ``wanted`` queues. None:
    those that were fixed stay so, in their order, as far as they are there. With ``rebuild``, or
    where none were fixed: those that broker groups have now, and those of groups that are away.
    """
    name = topics[0].name
    before = await known(connection, name)
    if not any(topic.is_ordered for topic in topics):
        if before:
            await forget(connection, name)
        return
    route = await connection.route(name)
    counts = {group.broker_group: group.topic.write_queue_count for group in route.groups}
    if wanted is not None:
        after = list(wanted)
    elif before and not rebuild:
        after = [OrderedQueues(group, min(n, counts.get(group, n))) for group, n in before]
    else:
        every = sorted((dict(before) | counts).items())
        after = [OrderedQueues(group, count) for group, count in every]
    if after != before:
        await fix(connection, name, after)

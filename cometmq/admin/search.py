"""Messages by key and offsets by time: functions that take a Connection and answer views."""

from __future__ import annotations

from itertools import chain

from cometmq.admin.connection import Connection, call, each, until
from cometmq.admin.convert import message_view
from cometmq.admin.messages import FLUSH_WAIT_S
from cometmq.admin.ops import describe_broker
from cometmq.admin.views import MessageView, QueueTimeView
from cometmq.errors import RouteNotFound
from cometmq.v1 import broker_pb2, common_pb2, namesrv_pb2

DEADLINE_S = 10.0  # a cold index is read from the disk

Members = dict[str, namesrv_pb2.Member]  # by broker group


async def query_messages(
    connection: Connection,
    topic: str,
    *,
    key: str | None = None,
    unique_id: str | None = None,
    begin_ms: int | None = None,
    end_ms: int | None = None,
    count_max: int = 0,
    complete: bool = False,
) -> list[MessageView]:
    """The messages of ``topic`` with this key, or with this unique id, of all broker groups; the
    newest first, ``count_max`` at most (0: 32).

    A broker group that has found none is asked again until what it had stored is in its index;
    with ``complete`` also one that has found some.
    """
    request = broker_pb2.QueryMessagesRequest(
        topic=topic,
        begin_ms=begin_ms,
        end_ms=end_ms,
        max_count=count_max,
        form=broker_pb2.MESSAGE_FORM_MESSAGES,
    )
    if unique_id is not None:
        request.unique_id = unique_id
    elif key is not None:
        request.key = key
    _, members = await _members(connection, topic)
    found = await each(
        members, lambda member: _query(connection, member, request, complete=complete)
    )
    newest_first = sorted(chain(*found.values()), key=lambda m: -m.store_time_ms)
    return [message_view(message) for message in newest_first[: count_max or 32]]


async def _query(
    connection: Connection,
    member: namesrv_pb2.Member,
    request: broker_pb2.QueryMessagesRequest,
    *,
    complete: bool,
) -> list[broker_pb2.StoredMessage]:
    end = (await describe_broker(connection, member)).log_appended_offset
    found: list[broker_pb2.StoredMessage] = []

    async def is_settled() -> bool:
        method = connection.broker(member).QueryMessages
        answer = await call(member.address, method, request, deadline_s=DEADLINE_S)
        found[:] = answer.messages
        return (bool(found) and not complete) or answer.indexed_offset >= end

    await until(is_settled, FLUSH_WAIT_S)
    return found


async def offsets_by_time(
    connection: Connection, topic: str, time_ms: int, boundary: broker_pb2.TimeBoundary.ValueType
) -> list[QueueTimeView]:
    """Which message of each queue of ``topic`` was stored at ``time_ms``."""
    route, members = await _members(connection, topic)
    queue_counts = {group.broker_group: group.topic.read_queue_count for group in route.groups}

    async def ask(member: namesrv_pb2.Member) -> broker_pb2.QueryOffsetsByTimeResponse:
        numbers = range(queue_counts[member.broker_group])
        request = broker_pb2.QueryOffsetsByTimeRequest(
            queues=[common_pb2.QueueRef(topic=topic, queue_id=number) for number in numbers],
            time_ms=time_ms,
            boundary=boundary,
        )
        method = connection.broker(member).QueryOffsetsByTime
        return await call(member.address, method, request, deadline_s=DEADLINE_S)

    answers = await each(members, ask)
    return [
        QueueTimeView(
            topic=topic,
            broker_group=broker_group,
            queue_id=row.queue.queue_id,
            generation=row.position.generation,
            offset=row.position.offset,
            store_time_ms=row.store_time_ms,
        )
        for broker_group, answer in answers.items()
        for row in answer.queues
        if not row.HasField("error")  # the topic has fewer queues by now
    ]


async def _members(connection: Connection, topic: str) -> tuple[namesrv_pb2.TopicRoute, Members]:
    """The route of a topic, and of each of its broker groups the writer, or else a follower."""
    route = await connection.route(topic)
    members = {
        group.broker_group: min(
            group.members, key=lambda m: m.role != common_pb2.MEMBER_ROLE_WRITER
        )
        for group in route.groups
        if group.members
    }
    if not members:
        raise RouteNotFound(f"no broker group of topic {topic} has a member now")
    return route, members

"""Where consumer groups go on in one topic, at all broker groups that have it."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.admin import ops
from cometmq.admin.connection import Connection, call
from cometmq.admin.views import ForgottenView, QueueResetView
from cometmq.errors import CometError, GroupInUse, GroupNotFound, TopicNotFound
from cometmq.messaging.groups import in_the_way
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2, namesrv_pb2

DEADLINE_S = 10.0


async def reset_offsets(
    connection: Connection,
    request: broker_pb2.ResetOffsetsRequest,
    queue_ids: Sequence[int] = (),
    broker_groups: tuple[str, ...] = (),
) -> list[QueueResetView]:
    """What became of the group in each queue, or would become of it. TopicNotFound, GroupNotFound
    when no broker group knows both; raises the first refusal of a queue. Broker groups that were
    asked before a refusal have done it.
    """
    request.queue_ids.extend(queue_ids)
    views: list[QueueResetView] = []
    unknown: CometError | None = None
    writers = await connection.writers(broker_groups)
    for broker_group, member in writers.items():
        try:
            views += await _reset_at(connection, broker_group, member, request)
        except (TopicNotFound, GroupNotFound) as error:
            unknown = error
    if not views and unknown is not None:
        raise unknown
    return views


async def _reset_at(
    connection: Connection,
    broker_group: str,
    member: namesrv_pb2.Member,
    request: broker_pb2.ResetOffsetsRequest,
) -> list[QueueResetView]:
    method = connection.admin(member).ResetOffsets
    answer = await call(member.internal_address, method, request, deadline_s=DEADLINE_S)
    refused = [from_proto(one.error) for one in answer.results if one.HasField("error")]
    if refused:
        error: CometError = refused[0]
        raise error
    return [
        QueueResetView(
            broker_group,
            request.topic,
            one.queue_id,
            one.before.offset if one.HasField("before") else None,
            one.after.offset,
            not request.dry_run,
        )
        for one in answer.results
    ]


async def forget_offsets(
    connection: Connection, group: str, topic: str, broker_groups: tuple[str, ...] = ()
) -> list[ForgottenView]:
    """Forget a group in a topic that it has left. TopicNotFound, GroupNotFound when no broker group
    knows both; GroupInUse while members read the topic anywhere: then nothing is forgotten.
    """
    members = await ops.group_members(connection, group)
    reading = {one.client_id: one.is_away for one in members if topic in one.subscriptions}
    if reading:
        raise GroupInUse(f"topic {topic} is read: {in_the_way(group, reading)}")
    request = broker_pb2.ForgetOffsetsRequest(group=group, topic=topic)
    views: list[ForgottenView] = []
    unknown: CometError | None = None
    for broker_group, member in (await connection.writers(broker_groups)).items():
        method = connection.admin(member).ForgetOffsets
        try:
            answer = await call(member.internal_address, method, request, deadline_s=DEADLINE_S)
        except (TopicNotFound, GroupNotFound) as error:
            unknown = error
        else:
            views.append(ForgottenView(group, topic, broker_group, len(answer.queue_ids)))
    if not views and unknown is not None:
        raise unknown
    return views


async def committed_topics(connection: Connection, group: str) -> list[str]:
    """The topics in which a group has committed, at any broker group. Raises GroupNotFound."""
    progress = await ops.group_progress(connection, group)
    return sorted({queue.topic for queue in progress.queues if queue.committed_offset is not None})

"""Operations on members, topics and groups: functions that take a Connection and answer views.

They raise the catalogue error of the process that refused. An operation on many broker groups asks
all of them at once; when one refuses, its error is raised and what the others did stays done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from cometmq.admin import topic_order
from cometmq.admin.connection import (
    CHANGE_DEADLINE_S,
    Connection,
    Writers,
    call,
    each,
    each_that_knows,
    said,
    until,
)
from cometmq.admin.convert import (
    flush_mode_name,
    message_type_name,
    permission_name,
    quota_text,
    replication_mode_name,
    role_name,
    topic_view,
    writer_of,
)
from cometmq.admin.group_members import members_of
from cometmq.admin.views import (
    CreatedTopicView,
    DeletedGroupView,
    DeletedTopicView,
    GroupMemberView,
    GroupProgressView,
    GroupView,
    MemberView,
    QueueProgressView,
    QueueView,
    RouteView,
    TopicView,
)
from cometmq.errors import (
    CometError,
    GroupInUse,
    GroupNotFound,
    PeerUnavailable,
    RouteNotFound,
    TopicNotFound,
)
from cometmq.messaging.groups import in_the_way
from cometmq.messaging.order import OrderedQueues
from cometmq.messaging.topics import is_system
from cometmq.model import FlushMode, MessageType, ReplicationMode
from cometmq.v1 import broker_pb2, common_pb2, namesrv_pb2

ROUTE_WAIT_S = 5.0  # a change of a topic reaches the name servers well within this


# --- the cluster --------------------------------------------------------------------------------


async def describe_cluster(connection: Connection) -> list[MemberView]:
    """Every registered member, with what it says of itself when it answers. Where none does, and
    one refuses, that is raised.
    """
    members = await connection.members()
    answers = await asyncio.gather(*(said(describe_broker(connection, m.member)) for m in members))
    refusals = [answer for answer in answers if isinstance(answer, CometError)]
    if refusals and not any(isinstance(a, broker_pb2.DescribeBrokerResponse) for a in answers):
        raise refusals[0]
    return [_view_of(status, answer) for status, answer in zip(members, answers, strict=True)]


def _view_of(
    status: namesrv_pb2.RegisteredMember,
    answer: broker_pb2.DescribeBrokerResponse | CometError | None,
) -> MemberView:
    member = status.member
    observed = answer if isinstance(answer, broker_pb2.DescribeBrokerResponse) else None
    return MemberView(
        cluster=member.cluster,
        broker_group=member.broker_group,
        member_id=member.member_id,
        role=role_name(member),
        address=member.address,
        internal_address=member.internal_address,
        epoch=member.epoch,
        topic_count=status.topic_count,
        last_heard_ms=status.last_heard_ms,
        reachable=observed is not None,
        error=answer.name() if isinstance(answer, CometError) else None,
        version=observed.version if observed else None,
        store_id=observed.store_id if observed else None,
        started_ms=observed.started_ms if observed else None,
        log_min_offset=observed.log_min_offset if observed else None,
        log_appended_offset=observed.log_appended_offset if observed else None,
        log_flushed_offset=observed.log_flushed_offset if observed else None,
        refusal=observed.refusal if observed else None,
        clock_skew_ms=_skew_of(observed),
    )


def _skew_of(answer: broker_pb2.DescribeBrokerResponse | None) -> int | None:
    known = answer is not None and answer.HasField("clock_skew_ms")
    return answer.clock_skew_ms if answer is not None and known else None


async def describe_broker(
    connection: Connection, member: namesrv_pb2.Member
) -> broker_pb2.DescribeBrokerResponse:
    """What a member says of itself."""
    request = broker_pb2.DescribeBrokerRequest()
    return await call(member.internal_address, connection.admin(member).DescribeBroker, request)


async def wait_for_brokers(
    connection: Connection, broker_groups: tuple[str, ...], *, deadline_s: float
) -> None:
    """Return when every group has a registered writer; GroupNotFound when one has none in time."""

    async def registered() -> bool:
        try:
            await connection.writers(broker_groups)
        except (GroupNotFound, RouteNotFound, PeerUnavailable):
            return False
        return True

    if broker_groups and not await until(registered, deadline_s):
        await connection.writers(broker_groups)  # raises what is missing


# --- topics -------------------------------------------------------------------------------------


async def create_topic(
    connection: Connection,
    name: str,
    *,
    read_queue_count: int = 0,
    write_queue_count: int = 0,
    permission: int = 0,
    flush_mode: FlushMode | None = None,
    replication_mode: ReplicationMode | None = None,
    reserve_time_ms: int | None = None,
    message_type: MessageType | None = None,
    is_ordered: bool | None = None,
    broker_groups: tuple[str, ...] = (),
) -> list[CreatedTopicView]:
    """Create a topic, or change its settings, on all broker groups or on the named ones.

    Settings of 0 or None are the broker's defaults. Returns when the name server shows the topic
    too, so that clients find it; RouteNotFound when that takes longer than ROUTE_WAIT_S.
    """
    writers = await connection.writers(broker_groups)
    wanted = common_pb2.TopicConfig(
        name=name,
        read_queue_count=read_queue_count,
        write_queue_count=write_queue_count,
        permission=permission,
        flush_mode=common_pb2.FlushMode.ValueType(flush_mode.value if flush_mode else 0),
        replication_mode=common_pb2.ReplicationMode.ValueType(replication_mode or 0),
        reserve_time_ms=reserve_time_ms,
        message_type=common_pb2.MessageType.ValueType(message_type.value if message_type else 0),
        is_ordered=is_ordered,
    )
    return await put_topic(connection, writers, wanted)


async def put_topic(
    connection: Connection,
    writers: Writers,
    wanted: common_pb2.TopicConfig,
    order: Sequence[OrderedQueues] | None = None,
    send_quota: broker_pb2.Quota | None = None,
) -> list[CreatedTopicView]:
    """Give a topic these settings on the broker groups of ``writers``, and fix the queues of an
    ordered one: those of ``order``, else as :func:`topic_order.follow` says. ``send_quota`` None:
    as it is. As :func:`create_topic`.
    """
    request = broker_pb2.PutTopicRequest(topic=wanted, send_quota=send_quota)
    answers = await each(
        writers,
        lambda member: call(
            member.internal_address,
            connection.admin(member).PutTopic,
            request,
            deadline_s=CHANGE_DEADLINE_S,
        ),
    )
    await _routed(connection, {group: answer.topic for group, answer in answers.items()})
    put = [answer.topic for answer in answers.values()]
    await topic_order.follow(connection, put, order, rebuild=wanted.is_ordered)
    return [
        CreatedTopicView(
            topic=answer.topic.name,
            broker_group=group,
            read_queue_count=answer.topic.read_queue_count,
            write_queue_count=answer.topic.write_queue_count,
            permission=permission_name(answer.topic.permission),
            flush_mode=flush_mode_name(answer.topic.flush_mode),
            replication_mode=replication_mode_name(answer.topic.replication_mode),
            reserve_time_ms=answer.topic.reserve_time_ms,
            message_type=message_type_name(answer.topic.message_type),
            is_ordered=answer.topic.is_ordered,
            send_quota=quota_text(answer.send_quota),
            created=answer.created,
        )
        for group, answer in answers.items()
    ]


def _quota_of(
    answer: broker_pb2.BrokerAdminServiceListTopicsResponse, topic: str
) -> broker_pb2.Quota:
    # To ask a map of messages for what it lacks would put it there.
    return answer.send_quotas[topic] if topic in answer.send_quotas else broker_pb2.Quota()


async def _routed(connection: Connection, put: Mapping[str, common_pb2.TopicConfig]) -> None:
    """Wait until the name server shows these settings by broker group."""
    name = next(iter(put.values())).name
    wanted = {group: _routed_settings(topic) for group, topic in put.items()}

    async def shown() -> bool:
        try:
            route = await connection.route(name)
        except TopicNotFound:
            return False
        there = {group.broker_group: _routed_settings(group.topic) for group in route.groups}
        return all(there.get(group) == settings for group, settings in wanted.items())

    if not await until(shown, ROUTE_WAIT_S):
        raise RouteNotFound(
            f"topic {name} is stored on {', '.join(put)}, but the name server does not show it yet"
        )


def _routed_settings(topic: common_pb2.TopicConfig) -> tuple[int, int, int, bool]:
    counts = topic.read_queue_count, topic.write_queue_count
    return *counts, topic.message_type, topic.is_ordered


async def delete_topic(
    connection: Connection, name: str, *, broker_groups: tuple[str, ...] = ()
) -> list[DeletedTopicView]:
    """Delete a topic, its queues and the offsets committed there, on all broker groups that have
    it or on the named ones. TopicNotFound when none of them has it."""
    writers = await connection.writers(broker_groups)
    request = broker_pb2.DeleteTopicRequest(topic=name)
    is_fixed = bool(await topic_order.known(connection, name))

    async def delete(member: namesrv_pb2.Member) -> bool:
        method = connection.admin(member).DeleteTopic
        try:
            await call(member.internal_address, method, request, deadline_s=CHANGE_DEADLINE_S)
        except TopicNotFound:
            return False
        return True

    deleted = await each(writers, delete)
    if not any(deleted.values()):
        raise TopicNotFound(f"no topic {name} on {', '.join(writers)}")
    if is_fixed and not broker_groups:
        await topic_order.forget(connection, name)
    return [DeletedTopicView(name, group) for group, done in deleted.items() if done]


async def list_topics(connection: Connection, *, system: bool = False) -> list[TopicView]:
    """The topics of all broker groups; the system's own only when asked for."""
    request = broker_pb2.BrokerAdminServiceListTopicsRequest()
    answers = await each(
        await connection.writers(),
        lambda m: call(m.internal_address, connection.admin(m).ListTopics, request),
    )
    rows = (
        topic_view(topic, group, _quota_of(its, topic.name))
        for group, its in answers.items()
        for topic in its.topics
    )
    shown = (row for row in rows if system or not is_system(row.topic))
    return sorted(shown, key=lambda row: (row.topic, row.broker_group))


async def topic_route(connection: Connection, name: str) -> list[RouteView]:
    """The route of a topic, as the name server sends it to clients."""
    route = await connection.route(name)
    return [_route_view(group) for group in route.groups]


def _route_view(group: namesrv_pb2.GroupRoute) -> RouteView:
    writer = writer_of(group)
    return RouteView(
        topic=group.topic.name,
        broker_group=group.broker_group,
        read_queue_count=group.topic.read_queue_count,
        write_queue_count=group.topic.write_queue_count,
        permission=permission_name(group.topic.permission),
        flush_mode=flush_mode_name(group.topic.flush_mode),
        replication_mode=replication_mode_name(group.topic.replication_mode),
        writer=writer.address if writer else "",
        followers=[m.address for m in group.members if m.role != common_pb2.MEMBER_ROLE_WRITER],
    )


async def topic_status(connection: Connection, name: str) -> list[QueueView]:
    """Every queue of a topic with its bounds. TopicNotFound when no broker group has it."""
    request = broker_pb2.DescribeTopicRequest(topic=name)
    answers = await each_that_knows(
        await connection.writers(),
        lambda m: call(m.internal_address, connection.admin(m).DescribeTopic, request),
        TopicNotFound(f"no broker group has a topic {name}"),
    )
    return [
        QueueView(
            topic=name,
            broker_group=group,
            queue_id=queue.queue_id,
            generation=queue.generation,
            min_offset=queue.min_offset,
            max_offset=queue.max_offset,
            appended_offset=queue.appended_offset,
            message_count=queue.max_offset - queue.min_offset,
            last_store_time_ms=queue.last_store_time_ms,
        )
        for group, answer in answers.items()
        for queue in answer.queues
    ]


# --- consumer groups ----------------------------------------------------------------------------


async def list_groups(connection: Connection, *, idle_ms: int = 0) -> list[GroupView]:
    """Consumer groups and their broker groups; only those that are unused for ``idle_ms``."""
    request = broker_pb2.ListGroupsRequest()
    answers = await each(
        await connection.writers(),
        lambda m: call(m.internal_address, connection.admin(m).ListGroups, request),
    )
    names = sorted({name for answer in answers.values() for name in answer.groups})
    groups = [_group_view(name, answers) for name in names]
    return [group for group in groups if not idle_ms or (group.idle_ms or 0) >= idle_ms]


def _group_view(name: str, answers: Mapping[str, broker_pb2.ListGroupsResponse]) -> GroupView:
    observed = [one for answer in answers.values() for one in answer.summaries if one.group == name]
    where = [group for group, answer in answers.items() if name in answer.groups]
    if not observed:
        return GroupView(name, where)
    return GroupView(
        name,
        where,
        member_count=max(one.member_count for one in observed),
        away_count=max(one.away_count for one in observed),
        queue_count=sum(one.queue_count for one in observed),
        idle_ms=min(one.idle_ms for one in observed),
        retry_count=sum(one.retry_count for one in observed),
        dead_letter_count=sum(one.dead_letter_count for one in observed),
    )


async def delete_group(
    connection: Connection,
    name: str,
    *,
    broker_groups: tuple[str, ...] = (),
    dead_letters: bool = False,
) -> list[DeletedGroupView]:
    """Delete a consumer group, all that it committed and its retry topic, on all broker groups that
    know it or on the named ones; its dead letters too if there are none, or ``dead_letters``.
    GroupNotFound when none does; GroupInUse while it has members anywhere: then nothing is deleted.
    """
    writers = await connection.writers(broker_groups)
    listed = await each(
        writers,
        lambda m: call(
            m.internal_address, connection.admin(m).ListGroups, broker_pb2.ListGroupsRequest()
        ),
    )
    if _group_view(name, listed).member_count:
        members = await group_members(connection, name)
        if members:
            raise GroupInUse(in_the_way(name, {one.client_id: one.is_away for one in members}))
    request = broker_pb2.DeleteGroupRequest(group=name, dead_letters=dead_letters)

    async def delete(member: namesrv_pb2.Member) -> broker_pb2.DeleteGroupResponse | None:
        method = connection.admin(member).DeleteGroup
        try:
            return await call(
                member.internal_address, method, request, deadline_s=CHANGE_DEADLINE_S
            )
        except GroupNotFound:
            return None

    deleted = await each(writers, delete)
    if all(answer is None for answer in deleted.values()):
        raise GroupNotFound(f"no consumer group {name} on {', '.join(writers)}")
    return [
        DeletedGroupView(name, group, [*answer.topics])
        for group, answer in deleted.items()
        if answer is not None
    ]


async def delete_idle_groups(
    connection: Connection,
    names: Iterable[str],
    *,
    broker_groups: tuple[str, ...] = (),
    dead_letters: bool = False,
) -> list[DeletedGroupView]:
    """Delete groups that were idle a moment ago; one that has members now, or is gone, stays as it
    is.
    """
    done: list[DeletedGroupView] = []
    for name in names:
        with suppress(GroupInUse, GroupNotFound):
            done += await delete_group(
                connection, name, broker_groups=broker_groups, dead_letters=dead_letters
            )
    return done


async def group_members(connection: Connection, group: str) -> list[GroupMemberView]:
    """The members of a group, those that are away included. GroupNotFound when no broker group
    knows it.
    """
    return (await group_progress(connection, group)).members


async def group_progress(
    connection: Connection, group: str, *, topic: str = ""
) -> GroupProgressView:
    """The members of a consumer group and its progress, in one topic or in all.

    GroupNotFound when no broker group knows it.
    """
    request = broker_pb2.DescribeGroupRequest(group=group, topic=topic)
    answers = await each_that_knows(
        await connection.writers(),
        lambda m: call(m.internal_address, connection.admin(m).DescribeGroup, request),
        GroupNotFound(f"no broker group knows a consumer group {group}"),
    )
    rows = [
        _progress_view(broker_group, row)
        for broker_group, answer in answers.items()
        for row in answer.progress
    ]
    return GroupProgressView(
        group=group,
        members=members_of(answers.values()),
        queues=sorted(rows, key=lambda row: (row.topic, row.broker_group, row.queue_id)),
        lag_count=sum(row.lag_count or 0 for row in rows),
    )


def _progress_view(broker_group: str, row: broker_pb2.GroupProgress) -> QueueProgressView:
    committed = row.committed if row.HasField("committed") else None
    return QueueProgressView(
        topic=row.queue.topic,
        broker_group=broker_group,
        queue_id=row.queue.queue_id,
        generation=row.generation,
        committed_offset=committed.offset if committed else None,
        committed_generation=committed.generation if committed else None,
        min_offset=row.min_offset,
        max_offset=row.max_offset,
        # What retention has removed cannot be waited for any more.
        lag_count=row.max_offset - max(committed.offset, row.min_offset) if committed else None,
    )

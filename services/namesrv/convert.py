"""proto ↔ what the route table stores."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.errors import InvalidRequest
from cometmq.messaging.order import OrderedQueues
from cometmq.model import (
    PERMISSION_READ,
    PERMISSION_WRITE,
    FlushMode,
    MessageType,
    ReplicationMode,
    TopicConfig,
)
from cometmq.v1 import common_pb2, namesrv_pb2
from services.namesrv.routes import DataVersion, GroupRoute, LiveMember, Member, Role


def member_from_proto(proto: namesrv_pb2.Member) -> Member:
    """InvalidRequest: an unknown role. The route table checks everything else."""
    if proto.role not in (common_pb2.MEMBER_ROLE_WRITER, common_pb2.MEMBER_ROLE_FOLLOWER):
        raise InvalidRequest("role: writer or follower")
    return Member(
        cluster=proto.cluster,
        broker_group=proto.broker_group,
        member_id=proto.member_id,
        role=Role(proto.role),
        address=proto.address,
        internal_address=proto.internal_address,
        epoch=proto.epoch,
    )


def member_to_proto(member: Member) -> namesrv_pb2.Member:
    return namesrv_pb2.Member(
        cluster=member.cluster,
        broker_group=member.broker_group,
        member_id=member.member_id,
        role=common_pb2.MemberRole.ValueType(member.role.value),
        address=member.address,
        internal_address=member.internal_address,
        epoch=member.epoch,
    )


def version_from_proto(proto: namesrv_pb2.DataVersion) -> DataVersion:
    return DataVersion(proto.epoch, proto.counter)


def topic_from_proto(proto: common_pb2.TopicConfig) -> TopicConfig:
    """Permission 0 means both; the flush mode must be there. InvalidRequest."""
    if proto.flush_mode not in (common_pb2.FLUSH_MODE_ASYNC, common_pb2.FLUSH_MODE_SYNC):
        raise InvalidRequest(f"topics: {proto.name[:127]!r} has no flush mode")
    # Brokers of an older release send no replication mode: they know no other than ASYNC.
    if proto.replication_mode not in common_pb2.ReplicationMode.values():
        raise InvalidRequest(f"topics: {proto.name[:127]!r} has an unknown replication mode")
    return TopicConfig(
        name=proto.name,
        read_queue_count=proto.read_queue_count,
        write_queue_count=proto.write_queue_count,
        permission=proto.permission or PERMISSION_READ | PERMISSION_WRITE,
        flush_mode=FlushMode(proto.flush_mode),
        replication_mode=ReplicationMode(proto.replication_mode or ReplicationMode.ASYNC),
        reserve_time_ms=proto.reserve_time_ms,
        message_type=_message_type(proto),
        is_ordered=proto.is_ordered,
    )


def _message_type(proto: common_pb2.TopicConfig) -> MessageType:
    if proto.message_type not in common_pb2.MessageType.values():
        raise InvalidRequest(f"topics: {proto.name[:127]!r} has an unknown message type")
    # Of an older release: its topics take every message.
    return MessageType(proto.message_type or MessageType.UNSPECIFIED.value)


def topic_to_proto(topic: TopicConfig) -> common_pb2.TopicConfig:
    return common_pb2.TopicConfig(
        name=topic.name,
        read_queue_count=topic.read_queue_count,
        write_queue_count=topic.write_queue_count,
        permission=topic.permission,
        flush_mode=common_pb2.FlushMode.ValueType(topic.flush_mode.value),
        replication_mode=common_pb2.ReplicationMode.ValueType(topic.replication_mode.value),
        message_type=common_pb2.MessageType.ValueType(topic.message_type.value),
        is_ordered=topic.is_ordered,
    )


def route_to_proto(
    topic: str, groups: Sequence[GroupRoute], order: Sequence[OrderedQueues] = ()
) -> namesrv_pb2.TopicRoute:
    return namesrv_pb2.TopicRoute(
        topic=topic,
        order=[
            namesrv_pb2.OrderedQueues(broker_group=group, queue_count=count)
            for group, count in order
        ],
        groups=[
            namesrv_pb2.GroupRoute(
                broker_group=group.broker_group,
                topic=topic_to_proto(group.topic),
                members=[member_to_proto(member) for member in group.members],
            )
            for group in groups
        ],
    )


def status_to_proto(live: LiveMember) -> namesrv_pb2.RegisteredMember:
    return namesrv_pb2.RegisteredMember(
        member=member_to_proto(live.member),
        last_heard_ms=live.heard_ms,
        data_version=namesrv_pb2.DataVersion(
            epoch=live.data_version.epoch, counter=live.data_version.counter
        ),
        topic_count=live.topic_count,
    )

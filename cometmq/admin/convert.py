"""Wire → views. Nothing else, and nowhere else."""

from __future__ import annotations

import base64
from contextlib import suppress

from cometmq.admin.views import MessageView, TopicView
from cometmq.errors import BodyCompressionInvalid
from cometmq.format.compression import SYS_FLAG_COMPRESSED, decompress
from cometmq.model import PERMISSION_READ, PERMISSION_WRITE, FlushMode, MessageType, ReplicationMode
from cometmq.v1 import broker_pb2, common_pb2, namesrv_pb2


def permission_name(bits: int) -> str:
    """RocketMQ's permission bits → ``rw``, ``r``, ``w`` or ``-``."""
    read = "r" if bits & PERMISSION_READ else ""
    write = "w" if bits & PERMISSION_WRITE else ""
    return read + write or "-"


def permission_bits(name: str) -> int:
    """``rw``, ``r`` or ``w`` → RocketMQ's permission bits."""
    return (PERMISSION_READ if "r" in name else 0) | (PERMISSION_WRITE if "w" in name else 0)


def role_name(member: namesrv_pb2.Member) -> str:
    return "writer" if member.role == common_pb2.MEMBER_ROLE_WRITER else "follower"


def writer_of(group: namesrv_pb2.GroupRoute) -> namesrv_pb2.Member | None:
    """The registered writer; None: the group has none now."""
    writers = (m for m in group.members if m.role == common_pb2.MEMBER_ROLE_WRITER)
    return next(writers, None)


def flush_mode_name(mode: int) -> str:
    return FlushMode(mode).name.lower()


def replication_mode_name(mode: int) -> str:
    return ReplicationMode(mode or ReplicationMode.ASYNC).name.lower()


def message_type_name(number: int) -> str:
    return MessageType(number or MessageType.UNSPECIFIED.value).name.lower()


def quota_text(quota: broker_pb2.Quota) -> str:
    """As options take it; empty: there is no limit."""
    limits = (quota.messages_per_s, quota.bytes_per_s)
    return "{}/{}".format(*limits) if any(limits) else ""


def topic_view(
    topic: common_pb2.TopicConfig, broker_group: str, send_quota: broker_pb2.Quota
) -> TopicView:
    return TopicView(
        topic=topic.name,
        broker_group=broker_group,
        read_queue_count=topic.read_queue_count,
        write_queue_count=topic.write_queue_count,
        permission=permission_name(topic.permission),
        flush_mode=flush_mode_name(topic.flush_mode),
        replication_mode=replication_mode_name(topic.replication_mode),
        reserve_time_ms=topic.reserve_time_ms,
        message_type=message_type_name(topic.message_type),
        is_ordered=topic.is_ordered,
        send_quota=quota_text(send_quota),
    )


def message_view(message: broker_pb2.StoredMessage) -> MessageView:
    body, text = message.body, None
    with suppress(BodyCompressionInvalid, UnicodeDecodeError):
        body = decompress(body, message.sys_flag)
        text = body.decode()
    return MessageView(
        message_id=message.message_id,
        topic=message.queue.topic,
        queue_id=message.queue.queue_id,
        queue_offset=message.queue_offset,
        log_offset=message.log_offset,
        tag=message.tag,
        keys=list(message.keys),
        properties=dict(sorted(message.properties.items())),
        flag=message.flag,
        born_time_ms=message.born_time_ms,
        born_host=message.born_host,
        store_time_ms=message.store_time_ms,
        store_host=message.store_host,
        reconsume_times=message.reconsume_times,
        unique_id=message.unique_id,
        compressed=bool(message.sys_flag & SYS_FLAG_COMPRESSED),
        body_bytes=len(body),
        body_text=text,
        body_base64=base64.b64encode(body).decode(),
        withheld=message.withheld,
    )

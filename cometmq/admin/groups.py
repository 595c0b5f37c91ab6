"""Settings of consumer groups, at all broker groups or at named ones."""

from __future__ import annotations

from cometmq.admin import ops
from cometmq.admin.connection import Connection, call, each, each_that_knows
from cometmq.admin.group_members import disagreement, ids_changed
from cometmq.admin.group_settings_cli import mode_text, retry_policy_text
from cometmq.admin.views import (
    GroupReportView,
    GroupSettingsView,
    GroupTopicView,
    QueueProgressView,
)
from cometmq.errors import GroupNotFound, InvalidRequest
from cometmq.names import check_new_group
from cometmq.v1 import broker_pb2

CHANGE_DEADLINE_S = 10.0


async def create_group(
    connection: Connection, settings: broker_pb2.GroupSettings, broker_groups: tuple[str, ...] = ()
) -> list[GroupSettingsView]:
    """Create a group. GroupNameInvalid; InvalidRequest: it is there."""
    check_new_group(settings.group)
    known = await _known_at(connection, settings.group, broker_groups)
    if known:
        raise InvalidRequest(
            f"consumer group {settings.group} is there already, at {', '.join(known)}: cometmq "
            "group update changes it"
        )
    return await put_group(connection, settings, broker_groups)


async def update_group(
    connection: Connection, settings: broker_pb2.GroupSettings, broker_groups: tuple[str, ...] = ()
) -> list[GroupSettingsView]:
    """Change those settings that are given, where the group is known. GroupNotFound: nowhere."""
    known = await _known_at(connection, settings.group, broker_groups)
    if not known:
        raise GroupNotFound(f"no broker group knows a consumer group {settings.group}")
    return await put_group(connection, settings, tuple(known))


async def _known_at(connection: Connection, name: str, broker_groups: tuple[str, ...]) -> list[str]:
    request = broker_pb2.ListGroupsRequest()
    answers = await each(
        await connection.writers(broker_groups),
        lambda m: call(m.internal_address, connection.admin(m).ListGroups, request),
    )
    return [broker_group for broker_group, answer in answers.items() if name in answer.groups]


async def put_group(
    connection: Connection, settings: broker_pb2.GroupSettings, broker_groups: tuple[str, ...] = ()
) -> list[GroupSettingsView]:
    """Create a group, or change those settings that are given."""
    request = broker_pb2.PutGroupRequest(settings=settings)
    answers = await each(
        await connection.writers(broker_groups),
        lambda member: call(
            member.internal_address,
            connection.admin(member).PutGroup,
            request,
            deadline_s=CHANGE_DEADLINE_S,
        ),
    )
    return [_view(name, answer.settings, answer.created) for name, answer in answers.items()]


async def group_settings(connection: Connection, group: str) -> list[GroupSettingsView]:
    """What each broker group that knows it has of a group. GroupNotFound when none does."""
    request = broker_pb2.DescribeGroupRequest(group=group)
    answers = await each_that_knows(
        await connection.writers(),
        lambda m: call(m.internal_address, connection.admin(m).DescribeGroup, request),
        GroupNotFound(f"no broker group knows a consumer group {group}"),
    )
    return [_view(name, answer.settings, False) for name, answer in answers.items()]


async def group_report(connection: Connection, group: str) -> GroupReportView:
    """A group at a glance. GroupNotFound when no broker group knows it."""
    found = await ops.group_progress(connection, group)
    by_topic: dict[str, list[QueueProgressView]] = {}
    for row in found.queues:
        by_topic.setdefault(row.topic, []).append(row)
    return GroupReportView(
        group=group,
        members=found.members,
        disagreement=disagreement(found.members),
        changed_ids=ids_changed(found.members),
        topics=[
            GroupTopicView(
                topic=topic,
                broker_groups=sorted({row.broker_group for row in rows}),
                queue_count=len(rows),
                new_queue_count=sum(row.lag_count is None for row in rows),
                member_count=sum(topic in one.subscriptions for one in found.members),
                lag_count=sum(row.lag_count or 0 for row in rows),
            )
            for topic, rows in sorted(by_topic.items())
        ],
        settings=await _settings_or_none(connection, group),
        lag_count=found.lag_count,
    )


async def _settings_or_none(connection: Connection, group: str) -> list[GroupSettingsView]:
    try:
        return await group_settings(connection, group)
    except GroupNotFound:  # removed a moment ago
        return []


def _view(
    broker_group: str, settings: broker_pb2.GroupSettings, created: bool
) -> GroupSettingsView:
    return GroupSettingsView(
        group=settings.group,
        broker_group=broker_group,
        consume_enable=settings.consume_enable,
        consume_broadcast_enable=settings.consume_broadcast_enable,
        consume_from_min_enable=settings.consume_from_min_enable,
        notify_members_enable=settings.notify_members_enable,
        consume_orderly=settings.consume_orderly,
        retry_times_max=settings.retry_times_max,
        retry_queue_count=settings.retry_queue_count,
        retry_policy=retry_policy_text(settings.retry_policy),
        consume_timeout_min=settings.consume_timeout_min,
        mode=mode_text(settings.mode),
        read_messages_per_s=settings.read_quota.messages_per_s,
        read_bytes_per_s=settings.read_quota.bytes_per_s,
        dlq_reserve_time_ms=settings.dlq_reserve_time_ms,
        broker_id=settings.broker_id,
        broker_id_when_slow=settings.broker_id_when_slow,
        attributes=[f"{name}={value}" for name, value in sorted(settings.attributes.items())],
        created=created,
    )

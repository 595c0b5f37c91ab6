"""Settings of consumer groups, at all broker groups or at named ones."""

from __future__ import annotations

from cometmq.admin.connection import Connection, call, each, each_that_knows
from cometmq.admin.views import GroupSettingsView
from cometmq.errors import GroupNotFound
from cometmq.v1 import broker_pb2

CHANGE_DEADLINE_S = 10.0


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


def _view(
    broker_group: str, settings: broker_pb2.GroupSettings, created: bool
) -> GroupSettingsView:
    return GroupSettingsView(
        settings.group,
        broker_group,
        settings.consume_enable,
        settings.consume_broadcast_enable,
        settings.retry_times_max,
        settings.retry_queue_count,
        created,
    )

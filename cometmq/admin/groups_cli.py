"""``cometmq group``: members, progress, settings, clean-up."""

from __future__ import annotations

from typing import Any

import click

from cometmq.admin import groups, ops, resets_cli
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group, broker_groups_option
from cometmq.admin.connection import Connection
from cometmq.admin.group_settings_cli import settings_options
from cometmq.admin.groups import disagreement
from cometmq.admin.views import (
    DeletedGroupView,
    GroupMemberView,
    GroupProgressView,
    GroupReportView,
    GroupSettingsView,
    GroupView,
)
from cometmq.v1 import broker_pb2


def add_commands(group: click.Group) -> None:
    """The verbs, as commands of ``group``."""

    @cluster_command(group, "create")
    @click.argument("name")
    @settings_options
    @broker_groups_option
    async def group_create(
        connection: Connection,
        name: str,
        settings: broker_pb2.GroupSettings,
        broker_groups: tuple[str, ...],
    ) -> list[GroupSettingsView]:
        """Create group NAME; without settings it has RocketMQ's.

        A group is also made by its first member. mqadmin: updateSubGroup.
        """
        settings.group = name
        return await groups.create_group(connection, settings, broker_groups)

    @cluster_command(group, "update")
    @click.argument("name")
    @settings_options
    @broker_groups_option
    async def group_update(
        connection: Connection,
        name: str,
        settings: broker_pb2.GroupSettings,
        broker_groups: tuple[str, ...],
    ) -> list[GroupSettingsView]:
        """Change the given settings of group NAME; the others stay.

        With --no-consume members keep their progress and get nothing more; --consume ends that.
        A step of --retry-policy waits for the nearest delay level that is not shorter. With --mode
        pop members receive from all queues together; --orderly then keeps the order of message
        groups. --consume-timeout-min is kept and shown; consumers have an option of their own.
        mqadmin: updateSubGroup, setConsumeMode.
        """
        settings.group = name
        return await groups.update_group(connection, settings, broker_groups)

    @cluster_command(group, "members", disagreement)
    @click.argument("name")
    async def group_members(connection: Connection, name: str) -> list[GroupMemberView]:
        """Show the live members of group NAME and what they read.

        mqadmin: consumerConnection.
        """
        return await ops.group_members(connection, name)

    @cluster_command(group, "info", has_more=True)
    @click.argument("name")
    async def group_info(connection: Connection, name: str) -> list[GroupSettingsView]:
        """Show the settings of group NAME at each broker group.

        mqadmin: getConsumerConfig.
        """
        return await groups.group_settings(connection, name)

    @cluster_command(group, "status", lambda found: found.disagreement)
    @click.argument("name")
    async def group_status(connection: Connection, name: str) -> GroupReportView:
        """Show group NAME at a glance: members, lag, settings.

        Ends with exit code 3 when members do not agree. `group progress` has every queue.
        mqadmin: consumerStatus, consumerProgress.
        """
        return await groups.group_report(connection, name)


@click.group("group", cls=Group)
def group_group() -> None:
    """Consumer groups: members, progress, resets, clean-up."""


add_commands(group_group)
resets_cli.add_commands(group_group)


@cluster_command(group_group, "list")
@click.option(
    "--idle-hours",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Only groups with neither a member nor a commit for so long.",
)
async def group_list(connection: Connection, idle_hours: float) -> list[GroupView]:
    """List all groups: live members, queues, idle time.

    mqadmin: consumerProgress, without a group.
    """
    return await ops.list_groups(connection, idle_ms=round(idle_hours * 3_600_000))


@cluster_command(group_group, "delete")
@click.argument("name", required=False)
@click.option(
    "--idle-hours",
    type=click.FloatRange(min=0, min_open=True),
    help="Instead of NAME: all groups with neither a member nor a commit for so long.",
)
@click.option("--dead-letters", is_flag=True, help="Its dead letters too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@broker_groups_option
async def group_delete(
    connection: Connection,
    name: str | None,
    idle_hours: float | None,
    dead_letters: bool,
    yes: bool,
    broker_groups: tuple[str, ...],
) -> list[DeletedGroupView]:
    """Delete group NAME, its offsets and its retry topic.

    Refused while the group has members, static ones that are away included. Its dead letters stay,
    unless there are none or --dead-letters says so. Broker groups count a group idle since their
    writer's start at most.

    mqadmin: deleteSubGroup.
    """
    if (name is None) == (idle_hours is None):
        raise click.UsageError("take one of NAME and --idle-hours")
    names = [name] if name is not None else []
    if idle_hours is not None:
        idle_ms = max(1, round(idle_hours * 3_600_000))
        names = [one.group for one in await ops.list_groups(connection, idle_ms=idle_ms)]
        if not names:
            return []
    if not yes:
        also = ", their dead letters" if dead_letters else ""
        text = f"Delete {', '.join(names)}: committed offsets{also} and retry topics?"
        click.confirm(text, abort=True, err=True)
    options: Any = {"broker_groups": broker_groups, "dead_letters": dead_letters}
    if name is not None:
        return await ops.delete_group(connection, name, **options)
    return await ops.delete_idle_groups(connection, names, **options)


@cluster_command(group_group, "progress")
@click.argument("name")
@click.option("--topic", default="", help="Only this topic.")
async def group_progress(connection: Connection, name: str, topic: str) -> GroupProgressView:
    """Show members, committed offsets and lag of group NAME.

    mqadmin: consumerProgress.
    """
    return await ops.group_progress(connection, name, topic=topic)

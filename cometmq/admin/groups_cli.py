"""``cometmq group``: members, progress, settings, clean-up."""

from __future__ import annotations

from typing import Any

import click

from cometmq.admin import group_members, groups, ops, resets_cli
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group, broker_groups_option
from cometmq.admin.connection import Connection
from cometmq.admin.group_settings_cli import settings_options
from cometmq.admin.views import (
    DeletedGroupView,
    GroupMemberView,
    GroupProgressView,
    GroupReportView,
    GroupSettingsView,
    GroupView,
    RemovedMemberView,
)
from cometmq.v1 import broker_pb2


def _doubt(found: list[GroupMemberView] | list[RemovedMemberView]) -> str:
    """What is wrong with the members that are shown, or stay."""
    shown = [one for one in found if isinstance(one, GroupMemberView)]
    stay = [one for one in found if isinstance(one, RemovedMemberView) and one.connected]
    if stay:
        names = ", ".join(one.client_id for one in stay)
        return f"{names}: connected, and stays a member. cometmq client list shows from where"
    return group_members.trouble(shown)


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

    @cluster_command(group, "members", _doubt, has_more=True)
    @click.argument("name")
    @click.option("--away", is_flag=True, help="Only static members that are away.")
    @click.option(
        "--remove",
        "removed",
        multiple=True,
        metavar="CLIENT_ID",
        help="End the session of this member, which is away. May be given several times.",
    )
    @click.option("--remove-away", is_flag=True, help="End the sessions of all that are away.")
    async def members(
        connection: Connection, name: str, away: bool, removed: tuple[str, ...], remove_away: bool
    ) -> list[GroupMemberView] | list[RemovedMemberView]:
        """Show members of a group, or remove those away.

        A static member that is away keeps its share of the queues until its session ends, and
        nobody reads them. --remove gives them to the others at once. A client that comes back joins
        again. One that is connected stays: then the command ends with exit code 3.

        mqadmin: consumerConnection.
        """
        if removed and remove_away:
            raise click.UsageError("take one of --remove and --remove-away")
        if removed or remove_away:
            return await group_members.remove_members(connection, name, removed)
        found = await ops.group_members(connection, name)
        return [one for one in found if one.is_away] if away else found

    @cluster_command(group, "info", has_more=True)
    @click.argument("name")
    async def group_info(connection: Connection, name: str) -> list[GroupSettingsView]:
        """Show the settings of group NAME at each broker group.

        mqadmin: getConsumerConfig.
        """
        return await groups.group_settings(connection, name)

    @cluster_command(group, "status", lambda found: group_members.trouble(found.members))
    @click.argument("name")
    async def group_status(connection: Connection, name: str) -> GroupReportView:
        """Show group NAME at a glance: members, lag, settings.

        Ends with exit code 3 when members do not agree, or client ids change at restarts. `group
        progress` has every queue.
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

"""``cometmq group create``, ``update``, ``info``, ``members`` and ``status``."""

from __future__ import annotations

import click

from cometmq.admin import groups, ops
from cometmq.admin.commandline import broker_groups_option, cluster_command
from cometmq.admin.connection import Connection
from cometmq.admin.group_settings_cli import settings_options
from cometmq.admin.groups import disagreement
from cometmq.admin.views import GroupMemberView, GroupReportView, GroupSettingsView
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
        A step of --retry-policy waits for the nearest delay level that is not shorter. --orderly,
        --consume-timeout-min and --mode are kept and shown; consumers have options of their own.
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

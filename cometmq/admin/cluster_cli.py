"""``cometmq cluster``."""

from __future__ import annotations

import click

from cometmq.admin import group_status, ops
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group
from cometmq.admin.connection import Connection
from cometmq.admin.views import GroupStatusView, MemberView


@click.group("cluster", cls=Group)
def cluster_group() -> None:
    """Broker groups and their members at a glance."""


@cluster_command(cluster_group, "status")
async def cluster_status(connection: Connection) -> list[GroupStatusView]:
    """Show writer, in-sync set and troubles of every group.

    mqadmin: clusterList, getSyncStateSet.
    """
    return await group_status.describe(connection)


@cluster_command(cluster_group, "members", has_more=True)
async def cluster_members(connection: Connection) -> list[MemberView]:
    """List every registered member with its role and log.

    mqadmin: clusterList.
    """
    return await ops.describe_cluster(connection)

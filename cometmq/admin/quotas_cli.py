"""``cometmq quota``: what addresses and topics may send and read."""

from __future__ import annotations

import click

from cometmq.admin import quotas
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group, broker_groups_option
from cometmq.admin.connection import Connection
from cometmq.admin.group_settings_cli import QuotaType
from cometmq.admin.views import QuotaView
from cometmq.v1 import broker_pb2

_scope = click.argument("scope", type=click.Choice([*quotas.SCOPES]))
_name = click.argument("name", default="")


@click.group("quota", cls=Group)
def quota_group() -> None:
    """Quotas: what addresses and topics may send and read."""


@cluster_command(quota_group, "set")
@_scope
@_name
@click.option(
    "--send",
    type=QuotaType(),
    metavar="MESSAGES/BYTES",
    help="What may be sent a second; 0 = no limit, whatever each has.",
)
@click.option(
    "--read",
    type=QuotaType(),
    metavar="MESSAGES/BYTES",
    help="What may be read a second; 0 = no limit, whatever each has.",
)
@broker_groups_option
async def quota_set(
    connection: Connection,
    scope: str,
    name: str,
    send: broker_pb2.Quota | None,
    read: broker_pb2.Quota | None,
    broker_groups: tuple[str, ...],
) -> list[QuotaView]:
    """Limit what an address, or all clients of a topic, send and read.

    Without NAME it is the quota of each address or topic that has none of its own. An address of
    IPv6 stands for its /64. Each broker group counts for itself. The quotas of each client are
    options of topic update and group update.

    mqadmin: none.
    """
    if send is None and read is None:
        raise click.UsageError("nothing to set: give --send or --read")
    return await quotas.set_quota(connection, scope, name, send, read, broker_groups)


@cluster_command(quota_group, "unset")
@_scope
@_name
@broker_groups_option
async def quota_unset(
    connection: Connection, scope: str, name: str, broker_groups: tuple[str, ...]
) -> list[QuotaView]:
    """Remove the quota of an address or a topic; without NAME that of each.

    mqadmin: none.
    """
    return await quotas.unset_quota(connection, scope, name, broker_groups)


@cluster_command(quota_group, "list")
async def quota_list(connection: Connection) -> list[QuotaView]:
    """List the quotas of addresses and topics; an empty name is each.

    mqadmin: none.
    """
    return await quotas.list_quotas(connection)

"""``cometmq client``: who is connected."""

from __future__ import annotations

import click

from cometmq.admin import clients
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group
from cometmq.admin.connection import Connection
from cometmq.admin.views import ClientView


@click.group("client", cls=Group)
def client_group() -> None:
    """Clients: members of groups, producers."""


@cluster_command(client_group, "list", has_more=True)
@click.option("--kind", type=click.Choice(list(clients.KINDS)), help="Only these.")
@click.option("--group", default="", help="Only members of this group.")
@click.option(
    "--count",
    type=click.IntRange(1, 1_000_000),
    default=1_000,
    show_default=True,
    help="At most so many of each kind, at each broker group.",
)
async def client_list(
    connection: Connection, kind: str | None, group: str, count: int
) -> list[ClientView]:
    """List connected clients: address, language, version, since when.

    The broker knows the address; names and programs are what the clients say. A producer has a line
    for each broker group that it sends to. A static member that is away is listed, too.
    mqadmin: consumerConnection, producerConnection, and clientConnectionList of RocketMQ's tools.
    """
    return await clients.list_clients(connection, kind, group, count)

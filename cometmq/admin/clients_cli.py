"""``cometmq client``: connected clients, and their answers; ``cometmq message verify``."""

from __future__ import annotations

import click

from cometmq.admin import clients
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group
from cometmq.admin.connection import Connection
from cometmq.admin.views import (
    ClientDescriptionView,
    ClientStacksView,
    ClientView,
    ListenerResultView,
)

_timeout_option = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.001, 60.0),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for the client.",
)
_kind_option = click.option("--kind", type=click.Choice(list(clients.KINDS)), help="Only these.")


@click.group("client", cls=Group)
def client_group() -> None:
    """Clients: members of groups, producers."""


@cluster_command(client_group, "list", has_more=True)
@_kind_option
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


@cluster_command(client_group, "info", has_more=True)
@click.argument("client_id")
@_kind_option
@click.option("--group", default="", help="Only the member of this group.")
@click.option("--stacks", is_flag=True, help="Also where running listener calls are.")
@_timeout_option
async def client_info(
    connection: Connection,
    client_id: str,
    kind: str | None,
    group: str,
    stacks: bool,
    timeout_s: float,
) -> list[ClientDescriptionView]:
    """Ask a running client what it does.

    It reports its version, what it reads, its queues with positions, cached messages and locks,
    the rates of the last minute, and the listener calls that run. --wide adds its options.

    mqadmin: consumerStatus, and getConsumerConfig of RocketMQ's tools.
    """
    return await clients.describe_clients(
        connection,
        client_id,
        kind=kind,
        group=group,
        with_stacks=stacks,
        timeout_ms=round(timeout_s * 1000),
    )


@cluster_command(client_group, "stacks")
@click.argument("client_id")
@click.option("--group", default="", help="Only the member of this group.")
@_timeout_option
async def client_stacks(
    connection: Connection, client_id: str, group: str, timeout_s: float
) -> list[ClientStacksView]:
    """Ask a running consumer where its listener calls are.

    The calls that run longest come first, at most 64, each with the stack of its thread or of its
    coroutine. A call that takes longer than the consume timeout is late; the client's log has its
    stack, too. A simple consumer has receives in their place: those whose messages it has not
    acknowledged, each with the stack of its caller.

    mqadmin: consumerStatus -s.
    """
    described = await clients.describe_clients(
        connection,
        client_id,
        kind="member",
        group=group,
        with_stacks=True,
        timeout_ms=round(timeout_s * 1000),
    )
    return [
        ClientStacksView(one.client_id, one.group, one.role, one.call_count, one.calls)
        for one in described
    ]


def add_verify(group: click.Group) -> None:
    """Add ``verify`` to the group."""

    @cluster_command(group, "verify", _not_done)
    @click.argument("message_id")
    @click.option("--group", required=True, help="The consumer group.")
    @click.option("--client", "client_id", required=True, help="Its member that is to consume.")
    @_timeout_option
    async def message_verify(
        connection: Connection, message_id: str, group: str, client_id: str, timeout_s: float
    ) -> ListenerResultView:
        """Let a running consumer's listener consume a message now.

        The listener is called beside the consumer's other calls, and its work takes effect. The
        call is not counted, commits nothing, and causes no redelivery.
        Ends with 3 unless the listener is done with the message.

        mqadmin: queryMsgById with a group and a client (-g, -d).
        """
        return await clients.verify_message(
            connection, message_id, group, client_id, round(timeout_s * 1000)
        )


def _not_done(view: ListenerResultView) -> str:
    return "" if view.verdict == "success" else "the listener is not done with the message"

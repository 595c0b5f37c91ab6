"""``cometmq broker``: members of broker groups."""

from __future__ import annotations

import click

from cometmq.admin import brokers, group_status, render, trace
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group, output_option
from cometmq.admin.connection import Connection
from cometmq.admin.views import (
    BrokerMemberView,
    CleanedView,
    ElectedView,
    HandoverView,
    LogChecksumView,
)
from cometmq.errors import InvalidRequest


@click.group("broker", cls=Group)
def broker_group() -> None:
    """Members of broker groups: roles, logs, hand-over, election."""


@cluster_command(broker_group, "status", has_more=True)
async def broker_status(connection: Connection) -> list[BrokerMemberView]:
    """Show role, log and lag of every member.

    mqadmin: brokerStatus, haStatus, getBrokerEpoch.
    """
    return await brokers.describe(connection)


@cluster_command(broker_group, "step-down")
@click.option(
    "--broker-group", "--group", "name", metavar="NAME", help="Default: the only one there is."
)
@click.option(
    "--to", "member_id", type=int, help="Member id. Default: the follower that has synced most."
)
async def broker_step_down(
    connection: Connection, name: str | None, member_id: int | None
) -> HandoverView:
    """Hand the writer's role over to a follower.

    Returns when the follower is the writer. No message and no committed offset is lost; clients
    go on by themselves.

    mqadmin: electMaster.
    """
    if name is None:
        groups = sorted(await connection.writers())
        if len(groups) != 1:
            raise InvalidRequest(f"there are several broker groups, name one: {', '.join(groups)}")
        name = groups[0]
    return await brokers.step_down(connection, name, member_id)


@cluster_command(broker_group, "elect")
@click.argument("name", metavar="GROUP")
@click.argument("member_id", metavar="MEMBER", type=int)
@click.option("--force", is_flag=True, help="Acknowledged messages may be lost: yes, do it.")
async def broker_elect(
    connection: Connection, name: str, member_id: int, force: bool
) -> ElectedView:
    """Force MEMBER to become the writer of GROUP.

    For a group that has lost its writer and has no electable member. Waits until the lease counts
    as abandoned. Consumers lose what MEMBER lacks; a member that has it saves it to a file when it
    returns.

    mqadmin: electMaster.
    """
    return await group_status.elect(connection, name, member_id, force=force)


@cluster_command(broker_group, "checksum", brokers.doubt)
@click.option("--broker-group", "--group", "names", metavar="NAME", multiple=True)
async def broker_checksum(connection: Connection, names: tuple[str, ...]) -> list[LogChecksumView]:
    """Compare the logs of each group's members byte for byte.

    Ends with status 3 when logs differ, or a member is not registered and so was not compared.

    mqadmin has no such verb.
    """
    return await brokers.compare_logs(connection, names)


@cluster_command(broker_group, "clean")
@click.option("--broker-group", "--group", "names", metavar="NAME", multiple=True)
async def broker_clean(connection: Connection, names: tuple[str, ...]) -> list[CleanedView]:
    """Remove expired log files now.

    Every member cleans its own disk, whatever the hour. It also removes queue files that point
    before the log, and queues of topics that do not exist.

    mqadmin: cleanExpiredCQ, cleanUnusedTopic, deleteExpiredCommitLog.
    """
    return await brokers.clean(connection, names)


@broker_group.command("trace")
@click.argument("address")
@click.option("--kept", is_flag=True, help="The ring as it was when something took too long.")
@click.option(
    "--longer-than", metavar="MS", type=click.FloatRange(0), default=1.0, show_default=True,
    help="Stages that took at least so long.",
)  # fmt: skip
@output_option
def broker_trace(address: str, kept: bool, longer_than: float, output: str) -> None:
    """Show what a process did in the last seconds.

    ADDRESS is the metrics address, host:port, of a broker, a haslave, a name server or a pull-hold.
    Their flight recorders note loop turns, syncs, garbage collections and more; the option
    trace_limit_ms says when a process keeps its ring, and so does the signal USR2.

    mqadmin has no such verb.
    """
    render.show(trace.read(address, kept=kept, longer_than_ms=longer_than), output)

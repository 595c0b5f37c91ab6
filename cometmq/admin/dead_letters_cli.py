"""``cometmq dlq``."""

from __future__ import annotations

import click

from cometmq.admin import dead_letters
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import (
    Group,
    again_option,
    broker_groups_option,
    parse_places,
    rate_option,
)
from cometmq.admin.connection import Connection
from cometmq.admin.views import DeadLetterView, MessageView, PurgedView, ResentView
from cometmq.errors import MessageNotFound

_sql_option = click.option("--sql", default="", help="Only those for which this SQL92 is true.")


@click.group("dlq", cls=Group)
def dlq_group() -> None:
    """Dead letters: messages that a group gave up."""


@cluster_command(dlq_group, "list")
@click.argument("group")
@_sql_option
@click.option("--count", type=click.IntRange(min=1), default=100, show_default=True)
async def dlq_list(
    connection: Connection, group: str, sql: str, count: int
) -> list[DeadLetterView]:
    """List the dead letters of GROUP, oldest first.

    mqadmin has no such verb.
    """
    found: list[DeadLetterView] = []
    async for view, _ in dead_letters.read_dead_letters(connection, group, sql=sql):
        found.append(view)
        if len(found) == count:
            break
    return found


@cluster_command(dlq_group, "show")
@click.argument("group")
@click.argument("place", metavar="BROKER_GROUP/OFFSET")
async def dlq_show(connection: Connection, group: str, place: str) -> MessageView:
    """Show one dead letter of GROUP, whole.

    mqadmin has no such verb.
    """
    for owner, offset in parse_places([place]):
        found = dead_letters.read_dead_letters(connection, group, broker_group=owner)
        async for view, message in found:
            if view.offset == offset:
                return message
    raise MessageNotFound(f"group {group} has no dead letter {place}")


@cluster_command(dlq_group, "export")
@click.argument("group")
@_sql_option
async def dlq_export(connection: Connection, group: str, sql: str) -> list[MessageView]:
    """Print the dead letters of GROUP, whole.

    With --output json they are one document. mqadmin has no such verb.
    """
    found = dead_letters.read_dead_letters(connection, group, sql=sql)
    return [message async for _, message in found]


@cluster_command(dlq_group, "resend")
@click.argument("group")
@click.argument("places", nargs=-1, metavar="[BROKER_GROUP/OFFSET]...")
@click.option("--all", "everything", is_flag=True, help="All that were not sent again before.")
@_sql_option
@again_option
@rate_option
async def dlq_resend(
    connection: Connection,
    group: str,
    places: tuple[str, ...],
    everything: bool,
    sql: str,
    again: bool,
    rate: float,
) -> ResentView:
    """Send dead letters to GROUP again, as if never tried.

    Names one by one, --sql chooses some, --all takes all. Only this group gets them. What was sent
    again once is left out, unless --again. mqadmin has no such verb.
    """
    if (bool(places) + everything + bool(sql)) != 1:
        raise click.UsageError("name dead letters, or choose them with --sql, or take --all")
    named = set(parse_places(places))
    wanted = [
        view
        async for view, _ in dead_letters.read_dead_letters(connection, group, sql=sql)
        if not named or (view.broker_group, view.offset) in named
    ]
    if missing := named - {(view.broker_group, view.offset) for view in wanted}:
        owner, offset = min(missing)
        raise MessageNotFound(f"group {group} has no dead letter {owner}/{offset}")
    if not again and not named:
        wanted = [view for view in wanted if not view.resent]
    return await dead_letters.resend(connection, group, wanted, again=again, rate=rate)


@cluster_command(dlq_group, "purge")
@click.argument("group")
@click.option("--yes", is_flag=True, help="Do not ask.")
@broker_groups_option
async def dlq_purge(
    connection: Connection, group: str, yes: bool, broker_groups: tuple[str, ...]
) -> list[PurgedView]:
    """Delete all dead letters of GROUP.

    mqadmin has no such verb.
    """
    if not yes:
        click.confirm(f"Delete all dead letters of group {group}?", abort=True, err=True)
    return await dead_letters.purge(connection, group, broker_groups=broker_groups)

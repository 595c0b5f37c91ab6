"""``cometmq transaction``."""

from __future__ import annotations

import click

from cometmq.admin import transactions
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group, parse_places
from cometmq.admin.connection import Connection
from cometmq.admin.views import HalfView, HalvesChangedView, MessageView

_given_up_option = click.option(
    "--given-up", is_flag=True, help="Those that no producer has ended, instead of open ones."
)


@click.group("transaction", cls=Group)
def transaction_group() -> None:
    """Transactions: half messages that have no end yet."""


@cluster_command(transaction_group, "list", has_more=True)
@click.option("--group", default="", help="Only those of this producer group.")
@_given_up_option
@click.option("--count", type=click.IntRange(1, 1_000_000), default=1_000, show_default=True)
async def transaction_list(
    connection: Connection, group: str, given_up: bool, count: int
) -> list[HalfView]:
    """List half messages, oldest first.

    mqadmin has no such verb.
    """
    halves = transactions.given_up if given_up else transactions.open_halves
    found: list[HalfView] = []
    async for view, _ in halves(connection, group):
        found.append(view)
        if len(found) == count:
            break
    return found


@cluster_command(transaction_group, "show")
@click.argument("place", metavar="BROKER_GROUP/OFFSET")
@_given_up_option
async def transaction_show(connection: Connection, place: str, given_up: bool) -> MessageView:
    """Show one half message, whole.

    mqadmin has no such verb.
    """
    [named] = parse_places((place,))
    return await transactions.find(connection, named, is_given_up=given_up)


@cluster_command(transaction_group, "resume")
@click.argument("places", nargs=-1, metavar="[BROKER_GROUP/OFFSET]...")
@click.option("--all", "everything", is_flag=True, help="All that were given up.")
@click.option("--group", default="", help="With --all: only those of this producer group.")
async def transaction_resume(
    connection: Connection, places: tuple[str, ...], everything: bool, group: str
) -> HalvesChangedView:
    """Have given-up half messages checked again.

    Their producers are asked from the first check on. What was resumed before is left out.
    mqadmin has no such verb.
    """
    if bool(places) == everything:
        raise click.UsageError("name half messages, or take --all")
    named = parse_places(places)
    if everything:
        listed = transactions.given_up(connection, group)
        named = [(view.broker_group, view.offset) async for view, _ in listed]
    return await transactions.resume(connection, named)


@cluster_command(transaction_group, "drop")
@click.argument("places", nargs=-1, required=True, metavar="BROKER_GROUP/OFFSET...")
@click.option("--yes", is_flag=True, help="Do not ask.")
async def transaction_drop(
    connection: Connection, places: tuple[str, ...], yes: bool
) -> HalvesChangedView:
    """Roll open half messages back; no producer is asked.

    mqadmin has no such verb.
    """
    named = parse_places(places)
    if not yes:
        click.confirm(f"Roll back {len(named)} half messages?", abort=True, err=True)
    return await transactions.drop(connection, named)

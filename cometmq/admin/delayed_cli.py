"""``cometmq message delayed`` and ``cometmq message recall``."""

from __future__ import annotations

from typing import Any

import click

from cometmq.admin import delayed
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.connection import Connection
from cometmq.admin.delayed import Wanted
from cometmq.admin.search_cli import Time, check_range
from cometmq.admin.views import DelayedCountView, DelayedView, RecalledView
from cometmq.clock import SystemClock

COUNT_MAX = 10_000


def add_to(message_group: click.Group) -> None:
    """Make the commands."""

    @cluster_command(message_group, "delayed", has_more=True)
    @click.option("--topic", default="", help="Only messages for this topic.")
    @click.option("--begin", "begin_ms", type=Time(), metavar="TIME", help="Not due before.")
    @click.option("--end", "end_ms", type=Time(), metavar="TIME", help="Not due after.")
    @click.option(
        "--max", "count_max", type=click.IntRange(1, COUNT_MAX), default=32, show_default=True
    )
    @click.option(
        "--count-by", type=click.Choice(["topic", "time"]), help="Count them instead of a list."
    )
    async def message_delayed(
        connection: Connection, count_by: str | None, count_max: int, **options: Any
    ) -> list[DelayedView] | list[DelayedCountView]:
        """List messages that wait for a time of their own, next first.

        Those of delay levels are not among them. --wide adds the handles for message recall.
        --count-by topic looks at each message; --count-by time counts all, and a recalled one twice
        until its time.

        mqadmin: none.
        """
        check_range(options["begin_ms"], options["end_ms"])
        begin_ms, end_ms = options["begin_ms"] or 0, options["end_ms"] or 0
        wanted = Wanted(options["topic"], begin_ms, end_ms)
        if count_by == "time":
            if wanted != Wanted():
                raise click.UsageError(
                    "--count-by time counts all: without --topic, --begin, --end"
                )
            return await delayed.count_by_time(connection, SystemClock().wall_ms)
        if count_by == "topic":
            return await delayed.count_by_topic(connection, wanted)
        return await delayed.delayed(connection, wanted, count_max)

    @cluster_command(message_group, "recall", _too_late)
    @click.argument("handle")
    async def message_recall(connection: Connection, handle: str) -> RecalledView:
        """Take back the delayed message that HANDLE names.

        A handle is the recall_handle of a receipt, or of message delayed. Once recalled, no
        consumer ever gets the message. Ends with 3 if it was too late.

        mqadmin: none.
        """
        return await delayed.recall(connection, handle)


def _too_late(view: RecalledView) -> str:
    return "" if view.recalled else "it was too late: consumers get the message, or have it"

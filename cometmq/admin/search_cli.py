"""``cometmq message query`` and ``cometmq topic offset-by-time``."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click

from cometmq.admin import search
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.connection import Connection
from cometmq.admin.views import MessageView, QueueTimeView
from cometmq.v1 import broker_pb2

COUNT_MAX = 64
TIME_MS_MAX = 253_370_764_800_000  # the beginning of the year 9999
_BOUNDARIES = {
    "lower": broker_pb2.TIME_BOUNDARY_LOWER,
    "upper": broker_pb2.TIME_BOUNDARY_UPPER,
}


class Time(click.ParamType[int]):
    """A moment: milliseconds since 1970, or ISO 8601; local time unless it names its zone."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            is_number = value.isdecimal()
            ms = int(value) if is_number else round(datetime.fromisoformat(value).timestamp() * 1e3)
        except (ValueError, OverflowError):
            self.fail(f"{value!r} is neither milliseconds nor like 2026-01-31T23:59:59", param, ctx)
        if not 0 <= ms <= TIME_MS_MAX:
            self.fail(f"{value!r} is before 1970 or after 9998", param, ctx)
        return ms


def add_query(message_group: click.Group) -> None:
    """Make the command ``query``."""

    @cluster_command(message_group, "query")
    @click.option("--topic", required=True)
    @click.option("--key", help="One of the message's keys, or its unique id.")
    @click.option("--unique-id", help="The id that the producer gave it.")
    @click.option("--begin", "begin_ms", type=Time(), metavar="TIME", help="Not stored before.")
    @click.option("--end", "end_ms", type=Time(), metavar="TIME", help="Not stored after.")
    @click.option(
        "--max",
        "count_max",
        type=click.IntRange(1, COUNT_MAX),
        default=32,
        show_default=True,
        help="Of each broker group, and in all.",
    )
    async def message_query(
        connection: Connection,
        topic: str,
        key: str | None,
        unique_id: str | None,
        **limits: Any,
    ) -> list[MessageView]:
        """Find messages by key or unique id, newest first.

        TIME is milliseconds since 1970, or like 2026-01-31T23:59:59, local time.

        mqadmin: queryMsgByKey, queryMsgByUniqueKey.
        """
        if (key is None) == (unique_id is None):
            raise click.UsageError("give either --key or --unique-id")
        check_range(limits["begin_ms"], limits["end_ms"])
        return await search.query_messages(
            connection, topic, key=key, unique_id=unique_id, **limits
        )


def add_offset_by_time(topic_group: click.Group) -> None:
    """Make the command ``offset-by-time``."""

    @cluster_command(topic_group, "offset-by-time")
    @click.argument("name")
    @click.argument("time_ms", metavar="TIME", type=Time())
    @click.option(
        "--boundary",
        type=click.Choice(list(_BOUNDARIES)),
        default="lower",
        show_default=True,
        help="The first message not before TIME, or the last not after it.",
    )
    async def topic_offset_by_time(
        connection: Connection, name: str, time_ms: int, boundary: str
    ) -> list[QueueTimeView]:
        """Show the offset of each queue at a time.

        TIME is milliseconds since 1970, or like 2026-01-31T23:59:59, local time.

        mqadmin has no such verb.
        """
        return await search.offsets_by_time(connection, name, time_ms, _BOUNDARIES[boundary])


def check_range(begin_ms: int | None, end_ms: int | None) -> None:
    """Raises click.UsageError: it ends before it begins."""
    if begin_ms is not None and end_ms is not None and begin_ms > end_ms:
        raise click.UsageError(
            f"--begin {_local_time(begin_ms)} is later than --end {_local_time(end_ms)}"
        )


def _local_time(time_ms: int) -> str:
    """As it could be given."""
    return datetime.fromtimestamp(time_ms / 1000).isoformat(timespec="milliseconds")

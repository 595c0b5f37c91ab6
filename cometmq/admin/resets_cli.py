"""``cometmq group reset-offset``, ``skip``, ``clone-offset`` and ``forget``."""

from __future__ import annotations

import click

from cometmq.admin import resets
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Decorator, broker_groups_option
from cometmq.admin.connection import Connection
from cometmq.admin.search_cli import Time
from cometmq.admin.views import ForgottenView, QueueResetView
from cometmq.v1 import broker_pb2

FIRST, LAST = broker_pb2.RESET_BOUND_FIRST, broker_pb2.RESET_BOUND_LAST

_dry_run_option: Decorator = click.option(
    "--dry-run", is_flag=True, help="Only show what would happen."
)


def add_commands(group: click.Group) -> None:
    """The verbs, as commands of ``group``."""

    @cluster_command(group, "reset-offset")
    @click.argument("name")
    @click.argument("topic")
    @click.option("--to-first", is_flag=True, help="The oldest message that is there.")
    @click.option("--to-last", is_flag=True, help="What arrives from now on.")
    @click.option("--to-time", type=Time(), metavar="TIME", help="The first stored at this time.")
    @click.option("--to-offset", type=click.IntRange(min=0), help="This offset of each queue.")
    @click.option(
        "--queue", "queue_ids", type=click.IntRange(min=0), multiple=True, help="Only this queue."
    )
    @_dry_run_option
    @broker_groups_option
    async def group_reset_offset(
        connection: Connection,
        name: str,
        topic: str,
        to_first: bool,
        to_last: bool,
        to_time: int | None,
        to_offset: int | None,
        queue_ids: tuple[int, ...],
        dry_run: bool,
        broker_groups: tuple[str, ...],
    ) -> list[QueueResetView]:
        """Let group NAME go on elsewhere in TOPIC, online or not.

        Its members go on there within a second or two, without a restart. TIME is milliseconds
        since 1970, or like 2026-01-31T23:59:59, local time. mqadmin: resetOffsetByTime.
        """
        request = broker_pb2.ResetOffsetsRequest(group=name, topic=topic, dry_run=dry_run)
        if to_first + to_last + (to_time is not None) + (to_offset is not None) != 1:
            raise click.UsageError("take one of --to-first, --to-last, --to-time and --to-offset")
        if to_time is not None:
            request.time_ms = to_time
        elif to_offset is not None:
            request.offset = to_offset
        else:
            request.bound = FIRST if to_first else LAST
        return await resets.reset_offsets(connection, request, queue_ids, broker_groups)

    @cluster_command(group, "skip")
    @click.argument("name")
    @click.argument("topic")
    @_dry_run_option
    @broker_groups_option
    async def group_skip(
        connection: Connection,
        name: str,
        topic: str,
        dry_run: bool,
        broker_groups: tuple[str, ...],
    ) -> list[QueueResetView]:
        """Let group NAME skip all that it has not consumed of TOPIC.

        The same as reset-offset --to-last. mqadmin: skipAccumulatedMessage.
        """
        request = broker_pb2.ResetOffsetsRequest(
            group=name, topic=topic, bound=LAST, dry_run=dry_run
        )
        return await resets.reset_offsets(connection, request, (), broker_groups)

    @cluster_command(group, "clone-offset")
    @click.argument("source")
    @click.argument("name")
    @click.option("--topic", default="", help="Only this topic; default: all of SOURCE.")
    @_dry_run_option
    @broker_groups_option
    async def group_clone_offset(
        connection: Connection,
        source: str,
        name: str,
        topic: str,
        dry_run: bool,
        broker_groups: tuple[str, ...],
    ) -> list[QueueResetView]:
        """Let group NAME go on where group SOURCE is. NAME is made if need be.

        mqadmin: cloneGroupOffset.
        """
        views: list[QueueResetView] = []
        topics = [topic] if topic else await resets.committed_topics(connection, source)
        for one in topics:
            request = broker_pb2.ResetOffsetsRequest(
                group=name, topic=one, clone_of=source, dry_run=dry_run
            )
            views += await resets.reset_offsets(connection, request, (), broker_groups)
        return views

    @cluster_command(group, "forget")
    @click.argument("name")
    @click.argument("topic")
    @broker_groups_option
    async def group_forget(
        connection: Connection, name: str, topic: str, broker_groups: tuple[str, ...]
    ) -> list[ForgottenView]:
        """Forget group NAME in TOPIC, which it has left.

        Lag, progress and alerts have it in this topic no more. Refused while members read the
        topic. When the group comes back it begins there as a new one. mqadmin: none.
        """
        return await resets.forget_offsets(connection, name, topic, broker_groups)

"""``cometmq topic``: settings, routes and queues."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from cometmq.admin import ops, search_cli, topic_order, topics
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import Group, broker_groups_option
from cometmq.admin.connection import Connection
from cometmq.admin.convert import permission_bits
from cometmq.admin.forms import TABLE
from cometmq.admin.group_settings_cli import QuotaType
from cometmq.admin.views import (
    AllocatedQueueView,
    CreatedTopicView,
    DeletedTopicView,
    OrderView,
    QueueView,
    RouteView,
    ShrunkTopicView,
    TopicView,
)
from cometmq.messaging.order import parse
from cometmq.model import FlushMode, MessageType, ReplicationMode
from cometmq.v1 import common_pb2

COUNT = click.IntRange(min=1)  # none given is the default, 0 is a mistake


def settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The settings that `create` and `update` take; :func:`settings_of` gets them."""
    options = (
        click.option(
            "--queues", type=COUNT, help="Queues for readers and writers, on each broker group."
        ),
        click.option(
            "--read-queues", type=COUNT, help="Queues for readers, if other than --queues."
        ),
        click.option(
            "--write-queues", type=COUNT, help="Queues for writers, if other than --queues."
        ),
        click.option(
            "--flush", type=click.Choice(["async", "sync"]), help="When a message is acknowledged."
        ),
        click.option(
            "--replication",
            type=click.Choice(["async", "appended", "flushed"]),
            help="Which copies an acknowledgement waits for.",
        ),
        click.option(
            "--reserve-hours",
            type=click.FloatRange(min=0),
            help="Do not show messages that are older; 0 = show what the log has.",
        ),
        click.option(
            "--send-quota",
            type=QuotaType(),
            metavar="MESSAGES/BYTES",
            help="What each client may send a second; 0 = no limit.",
        ),
        click.option(
            "--message-type",
            type=click.Choice([one.name.lower() for one in MessageType]),
            help="Refuse other messages; unspecified and mixed take all.",
        ),
        click.option(
            "--ordered/--not-ordered",
            "is_ordered",
            default=None,
            help="Producers wait for the broker group of a key.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def settings_of(name: str, permission: str | None, given: dict[str, Any]) -> common_pb2.TopicConfig:
    """What :func:`settings_options` has taken; what was not given is not said."""
    queues, hours = given["queues"], given["reserve_hours"]
    flush, replication, message_type = (
        given[option] for option in ("flush", "replication", "message_type")
    )
    modes = common_pb2.ReplicationMode
    return common_pb2.TopicConfig(
        name=name,
        read_queue_count=given["read_queues"] or queues or 0,
        write_queue_count=given["write_queues"] or queues or 0,
        permission=permission_bits(permission) if permission else 0,
        flush_mode=common_pb2.FlushMode.ValueType(FlushMode[flush.upper()].value if flush else 0),
        replication_mode=modes.ValueType(
            ReplicationMode[replication.upper()] if replication else 0
        ),
        reserve_time_ms=None if hours is None else round(hours * 3_600_000),
        message_type=common_pb2.MessageType.ValueType(
            MessageType[message_type.upper()].value if message_type else 0
        ),
        is_ordered=given["is_ordered"],
    )


def not_drained(views: list[ShrunkTopicView]) -> str:
    """Which groups are waited for; empty: none."""
    groups = sorted({group for view in views for group in view.waiting})
    return (
        f"these groups have messages left in the queues that go: {', '.join(groups)}. "
        "Once they have consumed them, call it again; cometmq group skip or group delete ends the "
        "wait for a group that is not needed"
        if groups
        else ""
    )


def add_commands(group: click.Group) -> None:
    """The verbs, as commands of ``group``."""
    _add_settings(group)
    _add_order(group)
    _add_shrink(group)
    _add_allocate(group)


def _add_settings(group: click.Group) -> None:
    @cluster_command(group, "create")
    @click.argument("name")
    @settings_options
    @click.option(
        "--permission", type=click.Choice(["rw", "r", "w"]), default="rw", show_default=True
    )
    @broker_groups_option
    async def topic_create(
        connection: Connection,
        name: str,
        permission: str,
        broker_groups: tuple[str, ...],
        **settings: Any,
    ) -> list[CreatedTopicView]:
        """Create topic NAME, or change its settings.

        A setting that is not given is the broker's default.

        --flush async acknowledges a message when it is in the page cache; sync, when it is on disk.
        --replication async does not wait for copies; appended and flushed wait until every in-sync
        member has it in its page cache, or on its disk.
        --reserve-hours may not be longer than the broker keeps its log, which all topics share.

        mqadmin: updateTopic.
        """
        writers = await connection.writers(broker_groups)
        wanted = settings_of(name, permission, settings)
        return await ops.put_topic(connection, writers, wanted, send_quota=settings["send_quota"])

    @cluster_command(group, "update")
    @click.argument("name")
    @settings_options
    @click.option("--permission", type=click.Choice(["rw", "r", "w"]), help="Read, write, or both.")
    @broker_groups_option
    async def topic_update(
        connection: Connection,
        name: str,
        permission: str | None,
        broker_groups: tuple[str, ...],
        **settings: Any,
    ) -> list[CreatedTopicView]:
        """Change settings of topic NAME, which is there.

        A setting that is not given stays as it is. Messages of a queue that is taken away are not
        read any more: `topic shrink` waits for their readers first.

        mqadmin: updateTopic, updateTopicPerm.
        """
        wanted = settings_of(name, permission, settings)
        quota = settings["send_quota"]
        return await topics.update_topic(connection, wanted, broker_groups, send_quota=quota)


def _add_order(group: click.Group) -> None:
    @cluster_command(group, "order", topic_order.doubt)
    @click.argument("name")
    @click.option("--set", "queues", metavar="GROUP:COUNT;…", help="Exactly these queues.")
    @click.option("--clear", is_flag=True, help="The topic is not ordered any more.")
    async def topic_set_order(
        connection: Connection, name: str, queues: str | None, clear: bool
    ) -> list[OrderView]:
        """Show or fix the queues of ordered topic NAME.

        Messages with a key go to these queues also while a broker group is away: they wait for it.
        Every name server keeps the list. `topic update --ordered` makes it of the queues that the
        topic has then; more queues join it by the same command. Ends with status 3 when name
        servers differ.

        mqadmin: updateOrderConf.
        """
        if queues is not None and clear:
            raise click.UsageError("give --set or --clear, not both")
        if queues is not None or clear:
            await topics.set_order(connection, name, parse(queues) if queues is not None else ())
        return await topic_order.show(connection, name)


def _add_shrink(group: click.Group) -> None:
    @cluster_command(group, "shrink", not_drained)
    @click.argument("name")
    @click.option("--queues", type=COUNT, required=True, help="Queues that stay.")
    @click.option(
        "--timeout", "timeout_s", type=click.FloatRange(min=0), help="Seconds; default: no limit."
    )
    @broker_groups_option
    async def topic_shrink(
        connection: Connection,
        name: str,
        queues: int,
        timeout_s: float | None,
        broker_groups: tuple[str, ...],
    ) -> list[ShrunkTopicView]:
        """Take queues away from topic NAME without losing a message.

        First producers stop writing them, then it waits until every consumer group has come to
        their ends, then consumers stop reading them. After an interruption it continues when it is
        called again. Ends with status 3 when --timeout is over first, and names the groups.

        mqadmin: updateTopic, first with -w, then with -r.
        """
        shown: list[ShrunkTopicView] = []

        def show(views: list[ShrunkTopicView]) -> None:
            is_table = click.get_current_context().params["output"] == TABLE
            if is_table and views != shown:
                shown[:] = views
                for view in views:
                    for waiting, count in view.waiting.items():
                        click.echo(f"{view.broker_group}: {waiting} has {count} left", err=True)

        shrink = topics.Shrink(name, queues, broker_groups)
        return await topics.shrink_topic(connection, shrink, timeout_s=timeout_s, on_wait=show)


def _add_allocate(group: click.Group) -> None:
    @cluster_command(group, "allocate")
    @click.argument("name")
    @click.option(
        "--client-id", "client_ids", multiple=True, required=True, help="May be repeated."
    )
    @click.option(
        "--allocation",
        type=click.Choice(topics.ALLOCATIONS),
        default=topics.ALLOCATIONS[0],
        show_default=True,
        help="How the members of a group divide the queues.",
    )
    async def topic_allocate(
        connection: Connection, name: str, client_ids: tuple[str, ...], allocation: str
    ) -> list[AllocatedQueueView]:
        """Show which client would read which queue of NAME.

        Nothing changes. mqadmin: allocateMQ.
        """
        return await topics.allocate_queues(connection, name, client_ids, allocation)


@click.group("topic", cls=Group)
def topic_group() -> None:
    """Topics: settings, routes and queues."""


add_commands(topic_group)
search_cli.add_offset_by_time(topic_group)


@cluster_command(topic_group, "delete")
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@broker_groups_option
async def topic_delete(
    connection: Connection, name: str, yes: bool, broker_groups: tuple[str, ...]
) -> list[DeletedTopicView]:
    """Delete topic NAME with its messages and offsets.

    mqadmin: deleteTopic.
    """
    if not yes:
        click.confirm(f"Delete topic {name} and all its messages?", abort=True, err=True)
    return await ops.delete_topic(connection, name, broker_groups=broker_groups)


@cluster_command(topic_group, "list")
@click.option("--system", is_flag=True, help="The system's own topics, too.")
async def topic_list(connection: Connection, system: bool) -> list[TopicView]:
    """List all topics and their settings.

    mqadmin: topicList, topicClusterList.
    """
    return await ops.list_topics(connection, system=system)


@cluster_command(topic_group, "route")
@click.argument("name")
async def topic_route(connection: Connection, name: str) -> list[RouteView]:
    """Show where clients send and read topic NAME.

    mqadmin: topicRoute.
    """
    return await ops.topic_route(connection, name)


@cluster_command(topic_group, "status")
@click.argument("name")
async def topic_status(connection: Connection, name: str) -> list[QueueView]:
    """Show bounds and last store time of every queue of NAME.

    mqadmin: topicStatus.
    """
    return await ops.topic_status(connection, name)

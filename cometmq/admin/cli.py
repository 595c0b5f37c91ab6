"""The ``cometmq`` command: thin over :mod:`cometmq.admin.ops` and :mod:`cometmq.admin.local`.

Exit codes: 0 done; 1 refused, with the catalogue's text and advice on standard error; 2 the command
line is wrong; 130 interrupted. docs/cli.md shows every command and its JSON.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import click

from cometmq.admin import (
    brokers_cli,
    clients_cli,
    dead_letters_cli,
    group_status,
    groups_cli,
    local,
    messages,
    offsets_cli,
    ops,
    render,
    resends_cli,
    resets_cli,
    search_cli,
    store_cli,
    topics_cli,
)
from cometmq.admin.commandline import (
    Group,
    SectionedGroup,
    broker_groups_option,
    cluster_command,
    connection_to,
    directory_option,
    namesrv_option,
    output_option,
    pairs,
    secret_option,
)
from cometmq.admin.connection import Connection
from cometmq.admin.topic_reader import TopicReader, open_reader
from cometmq.admin.views import (
    DeletedGroupView,
    DeletedTopicView,
    GroupProgressView,
    GroupStatusView,
    GroupView,
    LocalView,
    MemberView,
    MessageView,
    ProcessView,
    QueueView,
    RouteView,
    SentView,
    StoppedView,
    TopicView,
)
from cometmq.model import Message, QueueRef

FOLLOW_INTERVAL_S = 0.2
PATIENCE_ROUNDS_MAX = 25  # 5 s for what is appended to become readable
REGISTERED_WAIT_S = 10.0


@click.group(
    cls=SectionedGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="First steps: cometmq local up; cometmq topic create hello; cometmq message send hello "
    "world; cometmq message consume hello; cometmq local down",
)
@click.version_option(version("cometmq"), message="CometMQ %(version)s")
@namesrv_option
@secret_option
@output_option
def cli(**_: Any) -> None:
    """Operate a CometMQ cluster.

    Every command takes --output json. All but `local` and `store` take --namesrv, before or behind
    the command. `cometmq COMMAND --help` shows the commands of a group.
    """


# --- local --------------------------------------------------------------------------------------


@cli.group("local", cls=Group)
def local_group() -> None:
    """A cluster of real processes on this machine."""


@local_group.command("up")
@directory_option
@click.option("--namesrvs", type=click.IntRange(1, 8), help="Default: 1.")
@click.option("--brokers", type=click.IntRange(0, 32), help="Default: 2.")
@click.option("--slaves", type=click.IntRange(0, 8), help="Of each broker. Default: 0.")
@click.option("--pullholds", type=click.IntRange(0, 8), help="Default: 0.")
@click.option(
    "--option", "options", multiple=True, callback=pairs, metavar="NAME=VALUE",
    help="A broker option, e.g. flush_disk_type=SYNC_FLUSH. May be repeated.",
)  # fmt: skip
@output_option
def local_up(
    directory: Path,
    namesrvs: int | None,
    brokers: int | None,
    slaves: int | None,
    pullholds: int | None,
    options: dict[str, str],
    output: str,
) -> None:
    """Start the cluster, or its processes that have died.

    Returns when it is ready. Options that are not given keep the values of the cluster's first
    start, which the command prints.
    """
    before = local.known(directory)
    if before is not None and output == render.TABLE:
        click.echo(f"This cluster was started with {local.as_given(before)}", err=True)

    async def run() -> LocalView:
        cluster = await local.up(
            directory,
            namesrv_count=namesrvs,
            broker_count=brokers,
            slave_count=slaves,
            pullhold_count=pullholds,
            options=options,
            own_secret=True,
        )
        async with connection_to(cluster.namesrv, cluster.secret_file) as connection:
            groups = cluster.broker_groups
            await ops.wait_for_brokers(connection, groups, deadline_s=REGISTERED_WAIT_S)
        return _local_view(directory, cluster)

    render.show(asyncio.run(run()), output)


@local_group.command("down")
@directory_option
@click.option("--purge", is_flag=True, help="Remove its data, too.")
@output_option
def local_down(directory: Path, purge: bool, output: str) -> None:
    """Stop the cluster; messages stay for the next `up`."""
    stopped = asyncio.run(local.down(directory, purge=purge))
    render.show(StoppedView(str(directory.resolve()), stopped, purge), output)


@local_group.command("env")
@directory_option
@output_option
def local_env(directory: Path, output: str) -> None:
    """Print variables for programs.

    Use it as: eval "$(cometmq local env)"
    """
    cluster = local.status(directory)
    if cluster is None:
        raise click.UsageError(f"nothing is up in {directory}: start a cluster: cometmq local up")
    view = _local_view(directory, cluster)
    if output == render.JSON:
        render.show(view, output)
    else:
        click.echo("\n".join(render.export_lines(view)))


@local_group.command("status")
@directory_option
@output_option
def local_status(directory: Path, output: str) -> None:
    """Show the processes and their addresses."""
    render.show(_local_view(directory, local.status(directory)), output)


def _local_view(directory: Path, cluster: local.LocalCluster | None) -> LocalView:
    if cluster is None:
        return LocalView(str(directory.resolve()), "", "", [])
    rows = [
        ProcessView(
            name=process.name,
            kind=process.kind,
            alive=process.alive,
            pid=process.pid,
            address=process.address,
            internal_address=process.internal_address,
            metrics_address=process.metrics_address,
            log=str(cluster.log(process.name)),
        )
        for process in cluster.processes
    ]
    return LocalView(str(cluster.directory), cluster.namesrv, str(cluster.secret_file or ""), rows)


# --- cluster and topics -------------------------------------------------------------------------


@cli.group("cluster", cls=Group)
def cluster_group() -> None:
    """Broker groups and their members at a glance."""


@cluster_command(cluster_group, "status")
async def cluster_status(connection: Connection) -> list[GroupStatusView]:
    """Show writer, in-sync set and troubles of every group.

    mqadmin: clusterList, getSyncStateSet.
    """
    return await group_status.describe(connection)


@cluster_command(cluster_group, "members", has_more=True)
async def cluster_members(connection: Connection) -> list[MemberView]:
    """List every registered member with its role and log.

    mqadmin: clusterList.
    """
    return await ops.describe_cluster(connection)


@cli.group("topic", cls=Group)
def topic_group() -> None:
    """Topics: settings, routes and queues."""


topics_cli.add_commands(topic_group)


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


# --- groups -------------------------------------------------------------------------------------


@cli.group("group", cls=Group)
def group_group() -> None:
    """Consumer groups: members, progress, resets, clean-up."""


@cluster_command(group_group, "list")
@click.option(
    "--idle-hours",
    type=click.FloatRange(min=0),
    default=0.0,
    help="Only groups with neither a member nor a commit for so long.",
)
async def group_list(connection: Connection, idle_hours: float) -> list[GroupView]:
    """List all groups: live members, queues, idle time.

    mqadmin: consumerProgress, without a group.
    """
    return await ops.list_groups(connection, idle_ms=round(idle_hours * 3_600_000))


@cluster_command(group_group, "delete")
@click.argument("name", required=False)
@click.option(
    "--idle-hours",
    type=click.FloatRange(min=0, min_open=True),
    help="Instead of NAME: all groups with neither a member nor a commit for so long.",
)
@click.option("--dead-letters", is_flag=True, help="Its dead letters too.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@broker_groups_option
async def group_delete(
    connection: Connection,
    name: str | None,
    idle_hours: float | None,
    dead_letters: bool,
    yes: bool,
    broker_groups: tuple[str, ...],
) -> list[DeletedGroupView]:
    """Delete group NAME, its offsets and its retry topic.

    Refused while the group has members, static ones that are away included. Its dead letters stay,
    unless there are none or --dead-letters says so. Broker groups count a group idle since their
    writer's start at most.

    mqadmin: deleteSubGroup.
    """
    if (name is None) == (idle_hours is None):
        raise click.UsageError("take one of NAME and --idle-hours")
    names = [name] if name is not None else []
    if idle_hours is not None:
        idle_ms = max(1, round(idle_hours * 3_600_000))
        names = [one.group for one in await ops.list_groups(connection, idle_ms=idle_ms)]
        if not names:
            return []
    if not yes:
        also = ", their dead letters" if dead_letters else ""
        text = f"Delete {', '.join(names)}: committed offsets{also} and retry topics?"
        click.confirm(text, abort=True, err=True)
    options: Any = {"broker_groups": broker_groups, "dead_letters": dead_letters}
    if name is not None:
        return await ops.delete_group(connection, name, **options)
    return await ops.delete_idle_groups(connection, names, **options)


@cluster_command(group_group, "progress")
@click.argument("name")
@click.option("--topic", default="", help="Only this topic.")
async def group_progress(connection: Connection, name: str, topic: str) -> GroupProgressView:
    """Show members, committed offsets and lag of group NAME.

    mqadmin: consumerProgress.
    """
    return await ops.group_progress(connection, name, topic=topic)


groups_cli.add_commands(group_group)
resets_cli.add_commands(group_group)
cli.add_command(offsets_cli.offsets_group)
cli.add_command(brokers_cli.broker_group)
cli.add_command(clients_cli.client_group)
cli.add_command(dead_letters_cli.dlq_group)


# --- messages -----------------------------------------------------------------------------------


@cli.group("message", cls=Group)
def message_group() -> None:
    """Send, read and look up messages."""


@cluster_command(message_group, "send")
@click.argument("topic")
@click.argument("body", required=False)
@click.option(
    "--file", type=click.File("rb"), help="Take the body from a file; - is standard input."
)
@click.option("--tag", default="", help="What consumers filter by.")
@click.option("--key", "keys", multiple=True, help="Finds the message again; may be repeated.")
@click.option("--property", "properties", multiple=True, callback=pairs, metavar="NAME=VALUE")
@click.option("--queue", metavar="BROKER_GROUP/NUMBER", help="Default: the broker chooses.")
async def message_send(
    connection: Connection,
    topic: str,
    body: str | None,
    file: BinaryIO | None,
    queue: str | None,
    **fields: Any,
) -> SentView:
    """Send one message to TOPIC.

    mqadmin: sendMessage.
    """
    if (body is None) == (file is None):
        raise click.UsageError("give one body: as an argument, or as --file (- is standard input)")
    content = file.read() if file else (body or "").encode()
    message = Message(topic, content, queue=_queue(topic, queue) if queue else None, **fields)
    return await messages.send_message(connection, message)


def _queue(topic: str, text: str) -> QueueRef:
    broker_group, _, number = text.rpartition("/")
    if not broker_group or not number.isdecimal():
        raise click.UsageError(f"--queue {text!r} is not BROKER_GROUP/NUMBER")
    return QueueRef(topic, int(number), broker_group)


@message_group.command("consume")
@click.argument("topic")
@click.option(
    "--from",
    "start",
    type=click.Choice(["first", "last"]),
    default="first",
    show_default=True,
    help="Start at the first message, or behind the last one.",
)
@click.option("--count", type=click.IntRange(1), help="Stop after so many messages.")
@click.option("--follow", is_flag=True, help="At the end wait for more, until Ctrl-C.")
@click.option("--tag", "tags", multiple=True, help="Only messages with this tag; may be repeated.")
@click.option("--sql", default="", help="Only messages for which this SQL92 expression is true.")
@click.option("--queue", metavar="BROKER_GROUP/NUMBER", help="Only this queue.")
@namesrv_option
@secret_option
@output_option
def message_consume(
    topic: str, start: str, tags: tuple[str, ...], sql: str, queue: str | None, **options: Any
) -> None:
    """Print the messages of TOPIC.

    Joins no group and commits nothing. With --output json each message is one line.

    mqadmin: consumeMessage, printMsg, printMsgByQueue.
    """
    only = _queue(topic, queue) if queue else None

    async def run() -> None:
        async with connection_to(options["namesrv"], options["secret_file"]) as connection:
            reader = await open_reader(
                connection,
                topic,
                from_end=start == "last",
                tags=tags,
                sql=sql,
                broker_group=only.broker_group if only else "",
                queue_id=only.queue_id if only else None,
            )
            await _print_messages(reader, options["count"], options["follow"], options["output"])

    asyncio.run(run())


async def _print_messages(
    reader: TopicReader, count: int | None, follow: bool, output: str
) -> None:
    left = sys.maxsize if count is None else count
    patience = PATIENCE_ROUNDS_MAX
    while left:
        found = await reader.read()
        for message in found[:left]:
            render.show_message(message, output)
        left -= min(left, len(found))
        if found:
            continue
        if not follow and (reader.caught_up or not patience):
            return
        patience -= 1
        await asyncio.sleep(FOLLOW_INTERVAL_S)


@cluster_command(message_group, "get")
@click.argument("message_id")
async def message_get(connection: Connection, message_id: str) -> MessageView:
    """Show the message with this id.

    An id is BROKER_GROUP/LOG_OFFSET, or RocketMQ's hexadecimal form.

    mqadmin: queryMsgById.
    """
    return await messages.get_message(connection, message_id)


search_cli.add_to(message_group, topic_group)
resends_cli.add_to(message_group)


cli.add_command(store_cli.store_group)


def main() -> None:
    """Run the command line; the process ends with its exit code, 1 if the output has no room."""
    try:
        try:
            cli()
        finally:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the exit
        sys.exit("error: the output is not complete: no space is left where it goes")

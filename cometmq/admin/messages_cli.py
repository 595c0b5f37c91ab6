"""``cometmq message``: send, read and look up."""

from __future__ import annotations

import asyncio
import sys
from typing import Any, BinaryIO

import click

from cometmq.admin import (
    clients_cli,
    delayed_cli,
    message_trace,
    messages,
    render,
    resends_cli,
    search_cli,
)
from cometmq.admin.cluster_command import cluster_command, connection_to
from cometmq.admin.commandline import (
    Group,
    namesrv_option,
    output_option,
    pairs,
    secret_option,
)
from cometmq.admin.connection import Connection
from cometmq.admin.topic_reader import TopicReader, open_reader
from cometmq.admin.views import MessageView, SentView, TraceEventView
from cometmq.format.trace import TRACE_TOPIC
from cometmq.model import Message, QueueRef

FOLLOW_INTERVAL_S = 0.2
PATIENCE_ROUNDS_MAX = 25  # 5 s for what is appended to become readable


@click.group("message", cls=Group)
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


@cluster_command(message_group, "trace")
@click.argument("name", required=False, metavar="[ID]")
@click.option("--topic", default="", help="Of a unique id, or of --key.")
@click.option("--key", help="All messages of --topic with this key.")
@click.option(
    "--trace-topic", default=TRACE_TOPIC, show_default=True, help="Where clients write traces."
)
async def message_trace_(
    connection: Connection, name: str | None, topic: str, key: str | None, trace_topic: str
) -> list[TraceEventView]:
    """Show what became of a message.

    ID is a message id or a unique id. Times are of the process that recorded it. Without trace
    records it shows what brokers have stored, and which groups are past the message.

    mqadmin: queryMsgTraceById.
    """
    if (name is None) == (key is None) or (key is not None and not topic):
        raise click.UsageError("give either an ID, or --key and --topic")
    if name is not None:
        return await message_trace.trace_message(connection, name, topic, trace_topic)
    return await message_trace.trace_key(connection, topic, key or "", trace_topic)


search_cli.add_query(message_group)
resends_cli.add_to(message_group)
delayed_cli.add_to(message_group)
clients_cli.add_verify(message_group)

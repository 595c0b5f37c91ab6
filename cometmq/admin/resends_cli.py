"""``cometmq message resend``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import click

from cometmq.admin import messages, resends, search
from cometmq.admin.cluster_command import cluster_command
from cometmq.admin.commandline import again_option, rate_option
from cometmq.admin.connection import Connection
from cometmq.admin.resends import Resending
from cometmq.admin.search_cli import COUNT_MAX, Time
from cometmq.admin.topic_reader import open_reader
from cometmq.admin.views import MessagesResentView, MessageView
from cometmq.errors import MessageNotFound

_BY_ID = ("message_ids", "unique_id", "key")
_RANGE = ("tags", "sql", "queue", "begin_ms", "end_ms", "everything")


def add_to(message_group: click.Group) -> None:
    """Make the command."""

    @cluster_command(message_group, "resend")
    @click.argument("message_ids", nargs=-1, metavar="[ID]...")
    @click.option("--topic", help="Where to look for messages, unless IDs name them.")
    @click.option("--unique-id", help="Those with the id that their producer gave.")
    @click.option("--key", help="Those with this key.")
    @click.option("--tag", "tags", multiple=True, help="Those with this tag; may be repeated.")
    @click.option("--sql", help="Those for which this SQL92 expression is true.")
    @click.option("--queue", metavar="BROKER_GROUP/NUMBER", help="Those of this queue.")
    @click.option("--begin", "begin_ms", type=Time(), metavar="TIME", help="Not stored before.")
    @click.option("--end", "end_ms", type=Time(), metavar="TIME", help="Not stored after.")
    @click.option("--all", "everything", is_flag=True, help="All of the topic.")
    @click.option("--group", default="", help="Only this group gets them. Default: the topic.")
    @again_option
    @click.option("--dry-run", "dry", is_flag=True, help="Only count them.")
    @rate_option
    async def message_resend(
        connection: Connection, topic: str | None, **options: Any
    ) -> MessagesResentView:
        """Send messages again: to their topic, or to one group.

        Name them by ID, --unique-id or --key, or choose a range of a topic. They keep their ids,
        bodies, keys and properties. What was sent to the same once is left out, unless --again.
        mqadmin: queryMsgById --sendMessage; checkMsg and resend of older ones.
        """
        how = {name: options[name] for name in ("group", "again", "dry", "rate")}
        chosen = [name for name in (*_BY_ID, *_RANGE) if options[name]]
        by_id = [name for name in chosen if name in _BY_ID]
        if not chosen or (by_id and len(chosen) > 1):
            raise click.UsageError("give IDs, --unique-id, --key, or a range of a topic")
        if (topic is None) != bool(options["message_ids"]):
            raise click.UsageError("give --topic, unless IDs name the messages")
        if options["message_ids"]:
            return await _resend_named(connection, options["message_ids"], how)
        assert topic is not None
        found = _by_key(connection, topic, options) if by_id else _range(connection, topic, options)
        return await resends.resend(connection, Resending(topic, **how), found)


async def _resend_named(
    connection: Connection, message_ids: tuple[str, ...], how: dict[str, Any]
) -> MessagesResentView:
    found = [await messages.get_message(connection, one) for one in dict.fromkeys(message_ids)]
    topics = sorted({one.topic for one in found})
    if len(topics) > 1:
        raise click.UsageError(f"messages of one topic at a time, not of {', '.join(topics)}")

    async def named() -> AsyncIterator[list[MessageView]]:
        yield found

    return await resends.resend(connection, Resending(topics[0], **how), named())


async def _by_key(
    connection: Connection, topic: str, options: dict[str, Any]
) -> AsyncIterator[list[MessageView]]:
    unique_id, key = options["unique_id"], options["key"]
    found = await search.query_messages(
        connection, topic, key=key, unique_id=unique_id, count_max=COUNT_MAX
    )
    if len(found) == COUNT_MAX:
        raise click.UsageError(f"{COUNT_MAX} messages or more have this key: choose by --sql")
    if not found:
        raise MessageNotFound(f"topic {topic} has no message with {unique_id or key!r}")
    yield resends.originals(found)


async def _range(
    connection: Connection, topic: str, options: dict[str, Any]
) -> AsyncIterator[list[MessageView]]:
    owner, _, number = (options["queue"] or "").rpartition("/")
    if options["queue"] and not (owner and number.isdecimal()):
        raise click.UsageError(f"--queue {options['queue']!r} is not BROKER_GROUP/NUMBER")
    reader = await open_reader(
        connection,
        topic,
        tags=options["tags"],
        sql=options["sql"] or "",
        broker_group=owner,
        queue_id=int(number) if number else None,
        begin_ms=options["begin_ms"],
        to_the_end=True,
    )
    tags = options["tags"]
    async for some in resends.read_range(reader, options["end_ms"]):
        # Brokers compare the hashes of tags.
        if wanted := [one for one in some if not tags or one.tag in tags]:
            yield wanted

"""Messages of a topic that are sent again: to the topic, or to one group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from cometmq.admin.connection import CHANGE_DEADLINE_S, Connection, call
from cometmq.admin.dead_letters import count_sent, errors_of
from cometmq.admin.pacing import Pace
from cometmq.admin.topic_reader import TopicReader
from cometmq.admin.views import MessagesResentView, MessageView
from cometmq.errors import RouteNotFound
from cometmq.format.properties import ORIGIN_MESSAGE_ID
from cometmq.v1 import broker_pb2, common_pb2, namesrv_pb2

PATIENCE_ROUNDS_MAX = 60  # of half a second, for what is acknowledged and not yet readable
WAIT_S = 0.5


def originals(found: list[MessageView]) -> list[MessageView]:
    """Without copies: they have the ids and keys of what they were made from."""
    return [one for one in found if ORIGIN_MESSAGE_ID not in one.properties]


async def read_range(
    reader: TopicReader, end_ms: int | None = None
) -> AsyncIterator[list[MessageView]]:
    """All that a reader finds to the end, stored up to ``end_ms``, without copies."""
    patience = PATIENCE_ROUNDS_MAX
    while True:
        found = await reader.read()
        if wanted := [
            one for one in originals(found) if end_ms is None or one.store_time_ms <= end_ms
        ]:
            yield wanted
        if found:
            continue
        if reader.caught_up or not patience:
            return
        patience -= 1
        await asyncio.sleep(WAIT_S)


@dataclass(frozen=True, slots=True)
class Resending:
    """Where messages go, and how. ``group`` empty: to their topic."""

    topic: str
    group: str = ""
    again: bool = False
    dry: bool = False
    rate: float = 0.0


async def resend(
    connection: Connection,
    how: Resending,
    found: AsyncIterator[list[MessageView]],
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> MessagesResentView:
    """Send messages again, some at a time as they are found. Raises the first refusal that is not
    AlreadyResent; what was sent before it is marked.
    """
    writers = await connection.writers()
    pace = Pace(0.0 if how.dry else how.rate, sleep)
    sent = count = 0
    async for messages in found:
        by_group: dict[str, list[MessageView]] = {}
        for one in messages:
            by_group.setdefault(one.message_id.rpartition("/")[0], []).append(one)
        for broker_group, of_group in sorted(by_group.items()):
            if broker_group not in writers:
                raise RouteNotFound(f"broker group {broker_group} has no writer now")
            for first in range(0, len(of_group), pace.at_once):
                some = of_group[first : first + pace.at_once]
                await pace.take(len(some))
                sent += await _resend_at(connection, writers[broker_group], how, some)
        count += len(messages)
    return MessagesResentView(how.topic, how.group, sent, count - sent, not how.dry)


async def _resend_at(
    connection: Connection, member: namesrv_pb2.Member, how: Resending, some: list[MessageView]
) -> int:
    items = [
        broker_pb2.ResendItem(
            queue_id=one.queue_id, position=common_pb2.Position(offset=one.queue_offset)
        )
        for one in some
    ]
    request = broker_pb2.ResendMessagesRequest(
        topic=how.topic, items=items, group=how.group, again=how.again, dry_run=how.dry
    )
    method = connection.admin(member).ResendMessages
    answer = await call(member.internal_address, method, request, deadline_s=CHANGE_DEADLINE_S)
    return count_sent(errors_of(answer.results))

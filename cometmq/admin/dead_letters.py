"""Dead letters of consumer groups: read, sent to their group again, deleted.

They lie in the topic ``%DLQ%group`` of each broker group, in one queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

from cometmq.admin.connection import (
    CHANGE_DEADLINE_S,
    Connection,
    call,
    each_that_knows,
)
from cometmq.admin.groups import group_settings
from cometmq.admin.pacing import Pace
from cometmq.admin.topic_reader import open_reader
from cometmq.admin.views import DeadLetterView, MessageView, PurgedView, ResentView
from cometmq.errors import AlreadyResent, CometError, TopicNotFound
from cometmq.format.properties import RETRY_TOPIC
from cometmq.messaging.intervals import Interval, holds_any
from cometmq.model import DLQ_PREFIX
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2, namesrv_pb2

PREVIEW_CHARACTERS = 60


async def read_dead_letters(
    connection: Connection, group: str, *, sql: str = "", broker_group: str = ""
) -> AsyncIterator[tuple[DeadLetterView, MessageView]]:
    """The dead letters of a group that are there now, by store time. Raises GroupNotFound."""
    topic = DLQ_PREFIX + group
    try:
        reader = await open_reader(connection, topic, sql=sql, broker_group=broker_group)
    except TopicNotFound:  # the group has none, if there is such a group
        await group_settings(connection, group)
        return
    resent = await _resent(connection, group)
    while messages := await reader.read():
        for message in messages:
            yield _view(message, resent), message


def _view(message: MessageView, resent: dict[str, list[Interval]]) -> DeadLetterView:
    owner, offset = message.message_id.rpartition("/")[0], message.queue_offset
    return DeadLetterView(
        broker_group=owner,
        offset=offset,
        topic=message.properties.get(RETRY_TOPIC, ""),
        unique_id=message.unique_id,
        keys=message.keys,
        tries=message.reconsume_times,
        store_time_ms=message.store_time_ms,
        resent=holds_any(resent.get(owner, []), offset, offset + 1),
        body_bytes=message.body_bytes,
        body=(message.body_text or "")[:PREVIEW_CHARACTERS],
    )


async def _resent(connection: Connection, group: str) -> dict[str, list[Interval]]:
    """The offsets of dead letters that were sent again, by broker group."""
    request = broker_pb2.DescribeDeadLettersRequest(group=group)
    found: dict[str, list[Interval]] = {}
    for name, member in (await connection.writers()).items():
        method = connection.admin(member).DescribeDeadLetters
        answer = await call(member.internal_address, method, request)
        found[name] = [Interval(one.first, one.end) for one in answer.resent]
    return found


async def resend(
    connection: Connection,
    group: str,
    wanted: list[DeadLetterView],
    *,
    again: bool = False,
    rate: float = 0.0,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> ResentView:
    """Send dead letters to their group again, ``rate`` a second; 0: as fast as it goes. Raises the
    first refusal that is not AlreadyResent.
    """
    offsets_of: dict[str, list[int]] = {}
    for one in sorted(wanted, key=lambda one: one.offset):
        offsets_of.setdefault(one.broker_group, []).append(one.offset)
    writers = await connection.writers(tuple(sorted(offsets_of)))
    sent, pace = 0, Pace(rate, sleep)
    for broker_group, offsets in sorted(offsets_of.items()):
        for first in range(0, len(offsets), pace.at_once):
            some = offsets[first : first + pace.at_once]
            await pace.take(len(some))
            member = writers[broker_group]
            sent += count_sent(await _resend_at(connection, member, group, some, again=again))
    return ResentView(group=group, resent_count=sent, resent_before_count=len(wanted) - sent)


async def _resend_at(
    connection: Connection,
    member: namesrv_pb2.Member,
    group: str,
    offsets: Sequence[int],
    *,
    again: bool,
) -> list[CometError | None]:
    request = broker_pb2.ResendDeadLettersRequest(group=group, offsets=offsets, again=again)
    method = connection.admin(member).ResendDeadLetters
    answer = await call(member.internal_address, method, request, deadline_s=CHANGE_DEADLINE_S)
    return errors_of(answer.results)


def errors_of(results: Iterable[broker_pb2.ResendResult]) -> list[CometError | None]:
    """Why each message was not sent again; None: it was."""
    return [from_proto(one.error) if one.HasField("error") else None for one in results]


def count_sent(errors: Sequence[CometError | None]) -> int:
    """How many were sent again. Raises the first refusal that is not AlreadyResent."""
    for error in errors:
        if error is not None and not isinstance(error, AlreadyResent):
            raise error
    return errors.count(None)


async def purge(
    connection: Connection, group: str, *, broker_groups: tuple[str, ...] = ()
) -> list[PurgedView]:
    """Delete the dead letters of a group. TopicNotFound when it has none."""
    writers = await connection.writers(broker_groups)
    request = broker_pb2.PurgeDeadLettersRequest(group=group)

    async def ask(member: namesrv_pb2.Member) -> broker_pb2.PurgeDeadLettersResponse:
        method = connection.admin(member).PurgeDeadLetters
        return await call(member.internal_address, method, request, deadline_s=CHANGE_DEADLINE_S)

    none = TopicNotFound(f"group {group} has no dead letters")
    return [PurgedView(group, name) for name in await each_that_knows(writers, ask, none)]

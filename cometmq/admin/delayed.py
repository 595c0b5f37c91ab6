"""Messages that wait for a time of their own: listed, counted, recalled."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from cometmq.admin.connection import CHANGE_DEADLINE_S, Connection, call, each
from cometmq.admin.views import DelayedCountView, DelayedView, RecalledView
from cometmq.format import recall as handles
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2, namesrv_pb2

PAGE_MAX = 1_000
SPANS_MS = (
    *("1 min", 60_000, "10 min", 600_000, "1 h", 3_600_000, "6 h", 21_600_000),
    *("1 d", 86_400_000, "3 d", 259_200_000, "10 d", 864_000_000, "40 d", 3_456_000_000),
)


class Wanted(NamedTuple):
    """Which messages. ``topic`` empty: of all; a time of 0: no limit."""

    topic: str = ""
    begin_ms: int = 0
    end_ms: int = 0


async def delayed(connection: Connection, wanted: Wanted, count_max: int) -> list[DelayedView]:
    """The messages that come next, of all broker groups, at most so many. Raises TopicNotFound."""
    await _check_topic(connection, wanted)
    found: list[DelayedView] = []
    for name, writer in (await connection.writers()).items():
        of_group: list[DelayedView] = []
        async for one in _each(connection, name, writer, wanted):
            of_group.append(one)
            if len(of_group) == count_max:
                break
        found += of_group
    return heapq.nsmallest(count_max, found, key=lambda one: (one.due_time_ms, one.message_id))


async def count_by_topic(connection: Connection, wanted: Wanted) -> list[DelayedCountView]:
    """How many messages wait, by topic: looks at each of them. Raises TopicNotFound."""
    await _check_topic(connection, wanted)
    counts: Counter[tuple[str, str]] = Counter()
    for name, writer in (await connection.writers()).items():
        async for one in _each(connection, name, writer, wanted):
            counts[name, one.topic] += 1
    return [
        DelayedCountView(broker_group, topic, count)
        for (broker_group, topic), count in counts.most_common()
    ]


async def _check_topic(connection: Connection, wanted: Wanted) -> None:
    """Raises TopicNotFound: no message waits for such a topic."""
    if wanted.topic:
        await connection.route(wanted.topic)


async def count_by_time(
    connection: Connection, now_ms: Callable[[], int]
) -> list[DelayedCountView]:
    """How many messages wait for a time within so long from now."""
    names, spans_ms = SPANS_MS[::2], [int(span) for span in SPANS_MS[1::2]]
    begun_ms = now_ms()
    request = broker_pb2.ListDelayedRequest(until_ms=[begun_ms + span for span in spans_ms])

    async def ask(member: namesrv_pb2.Member) -> broker_pb2.ListDelayedResponse:
        method = connection.admin(member).ListDelayed
        return await call(member.internal_address, method, request, deadline_s=CHANGE_DEADLINE_S)

    answers = await each(await connection.writers(), ask)
    return [
        DelayedCountView(broker_group, f"within {name}", count)
        for broker_group, answer in answers.items()
        for name, count in zip(names, answer.counts, strict=True)
    ]


async def recall(connection: Connection, handle: str) -> RecalledView:
    """Take a message back. Raises RecallHandleInvalid, GroupNotFound, PositionFenced."""
    found = handles.decode(handle)
    group = found.run.broker_group
    writer = (await connection.writers((group,)))[group]
    request = broker_pb2.RecallRequest(handles=[handle])
    answer = await call(writer.address, connection.broker(writer).Recall, request)
    [result] = answer.results
    if result.HasField("error"):
        raise from_proto(result.error)
    return RecalledView(
        broker_group=group,
        topic=found.run.topic,
        unique_id=found.unique_id,
        due_time_ms=found.due_ms,
        recalled=result.recalled,
    )


async def _each(
    connection: Connection, broker_group: str, writer: namesrv_pb2.Member, wanted: Wanted
) -> AsyncIterator[DelayedView]:
    request = broker_pb2.ListDelayedRequest(
        topic=wanted.topic, first_ms=wanted.begin_ms, last_ms=wanted.end_ms, count_max=PAGE_MAX
    )
    method = connection.admin(writer).ListDelayed
    while True:
        page = await call(writer.internal_address, method, request, deadline_s=CHANGE_DEADLINE_S)
        for one in page.messages:
            yield _view(broker_group, one)
        if not page.HasField("next"):
            return
        request.after.CopyFrom(page.next)


def _view(broker_group: str, one: broker_pb2.DelayedMessage) -> DelayedView:
    return DelayedView(
        due_time_ms=one.place.due_ms,
        topic=one.queue.topic,
        broker_group=broker_group,
        queue_id=one.queue.queue_id,
        message_id=one.message_id,
        unique_id=one.unique_id,
        store_time_ms=one.store_time_ms,
        size_bytes=one.size_bytes,
        recall_handle=one.recall_handle,
    )

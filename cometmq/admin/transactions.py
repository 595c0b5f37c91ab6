"""Half messages: listed, checked again, dropped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from cometmq.admin.connection import CHANGE_DEADLINE_S, Connection, call
from cometmq.admin.convert import message_view
from cometmq.admin.dead_letters import PREVIEW_CHARACTERS, errors_of
from cometmq.admin.topic_reader import open_reader
from cometmq.admin.views import HalfView, HalvesChangedView, MessageView
from cometmq.errors import (
    AlreadyResent,
    CometError,
    StoreDamaged,
    TopicNotFound,
    TransactionNotFound,
)
from cometmq.format.halves import GIVEN_UP_TOPIC, PGROUP, REAL_QID, REAL_TOPIC
from cometmq.v1 import broker_pb2, namesrv_pb2

AT_ONCE = 256  # halves of one call
NAMED_MAX = 10  # refused places in an error

Place = tuple[str, int]  # broker group, offset
Results = Iterable[broker_pb2.ResendResult]
Halves = AsyncIterator[tuple[HalfView, MessageView | None]]


async def open_halves(connection: Connection, group: str = "") -> Halves:
    """Half messages whose transactions have not ended, of one producer group or of all: by broker
    group, the oldest first.
    """
    for name, member in sorted((await connection.writers()).items()):
        request = broker_pb2.QueryHalvesRequest(producer_group=group)
        async for found in _open_at(connection, name, member, request):
            yield found


async def _open_at(
    connection: Connection,
    name: str,
    member: namesrv_pb2.Member,
    request: broker_pb2.QueryHalvesRequest,
) -> Halves:
    """Those of one broker group, page by page."""
    while True:
        answer = await call(member.internal_address, connection.admin(member).QueryHalves, request)
        for one in answer.halves:
            message = message_view(one.message) if one.HasField("message") else None
            yield _open_view(name, one, message), message
        if not answer.HasField("next_half_offset"):
            return
        request.first_half_offset = answer.next_half_offset


async def given_up(connection: Connection, group: str = "") -> Halves:
    """Half messages that no producer has ended, by store time."""
    try:
        reader = await open_reader(connection, GIVEN_UP_TOPIC)
    except TopicNotFound:
        return
    while messages := await reader.read():
        for message in messages:
            if group in ("", message.properties.get(PGROUP, "")):
                yield _given_up_view(message), message


def _open_view(
    broker_group: str, one: broker_pb2.HalfInfo, message: MessageView | None
) -> HalfView:
    return HalfView(
        broker_group=broker_group,
        offset=one.half_offset,
        producer_group=one.producer_group,
        check_count=one.check_count,
        producer_count=one.producer_count,
        is_given_up=False,
        **_of_message(message),
    )


def _given_up_view(message: MessageView) -> HalfView:
    return HalfView(
        broker_group=message.message_id.rpartition("/")[0],
        offset=message.queue_offset,
        producer_group=message.properties.get(PGROUP, ""),
        check_count=None,
        producer_count=None,
        is_given_up=True,
        **_of_message(message),
    )


def _of_message(message: MessageView | None) -> dict[str, Any]:
    """The fields of a view that come from the message; None: the message is damaged."""
    if message is None:
        none: dict[str, Any] = {"topic": "", "queue_id": 0, "unique_id": "", "keys": []}
        return {**none, "store_time_ms": 0, "body_bytes": 0, "body": ""}
    return {
        "topic": message.properties.get(REAL_TOPIC, ""),
        "queue_id": int(message.properties.get(REAL_QID, "0")),
        "unique_id": message.unique_id,
        "keys": message.keys,
        "store_time_ms": message.store_time_ms,
        "body_bytes": message.body_bytes,
        "body": (message.body_text or "")[:PREVIEW_CHARACTERS],
    }


async def find(connection: Connection, place: Place, *, is_given_up: bool) -> MessageView:
    """One half message, whole. TransactionNotFound, GroupNotFound (of the broker group)."""
    name, offset = place
    writer = (await connection.writers((name,)))[name]
    request = broker_pb2.QueryHalvesRequest(first_half_offset=offset, max_count=1)
    halves = given_up(connection) if is_given_up else _open_at(connection, name, writer, request)
    async for view, message in halves:
        if (view.broker_group, view.offset) == place:
            if message is None:
                drop = f"cometmq transaction drop {name}/{offset}"
                raise StoreDamaged(f"half message {name}/{offset} cannot be read: {drop} ends it")
            return message
        if not is_given_up:  # it is the next one
            break
    raise TransactionNotFound(f"there is no half message {name}/{offset}")


async def resume(connection: Connection, places: Sequence[Place]) -> HalvesChangedView:
    """Have given-up halves checked again. Raises a refusal that is not AlreadyResent, when all were
    tried; TransactionNotFound: a broker group has none.
    """

    async def ask(member: namesrv_pb2.Member, offsets: list[int]) -> Results:
        request = broker_pb2.ResumeChecksRequest(offsets=offsets)
        method = connection.admin(member).ResumeChecks
        address = member.internal_address
        try:
            return (await call(address, method, request, deadline_s=CHANGE_DEADLINE_S)).results
        except TopicNotFound as error:  # its advice, to create the topic, does not apply here
            raise TransactionNotFound(error.message) from None

    return await _each(connection, places, ask)


async def drop(connection: Connection, places: Sequence[Place]) -> HalvesChangedView:
    """Roll open halves back. Raises a refusal, after all were tried."""

    async def ask(member: namesrv_pb2.Member, offsets: list[int]) -> Results:
        request = broker_pb2.DropHalvesRequest(half_offsets=offsets)
        method = connection.admin(member).DropHalves
        address = member.internal_address
        return (await call(address, method, request, deadline_s=CHANGE_DEADLINE_S)).results

    return await _each(connection, places, ask)


async def _each(
    connection: Connection,
    places: Sequence[Place],
    ask: Callable[[namesrv_pb2.Member, list[int]], Awaitable[Results]],
) -> HalvesChangedView:
    offsets_of: dict[str, list[int]] = {}
    for broker_group, offset in sorted(set(places)):
        offsets_of.setdefault(broker_group, []).append(offset)
    writers = await connection.writers(tuple(sorted(offsets_of)))
    done = before = 0
    refused: list[tuple[str, CometError]] = []
    for broker_group, offsets in sorted(offsets_of.items()):
        for first in range(0, len(offsets), AT_ONCE):
            some = offsets[first : first + AT_ONCE]
            errors = errors_of(await ask(writers[broker_group], some))
            for offset, error in zip(some, errors, strict=True):
                if error is None:
                    done += 1
                elif isinstance(error, AlreadyResent):
                    before += 1
                else:
                    refused.append((f"{broker_group}/{offset}", error))
    if refused:
        names = ", ".join(place for place, _ in refused[:NAMED_MAX])
        error = refused[0][1]
        raise type(error)(f"{error.message}; refused: {len(refused)} ({names}), done: {done}")
    return HalvesChangedView(done, before)

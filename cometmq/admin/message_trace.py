"""The timeline of a message: from trace records of clients, and from the records and committed
offsets of brokers.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain

from cometmq.admin.connection import Connection, call
from cometmq.admin.messages import get_message
from cometmq.admin.search import query_messages
from cometmq.admin.views import MessageView, TraceEventView
from cometmq.errors import (
    IndexDisabled,
    MessageIdInvalid,
    MessageNotFound,
    RouteNotFound,
    TopicNotFound,
)
from cometmq.format import delayed, timers, trace
from cometmq.format.halves import GIVEN_UP_TOPIC, HALF_TOPIC, REAL_TOPIC
from cometmq.format.properties import RETRY_TOPIC, encode
from cometmq.format.trace import EndTransaction, Pub, Recall, SubAfter, SubBefore, TraceRecord
from cometmq.model import DLQ_PREFIX, RETRY_PREFIX
from cometmq.rpc.tasks import map_bounded
from cometmq.v1 import broker_pb2, common_pb2, namesrv_pb2

FOUND_MAX = 64  # messages of one query
GROUPS_MAX = 1_000  # of a broker group, that are asked how far they are
GROUPS_AT_A_TIME = 16

# Events.
PRODUCED, STORED, DELIVERED, CONSUMED = "produced", "stored", "delivered", "consumed"
DELAYED, HALF, GIVEN_UP = "delayed", "half stored", "given up"
RETRIED, DEAD_LETTER, RECALLED = "sent back", "dead letter", "recalled"
RESENT = "sent again"  # a dead letter, to its group
ENDED, CHECKED = "transaction ended", "transaction checked"
PASSED, NOT_PASSED = "group is past it", "group is before it"
# Sources of events.
STORE, TRACE, OFFSETS = "store", "trace", "offsets"

# Topics of messages that wait for their time, or for the end of their transaction.
_WAITING_TOPICS = (timers.TIMER_TOPIC, delayed.SCHEDULE_TOPIC, HALF_TOPIC, GIVEN_UP_TOPIC)
# Properties of messages that waited for their time, or for the end of their transaction.
_WAITED = (delayed.DELAY, *timers.TIMER_DELAYS, timers.TIMER_OUT_MS, timers.TIMER_DELIVER_MS)
_STATES = {"COMMIT_MESSAGE": "commit", "ROLLBACK_MESSAGE": "rollback", "UNKNOW": "unknown"}
_CODES = {trace.TIME_OUT: "timeout", trace.EXCEPTION: "exception"}
_TYPES = ("", "half", "committed", "delayed", "in order")  # by RocketMQ's ordinals


async def trace_message(
    connection: Connection, name: str, topic: str = "", trace_topic: str = trace.TRACE_TOPIC
) -> list[TraceEventView]:
    """The events of the message with a message id, or with a unique id; of the latter the topic is
    needed where no trace record has it. MessageNotFound, MessageIdInvalid.
    """
    message: MessageView | None = None
    with suppress(MessageIdInvalid, MessageNotFound):
        message = await get_message(connection, name)
    unique_id = message.unique_id if message is not None else name
    if message is not None:
        topic = _topic_of(message)
    records = await _records(connection, trace_topic, unique_id)
    topic = topic or next((r.topic for r, _ in records if isinstance(r, Pub)), "")
    stored = await _stored(connection, topic, unique_id) if topic and unique_id else []
    waiting = await _waiting(connection, topic, unique_id) if unique_id and not stored else []
    if waiting and not topic:
        topic = _topic_of(waiting[0])
        stored = await _stored(connection, topic, unique_id)
    if message is not None and not (stored or waiting):
        place = waiting if message.topic in _WAITING_TOPICS else stored
        place.append(message)
    if not (stored or waiting or records):
        where = f" in topic {topic}" if topic else "; give --topic for a unique id"
        raise MessageNotFound(f"no message and no trace with the id {name}{where}")
    return await _timeline(connection, unique_id, records, stored, waiting)


async def trace_key(
    connection: Connection, topic: str, key: str, trace_topic: str = trace.TRACE_TOPIC
) -> list[TraceEventView]:
    """The events of all messages of a topic with a key, at most 64, one message after the other;
    also those that wait. MessageNotFound, TopicNotFound.
    """
    found = (await query_messages(connection, topic, key=key, count_max=FOUND_MAX))[::-1]
    found += await _waiting(connection, topic, key, by_key=True)
    if not found:
        raise MessageNotFound(f"no message of topic {topic} has the key {key}")
    names = dict.fromkeys(one.unique_id or one.message_id for one in found)
    oldest_first = list(names)[:FOUND_MAX]
    events: list[TraceEventView] = []
    for name in oldest_first:
        events += await trace_message(connection, name, topic, trace_topic)
    return events


async def _records(
    connection: Connection, trace_topic: str, unique_id: str
) -> list[tuple[TraceRecord, MessageView]]:
    """The trace records about a message, each with the message that has it."""
    found: dict[TraceRecord, MessageView] = {}
    for message in await _stored(connection, trace_topic, unique_id, by_key=True):
        body = base64.b64decode(message.body_base64).decode("utf-8", "replace")
        for record in trace.decode(body):
            if record.message_id == unique_id:
                found[record] = message
    return list(found.items())


async def _stored(
    connection: Connection, topic: str, name: str, *, by_key: bool = False
) -> list[MessageView]:
    """Oldest first; none where no broker group has the topic, or a key index."""
    key, unique_id = (name, None) if by_key else (None, name)
    try:
        found = await query_messages(
            connection, topic, key=key, unique_id=unique_id, count_max=FOUND_MAX, complete=True
        )
    except (TopicNotFound, RouteNotFound, IndexDisabled):
        return []
    return found[::-1]


async def _waiting(
    connection: Connection, topic: str, name: str, *, by_key: bool = False
) -> list[MessageView]:
    """The records of messages for the topic that wait, or did, oldest first; an empty topic: for
    any, but none that a group sent back.
    """

    async def ask(waiting_topic: str) -> list[MessageView]:
        return await _stored(connection, waiting_topic, name, by_key=by_key)

    found = chain(*await map_bounded(ask, _WAITING_TOPICS, len(_WAITING_TOPICS)))
    targets = [(one, one.properties.get(REAL_TOPIC, "")) for one in found]
    wanted = [
        one
        for one, target in targets
        if (target == topic if topic else not target.startswith(RETRY_PREFIX))
    ]
    return sorted(wanted, key=lambda one: one.store_time_ms)


def _topic_of(message: MessageView) -> str:
    """The topic that it was sent to."""
    waits_for = message.properties.get(REAL_TOPIC) if message.topic in _WAITING_TOPICS else ""
    return message.properties.get(RETRY_TOPIC) or waits_for or message.topic


async def _timeline(
    connection: Connection,
    unique_id: str,
    records: Sequence[tuple[TraceRecord, MessageView]],
    stored: Sequence[MessageView],
    waiting: Sequence[MessageView],
) -> list[TraceEventView]:
    events = [*_sent(unique_id, records, stored), *_calls(records), *_others(records)]
    if not stored:
        events += _waits(unique_id, waiting, {(one.event, one.result) for one in events})
    progress = await _progress(connection, stored)
    called = {event.group for event in events if event.event == CONSUMED}

    async def tries(group: str) -> list[TraceEventView]:
        return await _tries(connection, group, unique_id)

    groups = sorted(called | {one.group for one in progress})
    for found in await map_bounded(tries, groups, GROUPS_AT_A_TIME):
        events += found
    return sorted(events, key=lambda event: event.time_ms or 0) + progress


def _sent(
    unique_id: str,
    records: Sequence[tuple[TraceRecord, MessageView]],
    stored: Sequence[MessageView],
) -> Iterator[TraceEventView]:
    """Sends, and where the message was stored for consumers. Without a trace of a send the time at
    which its producer made it.
    """
    sends = [(record, via) for record, via in records if isinstance(record, Pub)]
    for record, via in sends:
        yield TraceEventView(
            record.time_ms,
            PRODUCED,
            record.message_id,
            record.topic,
            client=via.born_host,
            result=_result(record.is_success),
            cost_ms=record.cost_ms,
            detail=_TYPES[record.message_type] if record.message_type < len(_TYPES) else "",
            source=TRACE,
        )
    for message in stored:
        if not sends:
            yield TraceEventView(
                message.born_time_ms, PRODUCED, unique_id, message.topic, client=message.born_host
            )
        waited = any(name in message.properties for name in _WAITED)
        detail = f"{message.message_id}, queue {message.queue_id} offset {message.queue_offset}"
        yield TraceEventView(
            message.store_time_ms,
            DELIVERED if waited else STORED,
            unique_id,
            message.topic,
            result=_result(True),
            detail=detail,
        )


def _waits(
    unique_id: str, waiting: Sequence[MessageView], told: set[tuple[str, str]]
) -> Iterator[TraceEventView]:
    """Where a message waits, or how that ended. ``told``: events and results of its trace."""
    if waiting and not any(event == PRODUCED for event, _ in told):
        first = waiting[0]
        topic, born_ms = _topic_of(first), first.born_time_ms
        yield TraceEventView(born_ms, PRODUCED, unique_id, topic, client=first.born_host)
    for message in waiting:
        event, detail = _wait(message)
        if (event, _result(True)) in told:  # or it was stored once more, before retention
            continue
        told.add((event, _result(True)))
        yield TraceEventView(
            message.store_time_ms,
            event,
            unique_id,
            _topic_of(message),
            result=_result(True),
            detail=f"{message.message_id}{detail}",
        )


def _wait(message: MessageView) -> tuple[str, str]:
    """The event that the record of a waiting message stands for, and what it waits for."""
    has = message.properties
    if message.topic == timers.TIMER_TOPIC:
        if timers.TIMER_DEL_UNIQKEY in has:
            return RECALLED, ""
        return DELAYED, f", due {_due(has)}"
    if message.topic == delayed.SCHEDULE_TOPIC:
        return DELAYED, f", level {has.get(delayed.DELAY, '')}"
    return HALF if message.topic == HALF_TOPIC else GIVEN_UP, ""


def _due(properties: Mapping[str, str]) -> str:
    """The local time at which a message is due."""
    due_ms = timers.due_ms(encode(properties))
    try:
        return datetime.fromtimestamp((due_ms or 0) / 1000).isoformat(" ", "milliseconds")
    except (ValueError, OverflowError):  # RocketMQ takes any number
        return f"{due_ms} ms"


def _calls(records: Sequence[tuple[TraceRecord, MessageView]]) -> Iterator[TraceEventView]:
    """Listener calls, each as one event."""
    ends = {record.request_id: record for record, _ in records if isinstance(record, SubAfter)}
    for record, via in records:
        if not isinstance(record, SubBefore):
            continue
        end = ends.pop(record.request_id, None)
        yield TraceEventView(
            record.time_ms,
            CONSUMED,
            record.message_id,
            group=record.group,
            client=via.born_host,
            result="no end known" if end is None else _result(end.is_success, end.code),
            cost_ms=None if end is None else end.cost_ms,
            detail=f"try {record.retry_times + 1}",
            source=TRACE,
        )
    for end in ends.values():  # its begin was lost
        yield TraceEventView(
            end.time_ms or None,
            CONSUMED,
            end.message_id,
            group=end.group,
            result=_result(end.is_success, end.code),
            cost_ms=end.cost_ms,
            source=TRACE,
        )


def _others(records: Sequence[tuple[TraceRecord, MessageView]]) -> Iterator[TraceEventView]:
    for record, via in records:
        if isinstance(record, EndTransaction):
            yield TraceEventView(
                record.time_ms,
                CHECKED if record.from_check else ENDED,
                record.message_id,
                record.topic,
                record.group,
                via.born_host,
                _STATES.get(record.state, record.state),
                source=TRACE,
            )
        elif isinstance(record, Recall):
            yield TraceEventView(
                record.time_ms,
                RECALLED,
                record.message_id,
                record.topic,
                record.group,
                via.born_host,
                _result(record.is_success),
                source=TRACE,
            )


async def _tries(connection: Connection, group: str, unique_id: str) -> list[TraceEventView]:
    """Messages that the group sent back, its dead letters, and those sent to it again."""
    events = []
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        for message in await _stored(connection, prefix + group, unique_id):
            tries = message.reconsume_times  # of a dead letter that was sent again: none
            if prefix == DLQ_PREFIX:
                event, detail = DEAD_LETTER, message.message_id
            else:
                event = RETRIED if tries else RESENT
                detail = f"{message.message_id}, try {tries + 1}"
            events.append(
                TraceEventView(
                    message.store_time_ms,
                    event,
                    unique_id,
                    message.properties.get(RETRY_TOPIC, ""),
                    group,
                    detail=detail,
                )
            )
    return events


async def _progress(connection: Connection, stored: Sequence[MessageView]) -> list[TraceEventView]:
    """The groups that have, or have not, passed the message, by their committed offsets; the time
    is not known.
    """
    known: dict[str, tuple[namesrv_pb2.Member, Sequence[str]]] = {}  # writer, its groups
    asks: list[tuple[MessageView, namesrv_pb2.Member, str]] = []
    for message in stored:
        broker_group = message.message_id.rpartition("/")[0]
        if broker_group not in known:
            member = (await connection.writers((broker_group,)))[broker_group]
            method = connection.admin(member).ListGroups
            listed = await call(member.internal_address, method, broker_pb2.ListGroupsRequest())
            known[broker_group] = member, listed.groups[:GROUPS_MAX]
        member, groups = known[broker_group]
        asks += [(message, member, group) for group in groups]

    async def ask(one: tuple[MessageView, namesrv_pb2.Member, str]) -> list[TraceEventView]:
        return await _progress_of(connection, *one)

    found = await map_bounded(ask, asks, GROUPS_AT_A_TIME)
    return [event for events in found for event in events]


async def _progress_of(
    connection: Connection, message: MessageView, member: namesrv_pb2.Member, group: str
) -> list[TraceEventView]:
    """Whether one group is past the message; nothing if it has committed no offset."""
    queue = common_pb2.QueueRef(topic=message.topic, queue_id=message.queue_id)
    request = broker_pb2.QueryOffsetsRequest(group=group, queues=[queue])
    answer = await call(member.address, connection.broker(member).QueryOffsets, request)
    return [
        TraceEventView(
            None,
            PASSED if result.position.offset > message.queue_offset else NOT_PASSED,
            message.unique_id,
            message.topic,
            group,
            detail=f"committed offset {result.position.offset}",
            source=OFFSETS,
        )
        for result in answer.results
        if result.HasField("position")
    ]


def _result(is_success: bool, code: int = trace.SUCCESS) -> str:
    if is_success:
        return "ok"
    return _CODES.get(code, "failed")

"""Messages that a stub sends field by field, made into a batch like any other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.errors import (
    BatchTooLarge,
    BodyTooLarge,
    InvalidRequest,
    PropertiesInvalid,
    PropertyReserved,
    RequestError,
)
from cometmq.format import delayed, halves, ids, properties, record, timers
from cometmq.format.batch import BatchLimits
from cometmq.format.halves import HalfForm
from cometmq.format.timers import TIMER_QUEUE, TimerForm
from cometmq.messaging.topics import TopicTable
from cometmq.model import check_delay, check_time
from cometmq.names import check_new_producer_group
from cometmq.v1 import broker_pb2
from services.broker.sending.produce import Claim

_CONTROL = frozenset(map(chr, [*range(32), 127]))


class _RunKey(NamedTuple):
    """Messages with the same of these are one segment."""

    topic: str
    queue_id: int
    delay_level: int
    wait_store: bool
    half: HalfForm | None
    timer: TimerForm


@dataclass(frozen=True, slots=True)
class StructuredBatch:
    """The encoded batch; ``order[i]`` is the place of message i of those that were encoded:
    (segment, index within it, byte).
    """

    records: bytes
    claims: list[Claim]
    order: list[tuple[int, int, int]]

    def first_message_of(self, segment: int | None) -> int | None:
        """Which message of the call an error of a segment is about: the first of them."""
        if segment is None:
            return None
        return next(i for i, (found, _, _) in enumerate(self.order) if found == segment)


class StructuredEncoder:
    """Encodes calls of ``Send``, and gives each message a UNIQ_KEY.

    ``new_queue_count``: write queues of a topic that is yet to be created by its first message.
    """

    def __init__(
        self,
        topics: TopicTable,
        new_queue_count: int,
        store_host: bytes,
        limits: BatchLimits,
        clock: Clock,
        source: random.Random,
    ) -> None:
        self._topics = topics
        self._new_queue_count = new_queue_count
        self._store_host = store_host
        self._limits = limits
        self._clock = clock
        self._source = source
        self._ids = ids.UniqueIds(clock)

    def encode(
        self, messages: Sequence[broker_pb2.OutgoingMessage], born_host: bytes
    ) -> StructuredBatch:
        """Raises BodyTooLarge, TopicNameInvalid, Properties…, PropertyReserved and InvalidRequest
        with the message's number as ``segment``; InvalidRequest and BatchTooLarge without.
        """
        self.check_count(len(messages))
        chosen: dict[str, int] = {}
        runs: dict[_RunKey, list[tuple[int, bytes]]] = {}
        for index, message in enumerate(messages):
            queue_id = self._queue_of(message, chosen)
            try:
                data = self.record(message, queue_id, born_host)
            except RequestError as error:
                error.segment = index
                raise
            key = _RunKey(
                message.topic,
                queue_id,
                message.delay_level,
                not message.no_wait_store,
                half_form(message),
                _timer_of(message)[0],
            )
            runs.setdefault(key, []).append((index, data))
        return self._join(runs, len(messages))

    def check_count(self, count: int) -> None:
        """Raises InvalidRequest for a call of no messages, or too many."""
        if not 1 <= count <= self._limits.batch_count_max:
            raise InvalidRequest(
                f"{count} messages, 1 to {self._limits.batch_count_max} are allowed"
            )

    def _queue_of(self, message: broker_pb2.OutgoingMessage, chosen: dict[str, int]) -> int:
        if message.HasField("queue_id"):
            return message.queue_id
        if message.topic not in chosen:
            config = self._topics.find(message.topic)
            count = config.write_queue_count if config else self._new_queue_count
            # A topic of RocketMQ's may have no queue for writers; then queue 0 is refused by name.
            chosen[message.topic] = self._source.randrange(max(1, count))
        return chosen[message.topic]

    def record(
        self,
        message: broker_pb2.OutgoingMessage,
        queue_id: int,
        born_host: bytes,
        born_time_ms: int = 0,
    ) -> bytes:
        """One message for a queue; ``born_time_ms`` 0: now, unless it says when."""
        if len(message.body) > self._limits.body_bytes_max:
            raise BodyTooLarge(
                f"the body has {len(message.body)} bytes, {self._limits.body_bytes_max} are allowed"
            )
        waits = message.delay_level or message.delay_ms or message.deliver_at_ms
        if message.producer_group and (waits or message.no_wait_store):
            raise InvalidRequest("a message of a transaction has no delay, no no_wait_store")
        if message.born_time_ms < 0:
            raise InvalidRequest(f"born_time_ms: {message.born_time_ms} is before 1970")
        topic, queue_id, prefix = _stored_form(message, queue_id)
        return record.encode(
            topic.encode(),
            queue_id,
            message.body,
            prefix + self._encoded_properties(message),
            flag=message.flag,
            born_time_ms=message.born_time_ms or born_time_ms or self._clock.wall_ms(),
            born_host=born_host,
            store_host=self._store_host,
        )

    def _encoded_properties(self, message: broker_pb2.OutgoingMessage) -> bytes:
        """With an id of the client the last separator is left out, as RocketMQ 4 does: so it is not
        taken for the id of a sender that numbers its messages.
        """
        encoded = properties.encode(self._properties(message))
        return encoded[:-1] if properties.UNIQ_KEY in message.properties else encoded

    def _properties(self, message: broker_pb2.OutgoingMessage) -> dict[str, str]:
        pairs = dict(message.properties)
        for name in (properties.TAGS, properties.KEYS):
            if name in pairs:
                raise PropertyReserved(f"property {name}: use the message's own field for it")
        if message.tag:
            if "|" in message.tag or not _CONTROL.isdisjoint(message.tag):
                raise PropertiesInvalid(f"tag {message.tag!r} has a '|' or a control character")
            pairs[properties.TAGS] = message.tag
        if message.keys:
            if any(not key or any(c.isspace() for c in key) for key in message.keys):
                raise PropertiesInvalid("a key is empty or has blanks")
            pairs[properties.KEYS] = properties.KEY_SEPARATOR.join(message.keys)
        pairs.setdefault(properties.UNIQ_KEY, self._ids.next())
        return pairs

    def _join(self, runs: dict[_RunKey, list[tuple[int, bytes]]], count: int) -> StructuredBatch:
        parts: list[bytes] = []
        claims: list[Claim] = []
        order = [(0, 0, 0)] * count
        at = 0
        for key, run in runs.items():
            for place, (index, data) in enumerate(run):
                order[index] = (len(claims), place, at)
                parts.append(data)
                at += len(data)
            claims.append(Claim(key.topic, key.queue_id, len(run), *key[2:]))
        assert sum(claim.record_count for claim in claims) == len(order), (
            "each message has its place"
        )
        if at > self._limits.batch_bytes_max:
            raise BatchTooLarge(
                f"{at} bytes of records, {self._limits.batch_bytes_max} are allowed"
            )
        return StructuredBatch(b"".join(parts), claims, order)


def half_form(message: broker_pb2.OutgoingMessage) -> HalfForm | None:
    """What makes the message a half message; None: it is of no transaction. InvalidRequest."""
    if message.producer_group:
        check_new_producer_group(message.producer_group)
        halves.check_immunity(message.check_immunity_s)
        return HalfForm(message.producer_group, message.check_immunity_s)
    if message.check_immunity_s:
        raise InvalidRequest("check_immunity_s: only a message with a producer_group has it")
    return None


def _stored_form(message: broker_pb2.OutgoingMessage, queue_id: int) -> tuple[str, int, bytes]:
    """The topic and queue in which the record lies, and what its properties begin with."""
    wait_store, level = not message.no_wait_store, message.delay_level
    half = half_form(message)
    if half is not None:
        return *halves.HALF_QUEUE, halves.prefix(half, message.topic, queue_id)
    timer, time_ms = _timer_of(message)
    if timer:
        prefix = timers.prefix_at(message.topic, queue_id, time_ms, wait_store=wait_store)
        return *TIMER_QUEUE, prefix
    prefix = delayed.stored_prefix(level, message.topic, queue_id, wait_store=wait_store)
    if level:
        delayed.check_level(level)
        return delayed.SCHEDULE_TOPIC, delayed.queue_id_of(level), prefix
    return message.topic, queue_id, prefix


def _timer_of(message: broker_pb2.OutgoingMessage) -> tuple[TimerForm, int]:
    """How it names the time that it waits for, and the number. InvalidRequest, DelayInvalid."""
    wanted = (message.deliver_at_ms, message.delay_ms, message.delay_level)
    if not any(wanted[:2]):
        return TimerForm.NONE, 0
    if sum(map(bool, wanted)) > 1:
        raise InvalidRequest("deliver_at_ms, delay_ms, delay_level: only one of them")
    if message.delay_ms:
        check_delay(message.delay_ms)
        return TimerForm.AFTER, message.delay_ms
    check_time(message.deliver_at_ms)
    return TimerForm.AT, message.deliver_at_ms

"""The structured ``Send``: a repeated call gets the same answer, and is stored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.errors import CometError, InvalidRequest, MessageNotFound, StoreDamaged, TopicNotFound
from cometmq.format import record, timers
from cometmq.format.delayed import SCHEDULE_TOPIC, target_of
from cometmq.format.halves import HALF_TOPIC
from cometmq.format.properties import UNIQ_KEY
from cometmq.format.record import Record
from cometmq.format.timers import TIMER_TOPIC, TimerForm
from cometmq.member.read.records import is_in_queue
from cometmq.messaging.sent_ids import SentIds, sent_id
from cometmq.model import SendStatus
from cometmq.replication.watermarks import union
from cometmq.store.base import BaseStore
from cometmq.store.writer import Appended
from cometmq.turns import Turns
from cometmq.v1 import broker_pb2
from services.broker.sending.produce import Accepted, ProduceHandler, SystemTopicMissing
from services.broker.sending.stored_batch import is_same
from services.broker.sending.structured import StructuredBatch, StructuredEncoder
from services.broker.transactions.names import HalfName


class SentPlace(NamedTuple):
    """Where a message of a call lies. ``queue_offset`` None: it waits, and is not there yet.
    ``half``: of a message of a transaction. ``timer``: of one that waits for a time of its own.
    """

    topic: str
    queue_id: int
    queue_offset: int | None
    log_offset: int
    half: HalfName | None = None
    timer: TimerName | None = None


class TimerName(NamedTuple):
    """Its offset in the timer queue, when it is due, and its unique id."""

    offset: int
    due_ms: int
    unique_id: str


class SentCall(NamedTuple):
    """The answer to a call. ``store_time_ms``: of the message that was stored last."""

    places: list[SentPlace]
    store_time_ms: int
    status: SendStatus


class _Call(NamedTuple):
    messages: Sequence[broker_pb2.OutgoingMessage]
    known: Mapping[int, Record]  # those that are stored already, by their numbers
    new: Sequence[int]  # the numbers of the others
    born_host: bytes
    client_id: str


class SendCalls:
    """Takes calls into the log. Belongs to the event loop."""

    def __init__(
        self,
        store: BaseStore,
        produce: ProduceHandler,
        encoder: StructuredEncoder,
        sent_ids: SentIds,
        clock: Clock,
    ) -> None:
        self._store = store
        self._produce = produce
        self._encoder = encoder
        self._sent_ids = sent_ids
        self._clock = clock

    async def send(
        self,
        messages: Sequence[broker_pb2.OutgoingMessage],
        born_host: bytes,
        client_id: str = "",
    ) -> SentCall:
        """Stores the messages that are not stored yet, all of them or none, and answers for all.
        Raises what is wrong with a message, its number as ``segment``. ``client_id``: the client
        that they count against, at the sender's address.
        """
        self._encoder.check_count(len(messages))
        _check_ids(messages)
        turns = Turns("creation of what messages need")
        while True:
            # Looked up each time: others may have sent them while a topic was created.
            known = self._known(messages, born_host) if self._produce.dedup else {}
            new = [number for number in range(len(messages)) if number not in known]
            call = _Call(messages, known, new, born_host, client_id)
            batch = self._encode(call) if new else None
            try:
                return await self._answer(call, batch, self._append(call, batch))
            except (TopicNotFound, SystemTopicMissing) as missing:
                assert batch is not None
                turns.next()
                try:
                    await self._produce.create_missing(missing, batch.claims, born_host)
                except CometError as error:
                    _number(error, call, batch)
                    raise
            except CometError as error:
                _number(error, call, batch)
                raise

    def _encode(self, call: _Call) -> StructuredBatch:
        try:
            return self._encoder.encode([call.messages[n] for n in call.new], call.born_host)
        except CometError as error:
            if error.segment is not None:
                error.segment = call.new[error.segment]
            raise

    def _append(self, call: _Call, batch: StructuredBatch | None) -> list[Accepted]:
        """Appends the new messages; a batch that is known comes first. Nothing waits here."""
        accepted = [self._take_known(call)] if call.known else []
        if batch is not None:
            accepted.append(
                self._produce.append(
                    batch.records,
                    batch.claims,
                    call.born_host,
                    has_ids=False,
                    client_id=call.client_id,
                )
            )
        return accepted

    async def _answer(
        self, call: _Call, batch: StructuredBatch | None, accepted: Sequence[Accepted]
    ) -> SentCall:
        places = {number: _place(found) for number, found in call.known.items()}
        if batch is not None:
            places |= zip(call.new, _places(batch, accepted[-1].ticket.appended), strict=True)
            self._remember(call, places)
        statuses = [await self._produce.settled(one) for one in accepted]
        return SentCall(
            [places[number] for number in range(len(call.messages))],
            max(one.ticket.appended.store_time_ms for one in accepted),
            max(statuses, key=lambda status: status.value),
        )

    def _known(
        self, messages: Sequence[broker_pb2.OutgoingMessage], born_host: bytes
    ) -> dict[int, Record]:
        """The messages that are stored, by their numbers."""
        now_s = self._clock.monotonic_s()
        known: dict[int, Record] = {}
        for number, message in enumerate(messages):
            unique_id = message.properties.get(UNIQ_KEY, "")
            if not unique_id:
                continue
            log_offset = self._sent_ids.find(sent_id(unique_id, born_host), now_s)
            found = None if log_offset is None else self._stored(message, log_offset, born_host)
            if found is not None:
                known[number] = found
        return known

    def _stored(
        self, message: broker_pb2.OutgoingMessage, log_offset: int, born_host: bytes
    ) -> Record | None:
        """The record there, if it is of this message; None: of another with its id."""
        try:
            found = record.decode(self._store.read_record(log_offset))
        except (MessageNotFound, StoreDamaged):
            return None
        topic, queue_id = _target(found)
        # Of a topic that was deleted since, nothing is known; it may have been created again.
        if not self._produce.has_topic(topic) or not is_in_queue(self._store, found):
            return None
        if message.topic != topic or (
            message.HasField("queue_id") and message.queue_id != queue_id
        ):
            return None
        sent = self._encoder.record(message, queue_id, born_host, found.born_time_ms)
        return found if is_same(found, record.decode(sent)) else None

    def _take_known(self, call: _Call) -> Accepted:
        found = call.known.values()
        last = max(found, key=lambda one: one.log_offset)
        appended = Appended(
            min(one.log_offset for one in found),
            last.log_offset + last.size,
            [],
            [one.size for one in found],
            last.store_time_ms,
            last.store_time_ms,
        )
        waiting = [one for n, one in call.known.items() if not call.messages[n].no_wait_store]
        topics = {topic for one in waiting for topic in (one.topic, _target(one)[0])}
        demands = union(map(self._produce.demands_of, topics))
        return self._produce.known(appended, demands, self._clock.monotonic_s())

    def _remember(self, call: _Call, places: Mapping[int, SentPlace]) -> None:
        now_s = self._clock.monotonic_s()
        for number in call.new:
            unique_id = call.messages[number].properties.get(UNIQ_KEY, "")
            if unique_id:
                sent = sent_id(unique_id, call.born_host)
                self._sent_ids.add(sent, places[number].log_offset, now_s)


def _check_ids(messages: Sequence[broker_pb2.OutgoingMessage]) -> None:
    met: dict[str, int] = {}
    for number, message in enumerate(messages):
        unique_id = message.properties.get(UNIQ_KEY, "")
        first = met.setdefault(unique_id, number)
        if unique_id and first != number:
            raise InvalidRequest(
                f"messages {first} and {number} have one {UNIQ_KEY}: {unique_id[:100]!r}",
                segment=number,
            )


def _number(error: CometError, call: _Call, batch: StructuredBatch | None) -> None:
    """Gives the error of a segment the number of the first message that it is about."""
    first = None if batch is None else batch.first_message_of(error.segment)
    error.segment = None if first is None else call.new[first]


def _target(found: Record) -> tuple[str, int]:
    """The topic and queue that a message is meant for."""
    target = None
    if found.topic in (SCHEDULE_TOPIC, TIMER_TOPIC, HALF_TOPIC):
        target = target_of(found.raw_properties)
    return target or (found.topic, found.queue_id)


def _place(found: Record) -> SentPlace:
    topic, queue_id = _target(found)
    if found.topic == HALF_TOPIC:
        half = HalfName(found.queue_offset, found.log_offset, found.unique_id)
        return SentPlace(topic, queue_id, None, found.log_offset, half)
    if found.topic == TIMER_TOPIC:
        timer = _timer_of(found, 0, found.queue_offset)
        return SentPlace(topic, queue_id, None, found.log_offset, timer=timer)
    shown = None if found.topic == SCHEDULE_TOPIC else found.queue_offset
    return SentPlace(topic, queue_id, shown, found.log_offset)


def _timer_of(found: Record, base_ms: int, offset: int) -> TimerName:
    """``base_ms``: what is to be added to the time that it names."""
    named_ms = timers.due_ms(found.raw_properties)
    assert named_ms is not None
    return TimerName(offset, base_ms + named_ms, found.unique_id)


def _places(batch: StructuredBatch, appended: Appended) -> list[SentPlace]:
    places = []
    for segment, index, byte in batch.order:
        claim = batch.claims[segment]
        offset = appended.queue_offsets[segment] + index
        log_offset = appended.log_offset + byte
        half = timer = None
        if claim.half is not None:
            half = HalfName(offset, log_offset, record.decode(batch.records, byte).unique_id)
        elif claim.timer:
            base_ms = appended.clock_ms if claim.timer is TimerForm.AFTER else 0
            timer = _timer_of(record.decode(batch.records, byte), base_ms, offset)
        shown = None if claim.waits or half is not None else offset
        places.append(SentPlace(claim.topic, claim.queue_id, shown, log_offset, half, timer))
    return places

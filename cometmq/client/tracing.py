"""Trace records of a client: gathered without waiting, sent in few messages by a producer of their
own. What the buffer cannot take, or nobody stores, is counted and logged.

A producer's records are made when a batch is answered, of its bytes: sending costs nothing more.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from asyncio import Future
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cometmq.client.batch import Batch, Segment
from cometmq.client.hooks import ConsumeContext
from cometmq.client.late_producer import LateProducer
from cometmq.client.messages import ConsumeResult, SendReceipt
from cometmq.client.options import (
    GroupOptions,
    ProducerOptions,
    SimpleConsumerOptions,
    TraceOptions,
)
from cometmq.client.received import ReceivedMessage
from cometmq.client.sampling import Sampling
from cometmq.clock import Clock, SystemClock
from cometmq.errors import CometError
from cometmq.format import trace
from cometmq.format.ids import offset_id
from cometmq.format.properties import KEYS, sharding_key_of, tag_of
from cometmq.format.record import decode
from cometmq.format.trace import PubForm, TraceRecord
from cometmq.model import Message, QueueRef
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger

FLUSH_S = 0.2  # how long a record waits for others
BODY_LENGTH_MAX = 128_000  # of one message of records, as RocketMQ's
KEYS_BYTES_MAX = 16_384  # of all keys of one message
KEY_LENGTH_MAX = 1_024  # a longer one is no key of the trace
CLOSE_S_MAX = 3.0
TELL_EVERY_S = 60.0
RECEIVED_MAX = 65_536  # messages whose acknowledgement is waited for
PRODUCER_GROUP = "DEFAULT_PRODUCER"  # RocketMQ's name of a group that nobody named

_MARK = f"{trace.TRACE_ON}\x01".encode()
_KEYS = f"{KEYS}\x01".encode()
_CLOCK = SystemClock()

_log = logger(__name__)


class _Entry(NamedTuple):
    text: str
    keys: tuple[str, ...]


class TraceDispatcher:
    """Sends records to the trace topic. Belongs to the event loop."""

    def __init__(
        self, namesrv: str, client_id: str, options: TraceOptions, clock: Clock = _CLOCK
    ) -> None:
        self.topic = options.trace_topic
        self._waiting_max = options.trace_buffer_max
        self._clock = clock
        own = ProducerOptions(
            client_id=client_id,
            delivery_timeout_ms=round(CLOSE_S_MAX * 1000),
            route_timeout_ms=1000,
        )
        self._producer = LateProducer(namesrv, own)
        self._waiting: deque[_Entry] = deque()
        self._waiting_length = 0
        self._sending: dict[Future[SendReceipt], int] = {}  # how many records each has
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self.lost_count = 0  # records that nobody will read
        self._untold = 0
        self._tell_s = 0.0

    def start(self, tasks: Tasks) -> None:
        self._task = tasks.start(self._run(), "send trace records")

    def put(self, record: TraceRecord, message_id: str, keys: str) -> None:
        """Takes a record; one too many is dropped, and counted."""
        self.put_text(trace.encode(record), message_id, keys)

    def put_text(self, text: str, message_id: str, keys: str) -> None:
        """As :meth:`put`, of an encoded record."""
        if len(self._waiting) >= self._waiting_max:
            self._lose(1, "the buffer is full (trace_buffer_max)")
            return
        words: tuple[str, ...] = (message_id,)
        if keys or len(message_id) > KEY_LENGTH_MAX:
            words = tuple(w for w in (message_id, *keys.split()) if 0 < len(w) <= KEY_LENGTH_MAX)
        self._waiting.append(_Entry(text, words))
        self._waiting_length += len(text)
        if self._waiting_length >= BODY_LENGTH_MAX:
            self._wake.set()

    async def close(self, *, flush: bool = True) -> None:
        """Sends what waits, for at most CLOSE_S_MAX; the rest is lost, and counted."""
        self._is_closing = True
        self._wake.set()
        try:
            async with asyncio.timeout(CLOSE_S_MAX if flush else 0):
                if self._task is not None:
                    await asyncio.wait([self._task])
                while self._sending:
                    await asyncio.wait(list(self._sending))
        except TimeoutError:
            pass
        finally:
            if self._task is not None:
                await stop_all([self._task])
            self._lose(len(self._waiting) + sum(self._sending.values()), "the client was closed")
            self._waiting.clear()
            self._sending.clear()
            await self._producer.close(flush=False)
            self._tell("the client was closed")

    async def _run(self) -> None:
        while not self._is_closing:
            if self._waiting_length < BODY_LENGTH_MAX:
                await wait_at_most(self._wake, FLUSH_S)
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        while self._waiting:
            producer = await self._producer.opened()
            message, count = self._next_message()
            try:
                future = await producer.send(message)
            except CometError as error:
                self._lose(count, error.message)
                continue
            except asyncio.CancelledError:
                self._lose(count, "the client was closed")
                raise
            self._sending[future] = count
            future.add_done_callback(self._decided)

    def _next_message(self) -> tuple[Message, int]:
        texts: list[str] = []
        keys: dict[str, None] = {}
        length = keys_length = 0
        while self._waiting:
            text, words = self._waiting[0]
            more = sum(_bytes(word) + 1 for word in words if word not in keys)
            is_full = length + len(text) > BODY_LENGTH_MAX or keys_length + more > KEYS_BYTES_MAX
            if texts and is_full:
                break
            self._waiting.popleft()
            self._waiting_length -= len(text)
            texts.append(text)
            length += len(text)
            if keys_length + more <= KEYS_BYTES_MAX:
                keys.update(dict.fromkeys(words))
                keys_length += more
        body = "".join(texts).encode("utf-8", "replace")
        return Message(self.topic, body, keys=tuple(keys)), len(texts)

    def _decided(self, future: Future[SendReceipt]) -> None:
        count = self._sending.pop(future, 0)
        error = None if future.cancelled() else future.exception()
        if error is not None:
            self._lose(count, str(error))

    def _lose(self, count: int, why: str) -> None:
        self.lost_count += count
        self._untold += count
        if count and self._clock.monotonic_s() >= self._tell_s:
            self._tell(why)

    def _tell(self, why: str) -> None:
        """Loses nothing unnoticed: the log has the number, at most once a minute and at the end."""
        if self._untold:
            self._tell_s = self._clock.monotonic_s() + TELL_EVERY_S
            _log.warning(
                "trace records lost", extra=fields(count=self._untold, topic=self.topic, why=why)
            )
            self._untold = 0


class _Answer(NamedTuple):
    """To a batch. ``log_offset`` None: nothing is stored."""

    began_ms: int
    cost_ms: int
    store_host: str
    log_offset: int | None


class SendTracer:
    """Records of what a producer sends, made of answered batches."""

    def __init__(
        self, dispatcher: TraceDispatcher, options: TraceOptions, timeout_s: float
    ) -> None:
        self._dispatcher = dispatcher
        self._sampling = Sampling(options.trace_sampling)
        self._timeout_s = timeout_s
        self._clock = _CLOCK

    def decided(self, batch: Batch, store_host: str, log_offset: int | None) -> None:
        """The batch has its answer; ``log_offset`` None: none of it is stored, as far as is
        known.
        """
        began_s = batch.deadline_s - self._timeout_s
        cost_ms = max(0, math.ceil((self._clock.monotonic_s() - began_s) * 1000))
        began_ms = self._clock.wall_ms() - cost_ms
        answer = _Answer(began_ms, cost_ms, store_host, log_offset)
        first = 0
        for segment in batch.segments:
            if segment.queue.topic != self._dispatcher.topic:
                chosen = self._chosen(batch, segment, first)
                self._put(batch, segment, first, chosen, answer)
            first += segment.count

    def ended(
        self, group: str, topic: str, message_id: str, state: str, *, from_check: bool = False
    ) -> None:
        """A producer has ended a transaction, or has answered a check; ``state`` in RocketMQ's
        words.
        """
        if self._sampling.chooses(message_id):
            now_ms = self._clock.wall_ms()
            record = trace.EndTransaction(
                *(now_ms, group, topic, message_id, "", "", "", trace.COMMIT, message_id, state),
                from_check,
            )
            self._dispatcher.put(record, message_id, "")

    def recalled(self, topic: str, message_id: str, *, is_recalled: bool) -> None:
        """A message was taken back, or it was too late."""
        if self._sampling.chooses(message_id):
            now_ms = self._clock.wall_ms()
            record = trace.Recall(now_ms, PRODUCER_GROUP, topic, message_id, is_recalled)
            self._dispatcher.put(record, message_id, "")

    def _chosen(self, batch: Batch, segment: Segment, first: int) -> Iterator[int]:
        """Places in the segment."""
        sampled = self._sampling.indexes(segment.id_stream, segment.first_counter, segment.count)
        if _MARK not in batch.records:
            yield from sampled
            return
        for index in range(segment.count):
            record = decode(batch.records, batch.starts[first + index])
            if _is_wanted(record.properties.get(trace.TRACE_ON, ""), index in sampled):
                yield index

    def _form(self, segment: Segment, answer: _Answer) -> PubForm:
        """What the records of a segment have in common."""
        return PubForm(
            trace.Pub(
                *(answer.began_ms, PRODUCER_GROUP, segment.queue.topic, "", "", ""),
                *(answer.store_host, 0, answer.cost_ms, trace.NORMAL, ""),
                answer.log_offset is not None,
            )
        )

    def _put(
        self, batch: Batch, segment: Segment, place: int, indexes: Iterable[int], answer: _Answer
    ) -> None:
        form: PubForm | None = None
        for index in indexes:
            start = batch.starts[place + index]
            record = decode(batch.records, start)
            raw = record.raw_properties
            keys = record.properties.get(KEYS, "") if _KEYS in raw else ""
            tags = tag_of(raw).decode("utf-8", "replace")
            form = form or self._form(segment, answer)
            message_id = f"{segment.id_stream}{segment.first_counter + index:08X}"
            stored_at = ""
            if answer.log_offset is not None:
                stored_at = offset_id(record.store_host, answer.log_offset + start)
            kind = _message_type(segment, raw)
            text = form.encode(message_id, tags, keys, record.body_bytes, kind, stored_at)
            self._dispatcher.put_text(text, message_id, keys)


class ConsumeTracer:
    """A ConsumeHook: records of each listener call."""

    def __init__(self, dispatcher: TraceDispatcher, options: TraceOptions) -> None:
        self._dispatcher = dispatcher
        self._sampling = Sampling(options.trace_sampling)
        self._clock = _CLOCK
        self._token = secrets.token_hex(8).upper()
        self._numbers = itertools.count()
        # Of messages that are received and not acknowledged: request id, when.
        self._received: dict[tuple[QueueRef, int], tuple[str, int]] = {}

    def before_consume(self, context: ConsumeContext) -> None:
        """As ConsumeHook says."""
        chosen = [message for message in context.messages if self._wants(message)]
        if chosen:
            request_id = f"{self._token}{next(self._numbers):X}"
            context.values[self] = request_id, self._clock.wall_ms(), chosen
            self._before(context.group, request_id, chosen)

    def after_consume(self, context: ConsumeContext) -> None:
        """As ConsumeHook says."""
        if self not in context.values:
            return
        request_id, began_ms, chosen = context.values[self]
        cost_ms = (self._clock.wall_ms() - began_ms) // len(context.messages)
        code = trace.SUCCESS
        if context.error is not None:
            code = trace.EXCEPTION
        elif context.answer not in (None, ConsumeResult.SUCCESS):
            code = trace.FAILED
        self._after(context.group, request_id, chosen, cost_ms, code)

    def received(self, group: str, messages: Sequence[ReceivedMessage]) -> None:
        """A SimpleConsumer hands these out: their call ends with their acknowledgement."""
        chosen = [message for message in messages if self._wants(message)]
        now_ms = self._clock.wall_ms()
        for message in chosen:
            request_id = f"{self._token}{next(self._numbers):X}"
            self._received[message.queue, message.queue_offset] = request_id, now_ms
            self._before(group, request_id, [message])
        while len(self._received) > RECEIVED_MAX:  # never acknowledged
            del self._received[next(iter(self._received))]

    def acknowledged(self, group: str, messages: Iterable[ReceivedMessage]) -> None:
        """These messages are done."""
        for message in messages:
            began = self._received.pop((message.queue, message.queue_offset), None)
            if began is not None:
                cost_ms = max(0, self._clock.wall_ms() - began[1])
                self._after(group, began[0], [message], cost_ms, trace.SUCCESS)

    def polled(self, group: str, messages: Sequence[ReceivedMessage]) -> None:
        """A pull consumer hands these out: as RocketMQ's does, that is a call that has ended."""
        chosen = [message for message in messages if self._wants(message)]
        if chosen:
            request_id = f"{self._token}{next(self._numbers):X}"
            self._before(group, request_id, chosen)
            self._after(group, request_id, chosen, 0, trace.SUCCESS)

    def _wants(self, message: ReceivedMessage) -> bool:
        if message.queue.topic == self._dispatcher.topic:
            return False
        mark = message.properties.get(trace.TRACE_ON, "")
        return _is_wanted(mark, self._sampling.chooses(message.unique_id))

    def _before(self, group: str, request_id: str, chosen: list[ReceivedMessage]) -> None:
        now_ms = self._clock.wall_ms()
        for message in chosen:
            name, keys = _id_of(message), message.properties.get(KEYS, "")
            times = message.reconsume_times + message.attempt - 1
            record = trace.SubBefore(now_ms, group, request_id, name, times, keys)
            self._dispatcher.put(record, name, keys)

    def _after(
        self, group: str, request_id: str, chosen: list[ReceivedMessage], cost_ms: int, code: int
    ) -> None:
        now_ms, is_success = self._clock.wall_ms(), code == trace.SUCCESS
        for message in chosen:
            name, keys = _id_of(message), message.properties.get(KEYS, "")
            record = trace.SubAfter(
                request_id, name, cost_ms, is_success, keys, code, now_ms, group
            )
            self._dispatcher.put(record, name, keys)


def _bytes(word: str) -> int:
    return len(word) if word.isascii() else len(word.encode("utf-8", "replace"))


def _is_wanted(mark: str, is_sampled: bool) -> bool:
    return mark == "true" or (is_sampled and mark != "false")


def _id_of(message: ReceivedMessage) -> str:
    return message.unique_id or message.message_id


def _message_type(segment: Segment, raw_properties: bytes) -> int:
    if segment.stored.half is not None:
        return trace.HALF
    if segment.stored.waits:
        return trace.DELAY
    return trace.ORDER if sharding_key_of(raw_properties) else trace.NORMAL


def tracing_of(
    namesrv: str, options: GroupOptions | SimpleConsumerOptions
) -> TraceDispatcher | None:
    """Of a consumer; None: nothing is traced."""
    return TraceDispatcher(namesrv, options.client_id, options) if options.trace_enable else None

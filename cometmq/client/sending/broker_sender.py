"""One broker group's send stream: encodes, batches, sends, sends again, hands out receipts.

The sender outlives its streams. Three owned tasks work while one is up (reader, writer, watchdog);
nothing here is done per message.
"""

from __future__ import annotations

import asyncio
import random
from typing import TypeAlias

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.messages import Recallable, StoredRun
from cometmq.client.namespaces import Namespace
from cometmq.client.options import ProducerOptions, backoff_policy
from cometmq.client.remote.answers import Answers
from cometmq.client.remote.description import SendingState
from cometmq.client.sending.batch import Batch, Segment
from cometmq.client.sending.batcher import Batcher, Buffer, Slot
from cometmq.client.sending.in_flight import InFlightBatches
from cometmq.client.sending.latency import LatencyFault
from cometmq.client.sending.send_tracer import SendTracer
from cometmq.client.sending.stored_form import StoredForm
from cometmq.clock import Clock
from cometmq.errors import (
    BatchOutOfOrder,
    ClientClosed,
    CometError,
    InternalError,
    PeerUnavailable,
    QueueNotFound,
    Retry,
    SendTimeout,
)
from cometmq.format.recall import RecallRun
from cometmq.format.timers import TimerForm
from cometmq.model import QueueRef, SendStatus
from cometmq.native import crc32
from cometmq.rpc.interceptors import from_proto
from cometmq.rpc.retry import Backoff
from cometmq.rpc.streams import Stream, read, read_first, write
from cometmq.rpc.tasks import Tasks, race
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2, namesrv_pb2

SendStream: TypeAlias = "Stream[broker_pb2.SendStreamRequest, broker_pb2.SendStreamResponse]"

ATTEMPTS_MIN = 3  # so many times a message is tried in its time, whatever single tries may take

_log = logger(__name__)


class QueueWriter(Slot):
    """One queue as a producer sees it."""

    __slots__ = ("sender",)

    def __init__(self, sender: BrokerSender, queue: QueueRef, *, pinned: bool = False) -> None:
        super().__init__(queue, pinned=pinned)
        self.sender = sender

    def ready(self) -> bool:
        """Whether records can be encoded for it."""
        return self.sender.batcher.ready(self)


class BrokerSender:
    """Everything that goes to one broker group."""

    def __init__(
        self,
        broker_group: str,
        options: ProducerOptions,
        connections: Connections,
        routes: RouteWatcher,
        buffer: Buffer,
        clock: Clock,
        answers: Answers,
    ) -> None:
        self.broker_group = broker_group
        self._options = options
        self._namespace = Namespace(options.namespace)
        self._connections = connections
        self._routes = routes
        self._buffer = buffer
        self._clock = clock
        self._answers = answers
        self._stored_count = self._failed_count = 0
        self._attempt_s_max = options.delivery_timeout_ms / 1000 / ATTEMPTS_MIN
        policy = backoff_policy(options).at_most(self._attempt_s_max)
        self._reconnect = Backoff(policy, random.Random())
        self._refusals = Backoff(policy, random.Random())
        self._paused = False  # the broker said: later
        # Why nothing is sent or stored now, as far as is known: of all that waits here.
        self.hindrance: CometError | None = None
        self._latency = LatencyFault()
        self._wake = asyncio.Event()  # the writer task may find something to send
        self.opened = asyncio.Event()  # set, and never cleared, when records can be encoded
        self.connected = False  # a stream is up
        self.tracer: SendTracer | None = None  # None: nothing is traced
        self._id_host = b""  # of the writer, as ids of messages have it
        self.window = InFlightBatches(options.in_flight_max)
        # Of queues that the broker group has no more: the topic's number of queues was lowered.
        self.homeless: list[Batch] = []
        self.batcher = Batcher(options, buffer, clock, self._closed, self._close_if_sendable)

    def start(self, tasks: Tasks) -> None:
        tasks.start(self._run(), f"send to {self.broker_group}")

    def rank(self) -> int:
        """For messages that may go to any group: 0 = take this one, 1 = it answers late, 2 = it is
        not connected.
        """
        if not self.connected:
            return 2
        now_s = self._clock.monotonic_s()
        is_avoided = self._options.latency_fault_enable and self._latency.is_avoided(
            self.window.waits_s(now_s), now_s
        )
        return int(is_avoided)

    def batches(self) -> list[Batch]:
        """Everything that has no answer yet."""
        self.batcher.end_run()
        opened = [self.batcher.open] if self.batcher.open is not None else []
        return [*self.window.in_flight.values(), *self.window.waiting, *opened, *self.homeless]

    def state(self) -> SendingState:
        """The description of the sender, for operators."""
        undecided = self.batches()
        return SendingState(
            self.broker_group,
            self.connected,
            len(self.window.in_flight),
            sum(batch.count for batch in undecided),
            sum(batch.size for batch in undecided),
            self._stored_count,
            self._failed_count,
        )

    def _closed(self, batch: Batch) -> None:
        self.window.push(batch)
        self._wake.set()

    def _close_if_sendable(self) -> None:
        """Closes the open batch when it could be sent at once; else it goes on collecting."""
        sendable = self.connected and not self._paused and self.window.open
        if sendable and not self.window.waiting:
            self.batcher.close()

    # --- the stream -------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._one_stream()
            except CometError as error:
                self.hindrance = error
                _log.info(
                    "send stream ended",
                    extra=fields(
                        broker_group=self.broker_group,
                        address=self._routes.writer(self.broker_group) or "none",
                        waiting=sum(batch.count for batch in self.batches()),
                        error=error,
                    ),
                )
                self._routes.doubt(self.broker_group)
            finally:
                self.connected = False
                self.window.restart()
            if await self._routes.wait_change(self._reconnect.next_s()):
                self._reconnect.reset()  # somebody else may write, or write again: ask at once

    async def _one_stream(self) -> None:
        writer = self._routes.require_writer(self.broker_group)
        address = writer.address
        call = self._connections.broker(address).SendStream()
        try:
            timeout_s = min(self._options.request_timeout_ms / 1000, self._attempt_s_max)
            first = await read_first(call, timeout_s)
            if first is None or first.WhichOneof("kind") != "opened":
                raise InternalError(f"The broker at {address} opened the stream wrongly.")
            if first.opened.broker_group != self.broker_group:  # the address has a new owner
                found = first.opened.broker_group
                raise PeerUnavailable(f"At {address} is broker group {found!r} now.")
            self._take_opened(first.opened)
            await self._exchange(call, writer)
        finally:
            call.cancel()

    def _take_opened(self, opened: broker_pb2.SendStreamOpened) -> None:
        if opened.HasField("memory"):
            self._take_memory(opened.memory)
        if self.batcher.take_opened(opened):
            for batch in self.window.waiting:
                self.batcher.encode_again(batch)
        self._id_host = opened.store_host + opened.store_port.to_bytes(4, "big")
        self._paused = False
        self.connected = True
        self.opened.set()
        self._close_if_sendable()

    def _take_memory(self, memory: broker_pb2.RequestMemory) -> None:
        """Lowers what the options ask for to what the broker remembers."""
        if not memory.batches_max:
            _log.warning(
                "the broker stores again what is sent again (message_dedup_enable)",
                extra=fields(broker_group=self.broker_group),
            )
            return
        known = {
            "in_flight_max": min(memory.batches_max, memory.batches_in_flight_max),
            "delivery_timeout_ms": memory.sender_ms,
        }
        for option, most in known.items():
            asked = getattr(self._options, option)
            if asked > most:
                _log.warning(
                    "an option is lowered to what the broker remembers",
                    extra=fields(
                        broker_group=self.broker_group, option=option, asked=asked, used=most
                    ),
                )
        self.window.in_flight_max = min(self._options.in_flight_max, known["in_flight_max"])
        delivery_ms = min(self._options.delivery_timeout_ms, memory.sender_ms)
        self.batcher.delivery_s = delivery_ms / 1000

    async def _exchange(self, call: SendStream, writer: namesrv_pb2.Member) -> None:
        """Works on the stream until it ends; raises why."""
        await race(
            self._read(call),
            self._write(call),
            self._watch_answers(),
            self._routes.until_deposed(writer),
            name=f"send to {self.broker_group}",
        )

    async def _read(self, call: SendStream) -> None:
        while (response := await read(call)) is not None:
            if response.HasField("question"):
                self._answers.asked(self.broker_group, response.question)
                continue
            result = response.result
            batch, sent_s = self.window.answered(result.batch_id)
            now_s = self._clock.monotonic_s()
            self._latency.answered(now_s - sent_s, now_s)
            error = from_proto(result.error) if result.HasField("error") else None
            self._namespace.strip(error)
            if batch.in_order and _breaks_order(batch, result, error):
                self.window.refused(result.batch_id)
            if not batch.expired:
                if error is not None:
                    batch.may_be_stored |= result.may_be_stored
                    self._refused(batch, error)
                else:
                    self._stored(batch, result)
            self._close_if_sendable()
            self._wake.set()
        raise PeerUnavailable(f"Broker group {self.broker_group!r} ended the stream.")

    async def _write(self, call: SendStream) -> None:
        while True:
            item = None if self._paused else self.window.take(self._clock.monotonic_s())
            if item is None:
                self._wake.clear()
                await self._wake.wait()
            else:
                after = self.window.refused_id if item[1].in_order else None
                checksum = self._options.batch_checksum
                request = request_of(
                    *item, self._namespace, checksum=checksum, in_order_after=after
                )
                if item[0] == 1:
                    request.client_id = self._options.client_id
                    request.known_questions.extend(self._answers.known)
                await write(call, request)

    async def _watch_answers(self) -> None:
        """Gives the stream up when a batch waits too long: a half-dead peer says nothing."""
        limit_s = min(self._options.answer_timeout_ms / 1000, self._attempt_s_max)
        while True:
            await asyncio.sleep(limit_s / 8)
            if self.window.waits_s(self._clock.monotonic_s()) > limit_s:
                group = self.broker_group
                raise PeerUnavailable(f"Broker group {group!r} has not answered for {limit_s} s.")

    # --- answers ----------------------------------------------------------------------------------

    def _stored(self, batch: Batch, result: broker_pb2.SendBatchResult) -> None:
        is_partial = _is_partial(batch, result)
        if len(result.queue_offsets) != len(batch.segments) and not is_partial:
            error = InternalError("The broker's answer does not fit the batch.")
            self.fail(batch, error)
            raise error
        self._refusals.reset()
        self._reconnect.reset()
        self.hindrance = None
        if is_partial:  # the broker has crashed meanwhile
            batch, rest = batch.split_at(result.stored_count)
            self.window.push(rest)
        resolve(batch, result, self._namespace)
        self._stored_count += batch.count
        for segment in batch.segments:
            self._answers.rates.of(segment.queue.topic).done += segment.count
        if self.tracer is not None:
            self.tracer.stored(batch, self._host(), self._id_host, result.log_offset)
        self._buffer.release(batch.size, batch.count)

    def _refused(self, batch: Batch, error: CometError) -> None:
        """A refusal that names a segment is that segment's alone; one that may pass is tried again,
        in the same bytes.
        """
        if not isinstance(error, BatchOutOfOrder):  # that says nothing of itself
            batch.refusal = error
        if error.retry is not Retry.LATER and error.segment is not None:
            failed, rest = batch.split({error.segment})
            for part in failed or [batch]:
                if isinstance(error, QueueNotFound) and _may_move(part):
                    self.homeless.append(part)
                else:
                    self.fail(part, error)
            for part in rest if failed else []:
                self.window.push(part)
        elif error.retry is Retry.NEVER:
            self.fail(batch, error)
        else:
            self.window.push(batch)
            if not isinstance(error, BatchOutOfOrder):
                self._pause(error)

    def _pause(self, error: CometError) -> None:
        self.hindrance = error
        if not self._paused:
            self._paused = True
            delay_s = self._refusals.next_s()
            if error.retry_after_ms is not None:  # the broker knows
                delay_s = error.retry_after_ms / 1000
            _log.info(
                "batch refused for now",
                extra=fields(broker_group=self.broker_group, error=error, again_s=delay_s),
            )
            asyncio.get_running_loop().call_later(delay_s, self._resume)

    def _resume(self) -> None:
        self._paused = False
        self._close_if_sendable()
        self._wake.set()

    def fail(self, batch: Batch, error: CometError) -> None:
        """No message of the batch will be stored, as far as is known."""
        batch.failed(error)
        self._failed_count += batch.count
        for segment in batch.segments:
            self._answers.rates.of(segment.queue.topic).failed += segment.count
        if self.tracer is not None:
            self.tracer.failed(batch, self._host())
        self._buffer.release(batch.size, batch.count)

    def _host(self) -> str:
        return self._routes.writer(self.broker_group) or ""

    def expire(self, now_s: float) -> None:
        """Fails what is past its deadline with SendTimeout, which says if it is not stored."""
        batch = self.batcher.open
        if batch is not None and batch.deadline_s <= now_s:
            self.batcher.close()
        homeless = [batch for batch in self.homeless if batch.deadline_s <= now_s]
        self.homeless = [batch for batch in self.homeless if batch.deadline_s > now_s]
        for late in (*self.window.expire(now_s), *homeless):
            limit_ms = round(self.batcher.delivery_s * 1000)
            what = f"Broker group {self.broker_group!r}: no acknowledgement within {limit_ms} ms."
            error = SendTimeout(what) if late.is_unsure else SendTimeout.not_stored(what)
            self.fail(late, error.after(self._reason(late)))

    def _reason(self, batch: Batch) -> CometError | None:
        """What the last try of the batch was refused with, or why there was none."""
        own = batch.refusal if self.connected else None
        return own or self.hindrance or batch.refusal

    def fail_all(self) -> None:
        """The producer closes."""
        self.batcher.close()
        for batch in (*self.window.drain(), *self.take_homeless()):
            what = "The producer was closed before the message was acknowledged."
            if not batch.is_unsure:
                what = f"{what} It is not stored."
            self.fail(batch, ClientClosed(what).after(self._reason(batch)))

    def take_homeless(self) -> list[Batch]:
        """Takes out what was refused because its queue is gone, and may go to another queue."""
        batches, self.homeless = self.homeless, []
        return batches

    def evacuate(self, now_s: float) -> list[Batch]:
        """Takes out what waits and may go to another broker group: batches that this sender
        forgets. One that the group may have stored waits for the group until half of its time is
        over: elsewhere it would be stored twice.
        """
        self.batcher.close()
        batches, self.window.waiting = self.window.waiting, []
        patience_s = self._options.delivery_timeout_ms / 2000
        moving: list[Batch] = []
        for batch in batches:
            if batch.may_be_stored and batch.deadline_s - now_s > patience_s:
                self.window.push(batch)
            else:
                moving.append(batch)
        return moving


def _may_move(batch: Batch) -> bool:
    """Whether the messages may go to another queue: nobody chose theirs, and none is stored."""
    [*others, last] = batch.segments
    return not (batch.may_be_stored or others or last.pinned)


def _is_partial(batch: Batch, result: broker_pb2.SendBatchResult) -> bool:
    return 0 < result.stored_count < batch.count


def _breaks_order(
    batch: Batch, result: broker_pb2.SendBatchResult, error: CometError | None
) -> bool:
    """Whether the broker refuses what came behind the batch, by docs/protocol.md."""
    if error is None:
        return _is_partial(batch, result)
    return not result.may_be_stored and not isinstance(error, BatchOutOfOrder)


def _recallable(
    segment: Segment,
    queue_offset: int,
    result: broker_pb2.SendBatchResult,
    mac: bytes,
    namespace: Namespace,
) -> Recallable:
    """``mac``: what the broker signs the handles of the segment's messages with."""
    topic, broker_group = namespace.wire(segment.queue.topic), segment.queue.broker_group
    generation = result.timer_generation
    run = RecallRun(broker_group, topic, generation, queue_offset, segment.count)
    # A broker of the release before counts delays from the store time.
    clock_ms = result.clock_ms if result.HasField("clock_ms") else result.store_time_ms
    base_ms = clock_ms if segment.stored.timer is TimerForm.AFTER else 0
    return Recallable(run, mac, [base_ms + time_ms for time_ms in segment.times])


def resolve(batch: Batch, result: broker_pb2.SendBatchResult, namespace: Namespace) -> None:
    """Gives every message of a stored batch its receipt."""
    runs: list[StoredRun] = []
    first = 0
    macs = iter(result.recall_macs)
    status = SendStatus(result.status or SendStatus.SEND_OK.value)
    for segment, queue_offset in zip(batch.segments, result.queue_offsets, strict=True):
        run = StoredRun(segment.queue, queue_offset, result.store_time_ms)
        run.is_delayed = segment.stored.waits
        run.status = status
        run.log_offset = result.log_offset
        run.starts = batch.starts
        run.first = first
        run.id_stream = segment.id_stream
        run.first_counter = segment.first_counter
        if segment.stored.timer and (mac := next(macs, b"")):
            run.recall = _recallable(segment, queue_offset, result, mac, namespace)
        runs.append(run)
        first += segment.count
    batch.stored(runs)


def _kind_of(stored: StoredForm) -> broker_pb2.SegmentKind.ValueType:
    if stored.half is not None:
        return broker_pb2.SEGMENT_KIND_HALF
    if stored.timer:
        return broker_pb2.SEGMENT_KIND_TIMER
    if stored.delay_level:
        return broker_pb2.SEGMENT_KIND_DELAY_LEVEL
    return broker_pb2.SEGMENT_KIND_UNSPECIFIED


def request_of(
    batch_id: int,
    batch: Batch,
    namespace: Namespace,
    *,
    checksum: bool,
    in_order_after: int | None = None,
) -> broker_pb2.SendStreamRequest:
    """A closed batch as it travels."""
    return broker_pb2.SendStreamRequest(
        batch_id=batch_id,
        records=batch.records,
        records_crc32=crc32(batch.records) if checksum else None,
        in_order_after=in_order_after,
        segments=[
            broker_pb2.Segment(
                topic=namespace.wire(s.queue.topic),
                queue_id=s.queue.queue_id,
                count=s.count,
                kind=_kind_of(s.stored),
                delay_level=s.stored.delay_level,
                no_wait_store=not s.stored.wait_store,
                timer_from_now=s.stored.timer is TimerForm.AFTER,
                producer_group=s.stored.half.group if s.stored.half else "",
                check_immunity_s=s.stored.half.immunity_s if s.stored.half else 0,
            )
            for s in batch.segments
        ],
    )

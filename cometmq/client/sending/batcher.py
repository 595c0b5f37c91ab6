"""Collects messages of one broker group into batches: the hot path of a producer.

A batch is closed by bytes, by count, or at the end of the event loop's turn when it could be sent
at once (the sender decides that); else it goes on collecting. Nothing here waits.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Sequence
from itertools import islice

from cometmq.client.lifecycle import check_loop
from cometmq.client.messages import SendReceipt
from cometmq.client.namespaces import Namespace
from cometmq.client.options import ProducerOptions
from cometmq.client.sending.batch import Batch, Segment, Waiter
from cometmq.client.sending.encoder import RecordEncoder, RecordForm
from cometmq.client.sending.send_many import MessageRange, SendMany
from cometmq.client.sending.stored_form import PLAIN, StoredForm, form_of
from cometmq.clock import Clock
from cometmq.errors import BatchTooLarge, CometError
from cometmq.format.compression import SYS_FLAG_ZLIB, ZlibBody, compress
from cometmq.format.halves import HalfForm
from cometmq.format.record import decode_all
from cometmq.format.timers import DIGITS_AT, DIGITS_END, with_time
from cometmq.format.trace import TRACE_ON
from cometmq.model import Message, QueueRef
from cometmq.native import accelerator
from cometmq.native.interface import OpenRun
from cometmq.v1 import broker_pb2

RUN_AFTER_COUNT = 2  # messages of a segment: where few come at a time a run does not pay


class Buffer:
    """The messages that all senders of a producer hold together, in bytes and in number; senders
    wait while it is full: while ``used`` is not below ``limit``. Both count when their batch is
    closed, so that a single message costs nothing more.
    """

    __slots__ = (
        "batch_count",
        "bytes_max",
        "count",
        "count_max",
        "half_runs",
        "limit",
        "room",
        "runs",
        "used",
    )

    def __init__(self, bytes_max: int, count_max: int) -> None:
        self.bytes_max = bytes_max
        self.count_max = count_max
        self.used = 0
        self.count = 0
        self.batch_count = 0  # that were closed so far
        self.limit = bytes_max  # of `used`; 0 while there are as many messages as there may be
        self.room = asyncio.Event()  # not set while senders have to wait
        self.room.set()
        # The open runs, by topic: messages may go there without another look.
        self.runs: dict[str, OpenRun] = {}
        # The same of halves, by topic and form, with the run's broker group.
        self.half_runs: dict[tuple[str, HalfForm], tuple[OpenRun, str]] = {}

    def forget_runs(self) -> None:
        """Messages need another look."""
        self.runs.clear()
        self.half_runs.clear()

    def run_ended(self, run: OpenRun, topic: str, half: HalfForm | None) -> None:
        """It would keep the bytes of its batch."""
        if half is None:
            if self.runs.get(topic) is run:
                del self.runs[topic]
        elif self.half_runs.get((topic, half), (None,))[0] is run:
            del self.half_runs[topic, half]

    def closed(self, size: int, count: int) -> None:
        """A batch of so many bytes and messages takes no more."""
        self.used += size
        self.count += count
        self.batch_count += 1
        if self.count >= self.count_max:
            self.limit = 0
        if self.used >= self.limit:
            self.forget_runs()

    def release(self, size: int, count: int) -> None:
        self.used -= size
        self.count -= count
        assert self.used >= 0
        assert self.count >= 0
        if self.count < self.count_max:
            self.limit = self.bytes_max
        if self.used < self.limit:
            self.room.set()


class Slot:
    """One queue as records are encoded for it, or the messages for one queue that are stored in
    another form. ``pinned``: the application chose the queue.
    """

    __slots__ = (
        "_others",
        "form",
        "pinned",
        "queue",
        "segment",
        "stored",
        "stored_queue_id",
    )

    def __init__(self, queue: QueueRef, *, pinned: bool, stored: StoredForm = PLAIN) -> None:
        self.queue = queue
        self.pinned = pinned
        self.stored = stored
        # What the records carry.
        _, self.stored_queue_id = stored.place(queue.topic, queue.queue_id)
        self.form: RecordForm | None = None  # None until the broker has said how to encode
        self.segment: Segment | None = None  # written last; counts while it is its batch's last
        self._others: dict[StoredForm, Slot] = {}

    def like(self, message: Message) -> Slot:
        """The same queue, for messages stored like this one. Raises what is wrong with it."""
        message.check()  # it may have been changed since it was made
        return self.of(form_of(message))

    def of(self, stored: StoredForm) -> Slot:
        """The same queue, for messages stored in this form."""
        if stored == self.stored:
            return self
        slot = self._others.get(stored)
        if slot is None:
            slot = self._others[stored] = Slot(self.queue, pinned=self.pinned, stored=stored)
        return slot

    def of_half(self, half: HalfForm) -> Slot:
        """The same queue, for messages of transactions: these stay at its broker group."""
        stored = StoredForm(half=half)
        slot = self._others.get(stored)
        if slot is None:
            slot = self._others[stored] = Slot(self.queue, pinned=True, stored=stored)
        return slot


class Batcher:
    """The open batch. ``on_close`` gets each batch that is closed, ``on_turn_end`` is called at the
    end of every turn of the event loop in which messages were put."""

    def __init__(
        self,
        options: ProducerOptions,
        buffer: Buffer,
        clock: Clock,
        on_close: Callable[[Batch], None],
        on_turn_end: Callable[[], None],
    ) -> None:
        self._options = options
        self._namespace = Namespace(options.namespace)
        self._buffer = buffer
        self._clock = clock
        self._on_close = on_close
        self._on_turn_end = on_turn_end
        self._loop = asyncio.get_running_loop()
        self.delivery_s = options.delivery_timeout_ms / 1000  # from a batch's first message
        self._bytes_most = min(options.batch_bytes_max, buffer.bytes_max)
        self._bytes_max = self._bytes_most
        self._count_most = min(options.batch_count_max, buffer.count_max)
        self._count_max = self._count_most
        self._unit_count_max = self._unit_bytes_max = 0  # of a batch that is sent as a unit
        self._plain_bytes_max = options.compress_above_bytes
        self._sequence = 0  # of the last batch
        self._in_turn = False  # messages were put in this turn of the event loop
        self._now_ms = 0  # when the turn's first message was put
        self.encoder: RecordEncoder | None = None  # None until a stream was opened
        self.open: Batch | None = None
        # What the open batch's last segment is written by now, for which messages of it, and their
        # topic and form; else None. Nothing else may touch the batch before the run has ended.
        self._run: tuple[OpenRun, MessageRange, str, HalfForm | None] | None = None
        self._slot: Slot | None = None  # of the message that was put last

    def take_opened(self, opened: broker_pb2.SendStreamOpened) -> bool:
        """The form of a new stream. True when closed batches have to be encoded again."""
        self._bytes_max = min(self._bytes_most, opened.batch_max_bytes)
        self._count_max = min(self._count_most, opened.batch_max_count)
        self._unit_count_max, self._unit_bytes_max = opened.batch_max_count, opened.batch_max_bytes
        self._plain_bytes_max = min(self._options.compress_above_bytes, opened.body_max_bytes)
        if self.encoder is None:
            self.encoder = RecordEncoder(opened, self._clock, self._namespace)
            return False
        self.close()  # its records were encoded as the stream before wanted them
        return self.encoder.take(opened)

    def ready(self, slot: Slot) -> bool:
        """Whether records can be encoded for it."""
        if slot.form is None and self.encoder is not None:
            slot.form = self._form(self.encoder, slot)
        return slot.form is not None

    @staticmethod
    def _form(encoder: RecordEncoder, slot: Slot) -> RecordForm:
        if slot.stored == PLAIN:
            return encoder.form(slot.queue.topic)
        return encoder.form_with_prefix(slot.queue, slot.stored)

    def _like(self, slot: Slot, message: Message) -> Slot:
        """The slot of the same queue for messages stored like this one. Raises what is wrong with
        it.
        """
        slot = slot.like(message)
        if slot.form is None:
            self.ready(slot)
        return slot

    def put(self, message: Message, slot: Slot, waiter: Waiter) -> None:
        """Encodes a message into the open batch. Raises what is wrong with the message itself; then
        nothing has changed."""
        self.end_run()
        if not self._in_turn:
            self._begin_turn()
        if (
            message.delay_level
            or message.delay_ms
            or message.deliver_at_ms
            or message.wait_store is not True
        ):
            slot = self._like(slot, message)
        encoder, form = self.encoder, slot.form
        assert encoder is not None
        assert form is not None
        body, sys_flag = message.body, 0
        if body.__class__ is not bytes or len(body) > self._plain_bytes_max or message.flag:
            body, sys_flag = self._stored_body(encoder, message)
        # None unless the message has just a tag, and one that was met before.
        middle = form.middles.get(message.tag)
        if middle is None or message.keys or message.properties or message.sharding_key:
            middle = form.middle(message)
        size = encoder.fixed_bytes + len(body) + len(middle)
        batch = self.open
        if batch is None or len(batch.buffer) + size > self._bytes_max:
            stream = encoder.stream
            batch = self._start()
            # A new incarnation has other ids.
            middle = middle if encoder.stream is stream else form.middle(message)
        batch.is_marked |= bool(message.properties) and TRACE_ON in message.properties
        segment = slot.segment
        if segment is None or segment is not batch.last:
            segment = slot.segment = self._next_segment(batch, slot)
        self._slot = slot
        if slot.stored.timer:
            time_ms = message.deliver_at_ms or message.delay_ms
            middle = with_time(middle, time_ms, form.digits_at)
            segment.times.append(time_ms)
        buffer, starts = batch.buffer, batch.starts
        start = len(buffer)
        encoder.append_record(
            buffer, slot.stored_queue_id, body, message.flag, sys_flag, middle, self._now_ms
        )
        starts.append(start)
        segment.count += 1
        batch.waiters.append(waiter)
        if len(buffer) + size > self._bytes_max or len(starts) >= self._count_max:
            self.close()  # the next one, if it is like this one, would not fit

    def _stored_body(self, encoder: RecordEncoder, message: Message) -> tuple[bytes, int]:
        """The body as it is stored, and its bits of SYSFLAG. Raises what is wrong with the body or
        the flag.
        """
        encoder.refuse(message)
        body = message.body
        if body.__class__ is ZlibBody:
            return body, SYS_FLAG_ZLIB
        if len(body) > self._plain_bytes_max:
            return compress(body, self._options.compression)
        return body, 0

    def extend(
        self, messages: list[Message], at: int, slot: Slot, many: SendMany, *, count: int
    ) -> int:
        """Encodes messages from ``at`` on, at most so many, beside the ones before them, as long as
        there is room in the batch and they need no other look; how many. The next one is for
        :meth:`put`. Either all have a sharding key, and the slot's queue is that of all these keys,
        or none has.
        """
        self.end_run()
        if not self._in_turn:
            self._begin_turn()
        first = messages[at]
        if first.__class__ is not Message:
            return 0
        if (
            first.delay_level
            or first.delay_ms
            or first.deliver_at_ms
            or first.wait_store is not True
        ):
            try:
                slot = slot.like(first)
            except CometError:
                return 0
        batch, encoder, form = self.open, self.encoder, slot.form
        if batch is None or batch.last is None or batch.last is not slot.segment:
            return 0
        assert encoder is not None
        assert form is not None
        starts, is_marked = encoder.extend(
            batch.buffer,
            messages,
            at,
            min(count, self._count_max - batch.count),
            form,
            slot.stored_queue_id,
            is_keyed=bool(first.sharding_key),
            bytes_max=self._bytes_max,
            body_bytes_max=self._plain_bytes_max,
            born_time_ms=self._now_ms,
        )
        if starts:
            batch.starts += starts
            batch.is_marked |= is_marked
            batch.last.count += len(starts)
            if slot.stored.timer:
                taken = messages[at : at + len(starts)]
                batch.last.times.extend([one.deliver_at_ms or one.delay_ms for one in taken])
            batch.waiters.append(many.take(len(starts)))
            next_end = 2 * len(batch.buffer) - starts[-1]  # if it is like the last one
            if next_end > self._bytes_max or batch.count >= self._count_max:
                self.close()
        return len(starts)

    def begin_run(self) -> None:
        """Messages that are like the one that was put last go into the open batch behind it, by the
        extension and without a call of :meth:`put`. Nothing is done where that would not pay.
        """
        slot = self._slot
        if slot is None:
            return
        batch, encoder, form, segment = self.open, self.encoder, slot.form, slot.segment
        if (
            accelerator is None
            or batch is None
            or segment is None
            or batch.last is not segment
            or segment.count < RUN_AFTER_COUNT
            or not self._in_turn
        ):
            return
        assert self._run is None
        assert encoder is not None
        assert form is not None
        each = accelerator.SendEach(self._loop)
        run = encoder.open_run(
            accelerator,
            batch.buffer,
            each,
            self._count_max - batch.count,
            form,
            slot.stored_queue_id,
            bytes_max=self._bytes_max,
            body_bytes_max=self._plain_bytes_max,
            born_time_ms=self._now_ms,
        )
        messages = MessageRange(each, 0, 0)
        batch.waiters.append(messages)
        half = slot.stored.half
        self._run = run, messages, form.topic, half
        if half is None:
            self._buffer.runs[form.topic] = run
        else:
            self._buffer.half_runs[form.topic, half] = run, slot.queue.broker_group

    def end_run(self) -> None:
        """The open batch and the encoder are as if its messages had come by :meth:`put`."""
        if self._run is None:
            return
        run, messages, topic, half = self._run
        self._run = None
        self._buffer.run_ended(run, topic, half)
        batch, encoder = self.open, self.encoder
        assert batch is not None
        assert batch.last is not None
        assert encoder is not None
        batch.starts.frombytes(run.end())
        batch.is_marked |= bool(run.is_marked)
        messages.count = run.count
        batch.last.count += run.count
        batch.last.times.frombytes(run.times())
        encoder.counter += run.count
        if not run.count:
            batch.waiters.pop()

    def put_unit(self, messages: Sequence[Message], slot: Slot) -> list[Future[SendReceipt]]:
        """Encodes messages as a batch of their own, which travels at once. Raises what is wrong
        with a message, BatchTooLarge; then nothing has changed.
        """
        if len(messages) > self._unit_count_max:
            raise BatchTooLarge(
                f"{len(messages)} messages; the broker takes {self._unit_count_max} in a batch."
            )
        self.close()
        limits = self._count_max, self._bytes_max
        self._count_max, self._bytes_max = len(messages) + 1, 1 << 62
        futures: list[Future[SendReceipt]] = []
        try:
            for message in messages:
                futures.append(self._loop.create_future())
                self.put(message, slot, futures[-1])
                assert self.open is not None
                if self.open.size > self._unit_bytes_max:
                    raise BatchTooLarge(
                        f"The batch has more than {self._unit_bytes_max} bytes, which is what the "
                        "broker takes."
                    )
        except BaseException:
            self.open = None
            raise
        finally:
            self._count_max, self._bytes_max = limits
        self.close()
        return futures

    def _begin_turn(self) -> None:
        """First message of this turn of the event loop; one look at the clock serves them all, and
        one at the event loop. ClientLoopMismatch.
        """
        check_loop(self._loop)
        self._in_turn = True
        self._now_ms = self._clock.wall_ms()
        self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self.end_run()
        self._in_turn = False
        self._on_turn_end()

    def _start(self) -> Batch:
        """Opens the next batch."""
        assert self.encoder is not None
        self.close()
        self.encoder.begin_batch(self._count_max)
        deadline_s = self._clock.monotonic_s() + self.delivery_s
        self.open = self._new_batch(deadline_s)
        return self.open

    def _new_batch(self, deadline_s: float) -> Batch:
        self._sequence += 1
        return Batch(self._sequence, deadline_s)

    def _next_segment(self, batch: Batch, slot: Slot) -> Segment:
        """A new segment; it begins with the record that is encoded next."""
        assert self.encoder is not None
        stream, counter = self.encoder.stream, self.encoder.counter
        segment = Segment(slot.queue, slot.pinned, stream, counter, slot.stored)
        batch.segments.append(segment)
        batch.last = segment
        return segment

    def close(self) -> None:
        """Closes the open batch, if there is one, and hands it out."""
        self.end_run()
        batch = self.open
        if batch is not None:
            self.open = None
            batch.close()
            self._buffer.closed(batch.size, batch.count)
            self._on_close(batch)

    # --- other queues, other hosts ----------------------------------------------------------------

    def encode_again(self, batch: Batch) -> None:
        """The broker's new stream wants other host lengths: same messages and ids, other bytes."""
        assert self.encoder is not None
        before = batch.size
        records = decode_all(batch.records)
        batch.replace([self.encoder.again(r, r.queue_id) for r in records])
        self._buffer.used += batch.size - before

    def adopt(self, moved: Batch, slot: Slot) -> None:
        """Takes a batch of another sender, of one topic, for one queue: same futures, ids and
        deadline."""
        encoder = self.encoder
        assert encoder is not None
        self.close()
        batch = self._new_batch(moved.deadline_s)
        records = iter(decode_all(moved.records))
        parts: list[bytes] = []
        for before in moved.segments:
            assert before.stored.half is None, "a transaction stays at its broker group"
            to = slot.of(before.stored)
            segment = Segment(
                to.queue, to.pinned, before.id_stream, before.first_counter, before.stored
            )
            segment.count = before.count
            segment.times = before.times
            batch.segments.append(segment)
            for record in islice(records, before.count):
                digits = record.raw_properties[DIGITS_AT:DIGITS_END]
                prefix = self._prefix_of(before, digits), self._prefix_of(segment, digits)
                parts.append(encoder.again(record, to.stored_queue_id, prefix=prefix))
        batch.waiters = moved.waiters
        batch.is_marked = moved.is_marked
        batch.may_be_stored_elsewhere = moved.may_be_stored or moved.may_be_stored_elsewhere
        batch.refusal = moved.refusal
        batch.replace(parts)
        self._buffer.used += batch.size - moved.size
        self._on_close(batch)

    def _prefix_of(self, segment: Segment, digits: bytes) -> bytes:
        queue_id, topic = segment.queue.queue_id, self._namespace.wire(segment.queue.topic)
        return segment.stored.prefix(topic, queue_id, digits)

"""Trace records of a client: gathered without waiting, sent in few messages by a producer of their
own. What the buffer cannot take, or nobody stores, is counted and logged.
"""

from __future__ import annotations

import asyncio
from array import array
from asyncio import Future
from collections.abc import Sequence

from cometmq.client.messages import SendReceipt
from cometmq.client.options import (
    ProducerOptions,
    TraceOptions,
)
from cometmq.client.received import ReceivedMessage
from cometmq.client.requests.late_producer import LateProducer
from cometmq.client.tracing.pack import (
    BODY_BYTES_MAX,
    CallForm,
    Packer,
    SentForm,
)
from cometmq.client.tracing.sampling import Sampling
from cometmq.clock import Clock, SystemClock
from cometmq.errors import CometError
from cometmq.format.trace import TraceRecord
from cometmq.model import JoinedKeys, Message
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger

BATCH_BYTES_MAX = 1024 * 1024  # WHOLE_COUNT messages with compressed bodies
FLUSH_S = 0.5  # how long a record waits for others
CLOSE_S_MAX = 3.0
TELL_EVERY_S = 60.0

_CLOCK = SystemClock()

_log = logger(__name__)


class TraceDispatcher:
    """Sends records to the trace topic; without ``trace_enable`` there are none. Belongs to the
    event loop.
    """

    def __init__(
        self, namesrv: str, client_id: str, options: TraceOptions, clock: Clock = _CLOCK
    ) -> None:
        self.topic = options.trace_topic
        self._is_enabled = options.trace_enable
        self._clock = clock
        own = ProducerOptions(
            client_id=client_id,
            batch_bytes_max=BATCH_BYTES_MAX,
            compress_above_bytes=2 * BODY_BYTES_MAX,  # what pays is compressed already
        )
        self._producer = LateProducer(namesrv, own)
        self._packer = Packer(
            options.trace_topic, Sampling(options.trace_sampling), options.trace_buffer_max
        )
        self._sending: dict[Future[SendReceipt], int] = {}  # how many records each has
        self._has_some = asyncio.Event()  # records wait
        self._wake = asyncio.Event()  # there is enough for a batch, or there are no more
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self.lost_count = 0  # records that nobody will read
        self._untold = 0
        self._tell_s = 0.0

    def start(self, tasks: Tasks) -> None:
        if self._is_enabled:
            self._task = tasks.start(self._run(), "send trace records")

    def put(self, record: TraceRecord, message_id: str, keys: str) -> None:
        """Takes a record; one too many is dropped, and counted."""
        self._packer.put(record, message_id, keys)
        self._look()

    def put_sent(
        self,
        records: bytes,
        starts: array[int],
        first: int,
        count: int,
        sampled: range,
        form: SentForm,
        *,
        is_marked: bool,
    ) -> None:
        """Takes the records of messages that were sent: :meth:`Packer.put_sent`."""
        self._packer.put_sent(records, starts, first, count, sampled, form, is_marked=is_marked)
        self._look()

    def choose(self, messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        """Which of them are traced: a sample, and those that are marked."""
        return self._packer.choose(messages)

    def put_calls(self, messages: Sequence[ReceivedMessage], form: CallForm) -> None:
        """Takes the records of received messages: :meth:`Packer.put_calls`."""
        self._packer.put_calls(messages, form)
        self._look()

    def _look(self) -> None:
        self._has_some.set()
        if self._packer.is_pressing:
            self._wake.set()
        dropped = self._packer.take_dropped()
        if dropped:
            self._lose(dropped, "the buffer is full (trace_buffer_max)")

    async def close(self, *, flush: bool = True) -> None:
        """Sends what waits, for at most CLOSE_S_MAX; the rest is lost, and counted."""
        if self._task is None:
            return
        self._is_closing = True
        self._has_some.set()
        self._wake.set()
        try:
            async with asyncio.timeout(CLOSE_S_MAX if flush else 0):
                await asyncio.wait([self._task])
                while self._sending:
                    await asyncio.wait(list(self._sending))
        except TimeoutError:
            pass
        finally:
            await stop_all([self._task])
            waiting = 0
            while (packed := self._packer.next()) is not None:
                waiting += packed.record_count
            self._lose(waiting + sum(self._sending.values()), "the client was closed")
            self._sending.clear()
            await self._producer.close(flush=False)
            self._tell("the client was closed")

    async def _run(self) -> None:
        while not self._is_closing:
            await self._has_some.wait()
            await wait_at_most(self._wake, FLUSH_S)
            self._has_some.clear()
            self._wake.clear()
            await self._flush()

    async def _flush(self) -> None:
        while (packed := self._packer.next()) is not None:
            try:
                producer = await self._producer.opened()
                keys = JoinedKeys((packed.keys,))
                future = await producer.send(Message(self.topic, packed.body, keys=keys))
            except CometError as error:
                self._lose(packed.record_count, error.message)
            except asyncio.CancelledError:
                self._lose(packed.record_count, "the client was closed")
                raise
            else:
                self._sending[future] = packed.record_count
                future.add_done_callback(self._decided)

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

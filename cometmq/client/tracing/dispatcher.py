"""Trace records of a client: gathered without waiting, sent in few messages by a producer of their
own. What the buffer cannot take, or nobody stores, is counted and logged.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections import deque
from typing import NamedTuple

from cometmq.client.messages import SendReceipt
from cometmq.client.options import (
    ProducerOptions,
    TraceOptions,
)
from cometmq.client.requests.late_producer import LateProducer
from cometmq.clock import Clock, SystemClock
from cometmq.errors import CometError
from cometmq.format import trace
from cometmq.format.trace import TraceRecord
from cometmq.model import Message
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger

FLUSH_S = 0.2  # how long a record waits for others
BODY_LENGTH_MAX = 128_000  # of one message of records, as RocketMQ's
KEYS_BYTES_MAX = 16_384  # of all keys of one message
KEY_LENGTH_MAX = 1_024  # a longer one is no key of the trace
CLOSE_S_MAX = 3.0
TELL_EVERY_S = 60.0

_CLOCK = SystemClock()

_log = logger(__name__)


class _Entry(NamedTuple):
    text: str
    keys: tuple[str, ...]


class TraceDispatcher:
    """Sends records to the trace topic; without ``trace_enable`` there are none. Belongs to the
    event loop.
    """

    def __init__(
        self, namesrv: str, client_id: str, options: TraceOptions, clock: Clock = _CLOCK
    ) -> None:
        self.topic = options.trace_topic
        self._is_enabled = options.trace_enable
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
        if self._is_enabled:
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
        if self._task is None:
            return
        self._is_closing = True
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


def _bytes(word: str) -> int:
    return len(word) if word.isascii() else len(word.encode("utf-8", "replace"))

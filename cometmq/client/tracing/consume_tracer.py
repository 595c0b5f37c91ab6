"""Trace records of what a consumer does with messages."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence

from cometmq.client.hooks import ConsumeContext
from cometmq.client.messages import ConsumeResult
from cometmq.client.options import TraceOptions
from cometmq.client.received import ReceivedMessage
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.client.tracing.sampling import Sampling, is_wanted
from cometmq.clock import SystemClock
from cometmq.format import trace
from cometmq.format.properties import KEYS
from cometmq.model import QueueRef

RECEIVED_MAX = 65_536  # messages whose acknowledgement is waited for


class ConsumeTracer:
    """A ConsumeHook: records of each listener call."""

    def __init__(self, dispatcher: TraceDispatcher, options: TraceOptions) -> None:
        self._dispatcher = dispatcher
        self._sampling = Sampling(options.trace_sampling)
        self._clock = SystemClock()
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
        return is_wanted(mark, self._sampling.chooses(message.unique_id))

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


def _id_of(message: ReceivedMessage) -> str:
    return message.unique_id or message.message_id

"""Trace records of what a consumer does with messages."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence

from cometmq.client.hooks import ConsumeContext
from cometmq.client.messages import ConsumeResult
from cometmq.client.received import ReceivedMessage
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.client.tracing.pack import after_form, before_form
from cometmq.clock import SystemClock
from cometmq.format import trace
from cometmq.model import QueueRef

RECEIVED_MAX = 65_536  # messages whose acknowledgement is waited for


class ConsumeTracer:
    """A ConsumeHook: records of each listener call."""

    def __init__(self, dispatcher: TraceDispatcher) -> None:
        self._dispatcher = dispatcher
        self._clock = SystemClock()
        self._token = secrets.token_hex(8).upper()
        self._numbers = itertools.count()
        # Of messages that are received and not acknowledged: request id, when.
        self._received: dict[tuple[QueueRef, int], tuple[str, int]] = {}

    def before_consume(self, context: ConsumeContext) -> None:
        """As ConsumeHook says."""
        request_id = f"{self._token}{next(self._numbers):X}"
        now_ms = self._clock.wall_ms()
        if self._before(context.group, request_id, context.messages, now_ms):
            context.values[self] = request_id, now_ms

    def after_consume(self, context: ConsumeContext) -> None:
        """As ConsumeHook says."""
        if self not in context.values:
            return
        request_id, began_ms = context.values[self]
        cost_ms = (self._clock.wall_ms() - began_ms) // len(context.messages)
        code = trace.SUCCESS
        if context.error is not None:
            code = trace.EXCEPTION
        elif context.answer not in (None, ConsumeResult.SUCCESS):
            code = trace.FAILED
        self._after(context.group, request_id, context.messages, cost_ms, code)

    def received(self, group: str, messages: Sequence[ReceivedMessage]) -> None:
        """A SimpleConsumer hands these out: their call ends with their acknowledgement."""
        now_ms = self._clock.wall_ms()
        for message in messages:
            request_id = f"{self._token}{next(self._numbers):X}"
            if self._before(group, request_id, [message], now_ms):
                self._received[message.queue, message.queue_offset] = request_id, now_ms
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
        request_id = f"{self._token}{next(self._numbers):X}"
        if self._before(group, request_id, messages, self._clock.wall_ms()):
            self._after(group, request_id, messages, 0, trace.SUCCESS)

    def _before(
        self, group: str, request_id: str, messages: Sequence[ReceivedMessage], now_ms: int
    ) -> int:
        """How many of the messages are traced."""
        return self._dispatcher.put_calls(messages, before_form(now_ms, group, request_id))

    def _after(
        self,
        group: str,
        request_id: str,
        messages: Sequence[ReceivedMessage],
        cost_ms: int,
        code: int,
    ) -> None:
        form = after_form(request_id, cost_ms, code, self._clock.wall_ms(), group)
        self._dispatcher.put_calls(messages, form)

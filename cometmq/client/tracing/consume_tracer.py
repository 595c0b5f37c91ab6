"""Trace records of what a consumer does with messages."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterable, Sequence

from cometmq.client.hooks import AsyncListener, ListenerWrapper
from cometmq.client.messages import ConsumeResult
from cometmq.client.received import ReceivedMessage
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.client.tracing.pack import after_form, before_form
from cometmq.clock import SystemClock
from cometmq.format import trace
from cometmq.model import QueueRef

_SUCCESSES = (None, ConsumeResult.SUCCESS)

RECEIVED_MAX = 65_536  # messages whose acknowledgement is waited for


class ConsumeTracer(ListenerWrapper):
    """Records of listener calls."""

    def __init__(self, dispatcher: TraceDispatcher) -> None:
        self._dispatcher = dispatcher
        self._clock = SystemClock()
        self._token = secrets.token_hex(8).upper()
        self._numbers = itertools.count()
        # Of messages that are received and not acknowledged: request id, when.
        self._received: dict[tuple[QueueRef, int], tuple[str, int]] = {}

    def around(self, listener: AsyncListener, group: str) -> AsyncListener:
        """As ListenerWrapper says."""
        choose = self._dispatcher.choose

        async def call(messages: list[ReceivedMessage]) -> object:
            chosen = choose(messages)
            if not chosen:
                return await listener(messages)
            request_id, began_ms = self._begin(group, chosen)
            code = trace.EXCEPTION
            try:
                answer = await listener(messages)
                code = trace.SUCCESS if answer in _SUCCESSES else trace.FAILED
            finally:
                cost_ms = (self._clock.wall_ms() - began_ms) // len(messages)
                self._after(group, request_id, chosen, cost_ms, code)
            return answer

        return call

    def received(self, group: str, messages: Sequence[ReceivedMessage]) -> None:
        """A SimpleConsumer hands these out: their call ends with their acknowledgement."""
        for message in self._dispatcher.choose(messages):
            began = self._begin(group, [message])
            self._received[message.queue, message.queue_offset] = began
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
        chosen = self._dispatcher.choose(messages)
        if chosen:
            request_id, _ = self._begin(group, chosen)
            self._after(group, request_id, chosen, 0, trace.SUCCESS)

    def _begin(self, group: str, chosen: Sequence[ReceivedMessage]) -> tuple[str, int]:
        """A call with these messages begins; its request id, and when."""
        request_id = f"{self._token}{next(self._numbers):X}"
        now_ms = self._clock.wall_ms()
        self._dispatcher.put_calls(chosen, before_form(now_ms, group, request_id))
        return request_id, now_ms

    def _after(
        self,
        group: str,
        request_id: str,
        chosen: Sequence[ReceivedMessage],
        cost_ms: int,
        code: int,
    ) -> None:
        form = after_form(request_id, cost_ms, code, self._clock.wall_ms(), group)
        self._dispatcher.put_calls(chosen, form)

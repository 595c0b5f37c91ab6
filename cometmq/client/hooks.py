"""Hooks: what an application lets happen around each send and each listener call, and which
messages it keeps from its consumers. RocketMQ's SendMessageHook, ConsumeMessageHook and
FilterMessageHook.

What a hook raises is logged and changes nothing else.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from asyncio import Future
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

from cometmq.client.messages import ConsumeResult, Later, SendReceipt
from cometmq.client.received import ReceivedMessage
from cometmq.clock import SystemClock
from cometmq.model import Message, QueueRef
from cometmq.telemetry import fields, logger

TELL_EVERY_S = 60.0  # that a hook fails

_log = logger(__name__)


@dataclass(slots=True)
class SendContext:
    """One message on its way. Afterwards it has a ``receipt`` or an ``error``. ``values`` is the
    hooks' own: each keeps there what it wants to know afterwards.
    """

    message: Message
    values: dict[Any, Any] = field(default_factory=dict)
    receipt: SendReceipt | None = None
    error: BaseException | None = None


class SendHook(Protocol):
    """Is called around the send of each message, in the event loop; it must not block."""

    def before_send(self, context: SendContext) -> None:
        """Before the message is encoded: its properties can still be changed."""

    def after_send(self, context: SendContext) -> None:
        """When the message is decided, or ``send`` has raised."""


@dataclass(slots=True)
class ConsumeContext:
    """One listener call. Afterwards it has what the listener answered (``answer``) or raised
    (``error``).
    """

    group: str
    queue: QueueRef
    messages: Sequence[ReceivedMessage]
    values: dict[Any, Any] = field(default_factory=dict)
    answer: ConsumeResult | Later | None = None
    error: BaseException | None = None

    @property
    def is_success(self) -> bool:
        """Whether the listener has done all of the messages."""
        return self.error is None and self.answer in (None, ConsumeResult.SUCCESS)


class ConsumeHook(Protocol):
    """Is called around each listener call, in the event loop; it must not block."""

    def before_consume(self, context: ConsumeContext) -> None:
        """Before the listener gets the messages."""

    def after_consume(self, context: ConsumeContext) -> None:
        """When the call has ended, also of one that took too long."""


AsyncListener: TypeAlias = "Callable[[list[ReceivedMessage]], Awaitable[object]]"


class ListenerWrapper(ABC):
    """A wrapper of each listener call that needs no context for it."""

    @abstractmethod
    def around(self, listener: AsyncListener, group: str) -> AsyncListener:
        """The listener with it around."""


class FilterHook(Protocol):
    """Looks at each message that a consumer gets, in the event loop; it must not block."""

    def wants(self, message: ReceivedMessage) -> bool:
        """False: the consumer passes the message by, as done."""


def are_hooks(value: object, *methods: str) -> bool:
    """Whether these are hooks with such methods."""
    return isinstance(value, tuple) and all(
        callable(getattr(hook, method, None)) and not inspect.isclass(hook)
        for hook in value
        for method in methods
    )


class _Guard:
    """Calls hooks; what they raise is logged, once a minute each."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._told_s: dict[int, float] = {}  # by hook, its place

    def call(self, place: int, method: Callable[..., Any], *arguments: object) -> Any:
        """Calls the hook; its answer, or None when it raises."""
        try:
            return method(*arguments)
        except Exception as error:  # the application's: no send and no listener call breaks by it
            now_s = self._clock.monotonic_s()
            if now_s - self._told_s.get(place, -TELL_EVERY_S) >= TELL_EVERY_S:
                self._told_s[place] = now_s
                _log.warning(
                    "hook failed",
                    extra=fields(hook=getattr(method, "__qualname__", repr(method)), error=error),
                    exc_info=error,
                )
            return None


class SendHooks:
    """The hooks of a producer: before in their order, after in the reverse one."""

    def __init__(self, hooks: Sequence[SendHook]) -> None:
        self._hooks = hooks
        self._guard = _Guard()

    async def around(
        self, message: Message, send: Callable[[Message], Awaitable[Future[SendReceipt]]]
    ) -> Future[SendReceipt]:
        async def send_one(messages: Sequence[Message]) -> list[Future[SendReceipt]]:
            return [await send(messages[0])]

        [future] = await self.around_all([message], send_one)
        return future

    async def around_all(
        self,
        messages: Sequence[Message],
        send: Callable[[Sequence[Message]], Awaitable[list[Future[SendReceipt]]]],
    ) -> list[Future[SendReceipt]]:
        """Around each of them."""
        contexts = [SendContext(message) for message in messages]
        for context in contexts:
            for place, hook in enumerate(self._hooks):
                self._guard.call(place, hook.before_send, context)
        try:
            futures = await send(messages)
        except BaseException as error:
            for context in contexts:
                context.error = error
                self._after(context)
            raise
        for context, future in zip(contexts, futures, strict=True):
            future.add_done_callback(partial(self._decided, context))
        return futures

    def _decided(self, context: SendContext, future: Future[SendReceipt]) -> None:
        if not future.cancelled():
            context.error = future.exception()
            context.receipt = None if context.error else future.result()
        self._after(context)

    def _after(self, context: SendContext) -> None:
        for place, hook in reversed(list(enumerate(self._hooks))):
            self._guard.call(place, hook.after_send, context)


def with_consume_hooks(
    listener: AsyncListener, around: Sequence[ConsumeHook | ListenerWrapper], group: str
) -> AsyncListener:
    """The listener with the wrappers, and the hooks around them."""
    hooks: list[ConsumeHook] = []
    for one in around:
        if isinstance(one, ListenerWrapper):
            listener = one.around(listener, group)
        else:
            hooks.append(one)
    if not hooks:
        return listener
    guard, backwards = _Guard(), list(reversed(list(enumerate(hooks))))

    async def call(messages: list[ReceivedMessage]) -> object:
        context = ConsumeContext(group, messages[0].queue, tuple(messages))
        for place, hook in enumerate(hooks):
            guard.call(place, hook.before_consume, context)
        try:
            answer: Any = await listener(messages)
            context.answer = answer
        except BaseException as error:
            context.error = error
            raise
        finally:
            for place, hook in backwards:
                guard.call(place, hook.after_consume, context)
        return answer

    return call


def message_filter(
    hooks: Sequence[FilterHook],
) -> Callable[[list[ReceivedMessage]], list[ReceivedMessage]] | None:
    """Keeps the messages that all hooks want; None: there are no hooks."""
    if not hooks:
        return None
    guard = _Guard()

    def keep(messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        for place, hook in enumerate(hooks):
            wants = hook.wants
            messages = [m for m in messages if guard.call(place, wants, m) is not False]
        return messages

    return keep

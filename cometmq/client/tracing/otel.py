"""Spans of OpenTelemetry around sends and listener calls. The context travels in the property
``TRACE_CONTEXT``, a W3C traceparent, where RocketMQ's clients keep it, too. Needs the optional
extra ``otel``: the API; the application brings the SDK and an exporter.

Names and attributes are those of OpenTelemetry's conventions for messaging, and for RocketMQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cometmq.client.hooks import ConsumeContext, SendContext
from cometmq.client.messages import SendReceipt
from cometmq.errors import CometError, ConfigInvalid
from cometmq.format.properties import KEYS, TAGS

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.trace import Link, Span, SpanKind, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    _MISSING = True
else:
    _MISSING = False
    _PROPAGATOR = TraceContextTextMapPropagator()

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

    from cometmq.client.received import ReceivedMessage

TRACE_CONTEXT = "TRACE_CONTEXT"
_TRACEPARENT = "traceparent"
_SYSTEM = "rocketmq"  # of the known systems the one whose conventions fit


def _tracer(provider: TracerProvider | None) -> Tracer:
    if _MISSING:
        raise ConfigInvalid("OpenTelemetry is not installed: pip install 'cometmq[otel]'.")
    return trace.get_tracer("cometmq.client", tracer_provider=provider)


class SendSpans:
    """A SendHook: a producer span for each send, whose context goes along with the message."""

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """None: the provider of the process. ConfigInvalid: OpenTelemetry is not installed."""
        self._tracer = _tracer(tracer_provider)

    def before_send(self, context: SendContext) -> None:
        """As SendHook says."""
        message = context.message
        attributes: dict[str, Any] = {
            **_attributes("send", message.topic),
            "messaging.message.body.size": len(message.body),
            **_rocketmq(message.tag, message.keys, message.sharding_key),
        }
        name = f"send {message.topic}"
        span = self._tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)
        context.values[self] = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        if _TRACEPARENT in carrier:
            message.properties[TRACE_CONTEXT] = carrier[_TRACEPARENT]

    def after_send(self, context: SendContext) -> None:
        """As SendHook says."""
        span: Span | None = context.values.get(self)
        if span is None:
            return
        if context.receipt is not None:
            span.set_attributes(_stored(context.receipt))
        if context.error is not None:
            _fail(span, context.error)
        span.end()


class ConsumeSpans:
    """A ConsumeHook: a consumer span for each listener call, current while it runs. The span of a
    single message continues the sender's trace; that of several is linked with all of theirs.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        """None: the provider of the process. ConfigInvalid: OpenTelemetry is not installed."""
        self._tracer = _tracer(tracer_provider)

    def before_consume(self, context: ConsumeContext) -> None:
        """As ConsumeHook says."""
        messages = context.messages
        first = messages[0]
        attributes = _attributes("process", first.topic)
        attributes["messaging.consumer.group.name"] = context.group
        attributes["messaging.destination.partition.id"] = str(context.queue)
        parent = None
        links: list[Link] = []
        if len(messages) == 1:
            parent = _context_of(first)
            keys = tuple(first.properties.get(KEYS, "").split())
            tag = first.properties.get(TAGS, "")
            attributes["messaging.message.id"] = first.unique_id or first.message_id
            attributes |= _rocketmq(tag, keys, first.sharding_key)
        else:
            attributes["messaging.batch.message_count"] = len(messages)
            links = list(map(Link, filter(lambda one: one.is_valid, map(_span_of, messages))))
        span = self._tracer.start_span(
            f"process {first.topic}",
            context=parent,
            kind=SpanKind.CONSUMER,
            attributes=attributes,
            links=links,
        )
        token = contexts.attach(trace.set_span_in_context(span))
        context.values[self] = span, token

    def after_consume(self, context: ConsumeContext) -> None:
        """As ConsumeHook says."""
        if self not in context.values:
            return
        span, token = context.values[self]
        contexts.detach(token)
        if context.error is not None:
            _fail(span, context.error)
        elif not context.is_success:
            span.set_status(StatusCode.ERROR, "not done: the messages come again")
        span.end()


def _attributes(operation: str, topic: str) -> dict[str, Any]:
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": topic,
    }


def _rocketmq(tag: str, keys: tuple[str, ...], sharding_key: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "messaging.rocketmq.message.tag": tag,
        "messaging.rocketmq.message.keys": keys,
        "messaging.rocketmq.message.group": sharding_key,
    }
    return {name: value for name, value in found.items() if value}


def _stored(receipt: SendReceipt) -> dict[str, Any]:
    return {
        "messaging.message.id": receipt.unique_id,
        "messaging.destination.partition.id": str(receipt.queue),
    }


def _context_of(message: ReceivedMessage) -> Any:
    """The sender's context; empty = the message has none that can be read."""
    carrier = {_TRACEPARENT: message.properties.get(TRACE_CONTEXT, "")}
    return _PROPAGATOR.extract(carrier, contexts.Context())


def _span_of(message: ReceivedMessage) -> Any:
    return trace.get_current_span(_context_of(message)).get_span_context()


def _fail(span: Span, error: BaseException) -> None:
    span.record_exception(error)
    name = error.name() if isinstance(error, CometError) else type(error).__name__
    span.set_attribute("error.type", name)
    span.set_status(StatusCode.ERROR, str(error))

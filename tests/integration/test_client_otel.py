"""Spans of OpenTelemetry around sends and listener calls, in memory."""

from __future__ import annotations

import builtins
import importlib
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from cometmq.client import (
    ConsumeResult,
    ConsumeSpans,
    Message,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
    SendSpans,
)
from cometmq.client.tracing import otel
from cometmq.errors import ConfigInvalid, PropertyReserved
from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.waiting import until

QUEUE = QueueRef("T", 0, "g1")


class Spans:
    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def of(self, kind: SpanKind) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.kind is kind]


def producer_options(spans: Spans) -> ProducerOptions:
    return ProducerOptions(hooks=(SendSpans(spans.provider),))


def consumer_options(spans: Spans, **changes: Any) -> PushConsumerOptions:
    return PushConsumerOptions(
        consume_hooks=(ConsumeSpans(spans.provider),),
        rebalance_delay_ms=1,
        retry_in_place=True,
        redeliver_backoff_ms=1,
        **changes,
    )


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_trace_goes_from_the_sender_through_the_listener(is_async: bool) -> None:
    spans, tries = Spans(), list[trace.SpanContext]()

    def work(messages: Sequence[ReceivedMessage]) -> ConsumeResult:
        tries.append(trace.get_current_span().get_span_context())
        if len(tries) == 1:
            raise ValueError("mine")
        return ConsumeResult.LATER if len(tries) == 2 else ConsumeResult.SUCCESS

    async def work_async(messages: list[ReceivedMessage]) -> ConsumeResult:
        return work(messages)

    tracer = spans.provider.get_tracer("test")
    async with fake_cluster() as (namesrv, _):
        async with Producer(namesrv.address, options=producer_options(spans)) as producer:
            with tracer.start_as_current_span("request") as request:
                message = Message("T", b"12", tag="a", keys=("k",), queue=QUEUE)
                receipt = await producer.send_and_wait(message)
        listener = work_async if is_async else work
        options = consumer_options(spans)
        async with PushConsumer(namesrv.address, "g", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: len(spans.of(SpanKind.CONSUMER)) == 3)
    [sent] = spans.of(SpanKind.PRODUCER)
    assert sent.name == "send T"
    assert sent.parent is not None
    assert sent.parent.span_id == request.get_span_context().span_id
    assert sent.attributes is not None
    assert sent.attributes["messaging.message.id"] == receipt.unique_id
    assert sent.attributes["messaging.rocketmq.message.keys"] == ("k",)
    assert sent.attributes["messaging.message.body.size"] == 2
    calls = spans.of(SpanKind.CONSUMER)
    for call, seen in zip(calls, tries, strict=True):
        assert call.parent is not None
        assert sent.context is not None
        assert call.parent.span_id == sent.context.span_id, "the message carries the context"
        assert call.context is not None
        assert seen.span_id == call.context.span_id, "it is current in the listener"
        assert call.context.trace_id == request.get_span_context().trace_id
        assert call.attributes is not None
        assert call.attributes["messaging.consumer.group.name"] == "g"
        assert call.attributes["messaging.message.id"] == receipt.unique_id
    failed, later, done = calls
    assert [c.status.status_code for c in calls] == [
        StatusCode.ERROR,
        StatusCode.ERROR,
        StatusCode.UNSET,
    ]
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "ValueError"
    assert [event.name for event in failed.events] == ["exception"]
    assert (later.events, done.name) == ((), "process T")


async def test_a_call_with_several_messages_is_linked_with_their_sends() -> None:
    spans = Spans()
    async with fake_cluster() as (namesrv, _):
        async with Producer(namesrv.address, options=producer_options(spans)) as producer:
            for n in range(3):
                await producer.send_and_wait(Message("T", b"%d" % n, queue=QUEUE))
        async with Producer(namesrv.address) as plain:  # one without a context, one with nonsense
            await plain.send_and_wait(Message("T", b"3", queue=QUEUE))
            bad = {otel.TRACE_CONTEXT: "00-zz"}
            await plain.send_and_wait(Message("T", b"4", queue=QUEUE, properties=bad))

        async def listener(messages: list[ReceivedMessage]) -> None:
            return None

        options = consumer_options(spans, batch_count=16)
        async with PushConsumer(namesrv.address, "g", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: spans.of(SpanKind.CONSUMER))
    [call] = spans.of(SpanKind.CONSUMER)
    sends = [span.context.span_id for span in spans.of(SpanKind.PRODUCER) if span.context]
    assert [link.context.span_id for link in call.links] == sends
    assert call.attributes is not None
    assert call.attributes["messaging.batch.message_count"] == 5


async def test_a_send_that_fails_has_a_span_that_failed() -> None:
    spans = Spans()
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address, options=producer_options(spans)) as producer,
    ):
        broker.refuse = [PropertyReserved("no")]
        with pytest.raises(PropertyReserved):
            await producer.send_and_wait(Message("T", b"."))
    [sent] = spans.of(SpanKind.PRODUCER)
    assert sent.status.status_code is StatusCode.ERROR
    assert sent.attributes is not None
    assert sent.attributes["error.type"] == "PROPERTY_RESERVED"


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ImportError(name)
        return load(name, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without)
        importlib.reload(otel)
        for hook in (otel.SendSpans, otel.ConsumeSpans):
            with pytest.raises(ConfigInvalid, match=r"cometmq\[otel\]"):
                hook()
    importlib.reload(otel)

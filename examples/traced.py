"""A message that is traced: by spans of OpenTelemetry, and by records in RocketMQ's form.

The context travels with the message, so the span of the listener's call continues the trace of the
send. The records are for `cometmq message trace`, which shows them on one line of time.

pip install 'cometmq[otel]' opentelemetry-sdk
cometmq local up --option trace_topic_enable=true
cometmq topic create Parcels
python -m examples.traced
"""

import asyncio

from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

from cometmq.client import (
    ConsumeSpans,
    Message,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    SendSpans,
)

TOPIC, GROUP = "Parcels", "Delivery"

delivered = asyncio.Event()


def line(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"trace {span.context.trace_id:032x}: {span.name}\n"


async def deliver(messages: list[ReceivedMessage]) -> None:
    delivered.set()


async def main() -> None:
    provider = TracerProvider()  # yours has an exporter to where your traces are kept
    provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=line)))
    trace.set_tracer_provider(provider)
    producing = ProducerOptions(hooks=(SendSpans(),), trace_enable=True)
    consuming = PushConsumerOptions(consume_hooks=(ConsumeSpans(),), trace_enable=True)
    async with (
        Producer(options=producing) as producer,
        PushConsumer(group=GROUP, listener=deliver, options=consuming) as consumer,
    ):
        await consumer.subscribe(TOPIC)
        receipt = await producer.send_and_wait(Message(TOPIC, b"a book"))
        await delivered.wait()
    print(f"cometmq message trace {receipt.unique_id}")  # leaving the block has sent the records


if __name__ == "__main__":
    asyncio.run(main())

"""The bare loops move what the clients move with their default options."""

from __future__ import annotations

import pytest

from bench import stage
from cometmq.client import Message, ProducerOptions, PushConsumerOptions
from cometmq.client.encoder import RecordEncoder
from cometmq.clock import SystemClock
from cometmq.model import FlushMode
from cometmq.v1 import broker_pb2

OPENED = broker_pb2.SendStreamOpened(
    born_host=bytes(4), store_host=bytes(4), body_max_bytes=1 << 22, batch_max_bytes=1 << 22
)


@pytest.mark.parametrize("body_bytes", stage.BODY_SIZES)
def test_the_assumed_record_is_the_one_that_the_producer_makes(body_bytes: int) -> None:
    topic = stage.topic_name(body_bytes, FlushMode.ASYNC)
    message = Message(topic, bytes(body_bytes))
    encoder = RecordEncoder(OPENED, SystemClock())
    encoder.begin_batch(1)
    middle = encoder.form(topic).middle(message)
    size = encoder.fixed_bytes + body_bytes + len(middle)
    record = b"".join(encoder.pieces(size, 0, message, middle, 1))
    assert len(record) == stage.record_bytes(body_bytes)


@pytest.mark.parametrize("body_bytes", stage.BODY_SIZES)
def test_chunks_are_as_full_as_the_options_allow(body_bytes: int) -> None:
    record = stage.record_bytes(body_bytes)
    sent, pulled = stage.produce_chunk(body_bytes), stage.consume_chunk(body_bytes)
    producer, consumer = ProducerOptions(), PushConsumerOptions()
    assert sent.window == producer.in_flight_max
    for chunk, bytes_max, count_max in (
        (sent, producer.batch_bytes_max, producer.batch_count_max),
        (pulled, consumer.pull_bytes_max, consumer.pull_count_max),
    ):
        assert chunk.chunk_bytes == chunk.messages * record <= bytes_max
        assert chunk.messages <= count_max
        assert chunk.messages == count_max or chunk.chunk_bytes + record > bytes_max

from __future__ import annotations

import random
from typing import Any

import pytest

from cometmq.errors import BatchTooLarge, BodyTooLarge, CometError, InvalidRequest
from cometmq.format import record
from cometmq.format.batch import BatchLimits, SegmentClaim, stamp
from cometmq.messaging.topics import TopicTable
from cometmq.model import TopicConfig
from cometmq.v1 import broker_pb2 as pb
from services.broker.sending.structured import StructuredBatch, StructuredEncoder
from tests.support.stores.small_stores import HOST, START_MS, WallClock

LIMITS = BatchLimits(body_bytes_max=1_000, batch_bytes_max=5_000, batch_count_max=20)
V6 = record.host_bytes("fe80::1", 7)


def encode(
    *messages: pb.OutgoingMessage, host: bytes = HOST, queues: int = 8, new_queues: int = 4
) -> StructuredBatch:
    topics = TopicTable()
    topics.put(TopicConfig("T", queues, queues))
    encoder = StructuredEncoder(topics, new_queues, HOST, LIMITS, WallClock(), random.Random(1))
    return encoder.encode(messages, host)


def message(queue_id: int | None = 0, **fields: Any) -> pb.OutgoingMessage:
    return pb.OutgoingMessage(**{"topic": "T", "queue_id": queue_id, "body": b"x", **fields})


def test_messages_become_runs_and_keep_their_order_within_a_queue() -> None:
    queues = [2, 0, 2, 1, 0, 2]
    batch = encode(*(message(q, body=b"%d" % i) for i, q in enumerate(queues)))
    assert [claim[1:3] for claim in batch.claims] == [(2, 3), (0, 2), (1, 1)]
    records = record.decode_all(batch.records)
    assert [r.body for r in records] == [b"0", b"2", b"5", b"1", b"4", b"3"]
    for index, (segment, place, byte) in enumerate(batch.order):
        assert record.decode(batch.records, byte).body == b"%d" % index
        assert batch.claims[segment][1] == queues[index]
        assert place == queues[:index].count(queues[index])


def test_a_topic_without_queues_for_writers_is_left_to_the_check() -> None:
    assert encode(message(None), queues=0).claims[0][1] == 0


@pytest.mark.parametrize("host", [HOST, V6])
def test_what_it_makes_passes_the_check_of_batches(host: bytes) -> None:
    full = {"tag": "t", "keys": ["a", "b"], "properties": {"k": "v"}, "flag": 3, "born_time_ms": 9}
    batch = encode(message(0, **full), message(1), host=host)
    claims = [SegmentClaim(t.encode(), q, n, 0) for t, q, n, *_ in batch.claims]
    stamp(
        batch.records, claims, log_offset=0, store_time_ms=1,
        born_host=host, store_host=HOST, limits=LIMITS,
    )  # fmt: skip
    first, second = record.decode_all(batch.records)
    assert (first.tag, first.keys, first.properties["k"]) == ("t", ("a", "b"), "v")
    assert (first.flag, first.born_time_ms, second.born_time_ms) == (3, 9, START_MS)
    assert len(first.unique_id) == 34
    assert first.unique_id != second.unique_id


def test_a_unique_id_of_the_users_is_kept() -> None:
    batch = encode(message(properties={"UNIQ_KEY": "mine"}))
    assert record.decode(batch.records).unique_id == "mine"


def test_the_queue_is_chosen_once_for_each_topic_of_a_call() -> None:
    batch = encode(*[message(None)] * 5, *[message(None, topic="new")] * 5)
    assert [(claim.topic, claim.record_count) for claim in batch.claims] == [("T", 5), ("new", 5)]


@pytest.mark.parametrize("queues", [1, 2, 3])
def test_chosen_queues_exist(queues: int) -> None:
    for topic in ("T", "new"):
        for _ in range(20):
            batch = encode(message(None, topic=topic), queues=queues, new_queues=queues)
            assert batch.claims[0][1] < queues


def test_limits() -> None:
    encode(message(body=b"x" * 1_000))
    with pytest.raises(BodyTooLarge):
        encode(message(body=b"x" * 1_001))
    with pytest.raises(BatchTooLarge):
        encode(*[message(body=b"x" * 1_000)] * 5)
    for count in (0, 21):
        with pytest.raises(InvalidRequest):
            encode(*[message()] * count)


@pytest.mark.parametrize(
    "bad",
    [
        {"tag": "a|b"},
        {"tag": "a\n"},
        {"keys": ["a b"]},
        {"keys": [""]},
        {"properties": {"KEYS": "x"}},
        {"properties": {"k": "v" * 32_767}},
        {"topic": "a" * 128},
        {"topic": ""},
        {"body": b"x" * 1_001},
    ],
)
def test_an_error_names_the_message(bad: dict[str, Any]) -> None:
    with pytest.raises(CometError) as refused:
        encode(message(), message(), message(**bad))
    assert refused.value.segment == 2


def test_an_error_of_a_segment_is_about_its_first_message() -> None:
    batch = encode(message(2), message(0), message(2))
    assert [batch.first_message_of(s) for s in (0, 1, None)] == [0, 1, None]

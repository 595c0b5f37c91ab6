"""Trace records of producers and consumers, read back from the trace topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import (
    ConsumeResult,
    Message,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    SendReceipt,
    SimpleConsumer,
    SimpleConsumerOptions,
    TransactionProducer,
    TransactionState,
)
from cometmq.client.tracing import dispatcher
from cometmq.errors import ConfigInvalid, SendTimeout
from cometmq.format import trace
from cometmq.format.ids import parse_message_id
from cometmq.format.trace import (
    TRACE_TOPIC,
    EndTransaction,
    Pub,
    Recall,
    SubAfter,
    SubBefore,
    TraceRecord,
)
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.waiting import until

TRACED: dict[str, Any] = {"trace_enable": True}


@asynccontextmanager
async def cluster(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[str, LiveBroker]]:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(
            tmp_path, namesrv=(namesrv,), **{"trace_topic_enable": True, **options}
        ) as broker,
    ):
        await broker.put_topic("T", 2)
        yield namesrv, broker


async def records_in(broker: LiveBroker, topic: str = TRACE_TOPIC) -> list[TraceRecord]:
    messages = await broker.read_queue(topic, 0)
    for message in messages:
        for record in trace.decode(message.plain_body.decode()):
            assert record.message_id in message.keys, "it is found by the id"
    return [record for m in messages for record in trace.decode(m.plain_body.decode())]


async def test_a_message_is_traced_from_its_send_to_the_end_of_its_calls(tmp_path: Path) -> None:
    verdicts = [ConsumeResult.LATER, None]

    async def listener(messages: list[ReceivedMessage]) -> ConsumeResult | None:
        if not verdicts:
            raise ValueError("no more")
        return verdicts.pop(0)

    async with cluster(tmp_path) as (namesrv, broker):
        options = ProducerOptions(**TRACED)
        async with Producer(namesrv, options=options) as producer:
            message = Message("T", b"12345", tag="a", keys=("k1", "k2"), sharding_key="s")
            receipt = await producer.send_and_wait(message)
            later = await producer.send_and_wait(Message("T", b"", delay_level=5))
            timed = await producer.send_and_wait(Message("T", b"", delay_ms=3_600_000))
            assert await producer.recall(timed.recall_handle)
        push = PushConsumerOptions(
            **TRACED,
            rebalance_delay_ms=1,
            retry_in_place=True,
            redeliver_backoff_ms=1,
            concurrency=1,
        )
        async with PushConsumer(namesrv, "G", listener, options=push) as consumer:
            await consumer.subscribe("T", "a")
            await until(lambda: not verdicts)
        pull = PullConsumerOptions(**TRACED)
        async with PullConsumer(namesrv, "P", options=pull) as polling:
            await polling.assign([receipt.queue])
            assert await polling.poll(20_000)
        assert producer.traces_lost == consumer.traces_lost == polling.traces_lost == 0
        records = await records_in(broker)
        sent = {r.message_id: r for r in records if isinstance(r, Pub)}
        pub, delayed = sent[receipt.unique_id], sent[later.unique_id]
        assert (pub.topic, pub.tags, pub.keys, pub.body_bytes) == ("T", "a", "k1 k2", 5)
        assert (pub.is_success, pub.message_type) == (True, trace.ORDER)
        assert (delayed.topic, delayed.message_type) == ("T", trace.DELAY)
        assert sent[timed.unique_id].message_type == trace.DELAY
        [recall] = [r for r in records if isinstance(r, Recall)]
        assert (recall.message_id, recall.topic, recall.is_success) == (timed.unique_id, "T", True)
        place = parse_message_id(pub.offset_message_id)
        assert place.log_offset == parse_message_id(receipt.message_id).log_offset
        assert abs(pub.time_ms + pub.cost_ms - receipt.store_time_ms) < 60_000
        of_g = [r for r in records if isinstance(r, SubBefore | SubAfter) and r.group == "G"]
        assert [type(r) for r in of_g] == [SubBefore, SubAfter] * 2
        first, failed, second, done = of_g
        assert isinstance(first, SubBefore)
        assert isinstance(second, SubBefore)
        assert isinstance(failed, SubAfter)
        assert isinstance(done, SubAfter)
        assert first.request_id == failed.request_id != second.request_id == done.request_id
        assert (first.retry_times, second.retry_times) == (0, 1)
        assert (failed.is_success, failed.code) == (False, trace.FAILED)
        assert (done.is_success, done.code) == (True, trace.SUCCESS)
        of_p = [r for r in records if isinstance(r, SubBefore | SubAfter) and r.group == "P"]
        assert [type(r) for r in of_p] == [SubBefore, SubAfter]


async def test_sampling_and_marks_choose_the_same_messages_at_both_ends(tmp_path: Path) -> None:
    seen = 0

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal seen
        seen += len(messages)

    def marked(number: int) -> dict[str, str]:
        return {"TRACE_ON": "true"} if number == 5 else {"TRACE_ON": "false"} if number < 5 else {}

    async with cluster(tmp_path) as (namesrv, broker):
        await broker.put_topic("Mine", 1)
        chosen: dict[str, Any] = {**TRACED, "trace_sampling": 10, "trace_topic": "Mine"}
        async with Producer(namesrv, options=ProducerOptions(**chosen)) as producer:
            receipts: list[SendReceipt] = []
            for count in (40, 60):  # with marks among them, and without
                receipts += await producer.send_many_and_wait(
                    Message("T", b"%d" % n, properties=marked(n) if count == 40 else None)
                    for n in range(count)
                )
        options = PushConsumerOptions(**chosen, rebalance_delay_ms=1, batch_count=32)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: seen == 100)
        records = await records_in(broker, "Mine")
    ids = [receipt.unique_id for receipt in receipts]
    sent = {r.message_id for r in records if isinstance(r, Pub)}
    assert {r.message_id for r in records if isinstance(r, SubBefore)} == sent
    assert {r.message_id for r in records if isinstance(r, SubAfter)} == sent
    assert ids[5] in sent
    assert not sent & set(ids[:5])
    assert 6 <= len(sent) <= 12
    assert sum(message_id in ids[40:] for message_id in sent) == 6, "one of ten of the rest"


async def test_a_heavy_load_and_a_quick_stop_lose_none_in_several_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "CLOSE_S_MAX", 60.0)  # a busy machine may need them
    count, clients = 3_000, 3
    options = ProducerOptions(**TRACED)
    async with cluster(tmp_path) as (namesrv, broker):

        async def send() -> int:
            async with Producer(namesrv, options=options) as producer:
                await producer.send_many(Message("T", b".", keys=("k",)) for _ in range(count))
            return producer.traces_lost

        assert await asyncio.gather(*(send() for _ in range(clients))) == [0] * clients
        records = await records_in(broker)
    ids = [record.message_id for record in records if isinstance(record, Pub)]
    assert len(set(ids)) == len(ids) == count * clients


async def test_what_the_buffer_cannot_take_is_counted_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ProducerOptions(**TRACED, trace_buffer_max=100)
    async with cluster(tmp_path) as (namesrv, broker):
        async with Producer(namesrv, options=options) as producer:
            receipts = await producer.send_many_and_wait(Message("T", b".") for _ in range(1_000))
            receipts.raise_first_error()
        stored = len(await records_in(broker))
        assert 100 <= stored < 1_000
        assert producer.traces_lost == 1_000 - stored
    told = [r for r in caplog.records if r.getMessage().startswith("trace records lost")]
    assert sum(record.fields["count"] for record in told) == producer.traces_lost  # type: ignore[attr-defined]


async def test_ends_of_transactions_are_traced_and_so_are_answers_to_checks(tmp_path: Path) -> None:
    checked: list[ReceivedMessage] = []

    def check(message: ReceivedMessage) -> TransactionState:
        checked.append(message)
        return TransactionState.ROLLBACK

    quick = {"transaction_time_out": 0, "transaction_check_interval": 1_000}
    async with cluster(tmp_path, **quick) as (namesrv, broker):
        options = ProducerOptions(**TRACED)
        async with TransactionProducer(namesrv, "G", check, options=options) as producer:
            async with producer.transaction() as one:
                committed = await one.send(Message("T", b"1", keys=("k",)))
            left = producer.transaction()
            asked = await left.send(Message("T", b"2"))
            left.leave_open()
            await until(lambda: checked)
            await until(lambda: not len(broker.state.halves))
        records = await records_in(broker)
    halves = {r.message_id: r for r in records if isinstance(r, Pub)}
    assert {r.message_type for r in halves.values()} == {trace.HALF}
    assert halves[committed.unique_id].topic == "T"
    ends = {r.message_id: r for r in records if isinstance(r, EndTransaction)}
    end, answer = ends[committed.unique_id], ends[asked.unique_id]
    assert (end.group, end.topic, end.state, end.from_check) == ("G", "T", "COMMIT_MESSAGE", False)
    assert (answer.state, answer.from_check) == ("ROLLBACK_MESSAGE", True)


async def test_a_received_message_is_traced_until_it_is_acknowledged(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, broker):
        async with Producer(namesrv) as producer:
            sent = [await producer.send_and_wait(Message("T", b"%d" % n)) for n in range(2)]
        options = SimpleConsumerOptions(**TRACED)
        async with SimpleConsumer(namesrv, "S", options=options) as consumer:
            await consumer.subscribe("T")
            got: list[ReceivedMessage] = []
            while len(got) < 2:
                got += await consumer.receive(wait_ms=100)
            await consumer.ack(next(m for m in got if m.unique_id == sent[0].unique_id))
        records = await records_in(broker)
    begun = {r.message_id: r for r in records if isinstance(r, SubBefore)}
    [end] = [r for r in records if isinstance(r, SubAfter)]
    assert begun.keys() == {receipt.unique_id for receipt in sent}
    assert (end.message_id, end.group, end.is_success) == (sent[0].unique_id, "S", True)
    assert end.request_id == begun[end.message_id].request_id


async def test_without_a_trace_topic_messages_go_and_the_stop_waits_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatcher, "CLOSE_S_MAX", 0.2)
    async with cluster(tmp_path, trace_topic_enable=False) as (namesrv, _):
        async with Producer(namesrv, options=ProducerOptions(**TRACED)) as producer:
            await producer.send_and_wait(Message("T", b"."))
        assert producer.traces_lost == 1
    assert any(record.getMessage().startswith("trace records lost") for record in caplog.records)


async def test_a_send_that_fails_is_traced_and_so_are_hostile_keys() -> None:
    options = ProducerOptions(**TRACED, delivery_timeout_ms=300, retry_backoff_ms=1)
    async with fake_cluster() as (namesrv, [broker]):
        await namesrv.put(TRACE_TOPIC, broker, queues=1)
        broker.answering.clear()
        async with Producer(namesrv.address, options=options) as producer:
            with pytest.raises(SendTimeout):
                await producer.send_and_wait(Message("T", b"."))
            broker.answering.set()
            keys = ("k" * 3_000, "Pub", "ключ", "a\x7fb")
            await producer.send_and_wait(Message("T", b"Pub\x01\x02", keys=keys))
            many = [Message("T", b".", keys=(f"{n:03}" * 200,)) for n in range(90)]
            await producer.send_many_and_wait(many)
    bodies = [record.plain_body.decode() for record in broker.stored(TRACE_TOPIC)]
    records = [record for body in bodies for record in trace.decode(body)]
    assert producer.traces_lost == 0
    assert len(bodies) > 1, "keys have room"
    failed, hostile = records[:2]
    assert isinstance(failed, Pub)
    assert isinstance(hostile, Pub)
    assert (failed.is_success, failed.offset_message_id, failed.topic) == (False, "", "T")
    assert hostile.keys == " ".join(keys)
    assert len(records) == 92


@pytest.mark.parametrize("changes", [{"trace_enable": 1}, {"trace_topic": ""}, {"trace_topic": 7}])
def test_bad_options_are_refused(changes: dict[str, Any]) -> None:
    for kind in (ProducerOptions, PushConsumerOptions, PullConsumerOptions):
        with pytest.raises(ConfigInvalid, match="trace_"):
            kind(**changes)

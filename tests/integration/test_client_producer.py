"""The producer against a broker that does as ordered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cometmq.client import (
    Compression,
    Message,
    Producer,
    ProducerOptions,
    QueueRef,
    SendReceipt,
    SendStatus,
    at_random,
    by_hash,
)
from cometmq.client.sending import latency
from cometmq.errors import (
    BodyTooLarge,
    BrokerDraining,
    ClientClosed,
    FlowControl,
    InternalError,
    InvalidRequest,
    NoPermission,
    PeerUnavailable,
    PropertyReserved,
    QueueNotFound,
    SendTimeout,
    TopicNotFound,
)
from cometmq.format.compression import SYS_FLAG_COMPRESSED
from cometmq.v1 import common_pb2
from cometmq.v1.broker_pb2 import SEND_STATUS_FLUSH_DISK_TIMEOUT, RequestMemory, SendBatchResult
from tests.support.cluster.fake_cluster import FakeBroker, FakeNameServer, fake_cluster
from tests.support.waiting import until


@asynccontextmanager
async def sending(
    *names: str, **changes: Any
) -> AsyncIterator[tuple[Producer, FakeNameServer, list[FakeBroker]]]:
    options = ProducerOptions(**{"retry_backoff_ms": 5, "retry_backoff_max_ms": 20, **changes})
    async with (
        fake_cluster(*names) as (namesrv, brokers),
        Producer(namesrv.address, options=options) as producer,
    ):
        yield producer, namesrv, brokers


async def send_all(
    producer: Producer, count: int, **fields: Any
) -> list[asyncio.Future[SendReceipt]]:
    return [await producer.send(Message("T", b"%d" % n, **fields)) for n in range(count)]


def numbers(broker: FakeBroker) -> list[int]:
    return [int(body) for body in broker.bodies("T")]


async def test_a_message_arrives_as_it_was_sent() -> None:
    async with sending() as (producer, _, [broker]):
        message = Message("T", b"hello", "TagA", ("k1", "k2"), {"colour": "blue"}, flag=7)
        receipt = await producer.send_and_wait(message)
        [record] = broker.stored("T")
    assert (record.body, record.tag, record.flag) == (b"hello", "TagA", 7)
    assert (record.keys, record.properties["colour"]) == (("k1", "k2"), "blue")
    assert receipt.unique_id == record.unique_id
    assert receipt.message_id == f"g1/{record.log_offset}"
    assert receipt.queue == QueueRef("T", record.queue_id, "g1")
    assert receipt.queue_offset == record.queue_offset


async def test_a_large_body_is_stored_compressed() -> None:
    large, random_bytes = b"a line of a log\n" * 1_000, random.Random(1).randbytes(5_000)
    for how in Compression:
        async with sending(compression=how) as (producer, _, [broker]):
            for body in (bytes(4096), large, random_bytes):
                message = Message("T", body, delay_level=0, queue=QueueRef("T", 0, "g1"))
                await producer.send_and_wait(message)
            small, packed, loose = broker.stored("T")
        assert (small.sys_flag, loose.sys_flag) == (0, 0), "not above the limit, or no smaller"
        assert packed.sys_flag == SYS_FLAG_COMPRESSED | how.value << 8
        assert len(packed.body) < 1_000
        assert [r.plain_body for r in (small, packed, loose)] == [bytes(4096), large, random_bytes]


async def test_every_receipt_names_its_own_message() -> None:
    async with sending() as (producer, _, [broker]):
        futures = await send_all(producer, 3000, tag="A")
        receipts = await asyncio.gather(*futures)
        by_id = {f"g1/{record.log_offset}": record for record in broker.stored("T")}
    for number, receipt in enumerate(receipts):
        record = by_id[receipt.message_id]
        assert record.body == b"%d" % number
        assert record.unique_id == receipt.unique_id
        assert (record.queue_id, record.queue_offset) == (
            receipt.queue.queue_id,
            receipt.queue_offset,
        )


async def test_unique_ids_count_without_gaps_in_the_order_of_sending() -> None:
    async with sending() as (producer, _, [broker]):
        await asyncio.gather(*await send_all(producer, 2500))
        ids = [record.unique_id for record in broker.stored("T")]
    assert len({unique_id[:26] for unique_id in ids}) == 1
    assert [int(unique_id[26:], 16) for unique_id in ids] == list(range(2500))


async def test_batches_hold_what_one_turn_of_the_loop_sent() -> None:
    async with sending() as (producer, _, [broker]):
        await producer.send_and_wait(Message("T", b"first"))
        await asyncio.gather(*await send_all(producer, 100))
        assert [sum(s.count for s in b.segments) for b in broker.batches] == [1, 100]


async def test_single_messages_take_turns_between_all_queues() -> None:
    async with sending("g1", "g2") as (producer, _, brokers):
        for number in range(16):
            await producer.send_and_wait(Message("T", b"%d" % number))
        counts = [len(broker.queues[("T", n)]) for broker in brokers for n in range(4)]
    assert sorted(counts)[0] >= 1
    assert sum(counts) == 16


@pytest.mark.parametrize("largest", [100, 3000])
async def test_under_load_a_batch_is_one_run_and_all_queues_get_their_share(
    largest: int, rng: random.Random
) -> None:
    async with sending(batch_bytes_max=16_384, buffer_bytes_max=65_536) as (producer, _, [broker]):
        await producer.send_and_wait(Message("T", b"opens the stream"))
        for _ in range(2000):
            await producer.send(Message("T", bytes(rng.randint(100, largest))))
    counts = [len(broker.queues["T", n]) for n in range(4)]
    assert min(counts) > 0.5 * max(counts)
    segments = [len(batch.segments) for batch in broker.batches]
    assert sum(segments) < 3 * len(segments)


async def test_no_more_batches_are_in_flight_than_allowed() -> None:
    async with sending(batch_count_max=1, in_flight_max=3) as (producer, _, [broker]):
        broker.answering.clear()
        futures = await send_all(producer, 10)
        await until(lambda: len(broker.batches) == 3)
        broker.answering.set()
        await asyncio.gather(*futures)
    assert broker.most_unanswered <= 3


async def test_options_are_lowered_to_what_the_broker_remembers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with sending(batch_count_max=1, in_flight_max=3) as (producer, _, [broker]):
        broker.memory = RequestMemory(batches_max=2, batches_in_flight_max=2, sender_ms=100)
        await producer.send_and_wait(Message("T", b"opens the stream"))
        broker.answering.clear()
        futures = await send_all(producer, 10)
        await asyncio.wait(futures)  # after 100 ms, not after 30 s
        assert all(isinstance(future.exception(), SendTimeout) for future in futures)
        assert len(broker.batches) == 1 + 2
        broker.answering.set()
    lowered = [r for r in caplog.records if r.getMessage().startswith("an option is lowered")]
    assert [r.fields["option"] for r in lowered] == ["in_flight_max", "delivery_timeout_ms"]  # type: ignore[attr-defined]


async def test_a_broker_that_remembers_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    async with sending() as (producer, _, [broker]):
        broker.memory = RequestMemory()
        await producer.send_and_wait(Message("T", b"0"))
    assert any("message_dedup_enable" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("limit", [{"buffer_bytes_max": 1024}, {"buffer_count_max": 1}])
async def test_a_full_buffer_makes_senders_wait(limit: dict[str, int]) -> None:
    async with sending(**limit) as (producer, _, [broker]):
        await producer.send_and_wait(Message("T", b"opens the stream"))
        broker.answering.clear()
        futures = [await producer.send(Message("T", bytes(2000)))]
        waiting = asyncio.create_task(producer.send(Message("T", b"later")))
        await until(lambda: len(broker.batches) == 2)
        assert not waiting.done()
        broker.answering.set()
        futures.append(await waiting)
        await asyncio.gather(*futures)


async def test_a_broken_stream_is_answered_by_the_same_bytes_in_the_same_order() -> None:
    async with sending(batch_count_max=10) as (producer, _, [broker]):
        broker.answering.clear()
        futures = await send_all(producer, 50)
        await until(lambda: len(broker.batches) == 5)
        before = [batch.records for batch in broker.batches]
        broker.queues.clear()
        broker.batches.clear()
        broker.break_streams()
        await until(lambda: broker.streams == 2)
        broker.answering.set()
        await asyncio.gather(*futures)
        assert [batch.records for batch in broker.batches] == before
        assert [batch.batch_id for batch in broker.batches] == [1, 2, 3, 4, 5]
        assert numbers(broker) == list(range(50))
    assert broker.streams == 2


async def test_a_lost_answer_makes_a_duplicate_and_no_loss() -> None:
    async with sending() as (producer, _, [broker]):
        broker.lose_answers = 1
        await producer.send_and_wait(Message("T", b"0"))
        first, second = broker.stored("T")
    assert (first.body, first.unique_id) == (second.body, second.unique_id)


@pytest.mark.parametrize("error", [FlowControl("full"), BrokerDraining("stopping")])
async def test_what_is_refused_for_now_is_sent_again(error: Exception) -> None:
    async with sending() as (producer, _, [broker]):
        broker.refuse = [error, error]  # type: ignore[list-item]
        await producer.send_and_wait(Message("T", b"0"))
        assert len({batch.records for batch in broker.batches}) == 1
        assert len(broker.batches) == 3


async def test_a_refused_segment_fails_alone() -> None:
    async with sending(batch_bytes_max=1 << 20) as (producer, _, [broker]):
        await producer.send_and_wait(Message("T", b"opens the stream"))
        queues = [QueueRef("T", n) for n in (0, 1, 2)]
        broker.refuse = [TopicNotFound("gone", segment=1)]
        futures = [
            await producer.send(Message("T", b"%d" % queue.queue_id, queue=queue))
            for queue in queues
            for _ in range(2)
        ]
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert [isinstance(result, TopicNotFound) for result in results] == [0, 0, 1, 1, 0, 0]
    good = [r for r in results if isinstance(r, SendReceipt)]
    assert {r.message_id for r in good} == {
        f"g1/{record.log_offset}" for record in broker.stored("T")[1:]
    }


async def test_a_batch_refused_for_good_fails() -> None:
    async with sending() as (producer, _, [broker]):
        broker.refuse = [PropertyReserved("no")]
        with pytest.raises(PropertyReserved):
            await producer.send_and_wait(Message("T", b"0"))
        await producer.send_and_wait(Message("T", b"1"))
    assert numbers(broker) == [1]


async def test_without_an_answer_a_message_times_out() -> None:
    async with sending(delivery_timeout_ms=100) as (producer, _, [broker]):
        await producer.send_and_wait(Message("T", b"opens the stream"))
        broker.answering.clear()
        with pytest.raises(SendTimeout):
            await producer.send_and_wait(Message("T", b"0"))
        broker.answering.set()


async def test_a_receipt_tells_that_the_disk_was_late_and_nothing_is_sent_again() -> None:
    async with sending() as (producer, _, [broker]):
        assert (await producer.send_and_wait(Message("T", b"0"))).status is SendStatus.SEND_OK
        broker.status = SEND_STATUS_FLUSH_DISK_TIMEOUT
        late = await producer.send_and_wait(Message("T", b"1"))
        assert late.status is SendStatus.FLUSH_DISK_TIMEOUT
    assert sum(map(len, broker.queues.values())) == 2


async def test_a_silent_broker_is_given_up_and_asked_again() -> None:
    async with sending(answer_timeout_ms=100) as (producer, _, [broker]):
        broker.answering.clear()
        future = await producer.send(Message("T", b"0"))
        await until(lambda: broker.streams >= 2)
        broker.answering.set()
        await future


async def test_a_retry_always_has_time_left() -> None:
    """A broker that says nothing is given up early enough, whatever a single try may take."""
    limits = {"request_timeout_ms": 600_000, "answer_timeout_ms": 86_400_000}
    async with sending(delivery_timeout_ms=1_500, **limits) as (producer, _, [broker]):
        broker.answering.clear()
        future = await producer.send(Message("T", b"0"))
        await until(lambda: broker.streams >= 2)
        broker.answering.set()
        assert (await future).queue_offset >= 0


async def test_an_answer_that_does_not_fit_fails_its_batch_and_the_next_stream_goes_on() -> None:
    async with sending() as (producer, _, [broker]):
        store, broker._store = broker._store, lambda request: SendBatchResult(batch_id=1)  # type: ignore[method-assign]
        with pytest.raises(InternalError):
            await producer.send_and_wait(Message("T", b"0"))
        broker._store = store  # type: ignore[method-assign]
        await producer.send_and_wait(Message("T", b"1"))
    assert broker.streams == 2


async def test_a_broker_of_another_group_gets_nothing() -> None:
    async with sending(delivery_timeout_ms=100) as (producer, namesrv, [broker]):
        await namesrv.put("T", broker)
        broker.name = "somebody else"
        with pytest.raises(PeerUnavailable):
            await producer.send(Message("T", b"0"))
        broker.name = "g1"
        await until(lambda: broker.streams >= 2)
        await producer.send_and_wait(Message("T", b"1"))
    assert numbers(broker) == [1]


async def test_a_broker_that_comes_back_elsewhere_gets_what_waits() -> None:
    async with sending() as (producer, namesrv, [broker]):
        await producer.send_and_wait(Message("T", b"0"))
        await broker.stop()
        future = await producer.send(Message("T", b"1"))
        await broker.start()
        await namesrv.put("T", broker)
        await future
        assert numbers(broker) == [0, 1]


async def test_a_group_without_writer_loses_its_messages_to_the_others() -> None:
    """After half of their time, and with their ids: the group may have stored them."""
    options = {"batch_count_max": 2, "delivery_timeout_ms": 2_000}
    async with sending("g1", "g2", **options) as (producer, namesrv, [first, second]):
        await asyncio.gather(*await send_all(producer, 32))
        first.answering.clear()
        second.answering.clear()
        before = len(first.batches) + len(second.batches)
        futures = await send_all(producer, 32)
        await until(lambda: len(first.batches) + len(second.batches) >= before + 16)
        await first.stop()
        await namesrv.put("T", second)
        second.answering.set()
        receipts = await asyncio.gather(*futures)
        moved = {record.unique_id: record.body for record in second.stored("T")}
        before_it = {record.unique_id: record.body for record in first.stored("T")}
    assert {receipt.queue.broker_group for receipt in receipts} == {"g2"}
    assert [moved[r.unique_id] for r in receipts] == [b"%d" % n for n in range(32)]
    assert moved.keys() & before_it.keys()
    assert all(before_it.get(unique_id, body) == body for unique_id, body in moved.items())


async def test_a_batch_of_many_topics_that_waits_for_a_writer_stays_whole() -> None:
    async with sending() as (producer, namesrv, [broker]):
        await namesrv.put("U", broker)
        for topic in "TU":
            await producer.send_and_wait(Message(topic, b"-1"))
        await broker.stop()
        for topic in "TU":
            await namesrv.put(topic)  # nobody writes it now
        sender = producer._senders["g1"]
        await until(lambda: producer._routes.writer("g1") is None and not sender.connected)
        futures = [await producer.send(Message("TU"[n % 2], b"%d" % n)) for n in range(40)]
        await until(lambda: sender.window.waiting)  # it was looked at, whether it can go elsewhere
        before = len(broker.batches)
        await broker.start()
        for topic in "TU":
            await namesrv.put(topic, broker)
        await asyncio.gather(*futures)
        assert [len(batch.segments) for batch in broker.batches[before:]] == [40]


async def test_a_broker_that_is_away_gets_nothing_new() -> None:
    async with sending("g1", "g2") as (producer, _, [first, second]):
        await asyncio.gather(*await send_all(producer, 1))
        await until(lambda: first.streams and second.streams)
        await first.stop()
        await until(lambda: not producer._senders["g1"].connected)
        async with asyncio.timeout(10):
            receipts = [await producer.send_and_wait(Message("T", b"%d" % n)) for n in range(16)]
    assert {receipt.queue.broker_group for receipt in receipts} == {"g2"}


async def test_other_host_lengths_make_the_same_messages_in_other_bytes() -> None:
    async with sending() as (producer, _, [broker]):
        broker.answering.clear()
        futures = await send_all(producer, 20)
        await until(lambda: len(broker.batches) == 1)
        old = [record.unique_id for record in broker.stored("T")]
        broker.queues.clear()
        broker.host_bytes = 16
        broker.break_streams()
        await until(lambda: broker.streams == 2)
        broker.answering.set()
        await asyncio.gather(*futures)
        assert [record.unique_id for record in broker.stored("T")] == old
        assert {record.sys_flag for record in broker.stored("T")} == {48}


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ZeroDivisionError(), ZeroDivisionError),
        (None, InvalidRequest),
        ("T", InvalidRequest),
        (QueueRef("T", 99), QueueNotFound),
        (QueueRef("other", 0), QueueNotFound),
    ],
)
async def test_what_a_selector_does_wrong_is_the_error_of_its_message(
    answer: Any, error: type[Exception]
) -> None:
    def selector(message: Message, queues: Sequence[QueueRef]) -> QueueRef:
        if message.body == b"good":
            return queues[0]
        if isinstance(answer, Exception):
            raise answer
        found: QueueRef = answer
        return found

    async with sending(selector=selector) as (producer, _, [broker]):
        future = await producer.send(Message("T", b"bad"))
        await producer.send_and_wait(Message("T", b"good"))
        with pytest.raises(error):
            await future
    assert broker.bodies("T") == [b"good"]


async def test_the_application_chooses_the_queue() -> None:
    def by_length(message: Message, queues: list[QueueRef]) -> QueueRef:
        return queues[len(message.body) % len(queues)]

    async with sending(selector=by_length) as (producer, _, [broker]):
        for length in range(8):
            await producer.send_and_wait(Message("T", bytes(length)))
        await producer.send_and_wait(Message("T", b"", queue=QueueRef("T", 3)))
    lengths = {n: [len(r.body) for r in broker.queues[("T", n)]] for n in range(4)}
    assert lengths == {0: [0, 4], 1: [1, 5], 2: [2, 6], 3: [3, 7, 0]}


async def test_messages_of_one_key_go_to_one_queue_and_wait_for_its_broker_group() -> None:
    """The queues of Java's clients: the hashes of these keys, modulo 8, are 6, 5 and 2."""
    async with sending("g1", "g2") as (producer, namesrv, brokers):
        keys = ["order-1", "order-2", "order-5"]
        sent = [Message("T", b"%d" % n, sharding_key=key) for n in (0, 1) for key in keys]
        receipts = [await producer.send_and_wait(message) for message in sent]
        queues = [(r.queue.broker_group, r.queue.queue_id) for r in receipts]
        assert queues == [("g2", 2), ("g2", 1), ("g1", 2)] * 2
        [first, _] = brokers[1].queues["T", 1]
        assert first.properties["__SHARDINGKEY"] == "order-2"
        # g2 has no writer for a while. Messages without a key go elsewhere.
        brokers[1].role = common_pb2.MEMBER_ROLE_FOLLOWER
        await namesrv.put("T", *brokers)
        brokers[1].break_streams()
        await until(lambda: not producer._senders["g2"].connected)
        others = [await producer.send_and_wait(Message("T", b"2")) for _ in range(8)]
        assert {receipt.queue.broker_group for receipt in others} == {"g1"}
        waiting = [
            await producer.send(Message("T", b"%d" % n, sharding_key=keys[1])) for n in (3, 4)
        ]
        await producer.send_and_wait(Message("T", b"2", sharding_key=keys[2]))
        assert not any(future.done() for future in waiting)
        brokers[1].role = common_pb2.MEMBER_ROLE_WRITER
        await namesrv.put("T", *brokers)
        await asyncio.gather(*waiting)
        assert [record.body for record in brokers[1].queues["T", 1]] == [b"0", b"1", b"3", b"4"]


async def test_one_way_messages_are_stored_or_their_loss_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with sending(in_flight_max=1) as (producer, _, [broker]):
        await producer.send_one_way(Message("T", b"0"))
        await producer.flush()
        broker.refuse = [PropertyReserved("no"), PropertyReserved("no")]
        for _ in range(2):
            await producer.send_one_way(Message("T", b"1"))
            await producer.flush()
        await producer.send_one_way(Message("T", b"2"))
        with pytest.raises(BodyTooLarge):
            await producer.send_one_way(Message("T", bytes(5 * 1024 * 1024)))
    assert broker.bodies("T") == [b"0", b"2"]
    [told] = [r for r in caplog.records if r.getMessage().startswith("one-way messages")]
    assert told.levelname == "WARNING"
    assert vars(told)["fields"]["count"] == 1, "the second is told with the next, later"


async def test_a_broker_group_that_answers_late_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency, "AVOID_S", ((0.4, 600.0),))

    async def groups(producer: Producer) -> set[str]:
        receipts = [await producer.send_and_wait(Message("T", b"1")) for _ in range(16)]
        return {receipt.queue.broker_group for receipt in receipts}

    async with sending("g1", "g2", latency_fault_enable=True) as (producer, _, [quick, slow]):
        assert await groups(producer) == {"g1", "g2"}
        slow.answering.clear()
        late = await producer.send(Message("T", b"late", queue=QueueRef("T", 0, "g2")))
        await asyncio.sleep(0.5)
        assert await groups(producer) == {"g1"}, "it has not answered yet"
        slow.answering.set()
        await late
        assert await groups(producer) == {"g1"}, "it has answered late"
        await producer.send_and_wait(Message("T", b"chosen", queue=QueueRef("T", 1, "g2")))
        assert await groups(producer) == {"g1", "g2"}, "it has answered quickly"
        # Where all answer late, messages go on.
        for broker in (quick, slow):
            broker.answering.clear()
        futures = [await producer.send(Message("T", b"all")) for _ in range(8)]
        await asyncio.sleep(0.5)
        futures += [await producer.send(Message("T", b"all")) for _ in range(8)]
        for broker in (quick, slow):
            broker.answering.set()
        await asyncio.gather(*futures)


async def test_ready_made_selectors() -> None:
    async with sending("g1", "g2", selector=by_hash(lambda m: m.keys[0])) as (producer, *_):
        receipt = await producer.send_and_wait(Message("T", b"", keys=("order-2",)))
    assert (receipt.queue.broker_group, receipt.queue.queue_id) == ("g2", 1)
    async with sending("g1", "g2", selector=at_random) as (producer, *_):
        receipts = [await producer.send_and_wait(Message("T", b"")) for _ in range(64)]
    assert len({receipt.queue for receipt in receipts}) > 4


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Message("T", bytes(4 * 1024 * 1024 + 1)), BodyTooLarge),
        (Message("T", b"", properties={"DELAY": "3"}), PropertyReserved),
        (Message("T", b"", queue=QueueRef("T", 99)), QueueNotFound),
        (Message("T", b"", queue=QueueRef("T", 0, "nobody")), QueueNotFound),
        (Message("nowhere", b""), TopicNotFound),
        (Message("closed", b""), NoPermission),
    ],
)
async def test_bad_messages_are_refused_at_once(message: Message, error: type[Exception]) -> None:
    async with sending(route_timeout_ms=100) as (producer, namesrv, [broker]):
        await namesrv.put("closed", broker, perm=4)
        with pytest.raises(error):
            await producer.send(message)
        await producer.send_and_wait(Message("T", b"0"))
        assert [int(r.unique_id[26:], 16) for r in broker.stored("T")] == [0]


async def test_a_new_topic_goes_by_the_route_of_auto_creation() -> None:
    async with sending() as (producer, namesrv, [broker]):
        await namesrv.put("TBW102", broker, queues=8)
        broker.topics["new"] = 4
        receipts = [await producer.send_and_wait(Message("new", b"%d" % n)) for n in range(8)]
    assert {receipt.queue.queue_id for receipt in receipts} == {0, 1, 2, 3}
    assert len(broker.stored("new")) == 8


async def test_leaving_the_block_sends_what_is_buffered() -> None:
    async with sending() as (producer, _, [broker]):
        futures = await send_all(producer, 1000)
    assert all(future.done() for future in futures)
    assert numbers(broker) == list(range(1000))


async def test_a_cancelled_block_fails_what_is_open_and_leaves_no_task() -> None:
    async with fake_cluster() as (namesrv, [broker]):
        broker.answering.clear()
        before = asyncio.all_tasks()
        futures: list[asyncio.Future[SendReceipt]] = []

        async def work() -> None:
            async with Producer(namesrv.address) as producer:
                futures.extend(await send_all(producer, 10))
                await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await until(lambda: len(broker.batches) == 1)
        task.cancel()
        await asyncio.wait([task])
        assert all(isinstance(future.exception(), ClientClosed) for future in futures)
        left = {t.get_name() for t in asyncio.all_tasks() - before if "producer" in t.get_name()}
        assert left == set()


async def test_a_closed_producer_says_so() -> None:
    async with fake_cluster() as (namesrv, _):
        producer = Producer(namesrv.address)
        with pytest.raises(ClientClosed):
            await producer.send(Message("T", b""))


async def test_a_route_outlives_a_name_server_that_knows_nothing_yet() -> None:
    async with fake_cluster() as (_, [broker]):
        both = [await FakeNameServer().start(), await FakeNameServer().start()]
        first, second = sorted(both, key=lambda server: server.address)
        await first.put("T", broker)
        options = ProducerOptions(retry_backoff_ms=5, retry_backoff_max_ms=20)
        async with Producer(f"{first.address};{second.address}", options=options) as producer:
            await producer.send_and_wait(Message("T", b"0"))
            await first.stop()
            await until(lambda: "T" in second.asked)
            await producer.send_and_wait(Message("T", b"1"))
        await second.stop()
    assert numbers(broker) == [0, 1]

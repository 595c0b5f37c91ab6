"""Many messages with one future, against a broker that does as ordered."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from cometmq.client import Message, Producer, ProducerOptions, QueueRef, SendContext, by_hash
from cometmq.client.selectors import choose_by_hash
from cometmq.client.sync import Producer as SyncProducer
from cometmq.errors import (
    BodyTooLarge,
    ClientClosed,
    FlowControl,
    InternalError,
    InvalidRequest,
    MessageTypeMismatch,
    PropertyReserved,
    QueueNotFound,
    TopicNotFound,
)
from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.waiting import until

pytestmark = pytest.mark.usefixtures("implementation")

OPTIONS = ProducerOptions(retry_backoff_ms=5, retry_backoff_max_ms=20)


def numbered(count: int, **fields: Any) -> list[Message]:
    return [Message("T", b"%d" % n, **fields) for n in range(count)]


def mixed(source: random.Random, count: int) -> list[Message]:
    """All that a message may have."""
    choices: list[dict[str, Any]] = [
        *[{}] * 8,
        {"tag": "A"},
        {"tag": "B"},
        {"keys": ("k1", "k2")},
        {"properties": {"colour": "blue"}},
        {"flag": 7},
        {"sharding_key": "a"},
        {"sharding_key": "b"},
        {"queue": QueueRef("T", 3, "g1")},
    ]
    messages = []
    for number in range(count):
        fields = source.choice(choices)
        topic = "T" if "queue" in fields else source.choice(["T", "T", "T", "U"])
        body = b"%d " % number + bytes(source.choice([0, 10, 100, 6_000]))
        messages += [Message(topic, body, **fields)] * source.choice([1, 1, 30])
    return messages


async def test_they_are_stored_as_send_would_store_them(rng: random.Random) -> None:
    messages = mixed(rng, 300)
    async with fake_cluster("g1") as (namesrv, [broker]):
        await namesrv.put("U", broker)
        async with Producer(namesrv.address) as producer:
            receipts = await producer.send_many_and_wait(messages)
    assert not receipts.errors
    assert len(receipts) == len(messages)
    by_id = {f"g1/{record.log_offset}": record for topic in "TU" for record in broker.stored(topic)}
    assert len(by_id) == len(messages)
    for message, receipt in zip(messages, receipts, strict=True):
        record = by_id[receipt.message_id]
        pairs = {name: record.properties[name] for name in message.properties}
        assert (record.topic, record.plain_body, record.tag) == (
            *(message.topic, message.body, message.tag),
        )
        assert (record.keys, record.flag, pairs) == (
            *(message.keys, message.flag, message.properties),
        )
        assert (record.unique_id, record.queue_offset) == (receipt.unique_id, receipt.queue_offset)
        assert QueueRef(record.topic, record.queue_id, "g1") == receipt.queue
        assert message.queue in (None, receipt.queue)
    for key in "ab":
        places = [
            (r.queue, r.queue_offset)
            for m, r in zip(messages, receipts, strict=True)
            if m.sharding_key == key and m.topic == "T"
        ]
        assert places == sorted(places), "one queue, in the order of the call"


async def test_messages_with_keys_go_to_their_queues_in_order_and_keep_their_places(
    rng: random.Random,
) -> None:
    queues = [QueueRef("T", n, "g1") for n in range(4)]
    messages = []
    for number in range(3_000):
        key = rng.choice([*map(str, range(30)), ""]) if number % 97 else ""
        bad = {"TAGS": "x"} if number % 500 == 499 else {}
        messages.append(Message("T", b"%d" % number, sharding_key=key, properties=bad))
    async with fake_cluster("g1") as (namesrv, [broker]), Producer(namesrv.address) as producer:
        await producer.send_and_wait(Message("T", b"-1"))  # the route is known
        receipts = await (await producer.send_many(iter(messages)))
        segment_count = sum(len(batch.segments) for batch in broker.batches)
    assert {*receipts.errors} == {*range(499, 3_000, 500)}
    stored = {(QueueRef("T", r.queue_id, "g1"), r.queue_offset): r for r in broker.stored("T")}
    last: dict[str, int] = {}
    for number, message in enumerate(messages):
        if number in receipts.errors:
            with pytest.raises(PropertyReserved):
                receipts[number]
            continue
        receipt, key = receipts[number], message.sharding_key
        record = stored.pop((receipt.queue, receipt.queue_offset))
        assert (record.body, record.unique_id) == (message.body, receipt.unique_id)
        assert record.properties.get("__SHARDINGKEY", "") == key
        if key:
            assert receipt.queue == choose_by_hash(key, queues)
            assert receipt.queue_offset > last.get(key, -1)
            last[key] = receipt.queue_offset
    assert len(stored) == 1
    assert segment_count < 1_000, "messages of one queue travel together"


async def test_keys_go_to_the_queues_of_a_new_route() -> None:
    """The number of queues changes while messages wait for room."""
    options = ProducerOptions(buffer_count_max=20, batch_count_max=10)
    messages = [Message("T", b"%d" % n, sharding_key=str(n % 30)) for n in range(300)]
    async with (
        fake_cluster("g1") as (namesrv, [broker]),
        Producer(namesrv.address, options=options) as producer,
    ):
        await producer.send_and_wait(Message("T", b"-1"))
        broker.answering.clear()
        sending = asyncio.ensure_future(producer.send_many_and_wait(messages))
        await until(lambda: producer._buffer.count >= 20)
        partitioner = producer._partitioners["T"]
        fewer = partitioner.queue_writers[1:]
        partitioner.use(fewer, [partitioner.pinned[writer.queue] for writer in fewer])
        broker.answering.set()
        receipts = await sending
    receipts.raise_first_error()
    bodies = {(r.queue_id, r.queue_offset): r.body for r in broker.stored("T")}
    assert [bodies[r.queue.queue_id, r.queue_offset] for r in receipts] == [
        message.body for message in messages
    ]
    queues = [writer.queue for writer in fewer]
    elsewhere = [
        receipt
        for message, receipt in zip(messages, receipts, strict=True)
        if receipt.queue != choose_by_hash(message.sharding_key, queues)
    ]
    assert 0 < len(elsewhere) <= 30, "only what was in the buffer"


async def test_one_bad_message_fails_alone() -> None:
    messages: list[Any] = numbered(10_000)
    messages[5_000] = Message("T", b"", properties={"TAGS": "mine"})
    async with fake_cluster() as (namesrv, [broker]), Producer(namesrv.address) as producer:
        receipts = await (await producer.send_many(messages))
    assert list(receipts.errors) == [5_000]
    with pytest.raises(PropertyReserved):
        receipts[5_000]
    assert receipts[4_999].queue_offset >= 0
    assert sorted(int(body) for body in broker.bodies("T")) == [
        n for n in range(10_000) if n != 5_000
    ]


async def test_each_kind_of_bad_message_has_its_own_error() -> None:
    changed = Message("T", b"")
    changed.topic = ["T"]  # type: ignore[assignment]
    messages: list[Any] = [
        *(b"no message", None, changed, Message("T", bytes(5 << 20))),
        *(Message("T", b"", queue=QueueRef("T", 99)), Message("unknown", b"")),
        *(Message("unknown", b"again"), Message("T", b"good")),
    ]
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address, options=ProducerOptions(route_timeout_ms=1_000)) as producer,
    ):
        receipts = await (await producer.send_many(messages))
    kinds = [InvalidRequest] * 3 + [BodyTooLarge, QueueNotFound] + [TopicNotFound] * 2
    assert [type(receipts.errors[place]) for place in range(7)] == kinds
    assert broker.bodies("T") == [b"good"]


@pytest.mark.parametrize("messages", [[], (), iter(())])
async def test_no_messages_are_decided_at_once(messages: Any) -> None:
    async with fake_cluster() as (namesrv, _), Producer(namesrv.address) as producer:
        future = await producer.send_many(messages)
        assert future.done()
        assert list(await future) == []


@pytest.mark.parametrize("messages", [Message("T", b""), None, 5])
async def test_what_is_no_iterable_is_refused(messages: Any) -> None:
    async with fake_cluster() as (namesrv, _), Producer(namesrv.address) as producer:
        with pytest.raises(InvalidRequest):
            await producer.send_many(messages)


async def test_what_was_taken_before_the_iterator_raised_is_sent() -> None:
    def broken() -> Iterator[Message]:
        yield from numbered(1_500)
        raise ZeroDivisionError

    async with fake_cluster() as (namesrv, [broker]), Producer(namesrv.address) as producer:
        with pytest.raises(ZeroDivisionError):
            await producer.send_many(broken())
        await producer.flush()
        assert [int(body) for body in broker.bodies("T")] == list(range(1_500))


async def test_an_iterator_is_taken_as_there_is_room() -> None:
    taken = 0

    def many() -> Iterator[Message]:
        nonlocal taken
        for _ in range(2_000):
            taken += 1
            yield Message("T", bytes(1_000))

    options = ProducerOptions(buffer_bytes_max=65_536, batch_bytes_max=16_384, in_flight_max=2)
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address, options=options) as producer,
    ):
        await producer.send_and_wait(Message("T", b""))
        broker.answering.clear()
        sending = asyncio.create_task(producer.send_many(many()))
        await until(lambda: producer._buffer.used >= 65_536)
        await asyncio.sleep(0.01)
        assert producer._buffer.used < 100_000
        assert taken < 600
        broker.answering.set()
        receipts = await (await sending)
        assert len(receipts) == 2_000
        receipts.raise_first_error()
        assert producer._buffer.used == producer._buffer.count == 0


async def test_a_cancelled_future_takes_nothing_back() -> None:
    async with fake_cluster() as (namesrv, [broker]):
        async with Producer(namesrv.address) as producer:
            (await producer.send_many(numbered(2_000))).cancel()
        assert len(broker.stored("T")) == 2_000, "leaving the block sends what is buffered"


async def test_a_cancelled_call_has_sent_the_first_messages() -> None:
    options = ProducerOptions(buffer_count_max=10)
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address, options=options) as producer,
    ):
        await producer.send_and_wait(Message("T", b"-1"))
        broker.answering.clear()
        sending = asyncio.create_task(producer.send_many(numbered(100)))
        await until(lambda: producer._buffer.count >= 10)
        sending.cancel()
        await asyncio.wait([sending])
        assert sending.cancelled()
        broker.answering.set()
        await producer.flush()
        found = sorted(int(body) for body in broker.bodies("T"))
        assert found == list(range(-1, found[-1] + 1))
        assert 0 < len(found) < 100


async def test_a_closed_producer_takes_none() -> None:
    options = ProducerOptions(buffer_count_max=10)
    async with fake_cluster() as (namesrv, [broker]):
        async with Producer(namesrv.address, options=options) as producer:
            await producer.send_and_wait(Message("T", b"-1"))
            broker.answering.clear()
            sending = asyncio.create_task(producer.send_many(numbered(100)))
            await until(lambda: producer._buffer.count >= 10)
            asyncio.get_running_loop().call_later(0.05, broker.answering.set)
        for call in (sending, producer.send_many(numbered(1)), producer.send_many([])):
            with pytest.raises(ClientClosed):
                await call


async def test_refusals_losses_and_retries_are_settled_before_the_receipts() -> None:
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address, options=OPTIONS) as producer,
    ):
        await producer.send_and_wait(Message("T", b"-1"))
        alone = MessageTypeMismatch("by order")
        alone.segment = 0
        broker.refuse = [FlowControl("for now"), alone, InternalError("by order")]
        receipts = await (await producer.send_many(numbered(5_000)))
        broker.break_streams()
        more = await producer.send_many_and_wait(numbered(100))
    refused = {type(error) for error in receipts.errors.values()}
    assert refused <= {MessageTypeMismatch, InternalError}
    assert refused
    stored = {(f"g1/{r.log_offset}"): r.body for r in broker.stored("T")}
    for place in set(range(5_000)) - receipts.errors.keys():
        assert stored[receipts[place].message_id] == b"%d" % place
    assert not more.errors


async def test_hooks_and_selectors_see_each_message() -> None:
    class Hook:
        def __init__(self) -> None:
            self.contexts: list[SendContext] = []

        def before_send(self, context: SendContext) -> None:
            context.message.properties["seen"] = "yes"

        def after_send(self, context: SendContext) -> None:
            self.contexts.append(context)

    hook = Hook()
    options = ProducerOptions(hooks=(hook,), selector=by_hash(lambda message: message.tag))
    messages = [*numbered(20, tag="A"), Message("T", bytes(5 << 20), "A")]
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address, options=options) as producer,
    ):
        receipts = await (await producer.send_many(messages))
    assert list(receipts.errors) == [20]
    assert len({receipts[place].queue for place in range(20)}) == 1
    assert [record.properties["seen"] for record in broker.stored("T")] == ["yes"] * 20
    by_body = {context.message.body: context for context in hook.contexts}
    for place in range(20):
        receipt = by_body[b"%d" % place].receipt
        assert receipt is not None
        assert receipt.message_id == receipts[place].message_id
    assert isinstance(by_body[bytes(5 << 20)].error, BodyTooLarge)


async def test_they_move_to_another_broker_group_with_their_ids() -> None:
    """When half of their time is over: the first one may have stored them, and come back."""
    hasty = replace(OPTIONS, delivery_timeout_ms=9_000, answer_timeout_ms=3_000)
    async with (
        fake_cluster("g1", "g2") as (namesrv, [first, second]),
        Producer(namesrv.address, options=hasty) as producer,
    ):
        for _ in range(8):
            await producer.send_and_wait(Message("T", b"-1"))
        first.answering.clear()
        await first.stop()
        future = await producer.send_many(numbered(5_000))
        await namesrv.put("T", second)
        receipts = await future
        receipts.raise_first_error()
        stored = {record.unique_id: record.body for record in second.stored("T")}
    for place, receipt in enumerate(receipts):
        assert receipt.queue.broker_group == "g2"
        assert stored[receipt.unique_id] == b"%d" % place


async def test_the_synchronous_face_has_it() -> None:
    async with fake_cluster() as (namesrv, [broker]):

        def work() -> list[int]:
            with SyncProducer(namesrv.address) as producer:
                future = producer.send_many(numbered(100))
                return [*map(len, (future.result(), producer.send_many_and_wait(numbered(10))))]

        assert await asyncio.to_thread(work) == [100, 10]
    assert len(broker.stored("T")) == 110

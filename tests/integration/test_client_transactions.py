"""Transactions through the SDK: commit, rollback, listeners, checks after a producer died, several
messages, batched ends, and a broker that dies in between.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq.client import (
    Message,
    ProducerOptions,
    ReceivedMessage,
    SendContext,
    TransactionProducer,
    TransactionState,
    sync,
)
from cometmq.client.sending.batcher import Batcher
from cometmq.client.transactions.ends import TransactionEnds
from cometmq.errors import (
    BodyTooLarge,
    ClientClosed,
    CometError,
    ConfigInvalid,
    GroupNameInvalid,
    InvalidRequest,
    MessageTypeMismatch,
    QueueNotFound,
    TransactionEnded,
)
from cometmq.format.indexfile import Sizes as IndexSizes
from cometmq.model import QueueRef
from cometmq.store.repair.verify import verify
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import (
    SMALL_FILES,
    BrokerClient,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.live_group import live_group
from tests.support.independent.index import Shape
from tests.support.independent.reader import Store as IndependentStore
from tests.support.waiting import until, until_async

COMMIT, ROLLBACK, UNKNOWN = (
    TransactionState.COMMIT,
    TransactionState.ROLLBACK,
    TransactionState.UNKNOWN,
)
QUICK = {"transaction_time_out": 0, "transaction_check_interval": 1_000}
QUICK_GROUP: dict[str, Any] = {
    "transaction_time_out": 20_000,
    "transaction_check_interval": 1_000,
    "lease_duration_s": 1.0,
    "lease_renew_s": 0.1,
    "lease_poll_s": 0.05,
    "in_sync_lag_s_max": 0.5,
}


def commits_all(_: ReceivedMessage) -> TransactionState:
    return COMMIT


async def seen(broker: BrokerClient, topic: str = "T", queues: int = 2) -> list[bytes]:
    found = [one for n in range(queues) for one in await broker.read_queue(topic, n)]
    return sorted(one.plain_body for one in found)


async def sent_and_raised(producer: TransactionProducer, *messages: Message) -> None:
    async with producer.transaction() as one:
        for message in messages:
            await one.send(message)
        raise RuntimeError("mine")


async def test_a_block_commits_and_an_exception_rolls_back(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)
        async with TransactionProducer(namesrv, "P", commits_all) as producer:
            async with producer.transaction() as one:
                receipt = await one.send(Message("T", b"a", "A", ("k",), {"p": "v"}))
                assert receipt.queue_offset == -1
                await one.send(Message("T", b"b", queue=QueueRef("T", 1)))
                await one.send(Message("T", b"large" * 2_000))  # compressed
                assert await seen(broker) == []
            assert [one.committed[n].queue.topic for n in range(3)] == ["T"] * 3
            assert await seen(broker) == [b"a", b"b", b"large" * 2_000]
            with pytest.raises(RuntimeError, match="mine"):
                await sent_and_raised(producer, Message("T", b"c"))
            async with producer.transaction() as three:
                await three.send(Message("T", b"d"))
                await three.rollback()
            async with producer.transaction():
                pass
            await producer.send_and_wait(Message("T", b"plain"))
            assert len(broker.state.halves) == 0
            assert await seen(broker) == [b"a", b"b", b"large" * 2_000, b"plain"]
            with pytest.raises(InvalidRequest):
                await one.commit()
            with pytest.raises(InvalidRequest):
                await one.send(Message("T", b"x"))
        found = await broker.read_queue(
            one.committed[0].queue.topic, one.committed[0].queue.queue_id
        )
        assert found[one.committed[0].queue_offset].unique_id == receipt.unique_id


class Listener:
    """Executes as the argument says, and knows what became of each body."""

    def __init__(self) -> None:
        self.known: dict[bytes, TransactionState] = {}
        self.checked: Counter[bytes] = Counter()

    async def execute(self, message: Message, argument: Any) -> Any:
        if isinstance(argument, Exception):
            raise argument
        return argument

    def check(self, message: ReceivedMessage) -> TransactionState:
        assert message.topic == "T"
        self.checked[message.body] += 1
        return self.known.get(message.body, UNKNOWN)


async def test_a_commit_waits_for_no_send_and_for_no_closed_producer(tmp_path: Path) -> None:
    """It committed the messages whose send had ended, and said that all is done."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)
        async with TransactionProducer(namesrv, "P", commits_all) as producer:
            one, late = producer.transaction(), producer.transaction()
            await one.send(Message("T", b"a"))
            await late.send(Message("T", b"b"))
            sending = asyncio.create_task(one.send(Message("T", b"c")))
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequest, match="still being sent"):
                await one.commit()
            await sending
            assert len(broker.state.halves) == 2, "the first one is rolled back"
        with pytest.raises(ClientClosed):
            await late.commit()
        assert await seen(broker) == []


async def test_a_listener_executes_and_is_asked(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **QUICK) as broker,
    ):
        await broker.put_topic("T", 2)
        listener = Listener()
        async with TransactionProducer(namesrv, "P", listener) as producer:
            send = producer.send_in_transaction
            done = await send(Message("T", b"done"), COMMIT)
            assert done.committed is not None
            assert (await send(Message("T", b"not"), ROLLBACK)).committed is None
            assert (await send(Message("T", b"later"), UNKNOWN)).state is UNKNOWN
            assert (await send(Message("T", b"raises"), ValueError("x"))).state is UNKNOWN
            assert (await send(Message("T", b"no state"), "yes")).state is UNKNOWN
            assert await seen(broker) == [b"done"]
            await until(lambda: min(listener.checked[b] for b in (b"later", b"raises")) >= 2)
            listener.known = {b"later": COMMIT, b"raises": ROLLBACK, b"no state": COMMIT}
            await until(lambda: not len(broker.state.halves))
            assert await seen(broker) == [b"done", b"later", b"no state"]
            assert not listener.checked[b"done"]
            assert not listener.checked[b"not"]


async def test_what_a_dead_producer_left_is_asked_of_the_next_one(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **QUICK) as broker,
    ):
        await broker.put_topic("T", 2)
        async with TransactionProducer(namesrv, "P", Listener()) as dying:
            one = dying.transaction()
            await one.send(Message("T", b"a"))
            await one.send(Message("T", b"b"))
        listener = Listener()
        listener.known = {b"a": COMMIT, b"b": COMMIT}
        async with TransactionProducer(namesrv, "P", listener, topics=("T",)):
            await until(lambda: not len(broker.state.halves))
        assert await seen(broker) == [b"a", b"b"]


async def test_messages_of_one_transaction_stay_at_one_broker_group(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(folders[0], namesrv=(namesrv,), broker_group="a") as a,
        running_broker(folders[1], namesrv=(namesrv,), broker_group="b") as b,
    ):
        for broker in (a, b):
            await broker.put_topic("T", 2)
        await a.put_topic("A", 1)
        async with TransactionProducer(namesrv, "P", commits_all) as producer:
            groups = set()
            for _ in range(4):
                async with producer.transaction() as one:
                    for n in range(5):
                        await one.send(Message("T", b"%d" % n))
                here = {receipt.queue.broker_group for receipt in one.committed}
                assert len(here) == 1
                groups |= here
                assert len({receipt.queue.queue_id for receipt in one.committed}) == 2
            async with producer.transaction() as one:
                await one.send(Message("T", b"x", queue=QueueRef("T", 0, "b")))
                with pytest.raises(QueueNotFound):
                    await one.send(Message("A", b"y"))
                with pytest.raises(QueueNotFound):
                    await one.commit()  # it is rolled back
            at = [Message("T", b"x", queue=QueueRef("T", 0, group)) for group in ("b", "a")]
            with pytest.raises(InvalidRequest):
                await sent_and_raised(producer, *at)
        assert b"x" not in await seen(b)


async def test_ends_of_a_turn_travel_together(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)
        calls: list[int] = []
        original = TransactionEnds._call

        async def counted(self: TransactionEnds, group: str, some: Any) -> Any:
            calls.append(len(some))
            return await original(self, group, some)

        with mock.patch.object(TransactionEnds, "_call", counted):
            async with TransactionProducer(namesrv, "P", commits_all) as producer:
                ready = asyncio.Event()

                async def one(number: int) -> None:
                    transaction = producer.transaction()
                    await transaction.send(Message("T", b"%04d" % number))
                    await ready.wait()
                    await transaction.commit()

                tasks = [asyncio.create_task(one(n)) for n in range(200)]
                await until(lambda: len(broker.state.halves) == 200)
                ready.set()
                await asyncio.gather(*tasks)
        assert sum(calls) == 200
        assert len(calls) <= 3
        assert await seen(broker) == [b"%04d" % n for n in range(200)]


async def test_many_messages_of_a_transaction_are_sent_at_once(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        TransactionProducer(namesrv, "P", commits_all) as producer,
    ):
        await broker.put_topic("T", 2)
        bodies = [b"%04d" % number for number in range(1_000)]
        batches: list[int] = []
        taken = Batcher._next_segment

        def noted(self: Batcher, batch: Any, slot: Any) -> Any:
            batches.append(batch.sequence)
            return taken(self, batch, slot)

        async with producer.transaction() as one:
            with mock.patch.object(Batcher, "_next_segment", noted):
                receipts = await one.send_many([Message("T", body) for body in bodies])
            last = await one.send(Message("T", b"last"))
            assert len(batches) <= 4, "they travel together"
            assert len(receipts) == 1_000
            assert {receipt.queue_offset for receipt in receipts} == {-1}
            assert await seen(broker) == []
            assert len(broker.state.halves) == 1_001
        assert await seen(broker) == sorted([*bodies, b"last"])
        assert len(one.committed) == 1_001
        queues = [await broker.read_queue("T", queue_id) for queue_id in range(2)]
        ids = [*(receipt.unique_id for receipt in receipts), last.unique_id]
        for place, unique_id in enumerate(ids):
            its = one.committed[place]
            found = queues[its.queue.queue_id][its.queue_offset]
            assert found.unique_id == unique_id
            assert its.message_id == f"g1/{found.log_offset}"
        assert [one.committed[-1], one.committed[0]] == [
            *one.committed[1_000:],
            *one.committed[:1],
        ]
        with pytest.raises(IndexError):
            one.committed[1_001]


async def test_many_messages_go_where_each_alone_goes(tmp_path: Path) -> None:
    """Those with keys, in an order of their own, and those that name a queue."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        TransactionProducer(namesrv, "P", commits_all) as producer,
    ):
        await broker.put_topic("T", 4)
        messages = [
            Message(
                "T",
                b"%03d" % n,
                sharding_key=f"k{n % 7}" if n % 3 == 0 else "",
                queue=QueueRef("T", 2) if n % 50 == 1 else None,
                tag="A" if n % 2 else "",
                properties={"n": str(n)},
            )
            for n in range(300)
        ]
        one = producer.transaction()
        await one.send_many(messages[:100])
        await one.send_many(message for message in messages[100:])
        assert await one.send_many([]) is not None
        await one.commit()
        queues = [await broker.read_queue("T", number) for number in range(4)]
        alone = {}
        for key in [f"k{n}" for n in range(7)]:
            sent = await producer.send_and_wait(Message("T", b"x", sharding_key=key))
            alone[key] = sent.queue.queue_id
        for message, its in zip(messages, one.committed, strict=True):
            found = queues[its.queue.queue_id][its.queue_offset]
            assert (found.plain_body, found.tag) == (message.body, message.tag)
            assert found.properties["n"] == message.properties["n"]
            if message.sharding_key and message.queue is None:
                assert its.queue.queue_id == alone[message.sharding_key]
            if message.queue is not None:
                assert its.queue.queue_id == 2


async def test_a_bad_message_among_many_rolls_all_back(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        TransactionProducer(namesrv, "P", commits_all) as producer,
    ):
        await broker.put_topic("T", 2)
        good = [Message("T", b"%d" % n) for n in range(20)]
        for bad in (
            Message("T", bytes(5 << 20)),
            Message("T", b"x", delay_ms=1_000),
            Message("T", b"x", wait_store=False),
            "no message",
        ):
            with pytest.raises(CometError):
                async with producer.transaction() as one:
                    await one.send_many([*good, bad, *good])  # type: ignore[list-item]
            assert not one.committed
            assert len(broker.state.halves) == 0
        full = producer.transaction()
        for too_many in (3, [*good] * 52):
            with pytest.raises(InvalidRequest):
                await full.send_many(too_many)  # type: ignore[arg-type]
        await full.send_many([*good] * 51)
        with pytest.raises(InvalidRequest):
            await full.send_many(good)
        await full.rollback()
        with pytest.raises(InvalidRequest):
            await full.send_many(good)
        assert await seen(broker) == []
        assert len(broker.state.halves) == 0


async def test_halves_of_many_transactions_and_plain_messages_share_batches(tmp_path: Path) -> None:
    """The C extension takes what is like the message before; the others go their own way."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        TransactionProducer(namesrv, "P", commits_all) as producer,
    ):
        await broker.put_topic("T", 2)
        await broker.put_topic("U", 2)
        wanted: Counter[tuple[str, bytes]] = Counter()
        places: list[tuple[str, int, int, bytes]] = []
        dropped = 0

        async def one(number: int) -> None:
            nonlocal dropped
            immunity_s = 60 if number % 5 == 0 else 0
            topic = "U" if number % 4 == 0 else "T"
            body = b"%d" % number
            its = producer.transaction(check_immunity_s=immunity_s)
            await its.send(
                Message(topic, body, queue=QueueRef(topic, 1) if number % 9 == 0 else None)
            )
            await producer.send_and_wait(Message("T", b"plain"))
            wanted["T", b"plain"] += 1
            if number % 3:
                wanted[topic, body] += 1
                [committed] = await its.commit()
                places.append((topic, committed.queue.queue_id, committed.queue_offset, body))
            else:
                dropped += 1
                await its.rollback()

        for _ in range(2):  # the second time the routes are known
            await asyncio.gather(*(one(number) for number in range(200)))
        assert dropped == 134
        stored = {(t, n): await broker.read_queue(t, n) for t in "TU" for n in range(2)}
        assert all(stored[t, n][offset].plain_body == body for t, n, offset, body in places)
        assert Counter((t, m.plain_body) for (t, _), ms in stored.items() for m in ms) == wanted
        assert len(broker.state.halves) == 0
        table = broker.state.halves
        assert table.end == 400


async def test_a_broker_that_dies_in_between_neither_loses_nor_repeats(tmp_path: Path) -> None:
    quick = ProducerOptions(answer_timeout_ms=500, retry_backoff_max_ms=100)
    async with (
        running_namesrv(tmp_path) as namesrv,
        TransactionProducer(namesrv, "P", commits_all, options=quick) as producer,
    ):
        async with running_broker(tmp_path, namesrv=(namesrv,), **QUICK) as broker:
            await broker.put_topic("T", 2)
            first = producer.transaction()
            await first.send(Message("T", b"a"))
            second = producer.transaction()
            await second.send_many([Message("T", b"b%d" % n) for n in range(9)])
            await first.commit()
            broker.crash()
        committing = asyncio.create_task(second.commit())
        async with running_broker(tmp_path, namesrv=(namesrv,), **QUICK) as broker:
            await committing
            some = [b"a", *(b"b%d" % n for n in range(9))]
            await until_async(lambda: _are_seen(broker, some))
            assert len(second.committed) == 9
            assert len(broker.state.halves) == 0
            third = producer.transaction()
            await third.send(Message("T", b"c"))
            await until(lambda: not len(broker.state.halves))  # the new writer asks
            assert await seen(broker) == [*some, b"c"]


async def _are_seen(broker: BrokerClient, bodies: list[bytes]) -> bool:
    return await seen(broker) == bodies


async def test_what_is_no_transaction_is_refused(tmp_path: Path) -> None:
    for listener in (None, object(), 3):
        with pytest.raises(ConfigInvalid):
            TransactionProducer("127.0.0.1:1", "P", listener)  # type: ignore[arg-type]
    with pytest.raises(GroupNameInvalid):
        TransactionProducer("127.0.0.1:1", "", commits_all)
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)
        config = common.TopicConfig(
            name="Normal",
            read_queue_count=1,
            write_queue_count=1,
            message_type=common.MESSAGE_TYPE_NORMAL,
        )
        await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))
        async with TransactionProducer(namesrv, "P", commits_all) as producer:
            with pytest.raises(InvalidRequest):
                producer.transaction(check_immunity_s=3_601)
            with pytest.raises(ConfigInvalid):
                await producer.send_in_transaction(Message("T", b"x"))
            for message, error in (
                (Message("T", b"x", delay_level=3), InvalidRequest),
                (Message("T", b"x", delay_ms=30_000), InvalidRequest),
                (Message("T", b"x", wait_store=False), InvalidRequest),
                (Message("T", bytes(5 << 20)), BodyTooLarge),
                (Message("Normal", b"x"), MessageTypeMismatch),
            ):
                with pytest.raises(error):
                    async with producer.transaction() as one:
                        await one.send(message)
            one = producer.transaction()
            await one.send(Message("T", b"ok"))
            with pytest.raises(BodyTooLarge):
                await one.send(Message("T", bytes(5 << 20)))
            with pytest.raises(BodyTooLarge):
                await one.commit()
            assert await seen(broker) == []
            assert len(broker.state.halves) == 0
            late = producer.transaction()
            receipt = await late.send(Message("T", b"x"))
            run = receipt._run
            half = pb.HalfRef(
                half_offset=run.queue_offset,
                log_offset=run.log_offset,
                transaction_id=receipt.unique_id,
            )
            rolled_back = pb.TransactionEnd(
                half=half, resolution=pb.TRANSACTION_RESOLUTION_ROLLBACK
            )
            await broker.stub.EndTransactions(
                pb.EndTransactionsRequest(producer_group="P", ends=[rolled_back])
            )
            with pytest.raises(TransactionEnded):
                await late.commit()


async def test_without_asyncio(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)

        def work() -> int:
            with sync.TransactionProducer(namesrv, "P", Listener()) as producer:
                with producer.transaction() as one:
                    one.send(Message("T", b"a"))
                    one.send_many([Message("T", b"b"), Message("T", b"b2")])
                with suppress(RuntimeError), producer.transaction() as two:
                    two.send(Message("T", b"c"))
                    raise RuntimeError
                result = producer.send_in_transaction(Message("T", b"d"), COMMIT)
                assert result.committed is not None
                three = producer.transaction(check_immunity_s=60)
                three.send(Message("T", b"e"))
                three.leave_open()
                four = producer.transaction()
                four.send(Message("T", b"f"))
                four.rollback()
                return len(one.committed)

        assert await asyncio.to_thread(work) == 3
        assert await seen(broker) == [b"a", b"b", b"b2", b"d"]
        assert len(broker.state.halves) == 1


async def test_namespaces_are_kept_apart(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **QUICK) as broker,
    ):
        await broker.put_topic("N%T", 2)
        listener = Listener()
        listener.known = {b"b": COMMIT}
        options = ProducerOptions(namespace="N")
        async with TransactionProducer(namesrv, "P", listener, options=options) as producer:
            async with producer.transaction() as one:
                await one.send(Message("T", b"a"))
            assert one.committed[0].queue.topic == "T"
            await producer.transaction().send(Message("T", b"b"))
            await until(lambda: not len(broker.state.halves))
        assert await seen(broker, "N%T") == [b"a", b"b"]


@pytest.mark.parametrize("written_each_s", [0.05, 600.0])
async def test_a_fail_over_keeps_halves_and_ends(tmp_path: Path, written_each_s: float) -> None:
    """The next writer knows what is open and what has ended, and asks about the rest: by the state,
    and by the log's end where the writer before wrote no state.
    """
    each: dict[str, Any] = {"offset_record_interval_s": written_each_s}
    listener = Listener()
    options = ProducerOptions(answer_timeout_ms=500, retry_backoff_max_ms=100)
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,), **QUICK_GROUP, **each) as group,
    ):
        await group[0].until_role("writer")
        replicated = common.TopicConfig(
            name="T",
            read_queue_count=2,
            write_queue_count=2,
            replication_mode=common.REPLICATION_MODE_APPENDED,
        )
        await group.all_in_sync(0, 1)
        await group[0].client.admin.PutTopic(pb.PutTopicRequest(topic=replicated))
        async with TransactionProducer(namesrv, "P", listener, options=options) as producer:
            committed = producer.transaction()
            await committed.send(Message("T", b"committed"))
            await committed.commit()
            rolled_back = producer.transaction()
            await rolled_back.send(Message("T", b"rolled back"))
            await rolled_back.rollback()
            ending, orphan = producer.transaction(), producer.transaction(check_immunity_s=1)
            await ending.send(Message("T", b"ending"))
            await orphan.send(Message("T", b"orphan"))
            orphan.leave_open()
            await group[0].crash()
            await group[1].until_role("writer")
            await ending.commit()
            listener.known = {b"orphan": COMMIT}
            writer = group[1].client
            wanted = [b"committed", b"ending", b"orphan"]
            await until_async(lambda: _are_seen(writer, wanted))
        assert set(listener.checked) == {b"orphan"}


class Noted:
    """A hook that notes what became of messages."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bytes]] = []

    def before_send(self, context: SendContext) -> None:
        self.told.append(("before", context.message.body))

    def after_send(self, context: SendContext) -> None:
        self.told.append(("failed" if context.error else "after", context.message.body))


async def test_hooks_see_messages_of_transactions(tmp_path: Path) -> None:
    noted = Noted()
    options = ProducerOptions(hooks=(noted,))
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        TransactionProducer(namesrv, "P", commits_all, options=options) as producer,
    ):
        await broker.put_topic("T", 2)
        async with producer.transaction() as one:
            await one.send(Message("T", b"a"))
        with pytest.raises(InvalidRequest):
            await sent_and_raised(producer, Message("T", b"b", delay_level=1))
        assert noted.told == [("before", b"a"), ("after", b"a"), ("before", b"b"), ("failed", b"b")]
        noted.told.clear()
        async with producer.transaction() as many:
            await many.send_many([Message("T", b"c"), Message("T", b"d")])
    assert sorted(noted.told) == [
        (when, body) for when in ("after", "before") for body in (b"c", b"d")
    ]


async def test_what_transactions_leave_reads_by_the_documents(tmp_path: Path) -> None:
    """Log, queues, state and exports, by the independent reader and by ``store verify``."""
    shape = Shape(SMALL_FILES["max_hash_slot_num"], SMALL_FILES["max_index_num"])
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **QUICK, transaction_check_max=1) as broker,
    ):
        await broker.put_topic("T", 2)
        listener = Listener()
        async with TransactionProducer(namesrv, "P", listener) as producer:
            for number in range(30):
                one = producer.transaction(check_immunity_s=60)
                await one.send(Message("T", b"%d" % number, keys=(f"k{number}",)))
                if number % 3:
                    await (one.commit() if number % 2 else one.rollback())
            await producer.transaction().send(Message("T", b"given up"))
            await until(lambda: len(broker.state.halves) == 10)
            await until(lambda: bool(listener.checked[b"given up"]))
    store = tmp_path / "store"
    sizes = IndexSizes(SMALL_FILES["max_hash_slot_num"], SMALL_FILES["max_index_num"])
    assert verify(store, index_sizes=sizes).faults == []
    with IndependentStore(store, shape) as read:
        assert read.state is not None
        assert read.state.halves["h"] == 0, "the first half is open"
        assert {"TRANS_CHECK_MAX_TIME_TOPIC", "RMQ_SYS_TRANS_HALF_TOPIC"} <= set(read.state.topics)

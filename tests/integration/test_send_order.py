"""Messages of one key lie in the order of the sends, over real gRPC: the broker refuses batches,
dies, and takes some of them for known; eight are on their way at a time.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import Message, Producer, ProducerOptions, SendReceipt
from cometmq.errors import BatchOutOfOrder, CometError, DiskFull, FlowControl
from cometmq.format.record import Record
from cometmq.v1 import broker_pb2 as pb
from services.broker.sending.produce import ProduceHandler
from tests.integration.test_failover import replicated
from tests.support.cluster.broker import batch, running_broker, running_namesrv
from tests.support.waiting import until

KEYS, COUNT = 5, 3_000


async def test_acknowledged_messages_of_a_key_lie_in_the_order_of_the_sends(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = ProduceHandler.append
    refused: list[CometError] = []

    def unwilling(self: ProduceHandler, records: bytes, *arguments: Any, **more: Any) -> Any:
        if b"key" in records and rng.random() < 0.2:
            refused.append(rng.choice([FlowControl, DiskFull])("by order"))
            raise refused[-1]
        return append(self, records, *arguments, **more)

    monkeypatch.setattr(ProduceHandler, "append", unwilling)
    options = ProducerOptions(
        in_flight_max=8, batch_count_max=10, retry_backoff_ms=2, retry_backoff_max_ms=10
    )
    async with running_namesrv(tmp_path) as namesrv:
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.put_topic("T", 3)
        async with Producer(namesrv, options=options) as producer:

            async def send_all() -> list[SendReceipt]:
                futures = []
                for n in range(COUNT):
                    message = Message("T", b"%d" % n, sharding_key=f"key{n % KEYS}")
                    futures.append(await producer.send(message))
                    if n % 100 == 0:
                        await asyncio.sleep(0.01)
                return await asyncio.gather(*futures)

            sending: asyncio.Task[list[SendReceipt]] | None = None
            receipts: list[SendReceipt] = []
            found: list[Record] = []
            for life in range(4):
                async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
                    sending = sending or asyncio.create_task(send_all())
                    if life < 3:
                        await asyncio.sleep(rng.uniform(0.1, 0.3))
                        broker.crash()
                    else:
                        receipts = await sending
                        found = [r for q in range(3) for r in await broker.read_queue("T", q)]
    assert len(refused) > 20
    by_key = defaultdict(list)
    for record in found:
        by_key[record.properties["__SHARDINGKEY"]].append(int(record.body))
    assert by_key == {f"key{n}": list(range(n, COUNT, KEYS)) for n in range(KEYS)}
    places = {record.unique_id: record.queue_offset for record in found}
    assert [places[r.unique_id] for r in receipts] == [r.queue_offset for r in receipts]


async def test_behind_a_refused_batch_nothing_in_order_is_stored(tmp_path: Path) -> None:
    """Until its sender says that it knows of it; batches without order are stored."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        sent = 0

        async def send(body: bytes, after: int | None, queue_id: int = 0) -> pb.SendBatchResult:
            nonlocal sent
            sent += 1
            data, segments = batch(("T", queue_id, [body]))
            await lane.call.write(
                pb.SendStreamRequest(
                    batch_id=sent, records=data, segments=segments, in_order_after=after
                )
            )
            return await lane.result()

        assert not (await send(b"1", 0)).HasField("error")
        assert (await send(b"no such queue", 0, queue_id=9)).error.name == "QUEUE_NOT_FOUND"
        for after in (0, 1):
            result = await send(b"2", after)
            assert (result.error.name, result.may_be_stored) == (BatchOutOfOrder.name(), False)
        assert not (await send(b"free", None)).HasField("error")
        assert not (await send(b"3", 2)).HasField("error")
        assert await broker.bodies("T", 0) == [b"1", b"free", b"3"]


def at_least(some: list[Any], count: int) -> bool:
    return len(some) >= count


async def test_the_order_of_a_key_survives_the_writer(tmp_path: Path) -> None:
    """It dies with batches on their way, again and again; what it acknowledged is there."""
    options = ProducerOptions(
        in_flight_max=8, batch_count_max=5, retry_backoff_ms=5, retry_backoff_max_ms=50
    )
    async with (
        running_namesrv(tmp_path) as namesrv,
        replicated(tmp_path, namesrv=(namesrv,), auto_create_topic_enable=True) as group,
        Producer(namesrv, options=options) as producer,
    ):
        futures: list[asyncio.Future[SendReceipt]] = []
        stop = asyncio.Event()

        async def send_all() -> None:
            while not stop.is_set():
                message = Message("T", b"%d" % len(futures), sharding_key=f"key{len(futures) % 3}")
                futures.append(await producer.send(message))
                await asyncio.sleep(0.001)

        sending = asyncio.create_task(send_all())
        for writer, next_writer in ((0, 1), (1, 0)):
            wanted = len(futures) + 100
            await until(partial(at_least, futures, wanted))
            await group[writer].crash()
            await group[next_writer].until_role("writer")
            await group[writer].start("follower")
            await group.all_in_sync(0, 1)
        stop.set()
        await sending
        receipts = await asyncio.gather(*futures)
        found = await group[0].client.read_queue("T", 0)
    order = [int(record.body) for record in found]
    for key in range(3):
        assert [n for n in order if n % 3 == key] == list(range(key, len(futures), 3))
    places = {record.unique_id: record.queue_offset for record in found}
    assert [places[r.unique_id] for r in receipts] == [r.queue_offset for r in receipts]

"""Batches that come again, over real gRPC, through crashes; and what looks like them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from cometmq.client import Message, Producer, ProducerOptions, SendReceipt
from cometmq.errors import BatchOutsideWindow
from cometmq.format.record import Record
from cometmq.messaging import dedup
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import (
    STREAM,
    SendLane,
    numbered,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.pullhold import sample


async def test_a_batch_that_comes_again_has_its_place(tmp_path: Path) -> None:
    """On the same stream, on another, after a crash, after a stop."""
    first, second = numbered(0, b"0", b"1", b"2"), numbered(3, b"3", b"4")
    results: list[pb.SendBatchResult] = []
    for crashes in (True, False, False):
        async with running_broker(tmp_path) as broker:
            if not results:
                await broker.put_topic("T", 1)
            for _ in range(2):
                lane = await broker.lane()
                results += [await lane.exchange(*first), await lane.exchange(*second)]
                results += [await lane.exchange(*first)]
            assert await broker.bodies("T", 0) == [b"0", b"1", b"2", b"3", b"4"]
            if crashes:
                broker.crash()
    assert not any(result.HasField("error") for result in results)
    places = {(r.log_offset, tuple(r.queue_offsets), r.store_time_ms) for r in results}
    assert len(places) == 2
    assert [result.stored_count for result in results[:3]] == [0, 0, 3]
    assert all(result.stored_count in (2, 3) for result in results[3:])


async def test_the_beginning_of_a_batch_is_known_and_the_rest_is_asked_for(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        await lane.exchange(*numbered(0, b"0", b"1"))  # what a crash left of the batch
        result = await lane.exchange(*numbered(0, b"0", b"1", b"2", b"3"))
        assert (result.stored_count, list(result.queue_offsets)) == (2, [0])
        await lane.exchange(*numbered(2, b"2", b"3"))
        assert await broker.bodies("T", 0) == [b"0", b"1", b"2", b"3"]


async def test_ids_of_another_producer_hide_nothing(tmp_path: Path) -> None:
    """Somebody took the ids that a producer is going to give its messages."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        await lane.exchange(*numbered(0, b"bad", b"bad"))
        result = await lane.exchange(*numbered(0, b"good", b"news"))
        assert not result.HasField("error")
        assert result.stored_count == 0
        assert await broker.bodies("T", 0) == [b"bad", b"bad", b"good", b"news"]


async def test_a_batch_that_is_too_old_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        for n in range(dedup.RUNS_MAX + 1):
            await lane.exchange(*numbered(n, b"%d" % n))
        assert isinstance(await lane.refused(*numbered(0, b"0")), BatchOutsideWindow)
        assert (await lane.exchange(*numbered(1, b"1"))).stored_count == 1


async def test_all_that_a_producer_may_have_on_the_way_is_known(tmp_path: Path) -> None:
    """Its answers are lost, also with the largest window that its options allow."""
    allowed = {option.name: option.metadata["limits"] for option in fields(ProducerOptions)}
    _, most = allowed["in_flight_max"]
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        told = (await broker.stub.DescribeMember(pb.DescribeMemberRequest())).memory
        assert most <= min(told.batches_max, told.batches_in_flight_max)
        assert allowed["delivery_timeout_ms"][1] <= told.sender_ms
        lane = await broker.lane()
        for n in range(most):
            await lane.exchange(*numbered(n, b"%d" % n))
        broker.crash()
    async with running_broker(tmp_path) as broker:
        lane = await broker.lane()
        for n in range(most):
            assert (await lane.exchange(*numbered(n, b"%d" % n))).stored_count == 1


async def test_what_the_broker_remembers_is_told(tmp_path: Path) -> None:
    for is_on in (True, False):
        async with running_broker(tmp_path / str(is_on), message_dedup_enable=is_on) as broker:
            told = (await broker.stub.DescribeMember(pb.DescribeMemberRequest())).memory
            assert (await SendLane(broker.stub).opened()).memory == told
            assert (told.batches_max > 0, told.ids_per_client_max > 0) == (is_on, is_on)


async def test_senders_above_the_limit_are_forgotten_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedup, "STREAMS_MAX", 1)
    records, segments = numbered(0, b"0")
    other = records.replace(STREAM.encode(), b"F" * len(STREAM))
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        for some in (records, records, other, records):
            assert not (await lane.exchange(some, segments)).HasField("error")
        assert len(await broker.read_queue("T", 0)) == 3
        assert await sample(broker.metrics_address, "cometmq_senders_forgotten_total") == 2


async def test_without_dedup_a_batch_is_stored_again(tmp_path: Path) -> None:
    async with running_broker(tmp_path, message_dedup_enable=False) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        for _ in range(2):
            await lane.exchange(*numbered(0, b"0"))
        assert await broker.bodies("T", 0) == [b"0", b"0"]


async def test_a_producer_through_crashes_stores_each_message_once(tmp_path: Path) -> None:
    """The broker dies again and again between an append and its answer."""
    source = random.Random(7)
    options = ProducerOptions(retry_backoff_ms=5, retry_backoff_max_ms=50, batch_count_max=20)
    async with running_namesrv(tmp_path) as namesrv:
        async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
            await broker.put_topic("T", 2)
        async with Producer(namesrv, options=options) as producer:
            sending: asyncio.Task[None] | None = None
            receipts: list[SendReceipt] = []
            found: list[Record] = []

            async def send_all() -> None:
                futures = []
                for n in range(3_000):
                    futures.append(await producer.send(Message("T", b"%d" % n)))
                    if n % 50 == 0:
                        await asyncio.sleep(0.01)
                receipts.extend(await asyncio.gather(*futures))

            for life in range(6):
                async with running_broker(tmp_path, namesrv=(namesrv,)) as broker:
                    sending = sending or asyncio.create_task(send_all())
                    if life < 5:
                        await asyncio.sleep(source.uniform(0.1, 0.3))
                        broker.crash()
                    else:
                        await sending
                        found = [*await broker.read_queue("T", 0), *await broker.read_queue("T", 1)]
    counts = Counter(one.body for one in found)
    assert counts == Counter(b"%d" % n for n in range(3_000))
    places = {one.unique_id: (one.queue_id, one.queue_offset) for one in found}
    for receipt in receipts:
        assert places[receipt.unique_id] == (receipt.queue.queue_id, receipt.queue_offset)


async def test_a_topic_that_was_created_again_has_its_messages(tmp_path: Path) -> None:
    """What a deleted topic of its name had does not count as stored."""
    async with running_broker(tmp_path) as broker:
        for _ in range(2):
            await broker.put_topic("T", 1)
            result = await (await broker.lane()).exchange(*numbered(0, b"0", b"1"))
            assert result.stored_count == 0
            assert await broker.bodies("T", 0) == [b"0", b"1"]
            await broker.drop_topic("T")

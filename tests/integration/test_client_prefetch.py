"""How much consumers ask for at a time, against a broker that says when it answers."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

from cometmq.client import (
    Message,
    Position,
    Producer,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.client.reading.pull_budget import PULL_BYTES_MIN
from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.waiting import until

QUICK: dict[str, Any] = {"poll_backoff_ms": 2, "poll_backoff_max_ms": 10}
BODY = random.Random(1).randbytes(20 * 1024)  # which does not get smaller by compression


async def fill(address: str, queue_count: int, count: int) -> None:
    """``count`` messages in each queue of T."""
    async with Producer(address) as producer:
        for queue_id in range(queue_count):
            queue = QueueRef("T", queue_id)
            await producer.send_many_and_wait([Message("T", BODY, queue=queue)] * count)


async def test_many_queues_share_the_bytes_in_flight() -> None:
    queue_count, count, bytes_max = 40, 20, 2 * PULL_BYTES_MIN
    got: defaultdict[int, list[int]] = defaultdict(list)

    async def listener(messages: list[ReceivedMessage]) -> None:
        got[messages[0].queue.queue_id] += [message.queue_offset for message in messages]

    options = PushConsumerOptions(
        batch_count=8, rebalance_delay_ms=1, pull_bytes_in_flight_max=bytes_max, **QUICK
    )
    async with fake_cluster(queues=queue_count) as (namesrv, [broker]):
        await fill(namesrv.address, queue_count, count)
        broker.pulling.clear()
        async with PushConsumer(namesrv.address, "G", listener, options=options) as push:
            await push.subscribe("T")
            await until(lambda: broker.asked_bytes == bytes_max)
            assert len(push.assigned) == queue_count
            broker.pulling.set()
            await until(lambda: sum(map(len, got.values())) >= queue_count * count)
    assert broker.most_asked_bytes == bytes_max
    assert got == {queue_id: list(range(count)) for queue_id in range(queue_count)}


async def test_a_queue_with_much_left_asks_for_more_and_one_that_has_little_for_less() -> None:
    options = PullConsumerOptions(pull_bytes_max=3 * PULL_BYTES_MIN, **QUICK)
    async with fake_cluster(queues=1) as (namesrv, [broker]):
        await fill(namesrv.address, 1, 60)
        async with PullConsumer(namesrv.address, "G", options=options) as consumer:
            await consumer.assign([QueueRef("T", 0, "g1")])
            offsets: list[int] = []
            while len(offsets) < 60:
                offsets += [message.queue_offset for message in await consumer.poll()]
        assert offsets == list(range(60))
        asked = [pull.max_bytes // PULL_BYTES_MIN for pull in broker.pulls]
        assert asked[:3] == [1, 3, 1], "nothing is known, 48 messages are left, 10 are"


@pytest.mark.parametrize("act", ["seek", "give up"])
async def test_a_queue_that_waits_for_bytes_may_go_elsewhere(act: str) -> None:
    queues = [QueueRef("T", queue_id, "g1") for queue_id in range(2)]
    options = PullConsumerOptions(pull_bytes_in_flight_max=PULL_BYTES_MIN, **QUICK)
    async with fake_cluster(queues=2) as (namesrv, [broker]):
        await fill(namesrv.address, 2, 10)
        broker.pulling.clear()
        async with PullConsumer(namesrv.address, "G", options=options) as consumer:
            await consumer.assign(queues)
            polling = asyncio.create_task(consumer.poll(timeout_ms=20_000))
            await until(lambda: broker.pulls)
            [pull] = broker.pulls
            pulled, waits = queues[pull.queue.queue_id], queues[1 - pull.queue.queue_id]
            if act == "seek":
                await consumer.seek(waits, Position(0, 7))
                broker.pulling.set()
                got = await polling
                while len(got) < 10 + 3:
                    got += await consumer.poll()
                offsets = [(m.queue, m.queue_offset) for m in got]
                wanted = [(pulled, n) for n in range(10)] + [(waits, n) for n in (7, 8, 9)]
                assert sorted(offsets) == sorted(wanted)
            else:
                await consumer.assign([waits])
                broker.pulling.set()
                got = await polling
                assert {message.queue for message in got} == {waits}

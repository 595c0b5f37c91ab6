"""What consumers hold of all their queues together."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, cast

from cometmq.client import (
    ConsumeFrom,
    ConsumeMode,
    Message,
    Producer,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.cluster.pop_cluster import Ahead, pop_cluster
from tests.support.waiting import until

KIB = 1024
QUEUES, EACH = 8, 60
BODY = random.Random(1).randbytes(10 * KIB)  # nothing makes it smaller
TOTAL = QUEUES * EACH * len(BODY)
FAST: dict[str, Any] = {
    "poll_backoff_ms": 2,
    "poll_backoff_max_ms": 10,
    "rebalance_delay_ms": 1,
    "pull_bytes_max": 32 * KIB,
    "consume_from": ConsumeFrom.FIRST,
}


async def fill(namesrv: str, group: str, queues: int = QUEUES) -> None:
    async with Producer(namesrv) as producer:
        for queue_id in range(queues):
            queue = QueueRef("T", queue_id, group)
            await producer.send_many([Message("T", BODY, queue=queue) for _ in range(EACH)])


async def test_all_queues_of_a_push_consumer_share_its_memory() -> None:
    """With a listener that does nothing for now each queue has a part, and none is left out."""
    gate = asyncio.Event()
    got: list[ReceivedMessage] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        await gate.wait()
        got.extend(messages)

    bytes_max = TOTAL // 4
    options = PushConsumerOptions(memory_bytes_max=bytes_max, retry_in_place=True, **FAST)
    async with fake_cluster(queues=QUEUES) as (namesrv, [broker]):
        await fill(namesrv.address, broker.name)
        async with PushConsumer(namesrv.address, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")

            def held() -> list[int]:
                return [state.cached_bytes for state in consumer._queues.states()]

            def is_full() -> bool:
                least = bytes_max * (QUEUES - 1) // (QUEUES + 1)  # each pull asks for a piece
                return len(held()) == QUEUES and sum(held()) >= least - QUEUES * 32 * KIB

            await until(is_full)
            await until(lambda: not broker.asked_bytes)
            assert sum(held()) <= bytes_max
            assert min(held()) > 0
            assert max(held()) <= 2 * bytes_max // QUEUES, "none has much more than its part"
            gate.set()
            await until(lambda: len(got) == QUEUES * EACH)


async def test_one_busy_queue_may_have_half_of_the_memory() -> None:
    async def listener(_: list[ReceivedMessage]) -> None:
        await asyncio.Event().wait()

    options = PushConsumerOptions(
        memory_bytes_max=256 * KIB, retry_in_place=True, drain_timeout_ms=1, **FAST
    )
    async with fake_cluster(queues=QUEUES) as (namesrv, [broker]):
        await fill(namesrv.address, broker.name, queues=1)
        async with PushConsumer(namesrv.address, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")

            def busy() -> int:
                return max((s.cached_bytes for s in consumer._queues.states()), default=0)

            await until(lambda: busy() > 90 * KIB)
            assert busy() <= 128 * KIB


async def test_what_is_fetched_for_polls_has_a_bound() -> None:
    bytes_max = 3 * 32 * KIB
    options = PullConsumerOptions(memory_bytes_max=bytes_max, **FAST)
    async with fake_cluster(queues=QUEUES) as (namesrv, [broker]):
        await fill(namesrv.address, broker.name)
        async with PullConsumer(namesrv.address, "P", options=options) as consumer:
            await consumer.assign([QueueRef("T", n, broker.name) for n in range(QUEUES)])
            count, seen = 0, set[QueueRef]()
            while count < QUEUES * EACH:
                messages = await consumer.poll()
                count += len(messages)
                seen |= {message.queue for message in messages}
                held = sum(state.cached_bytes for state in consumer._queues.states())
                assert held <= bytes_max
                assert broker.most_asked_bytes <= bytes_max
            assert len(seen) == QUEUES


async def test_a_group_that_receives_has_the_same_bound(tmp_path: Path) -> None:
    gate = asyncio.Event()
    got: list[ReceivedMessage] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        await gate.wait()
        got.extend(messages)

    bytes_max = 160 * KIB
    options = PushConsumerOptions(
        consume_mode=ConsumeMode.POP, memory_bytes_max=bytes_max, pull_bytes_max=32 * KIB
    )
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _):
        await fill(namesrv, "g1", queues=2)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            share = cast(Any, consumer._share)

            def held() -> int:
                return sum(state.held_bytes for state in share.states())

            await until(lambda: held() >= bytes_max // 2 - 32 * KIB)
            assert held() <= bytes_max
            gate.set()
            await until(lambda: len(got) >= 2 * EACH)

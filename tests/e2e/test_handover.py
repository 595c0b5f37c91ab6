"""Planned hand-overs of a real group under load, and kill -9 in between.

A producer and two consumers of the SDK go on all the time. No acknowledged message is lost, no
committed offset, and no hand-over raises a generation. Counts are printed (pytest -s).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import (
    Message,
    Position,
    Producer,
    PullConsumer,
    PushConsumer,
    QueueRef,
    ReceivedMessage,
    SendReceipt,
)
from tests.support.cluster.broker import ASYNC, SYNC
from tests.support.cluster.groups import LocalGroup, local_group
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(180)

TOPICS = {"S": SYNC, "A": ASYNC}
QUEUE = QueueRef("S", 0, "g1")
BETWEEN_S = 0.5  # of load between two events


@dataclass
class Ledger:
    """What was sent, promised and seen."""

    sent: dict[bytes, asyncio.Future[SendReceipt]] = field(default_factory=dict)
    seen: dict[bytes, int] = field(default_factory=dict)

    async def see(self, messages: list[ReceivedMessage]) -> None:
        for message in messages:
            self.seen[message.body] = self.seen.get(message.body, 0) + 1

    def promised(self) -> set[bytes]:
        return {
            body
            for body, future in self.sent.items()
            if future.done() and not future.cancelled() and future.exception() is None
        }

    @property
    def repeated(self) -> int:
        return sum(count - 1 for count in self.seen.values())


async def produce(producer: Producer, ledger: Ledger, stop: asyncio.Event) -> None:
    number = 0
    while not stop.is_set():
        for topic in TOPICS:
            body = b"%s:%d:" % (topic.encode(), number) + b"." * (number * 37 % 900)
            ledger.sent[body] = await producer.send(Message(topic, body))
            number += 1
        if number % 40 == 0:
            await asyncio.sleep(0.01)


class Steady:
    """A group that commits by hand: its offset must stand wherever the writer is."""

    def __init__(self, consumer: PullConsumer) -> None:
        self._consumer = consumer
        self.committed = Position(0, 0)

    async def commit(self) -> None:
        bounds = (await self._consumer.bounds([QUEUE]))[QUEUE]
        wanted = {QUEUE: Position(bounds.generation, bounds.max_offset)}
        await self._consumer.commit(wanted)
        self.committed = wanted[QUEUE]

    async def check(self) -> None:
        kept = (await self._consumer.committed([QUEUE]))[QUEUE]
        assert kept == self.committed

    async def generation(self) -> int:
        return (await self._consumer.bounds([QUEUE]))[QUEUE].generation


async def hand_over(group: LocalGroup, steady: Steady) -> None:
    before = await group.writer()
    generation = await steady.generation()
    await steady.commit()
    done = await group.step_down()
    assert done.from_member == before
    assert done.to_member != before
    assert await group.writer() == done.to_member
    await steady.check()
    assert await steady.generation() == generation, "a planned hand-over raises nothing"
    print(f"hand-over {done.from_member} -> {done.to_member} at {done.log_end_offset}")


async def kill_follower(group: LocalGroup) -> None:
    writer = await group.writer()
    await group.kill(1 - writer)
    await asyncio.sleep(BETWEEN_S)
    await group.start()
    assert await group.writer() == writer


async def kill_writer(group: LocalGroup) -> None:
    """It is back before its lease is over, so it goes on as what the lease says that it is."""
    writer = await group.writer()
    await group.kill(writer)
    await asyncio.sleep(BETWEEN_S)
    await group.start()
    assert await group.writer() == writer
    assert "reason=restart" in group.log(writer)


@pytest.mark.slow
async def test_nothing_is_lost_when_the_role_goes_to_and_fro(tmp_path: Path) -> None:
    ledger, stop = Ledger(), asyncio.Event()
    async with local_group(tmp_path / "cluster") as group:
        client = group.client(await group.writer())
        for topic, flush in TOPICS.items():
            await client.put_topic(topic, 2, flush)
        async with (
            Producer(group.namesrv) as producer,
            PushConsumer(group.namesrv, "pushed", ledger.see) as pushed,
            PullConsumer(group.namesrv, "steady") as consumer,
        ):
            for topic in TOPICS:
                await pushed.subscribe(topic)
            await consumer.queues("S")
            steady = Steady(consumer)
            async with asyncio.TaskGroup() as load:
                load.create_task(produce(producer, ledger, stop))
                await until(lambda: ledger.seen)
                await hand_over(group, steady)
                await kill_follower(group)
                await hand_over(group, steady)
                await kill_writer(group)
                for _ in range(4):
                    await hand_over(group, steady)
                    await asyncio.sleep(BETWEEN_S)
                stop.set()
            await producer.flush()
            promised = ledger.promised()
            await until(lambda: promised <= ledger.seen.keys(), 30.0)
        await group.in_step()
        compared = await group.assert_logs_equal()
    failed = len(ledger.sent) - len(promised)
    print(
        f"{len(ledger.sent)} messages sent, {len(promised)} acknowledged, {failed} refused, "
        f"{len(ledger.seen)} seen ({ledger.repeated} repeated), {compared} bytes of log equal"
    )
    assert not failed


async def test_a_writer_that_is_told_to_stop_hands_over_first(tmp_path: Path) -> None:
    options: dict[str, Any] = {"hand_over_at_stop": "true", "lease_duration_s": "60"}
    async with local_group(tmp_path / "cluster", **options) as group:
        assert await group.writer() == 0
        client = group.client(0)
        await client.put_topic("S", 1, SYNC)
        for number in range(20):
            await client.send("S", 0, b"%d" % number)
        await group.in_step()
        await group.stop(0)
        assert "handed over before the stop" in group.log(0)
        assert await group.writer() == 1, "long before the lease is over"
        assert len(await group.client(1).bodies("S", 0)) == 20
        await group.start()
        await group.in_step()
        await group.assert_logs_equal()

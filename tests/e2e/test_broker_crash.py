"""kill -9 of a real broker in the middle of a run, again and again over the same store.

Whatever was acknowledged is there afterwards, with the same bytes at the offset that was
acknowledged; whatever a consumer has seen is still there. Counts are printed (pytest -s).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import subprocess
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.client import Message, Producer, SendReceipt
from cometmq.format import record
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import (
    SYNC,
    BrokerClient,
    BrokerProcess,
    StreamEnded,
    batch,
    running_namesrv,
)
from tests.support.waiting import until

QUEUES = [("A", 0), ("A", 1), ("S", 0), ("S", 1)]  # A is flushed in the background, S before an ack
PIPELINE = 8
SDK_IN_FLIGHT = 200

Place = tuple[str, int, int]  # topic, queue, offset


@dataclass
class Ledger:
    """What was promised, over all lives of the broker."""

    acknowledged: dict[Place, bytes] = field(default_factory=dict)
    seen: dict[Place, bytes] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)  # promises that contradict each other
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    def acknowledge(self, place: Place, body: bytes) -> None:
        self._note(self.acknowledged, place, body)

    def see(self, place: Place, body: bytes) -> None:
        self._note(self.seen, place, body)

    def _note(self, table: dict[Place, bytes], place: Place, body: bytes) -> None:
        # Kept for `check`: callbacks of futures cannot fail a test.
        if table.setdefault(place, body) != body:
            self.broken.append(f"{place} was {table[place]!r}, then {body!r}")

    def body(self) -> bytes:
        number = next(self.numbers)
        return b"%d:" % number + b"." * (number * 37 % 900)

    def bodies(self, count: int) -> list[bytes]:
        return [self.body() for _ in range(count)]

    async def check(self, broker: BrokerClient, life: int) -> None:
        stored = {
            (topic, queue_id, found.queue_offset): found.body
            for topic, queue_id in QUEUES
            for found in await broker.read_queue(topic, queue_id)
        }
        assert not self.broken
        for promised in (self.acknowledged, self.seen):
            lost = {place for place, body in promised.items() if stored.get(place) != body}
            assert not lost, f"life {life}: {sorted(lost)[:5]} of {len(lost)} lost or changed"
        print(
            f"life {life}: {len(self.acknowledged)} acknowledged, {len(self.seen)} seen, "
            f"{len(stored)} stored, all there"
        )


async def produce(broker: BrokerClient, ledger: Ledger, rng: random.Random) -> None:
    """Send batches over random queues, several in flight, until the broker is gone."""
    lane = await broker.lane()
    in_flight: list[list[tuple[str, int, list[bytes]]]] = []
    with suppress(grpc.aio.AioRpcError, StreamEnded):  # the end of the broker ends the stream
        while True:
            while len(in_flight) < PIPELINE:
                chosen = rng.sample(QUEUES, rng.randrange(1, 4))
                runs = [(t, q, ledger.bodies(rng.randrange(1, 9))) for t, q in chosen]
                in_flight.append(runs)
                await lane.put(*batch(*runs))
            result = await lane.result()
            for (topic, queue_id, bodies), first in zip(
                in_flight.pop(0), result.queue_offsets, strict=True
            ):
                for offset, body in enumerate(bodies, first):
                    ledger.acknowledge((topic, queue_id, offset), body)


async def consume(broker: BrokerClient, ledger: Ledger, key: tuple[str, int]) -> None:
    """Read one queue as it grows, from where the last life ended, until the broker is gone."""
    offset = sum(place[:2] == key for place in ledger.seen)
    with suppress(grpc.aio.AioRpcError):
        while True:
            answer = await broker.pull(*key, offset, max_count=1000)
            assert answer.status in (pb.PULL_STATUS_FOUND, pb.PULL_STATUS_NOT_FOUND), answer.status
            for found in record.decode_all(answer.records):
                ledger.see((*key, found.queue_offset), found.body)
            offset = answer.next_position.offset
            if not answer.count:
                await asyncio.sleep(0.001)


async def live_and_die(
    process: BrokerProcess, ledger: Ledger, send: Callable[[], Coroutine[Any, Any, None]], more: int
) -> None:
    """Load until ``more`` messages are acknowledged, then kill -9."""
    target = len(ledger.acknowledged) + more
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(send())
        readers = [tasks.create_task(consume(process.client, ledger, key)) for key in QUEUES]
        await until(lambda: len(ledger.acknowledged) >= target)
        await process.kill()
        sending.cancel()
        for reader in readers:
            reader.cancel()


async def put_topics(broker: BrokerClient) -> None:
    await broker.put_topic("A", 2)
    await broker.put_topic("S", 2, SYNC)


OFTEN = [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(300)])]


@pytest.mark.parametrize("kills", OFTEN)
async def test_acknowledged_messages_survive_kill_9(
    tmp_path: Path, rng: random.Random, kills: int
) -> None:
    ledger = Ledger()
    async with BrokerProcess(tmp_path) as process:
        await put_topics(process.client)
        for life in range(1, kills + 1):
            client = process.client

            async def send(broker: BrokerClient = client) -> None:
                await produce(broker, ledger, rng)

            await live_and_die(process, ledger, send, rng.randrange(100, 1500))
            await process.start()
            await ledger.check(process.client, life)
        assert len(ledger.acknowledged) > kills * 100
        assert ledger.seen
        assert await process.stop() == 0


async def test_kill_9_while_it_starts(tmp_path: Path, rng: random.Random) -> None:
    """Recovery that is cut short again and again loses nothing and ends well."""
    ledger = Ledger()
    async with BrokerProcess(tmp_path) as process:
        await put_topics(process.client)
        lane = await process.client.lane()
        for _ in range(60):
            topic, queue_id = rng.choice(QUEUES)
            bodies = [ledger.body() + b"." * 3_000 for _ in range(4)]
            [first] = (await lane.send((topic, queue_id, bodies))).queue_offsets
            for offset, body in enumerate(bodies, first):
                ledger.acknowledge((topic, queue_id, offset), body)
        await process.kill()
        for _ in range(5):
            cut_short = process.spawn()
            # From before its first line of Python to after it is ready.
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(cut_short.wait, rng.uniform(0.1, 1.2))
            cut_short.kill()
            cut_short.wait()
        await process.start()
        await ledger.check(process.client, 6)


async def churn(broker: BrokerClient, rng: random.Random, known: dict[str, bool | None]) -> None:
    """Create and delete topics. ``known``: what was answered; None = asked and not answered."""
    with suppress(grpc.aio.AioRpcError):
        while True:
            name = f"churn-{rng.randrange(6)}"
            exists, known[name] = known.get(name, False), None
            if exists:
                await broker.drop_topic(name)
            else:
                await broker.put_topic(name, 1)
                await broker.send(name, 0, b"x" * 500)
            known[name] = not exists


async def test_topics_that_come_and_go_under_kill_9(tmp_path: Path, rng: random.Random) -> None:
    """What was answered holds after the restart; a new topic never has an old one's messages."""
    known: dict[str, bool | None] = {}
    async with BrokerProcess(tmp_path) as process:
        for _ in range(3):
            task = asyncio.create_task(churn(process.client, rng, known))
            for _ in range(rng.randrange(50, 300)):
                await process.client.stub.QueryQueues(pb.QueryQueuesRequest())
            await process.kill()
            task.cancel()
            await asyncio.wait({task})
            client = await process.start()
            listed = await client.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
            exist = {topic.name for topic in listed.topics}
            for name, answered in known.items():
                assert answered in (None, name in exist), (name, answered)
                known[name] = name in exist
            for name in exist:
                assert await client.bodies(name, 0) in ([], [b"x" * 500])


# --- the SDK's producer -------------------------------------------------------------------------


async def produce_by_sdk(producer: Producer, ledger: Ledger) -> None:
    """Send until cancelled; the producer itself gets over the broker's deaths."""

    def acknowledged(body: bytes) -> Callable[[asyncio.Future[SendReceipt]], None]:
        def note(future: asyncio.Future[SendReceipt]) -> None:
            if (error := future.exception()) is not None:
                ledger.broken.append(f"the producer gave up: {error!r}")
                return
            receipt = future.result()
            place = (receipt.queue.topic, receipt.queue.queue_id, receipt.queue_offset)
            ledger.acknowledge(place, body)

        return note

    in_flight: deque[asyncio.Future[SendReceipt]] = deque()
    for number in itertools.count():
        body = ledger.body()
        in_flight.append(await producer.send(Message("AS"[number % 2], body)))
        in_flight[-1].add_done_callback(acknowledged(body))
        if len(in_flight) > SDK_IN_FLIGHT:
            await in_flight.popleft()


@pytest.mark.parametrize("kills", OFTEN)
async def test_what_the_sdk_acknowledged_survives_kill_9(
    tmp_path: Path, rng: random.Random, kills: int
) -> None:
    ledger = Ledger()
    async with running_namesrv(tmp_path) as namesrv:
        process = BrokerProcess(tmp_path, "--namesrv", namesrv)
        async with process, Producer(namesrv) as producer:
            await put_topics(process.client)
            for life in range(1, kills + 1):

                async def send() -> None:
                    await produce_by_sdk(producer, ledger)

                await live_and_die(process, ledger, send, rng.randrange(100, 1500))
                await process.start()
                await producer.flush()  # what was in flight is sent again, in order
                await ledger.check(process.client, life)
    assert len(ledger.acknowledged) > kills * 100

"""Pull consumers that are members of their group: their share of the queues comes and goes without
doubles, a listener learns of it, and positions may lie in a store of the application's own.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
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
    QueueListener,
    QueueRef,
)
from cometmq.errors import ConfigInvalid, InvalidRequest
from tests.support.cluster.broker import running_broker, running_namesrv
from tests.support.waiting import until

QUEUES = 8
FAST: dict[str, Any] = {
    "rebalance_delay_ms": 1,
    "poll_backoff_ms": 5,
    "poll_backoff_max_ms": 20,
    "retry_backoff_max_ms": 100,
}


def puller(namesrv: str, *, store: Any = None, listener: Any = None, **more: Any) -> PullConsumer:
    options = PullConsumerOptions(**{**FAST, **more})
    return PullConsumer(namesrv, "G", options=options, offset_store=store, queue_listener=listener)


class Traffic:
    """Messages that are sent until :meth:`stop`, and what consumers have seen of them."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()
        self.sent: set[bytes] = set()
        self._stopped = self._all_seen = False

    async def send(self, namesrv: str) -> None:
        async with Producer(namesrv) as producer:
            while not self._stopped:
                body = b"%d" % len(self.sent)
                self.sent.add(body)
                await producer.send_and_wait(Message("T", body))

    def stop(self) -> None:
        self._stopped = True

    def end_reading(self) -> None:
        """Readers commit what they polled last. Cancelled, they would leave it to other members."""
        self._all_seen = True

    async def read(self, consumer: PullConsumer, until_s: float, *, by_hand: bool = False) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + until_s
        while loop.time() < end_s and not self._all_seen:
            messages = await consumer.poll(timeout_ms=20)
            self.seen.update(message.body for message in messages)
            await asyncio.sleep(0.002)
            if by_hand and messages:
                await consumer.commit()

    @property
    def doubles(self) -> dict[bytes, int]:
        return {body: count for body, count in self.seen.items() if count > 1}


@pytest.mark.parametrize("by_hand", [False, True])
async def test_members_come_and_go_under_load_and_nothing_comes_twice(
    tmp_path: Path, by_hand: bool
) -> None:
    traffic = Traffic()
    commits = {} if by_hand else {"commit_interval_ms": 200}

    async def listener(messages: Any) -> None:
        traffic.seen.update(message.body for message in messages)

    async def come_and_go(namesrv: str, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(3):
            async with puller(namesrv, **commits) as one:
                await one.subscribe("T")
                await traffic.read(one, chance.uniform(0.2, 0.6), by_hand=by_hand)

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", QUEUES)
        sending = asyncio.create_task(traffic.send(namesrv))
        pushing = PushConsumer(
            namesrv, "G", listener, options=PushConsumerOptions(rebalance_delay_ms=1)
        )
        async with pushing, puller(namesrv, **commits) as stays:
            await pushing.subscribe("T")
            await stays.subscribe("T")
            reading = asyncio.create_task(traffic.read(stays, 60.0, by_hand=by_hand))
            await asyncio.gather(*(come_and_go(namesrv, seed) for seed in range(3)))
            await until(lambda: len(pushing.assigned) == len(stays.assigned) == QUEUES // 2)
            traffic.stop()
            await sending
            await until(lambda: traffic.seen.keys() >= traffic.sent)
            traffic.end_reading()
            await reading
    assert len(traffic.sent) > 100
    assert traffic.doubles == {}


class Listener(QueueListener):
    """Commits by hand what goes, and says what it heard."""

    def __init__(self) -> None:
        self.consumer: PullConsumer | None = None
        self.heard: list[tuple[str, int]] = []
        self.seek_to: int | None = None

    async def on_assigned(self, queues: Sequence[QueueRef]) -> None:
        self.heard.append(("+", len(queues)))
        assert self.consumer is not None
        if self.seek_to is not None:
            for queue in queues:
                await self.consumer.seek(queue, Position(0, self.seek_to))

    async def on_revoked(self, queues: Sequence[QueueRef]) -> None:
        self.heard.append(("-", len(queues)))
        assert self.consumer is not None
        await self.consumer.commit()


async def test_a_listener_seeks_what_comes_and_commits_what_goes(tmp_path: Path) -> None:
    listener = Listener()
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)
        for queue_id in (0, 1):
            await broker.send("T", queue_id, *[b"%d" % n for n in range(5)])
        listener.seek_to = 3
        async with puller(namesrv, listener=listener) as one:
            listener.consumer = one
            await one.subscribe("T")
            messages = [*await one.poll(), *await one.poll()]
            assert [message.queue_offset for message in messages] == [3, 4, 3, 4]
            assert len(one.assigned) == 2
            async with puller(namesrv) as other:
                await other.subscribe("T")
                assert await one.poll(timeout_ms=50) == []  # it is done with both
                await until(lambda: len(other.assigned) == 1)
                assert listener.heard == [("+", 2), ("-", 1)]
                (given_up,) = other.assigned
                committed = await broker.committed("G", "T", given_up.queue_id)
                assert committed is not None
                assert committed.offset == 5
                assert await other.poll(timeout_ms=50) == []
            await until(lambda: len(one.assigned) == 2)
        assert listener.heard == [("+", 2), ("-", 1), ("+", 1), ("-", 2)]


async def test_a_queue_in_work_waits_for_the_application_and_not_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0", b"1")
        options = {"commit_interval_ms": 10, "drain_timeout_ms": 500, "pull_count_max": 1}
        async with puller(namesrv, client_id="b", **options) as one:
            await one.subscribe("T")
            assert len(await one.poll()) == 1
            async with puller(namesrv, client_id="a", **options) as other:
                await other.subscribe("T")
                await asyncio.sleep(0.2)
                assert not other.assigned, "the application may work on the first message"
                await until(lambda: len(other.assigned) == 1)
                (first,) = await other.poll()
                assert first.queue_offset == 0, "nobody has said that it is done"
    assert "queues are given up while the application works" in caplog.text


async def test_assigning_and_subscribing_exclude_each_other(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        puller(namesrv) as one,
    ):
        await broker.put_topic("T", 1)
        queues = await one.queues("T")
        await one.assign(queues)
        with pytest.raises(InvalidRequest):
            await one.subscribe("T")
        await one.assign([])
        await one.subscribe("T")
        await until(lambda: one.assigned == queues)
        with pytest.raises(InvalidRequest):
            await one.assign(queues)
        await one.unsubscribe("T")
        await until(lambda: not one.assigned)
        with pytest.raises(InvalidRequest):
            await one.poll()


class Store:
    """Positions in memory; fails as often as it is told."""

    def __init__(self) -> None:
        self.positions: dict[QueueRef, Position] = {}
        self.history: list[tuple[QueueRef, Position]] = []
        self.failures = 0

    async def load(self, queues: Sequence[QueueRef]) -> Mapping[QueueRef, Position]:
        self._fail()
        return {queue: self.positions[queue] for queue in queues if queue in self.positions}

    async def store(self, positions: Mapping[QueueRef, Position]) -> None:
        self._fail()
        self.positions |= positions
        self.history += positions.items()

    def _fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the database is away")


@pytest.mark.parametrize("pushing", [False, True])
async def test_positions_lie_in_a_store_of_ones_own_and_never_go_back(
    tmp_path: Path, pushing: bool
) -> None:
    store, traffic = Store(), Traffic()
    store.failures = 3

    async def listener(messages: Any) -> None:
        traffic.seen.update(message.body for message in messages)

    async def work(namesrv: str, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(3):
            stay_s = chance.uniform(0.2, 0.5)
            if pushing:
                options = PushConsumerOptions(
                    rebalance_delay_ms=1, commit_interval_ms=20, retry_backoff_max_ms=100
                )
                push = PushConsumer(namesrv, "G", listener, options=options, offset_store=store)
                async with push:
                    await push.subscribe("T")
                    await asyncio.sleep(stay_s)
            else:
                async with puller(namesrv, store=store, commit_interval_ms=20) as pull:
                    await pull.subscribe("T")
                    await traffic.read(pull, stay_s)

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", QUEUES)
        sending = asyncio.create_task(traffic.send(namesrv))
        await asyncio.gather(*(work(namesrv, seed) for seed in range(3)))
        traffic.stop()
        await sending
        async with puller(namesrv, store=store, commit_interval_ms=20) as last:
            await last.subscribe("T")
            await traffic.read(last, 1.0)
        assert not any([await broker.committed("G", "T", n) for n in range(QUEUES)])
    assert traffic.seen.keys() == traffic.sent
    assert traffic.doubles == {}
    newest: dict[QueueRef, Position] = {}
    for queue, position in store.history:
        assert position.offset >= newest.get(queue, position).offset, queue
        newest[queue] = position


async def test_a_position_that_cannot_be_loaded_is_asked_for_again(tmp_path: Path) -> None:
    """#10176: RocketMQ's consumer began at the first message then."""
    store = Store()
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        puller(namesrv, store=store) as one,
    ):
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0", b"1", b"2")
        (queue,) = await one.queues("T")
        store.positions[queue], store.failures = Position(0, 2), 2
        await one.subscribe("T")
        assert [message.queue_offset for message in await one.poll()] == [2]
        await one.commit({queue: Position(0, 1)})
        assert not store.history, "an older position changes nothing"
        await one.commit()
        assert store.positions[queue].offset == 3


async def test_a_store_without_its_methods_is_refused() -> None:
    with pytest.raises(ConfigInvalid):
        puller("127.0.0.1:1", store=object())
    with pytest.raises(InvalidRequest):
        puller("127.0.0.1:1", listener=object())


async def test_cancellations_of_the_application_end_no_loop(tmp_path: Path) -> None:
    """A store or a listener may wait for something that is cancelled, a driver's task say."""

    class Cancelled(Store):
        def _fail(self) -> None:
            if self.failures:
                self.failures -= 1
                raise asyncio.CancelledError

    class Surprised(QueueListener):
        async def on_assigned(self, queues: Sequence[QueueRef]) -> None:
            raise asyncio.CancelledError

    store = Cancelled()
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0")
        store.failures = 1
        options = {"commit_interval_ms": 20}
        async with puller(namesrv, store=store, listener=Surprised(), **options) as one:
            await one.subscribe("T")
            assert len(await one.poll()) == 1
            store.failures = 1
            await one.poll(timeout_ms=1)
            await until(lambda: store.history)
            assert not store.failures


async def test_what_is_assigned_no_more_is_not_fetched_though_a_poll_waits(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        puller(namesrv) as one,
    ):
        await broker.put_topic("T", QUEUES)
        await one.assign(await one.queues("T"))
        polling = asyncio.create_task(one.poll(timeout_ms=300))
        await until(lambda: len(one._polled._fetching) == QUEUES)
        await one.assign([])
        assert await polling == []
        assert not one._polled._fetching


async def test_who_unsubscribes_and_does_not_wait_can_subscribe_again(tmp_path: Path) -> None:
    go_on = asyncio.Event()

    class Slow(QueueListener):
        async def on_revoked(self, queues: Sequence[QueueRef]) -> None:
            await go_on.wait()

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        puller(namesrv, listener=Slow()) as one,
    ):
        await broker.put_topic("T", 1)
        await one.subscribe("T")
        await until(lambda: one.assigned)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(one.unsubscribe("T"), 0.05)
        await one.subscribe("T")
        go_on.set()
        await until(lambda: one.assigned)

"""Consumption in order: one owner of a queue, one call at a time, through rebalance and faults."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.client import (
    ConsumeResult,
    Later,
    Message,
    OrderBy,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.client.group import queue_locks
from cometmq.client.group import share as group_share
from cometmq.errors import ConfigInvalid, QueueLocked, QueueNotFound
from cometmq.messaging import locks
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2
from services.broker import servicer
from tests.support.cluster.broker import BrokerClient, LiveBroker, running_broker, running_namesrv
from tests.support.waiting import until, until_async

QUEUES, GROUP = 4, "g1"
LOCKED = QueueLocked.code


@asynccontextmanager
async def cluster(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[str, LiveBroker]]:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **options) as broker,
    ):
        await broker.put_topic("T", QUEUES)
        yield namesrv, broker


def consumer(namesrv: str, listener: Any, **changes: Any) -> PushConsumer:
    options = {"rebalance_delay_ms": 1, "orderly": True, "suspend_queue_ms": 10, **changes}
    return PushConsumer(namesrv, "G", listener, options=PushConsumerOptions(**options))


async def send(namesrv: str, count: int) -> None:
    """Message n of queue q has the body ``n``."""
    async with Producer(namesrv) as producer:
        for n in range(count):
            await asyncio.gather(
                *(
                    producer.send_and_wait(Message("T", b"%d" % n, queue=QueueRef("T", q, GROUP)))
                    for q in range(QUEUES)
                )
            )


class Calls:
    """Every listener call of a group. Asserts that a queue has one at a time."""

    def __init__(self) -> None:
        self.done: defaultdict[int, list[int]] = defaultdict(list)
        self.running: Counter[int] = Counter()

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        queue_id = messages[0].queue.queue_id
        self.running[queue_id] += 1
        assert self.running[queue_id] == 1, f"two calls at a time for queue {queue_id}"
        await asyncio.sleep(0.002)
        self.done[queue_id] += [int(message.body) for message in messages]
        self.running[queue_id] -= 1

    def count(self) -> int:
        return sum(map(len, self.done.values()))


async def test_members_come_and_go_and_each_queue_stays_in_order_without_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_share, "MISSED_S", 0.02)
    calls, count = Calls(), 200
    async with cluster(tmp_path) as (namesrv, _):
        await send(namesrv, count)
        async with consumer(namesrv, calls) as first:
            await first.subscribe("T")
            await until(lambda: calls.count() > 20)
            async with consumer(namesrv, calls) as second:
                await second.subscribe("T")
                await until(lambda: len(second.assigned) == QUEUES // 2)
                assert len(first.assigned) == QUEUES // 2
                before = calls.count()
                await until(lambda: calls.count() > before + 20)
            await until(lambda: calls.count() >= count * QUEUES)
        assert calls.done == {q: list(range(count)) for q in range(QUEUES)}


async def test_what_fails_comes_before_what_follows_and_dies_after_its_tries(
    tmp_path: Path,
) -> None:
    seen: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> Later | ConsumeResult | None:
        number = int(messages[0].body)
        seen.append(number)
        if number == 1 and messages[0].attempt == 1:
            raise ValueError("a listener's mistake")
        if number == 2 and messages[0].attempt == 1:
            return ConsumeResult.LATER
        return Later() if number == 3 else None

    async with cluster(tmp_path) as (namesrv, broker):
        async with consumer(namesrv, listener, retry_times_max=2) as consuming:
            await consuming.subscribe("T")
            async with Producer(namesrv) as producer:
                queue = QueueRef("T", 2, GROUP)
                for n in range(6):
                    await producer.send_and_wait(Message("T", b"%d" % n, queue=queue))
            await until(lambda: seen[-1:] == [5])
        assert seen == [0, 1, 1, 2, 2, 3, 3, 3, 4, 5]
        dead = await broker.read_queue("%DLQ%G", 0)
        assert [one.body for one in dead] == [b"3"]
        position = await broker.committed("G", "T", 2)
        assert position is not None
        assert position.offset == 6


async def lock(broker: BrokerClient, client: str, *queue_ids: int) -> list[int]:
    """Lock numbers, or the codes of the errors."""
    request = pb.LockQueuesRequest(
        group="G", client_id=client, queues=[queue(queue_id) for queue_id in queue_ids]
    )
    response = await broker.stub.LockQueues(request)
    return [r.error.code if r.HasField("error") else r.lock_number for r in response.results]


async def unlock(broker: BrokerClient, client: str) -> None:
    await broker.stub.UnlockQueues(
        pb.UnlockQueuesRequest(group="G", client_id=client, queues=[queue(0)])
    )


def queue(queue_id: int) -> common_pb2.QueueRef:
    return common_pb2.QueueRef(topic="T", queue_id=queue_id)


async def commit(broker: BrokerClient, queue_id: int, offset: int, lock_number: int) -> int:
    """The code of the error; 0: it was taken."""
    generation = (
        (await broker.stub.QueryQueues(pb.QueryQueuesRequest(queues=[queue(queue_id)])))
        .queues[0]
        .generation
    )
    item = pb.OffsetCommit(
        queue=queue(queue_id),
        position=common_pb2.Position(generation=generation, offset=offset),
        lock_number=lock_number,
    )
    answer = await broker.stub.CommitOffsets(pb.CommitOffsetsRequest(group="G", commits=[item]))
    return int(answer.results[0].error.code)


async def test_locks_outlive_a_restart_and_stop_who_lost_them(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 2)
        await broker.send("T", 0, *[b"."] * 3)
        assert len(await broker.read_queue("T", 0)) == 3
        old, again = await lock(broker, "a", 0, 1), await lock(broker, "a", 0, 1)
        assert old == again
        assert await lock(broker, "b", 0, 99) == [LOCKED, QueueNotFound.code]
    async with running_broker(tmp_path) as broker:
        assert await lock(broker, "b", 0) == [LOCKED]  # the lease began anew
        assert await lock(broker, "a", 0) == old[:1]  # and the holder goes on at once
        assert await commit(broker, 0, 1, old[0]) == 0
        await unlock(broker, "b")
        assert await lock(broker, "b", 0) == [LOCKED]  # it is not the lock of b
        await unlock(broker, "a")
        (new,) = await lock(broker, "b", 0)
        assert new > old[0]
        assert await commit(broker, 0, 3, old[0]) == LOCKED
        assert await commit(broker, 0, 2, new) == 0
        pull = pb.PullRequest(group="G", queue=queue(0), lock_number=old[0])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await broker.stub.Pull(pull)
        assert error_from(refused.value).code == LOCKED


async def test_a_consumer_that_was_away_for_a_lease_calls_its_listener_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_s = 0.5
    monkeypatch.setattr(locks, "LEASE_S", lease_s)
    monkeypatch.setattr(servicer, "LEASE_S", lease_s)
    monkeypatch.setattr(queue_locks, "RENEW_S", 3600.0)  # it is away
    calls = Calls()
    async with cluster(tmp_path) as (namesrv, broker):
        await send(namesrv, 2)
        async with consumer(namesrv, calls, commit_interval_ms=20) as consuming:
            await consuming.subscribe("T")
            await until(lambda: calls.count() == 2 * QUEUES)
            consuming.suspend()
            await send(namesrv, 1)
            await asyncio.sleep(0.1)  # read, and not yet with the listener
            number = 0
            while number in (0, LOCKED):
                (number,) = await lock(broker, "b", 0)
            assert await commit(broker, 0, 3, number) == 0
            consuming.resume()
            await asyncio.sleep(0.1)
        assert calls.done[0] == [0, 1]
        position = await broker.committed("G", "T", 0)
        assert position is not None
        assert position.offset == 3


async def test_a_topic_is_read_again_while_a_call_holds_another_one_up(tmp_path: Path) -> None:
    """Who gives up one topic neither waits for the other nor touches its locks."""
    begun, go_on, got = asyncio.Event(), asyncio.Event(), list[bytes]()

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.extend(message.body for message in messages)
        if messages[0].topic == "U":
            begun.set()
            await go_on.wait()

    async with cluster(tmp_path) as (namesrv, broker):
        await broker.put_topic("U", 1)
        await broker.send("U", 0, b"u")
        async with consumer(namesrv, listener, drain_timeout_ms=60_000) as one:
            await one.subscribe("T")
            await one.subscribe("U")
            await begun.wait()
            await until(lambda: len(one.assigned) > QUEUES)
            leaving = asyncio.create_task(one.unsubscribe("U"))
            await asyncio.sleep(0.05)
            await asyncio.wait_for(one.unsubscribe("T"), 20)
            await one.subscribe("T")
            await until(lambda: [q.topic for q in one.assigned].count("T") == QUEUES)
            go_on.set()
            await leaving
            await broker.send("T", 0, b"t")
            await until(lambda: b"t" in got)


GROUPS = 5  # message groups of the tests below


async def send_groups(namesrv: str, start: int, stop: int) -> None:
    """Messages ``group number`` of each group, and between them some of no group."""
    async with Producer(namesrv) as producer:
        for n in range(start, stop):
            for key in range(GROUPS):
                body = b"%d %d" % (key, n)
                await producer.send(Message("U", body, sharding_key=f"k{key}"))
            await producer.send(Message("U", b"none %d" % n))


class GroupCalls:
    """Listener calls of all members. Asserts that a message group has one at a time, and that its
    messages come in order; one comes again only when its call has failed.
    """

    def __init__(self, fails: set[str]) -> None:
        self.fails = fails
        self.done: defaultdict[str, list[int]] = defaultdict(list)
        self.running: Counter[str] = Counter()
        self.busy: defaultdict[int, set[str]] = defaultdict(set)  # groups, by queue
        self.most = 0  # groups of a queue at a time

    async def __call__(self, messages: list[ReceivedMessage]) -> ConsumeResult | None:
        (body,) = {message.body.decode() for message in messages}
        key, number = body.split()
        queue_id = messages[0].queue.queue_id
        self.running[key] += 1
        assert key == "none" or self.running[key] == 1, f"two calls at a time for group {key}"
        self.busy[queue_id].update({key} - {"none"})
        self.most = max(self.most, len(self.busy[queue_id]))
        await asyncio.sleep(0.002)
        self.running[key] -= 1
        self.busy[queue_id].discard(key)
        if body in self.fails:
            self.fails.discard(body)
            return ConsumeResult.LATER
        self.done[key].append(int(number))
        return None

    def count(self) -> int:
        return sum(map(len, self.done.values()))


async def test_message_groups_stay_in_order_while_members_come_and_go_and_run_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_share, "MISSED_S", 0.02)
    count = 60
    calls = GroupCalls({"0 3", "1 40", "none 7"})
    changes: dict[str, Any] = {"order_by": "message_group", "commit_interval_ms": 20}
    async with cluster(tmp_path) as (namesrv, broker):
        await broker.put_topic("U", 2)
        await send_groups(namesrv, 0, count // 2)
        async with consumer(namesrv, calls, **changes) as first:
            await first.subscribe("U")
            await until(lambda: calls.count() > 40)
            async with consumer(namesrv, calls, **changes) as second:
                await second.subscribe("U")
                await until(lambda: len(second.assigned) == 1)
                await send_groups(namesrv, count // 2, count)
            await until(lambda: calls.count() >= count * (GROUPS + 1))
        for key in range(GROUPS):
            assert calls.done[str(key)] == list(range(count))
        assert sorted(calls.done["none"]) == list(range(count))
        assert not calls.fails
        assert calls.most > 1, "groups of a queue run in parallel"
        for queue_id in range(2):
            stored = await broker.read_queue("U", queue_id)
            assert await committed(broker, "U", queue_id, len(stored))


async def test_a_group_that_fails_stops_no_other_one_but_the_commit(tmp_path: Path) -> None:
    done: list[bytes] = []
    mended = False

    async def listener(messages: list[ReceivedMessage]) -> ConsumeResult | None:
        if messages[0].sharding_key == "bad" and not mended:
            return ConsumeResult.LATER
        done.extend(message.body for message in messages)
        return None

    changes: dict[str, Any] = {"order_by": OrderBy.MESSAGE_GROUP, "commit_interval_ms": 10}
    async with cluster(tmp_path) as (namesrv, broker):
        async with consumer(namesrv, listener, concurrency=1, **changes) as consuming:
            await consuming.subscribe("T")
            async with Producer(namesrv) as producer:
                queue = QueueRef("T", 1, GROUP)
                keys = ["good", "bad", "good", "bad", "better", "", "good"]
                for n, key in enumerate(keys):
                    message = Message("T", b"%d" % n, queue=queue, sharding_key=key)
                    await producer.send_and_wait(message)
            await until(lambda: len(done) == 5)
            await until_async(lambda: committed(broker, "T", 1, 1))
            mended = True
            await until_async(lambda: committed(broker, "T", 1, 7))
        assert sorted(done[:5]) == [b"0", b"2", b"4", b"5", b"6"]
        assert done[5:] == [b"1", b"3"]


async def committed(broker: LiveBroker, topic: str, queue_id: int, offset: int) -> bool:
    position = await broker.committed("G", topic, queue_id)
    return position is not None and position.offset == offset


@pytest.mark.parametrize("changes", [{"order_by": "key"}, {"order_by": None}, {"orderly": False}])
def test_an_order_that_cannot_be_kept_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalid, match="order_by"):
        consumer("127.0.0.1:1", print, **{"order_by": "message_group", **changes})

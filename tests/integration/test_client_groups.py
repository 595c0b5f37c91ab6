"""Members of a group, against a real broker: queues change hands without doubles, members that do
not agree are told, and so is a client whose name another one takes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.client import (
    Allocation,
    ByConfig,
    ConsumeFrom,
    Message,
    MessageModel,
    Position,
    Producer,
    PullConsumer,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.errors import InvalidRequest, NoPermission
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import BrokerClient, running_broker, running_namesrv
from tests.support.waiting import until, until_async

QUEUES = 8


@asynccontextmanager
async def cluster(tmp_path: Path) -> AsyncIterator[str]:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", QUEUES)
        yield namesrv


def consumer(namesrv: str, listener: Any, **changes: Any) -> PushConsumer:
    options = {"rebalance_delay_ms": 1, **changes}
    return PushConsumer(namesrv, "G", listener, options=PushConsumerOptions(**options))


async def test_members_come_and_go_under_load_and_nothing_comes_twice(tmp_path: Path) -> None:
    seen: Counter[bytes] = Counter()
    sent: set[bytes] = set()
    done = False

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.update(message.body for message in messages)
        await asyncio.sleep(0.005)

    async def send(producer: Producer) -> None:
        while not done or len(sent) <= 100:
            body = b"%d" % len(sent)
            sent.add(body)
            await producer.send_and_wait(Message("T", body))

    async def come_and_go(namesrv: str, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(4):
            async with consumer(namesrv, listener) as one:
                await one.subscribe("T")
                await asyncio.sleep(chance.uniform(0.1, 0.6))

    async with cluster(tmp_path) as namesrv, Producer(namesrv) as producer:
        sending = asyncio.create_task(send(producer))
        async with consumer(namesrv, listener) as stays:
            await stays.subscribe("T")
            await asyncio.gather(*(come_and_go(namesrv, seed) for seed in range(4)))
            done = True
            await sending
            await until(lambda: seen.keys() >= sent)
    assert len(sent) > 100
    assert {body: count for body, count in seen.items() if count > 1} == {}


async def test_members_that_differ_are_told_and_each_queue_has_one_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def listener(messages: list[ReceivedMessage]) -> None:
        pass

    async with cluster(tmp_path) as namesrv, AsyncExitStack() as members:
        consumers = [
            await members.enter_async_context(consumer(namesrv, listener, allocation=allocation))
            for allocation in (Allocation.AVERAGE, Allocation.CIRCLE, Allocation.STICKY)
        ]
        for one, tag in zip(consumers, ("*", "*", "A"), strict=True):
            await one.subscribe("T", tag)

        def owners() -> Counter[int]:
            mine = (queue for one in consumers for queue in one.assigned if queue.topic == "T")
            return Counter(queue.queue_id for queue in mine)

        def shares() -> list[int]:
            return sorted(sum(q.topic == "T" for q in one.assigned) for one in consumers)

        await until(lambda: shares() == [2, 3, 3] and owners() == Counter(range(QUEUES)))
    told = {record.__dict__["fields"]["on"] for record in caplog.records if _differ(record)}
    assert told == {"the allocation: all use AVERAGE", "the filter of T"}


def _differ(record: Any) -> bool:
    return getattr(record, "event", "") == "members of the group do not agree"


async def ignore(messages: list[ReceivedMessage]) -> None:
    """A listener that has nothing to do."""


async def test_queues_in_no_list_and_in_two_are_told_by_each_member_and_have_one_reader(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def member(namesrv: str, name: str, queue_ids: range) -> PushConsumer:
        mine = ByConfig([QueueRef("T", queue_id, "g1") for queue_id in queue_ids])
        return consumer(namesrv, ignore, client_id=name, allocation=mine, handover_timeout_ms=300)

    def told(what: str) -> list[Any]:
        found = [r.__dict__["fields"] for r in caplog.records if r.getMessage().startswith(what)]
        return sorted((one["queue_count"], one["first"]) for one in found)

    async with (
        cluster(tmp_path) as namesrv,
        member(namesrv, "b", range(2, 6)) as second,
        member(namesrv, "a", range(3)) as first,
    ):
        await second.subscribe("T")
        await until(lambda: len(second.assigned) == 4)
        await first.subscribe("T")
        await until(lambda: len(first.assigned) == len(second.assigned) == 3)
        await until(lambda: len(told("several members want")) == 2)
        await until(lambda: len(told("no member reads")) >= 2)
        assert told("several members want") == [(1, "g1/2")] * 2
        assert told("no member reads")[:2] == [(2, "g1/6")] * 2
        ids = [queue.queue_id for one in (first, second) for queue in one.assigned]
        assert ids == [0, 1, 2, 3, 4, 5]


class Failing:
    """Divides on the first calls only."""

    label = "mine"

    def __init__(self) -> None:
        self.calls = 0

    def divide(self, client_id: str, members: Any, queues: Any, held: Any) -> list[QueueRef]:
        self.calls += 1
        if self.calls > 1:
            raise ZeroDivisionError
        return list(queues)


async def test_a_strategy_that_fails_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    options = {"allocation": failing, "rebalance_interval_ms": 20}
    async with cluster(tmp_path) as namesrv, consumer(namesrv, ignore, **options) as one:
        await one.subscribe("T")
        await until(lambda: failing.calls > 5)
        assert "the allocation failed" in caplog.text
        await one.unsubscribe("T")
        await until(lambda: not one.assigned)


async def test_a_client_whose_name_another_one_takes_is_told_and_stops(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def listener(messages: list[ReceivedMessage]) -> None:
        pass

    async with (
        cluster(tmp_path) as namesrv,
        consumer(namesrv, listener, client_id="same") as first,
    ):
        await first.subscribe("T")
        await until(lambda: len(first.assigned) == QUEUES)
        async with consumer(namesrv, listener, client_id="same") as second:
            await second.subscribe("T")
            await until(lambda: len(second.assigned) == QUEUES)
            await until(lambda: not first.assigned)
            await asyncio.sleep(0.3)  # and it does not come back
            assert (len(first.assigned), len(second.assigned)) == (0, QUEUES)
    assert "CLIENT_ID_IN_USE" in caplog.text


async def test_every_broadcasting_member_gets_everything_and_goes_on_by_its_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[str, Counter[bytes]] = {"a": Counter(), "b": Counter(), "shared": Counter()}

    def member(namesrv: str, name: str, **changes: Any) -> PushConsumer:
        async def listener(messages: list[ReceivedMessage]) -> None:
            seen[name].update(message.body for message in messages)
            if messages[0].body == b"3":
                raise ValueError("a listener's mistake")

        return consumer(namesrv, listener, **changes)

    def broadcasting(namesrv: str, name: str) -> PushConsumer:
        file = str(tmp_path / f"{name}.json")
        return member(namesrv, name, message_model=MessageModel.BROADCASTING, offset_file=file)

    async def send(namesrv: str, first: int, end: int) -> None:
        async with Producer(namesrv) as producer:
            for n in range(first, end):
                await producer.send_and_wait(Message("T", b"%d" % n))

    def bodies(first: int, end: int) -> Counter[bytes]:
        return Counter(b"%d" % n for n in range(first, end))

    async with cluster(tmp_path) as namesrv:
        await send(namesrv, 0, 40)
        async with (
            broadcasting(namesrv, "a") as a,
            broadcasting(namesrv, "b") as b,
            member(namesrv, "shared") as shared,
        ):
            for one in (a, b, shared):
                await one.subscribe("T")
            await until(lambda: all(len(bodies) == 40 for bodies in seen.values()))
            assert len(a.assigned) == len(b.assigned) == QUEUES
        assert seen["a"] == seen["b"] == bodies(0, 40)  # none twice, also what failed
        assert "message failed, passed by" in caplog.text
        assert "the message model" in caplog.text
        await send(namesrv, 40, 60)
        async with broadcasting(namesrv, "a") as a:
            await a.subscribe("T")
            await until(lambda: len(seen["a"]) == 60)
        assert seen["a"] == bodies(0, 60)


async def test_a_group_that_may_not_read_stops_and_goes_on_where_it_was(tmp_path: Path) -> None:
    seen: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.body for message in messages)

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        Producer(namesrv) as producer,
        consumer(namesrv, listener) as one,
    ):
        await broker.put_topic("T", 1)
        await one.subscribe("T")
        await producer.send_and_wait(Message("T", b"before"))
        await until(lambda: seen == [b"before"])

        async def put(**settings: Any) -> pb.PutGroupResponse:
            request = pb.PutGroupRequest(settings=pb.GroupSettings(group="G", **settings))
            return await broker.admin.PutGroup(request)

        answer = await put(consume_enable=False, consume_broadcast_enable=False)
        assert not answer.created
        assert answer.settings.retry_times_max == 16
        await until(lambda: not one.assigned)
        async with PullConsumer(namesrv, "G") as pulling:
            (queue,) = await pulling.queues("T")
            with pytest.raises(NoPermission):
                await pulling.pull(queue, Position(0, 0))
        await producer.send_and_wait(Message("T", b"meanwhile"))
        for wrong in ({"retry_times_max": -1}, {"retry_queue_count": 0}):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await put(**wrong)
            assert isinstance(error_from(refused.value), InvalidRequest)
        broadcasting = consumer(namesrv, listener, message_model=MessageModel.BROADCASTING)
        async with broadcasting as refused_one:
            await refused_one.subscribe("T")
            await asyncio.sleep(0.3)
            assert not refused_one.assigned
            assert seen == [b"before"]
        await put(consume_enable=True)
        await until(lambda: seen == [b"before", b"meanwhile"])


async def fixed(broker: BrokerClient) -> bool:
    """Whether the group has a position in both queues."""
    return None not in [await broker.committed("G", "T", queue_id) for queue_id in (0, 1)]


async def test_last_means_the_start_of_the_group_and_new_queues_lose_nothing(
    tmp_path: Path,
) -> None:
    seen: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.body for message in messages)

    def member(namesrv: str) -> PushConsumer:
        return consumer(namesrv, listener, consume_from=ConsumeFrom.LAST)

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)
        await broker.send("T", 0, b"old")
        async with member(namesrv) as one:
            await one.subscribe("T")
            await until(lambda: len(one.assigned) == 2)
            await until_async(lambda: fixed(broker))
        await broker.put_topic("T", 3)
        for queue_id in (0, 1, 2):
            await broker.send("T", queue_id, b"while away %d" % queue_id)
        async with member(namesrv) as one:
            await one.subscribe("T")
            await until(lambda: len(seen) == 3)
        assert sorted(seen) == [b"while away 0", b"while away 1", b"while away 2"]


async def test_a_queue_rests_between_pulls(tmp_path: Path) -> None:
    seen: list[float] = []
    loop = asyncio.get_running_loop()

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.append(loop.time())

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *[b"."] * 4)
        options = {"pull_count_max": 1, "pull_interval_ms": 100}
        async with consumer(namesrv, listener, **options) as one:
            await one.subscribe("T")
            await until(lambda: len(seen) == 4)
    assert seen[3] - seen[0] >= 0.29

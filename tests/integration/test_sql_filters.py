"""SQL92 filters through real services: pulls, holds, the push and the pull consumer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.admin import ops
from cometmq.admin.connection import Connection
from cometmq.admin.topic_reader import open_reader
from cometmq.client import (
    Message,
    Position,
    Producer,
    PullConsumer,
    PullOutcome,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.errors import FilterInvalid
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2
from services.pullhold import holds
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.cluster.pullhold import LivePullhold, running_pullhold
from tests.support.waiting import until, until_async

EXPENSIVE = "price BETWEEN 100 AND 199.5 AND region IN ('eu', 'us')"


class Stage:
    """A name server, a broker with topic t of one queue, a pullhold and a producer."""

    def __init__(
        self, namesrv: str, broker: LiveBroker, pullhold: LivePullhold, producer: Producer
    ) -> None:
        self.namesrv = namesrv
        self.broker = broker
        self.pullhold = pullhold
        self.producer = producer

    async def send(self, price: object, region: str = "eu") -> None:
        found = {"price": str(price), "region": region}
        body = f"{price} {region}".encode()
        await self.producer.send(Message("t", body, properties=found))


@asynccontextmanager
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        namesrv = await stack.enter_async_context(running_namesrv(tmp_path))
        running = running_broker(tmp_path, namesrv=(namesrv,))
        broker = await stack.enter_async_context(running)
        pullhold = await stack.enter_async_context(running_pullhold(namesrv))
        await broker.put_topic("t", queues=1)
        producer = await stack.enter_async_context(Producer(namesrv))
        yield Stage(namesrv, broker, pullhold, producer)


async def test_a_push_consumer_gets_what_matches_from_the_backlog_and_from_holds(
    tmp_path: Path,
) -> None:
    bodies: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        bodies.extend(message.body for message in messages)

    options = PushConsumerOptions(rebalance_delay_ms=1, commit_interval_ms=20)
    async with stage(tmp_path) as on:
        for price in (5, 100, 150, 199.5, 200, "much"):
            await on.send(price)
        async with PushConsumer(on.namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("t", sql=EXPENSIVE)
            await until(lambda: len(bodies) == 3 and on.pullhold.waiting == 1)
            await on.send(7)
            await on.send(150, "cn")
            await until(lambda: on.pullhold.known("t", 0) == 8)
            await on.send(101)
            await until(lambda: len(bodies) == 4)
            queue = consumer.assigned[0]
        assert bodies == [b"100 eu", b"150 eu", b"199.5 eu", b"101 eu"]
        async with PullConsumer(on.namesrv, "G") as reader:
            position = (await reader.committed([queue]))[queue]
            assert position is not None
            assert position.offset == 9  # filtered messages leave no lag


async def test_a_hold_wakes_for_nothing_but_what_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holds, "PASSED_S_MAX", 60.0)  # else the client learns what was passed
    async with stage(tmp_path) as on:
        lane = on.pullhold.lane()
        await lane.hold(1, "t", 0, 0, sql=EXPENSIVE, hold_ms=60_000)
        await until(lambda: on.pullhold.waiting == 1 and on.pullhold.all_known)
        for number in range(40):  # more than come along with the arrivals of one wish
            await on.send(number)
            await until(lambda n=number: on.pullhold.known("t", 0) == n + 1)  # type: ignore[misc]
        assert on.pullhold.waiting == 1
        await on.send(100)
        pulled = (await lane.answer()).response.pull
        assert (pulled.status, pulled.count) == (pb.PULL_STATUS_FOUND, 1)
        assert pulled.next_position.offset == 41


async def test_pull_consumers_filter_one_pull_and_what_they_poll(tmp_path: Path) -> None:
    async with stage(tmp_path) as on, PullConsumer(on.namesrv, "P") as consumer:
        for price in (5, 100, 7):
            await on.send(price)
        (queue,) = await consumer.queues("t")

        async def all_are_readable() -> bool:
            return (await consumer.bounds([queue]))[queue].max_offset == 3

        await until_async(all_are_readable)
        batch = await consumer.pull(queue, Position(0, 0), sql=EXPENSIVE)
        assert [message.body for message in batch.messages] == [b"100 eu"]
        assert batch.next_position.offset == 3
        batch = await consumer.pull(queue, Position(0, 2), sql=EXPENSIVE)
        assert (batch.outcome, batch.next_position.offset) == (PullOutcome.NO_MATCH, 3)
        await consumer.assign([queue], sql="price < 50")
        await consumer.seek(queue, Position(0, 0))
        polled = [message.body for message in await consumer.poll()]
        assert polled == [b"5 eu", b"7 eu"]


async def test_the_command_prints_what_matches_and_shows_the_expression_of_a_member(
    tmp_path: Path,
) -> None:
    async with stage(tmp_path) as on, Connection(on.namesrv) as connection:
        for price in (5, 100, 7):
            await on.send(price)
        reader = await open_reader(connection, "t", sql="price < 50")
        bodies: list[str | None] = []
        while not reader.caught_up:
            bodies += [message.body_text for message in await reader.read()]
        assert bodies == ["5 eu", "7 eu"]
        subscription = pb.Subscription(topic="t", filter=common_pb2.Filter(sql="price > 5"))
        call = on.broker.stub.JoinGroup()
        request = pb.JoinGroupRequest(group="G", client_id="c", subscriptions=[subscription])
        await call.write(request)
        async with asyncio.timeout(10):
            await call.read()
        progress = await ops.group_progress(connection, "G")
        assert progress.members[0].subscriptions == {"t": ["price > 5"]}
        call.cancel()


@pytest.mark.parametrize("wanted", [{"sql": "price >"}, {"tags": ["a"], "sql": "price > 5"}])
async def test_a_bad_expression_is_refused_at_subscribe_and_by_the_broker(
    tmp_path: Path, wanted: dict[str, Any]
) -> None:
    async def listener(messages: list[ReceivedMessage]) -> None:
        """Nothing comes."""

    async with stage(tmp_path) as on:
        expression = {"expression": wanted.get("tags", "*"), "sql": wanted["sql"]}
        async with PushConsumer(on.namesrv, "G", listener) as consumer:
            with pytest.raises(FilterInvalid):
                await consumer.subscribe("t", **expression)
        async with PullConsumer(on.namesrv, "G") as reader:
            with pytest.raises(FilterInvalid):
                await reader.pull(QueueRef("t", 0, "g1"), Position(0, 0), **wanted)
            with pytest.raises(FilterInvalid):
                await reader.assign([], **wanted)
        call = on.broker.stub.JoinGroup()
        subscription = pb.Subscription(topic="t", filter=common_pb2.Filter(**wanted))
        request = pb.JoinGroupRequest(group="G", client_id="c", subscriptions=[subscription])
        await call.write(request)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async with asyncio.timeout(10):
                await call.read()
        assert isinstance(error_from(refused.value), FilterInvalid)


async def test_members_tell_each_other_their_expression(tmp_path: Path) -> None:
    async with stage(tmp_path) as on:
        call = on.broker.stub.JoinGroup()
        subscription = pb.Subscription(topic="t", filter=common_pb2.Filter(sql="price > 5"))
        request = pb.JoinGroupRequest(group="G", client_id="c", subscriptions=[subscription])
        await call.write(request)
        async with asyncio.timeout(10):
            view = await call.read()
        assert isinstance(view, pb.JoinGroupResponse)
        assert view.members[0].subscriptions[0] == subscription
        call.cancel()

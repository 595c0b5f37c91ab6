"""The broker tells a group's members of every change within a second, and clients look by timer
too; what hostile members tell is refused, and costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.client import PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.errors import CometError, InvalidRequest, LimitExceeded
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import BrokerClient, LiveBroker, running_broker, running_namesrv
from tests.support.waiting import until

NOTICE_S = 1.0


async def ignore(messages: list[ReceivedMessage]) -> None:
    """A listener that has nothing to do."""


@asynccontextmanager
async def cluster(tmp_path: Path, queues: int = 8) -> AsyncIterator[tuple[str, LiveBroker]]:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", queues)
        yield namesrv, broker


def member(namesrv: str, name: str, **changes: Any) -> PushConsumer:
    # An hour between looks of its own: what it learns, it learns by notice.
    options = {"client_id": name, "rebalance_interval_ms": 3_600_000, **changes}
    return PushConsumer(namesrv, "G", ignore, options=PushConsumerOptions(**options))


class Watcher:
    """A raw member: what it was told last, and when."""

    def __init__(self, stream: Any) -> None:
        self.told = pb.JoinGroupResponse()
        self.at_s = 0.0
        self._stream = stream

    async def watch(self) -> None:
        while isinstance(told := await self._stream.read(), pb.JoinGroupResponse):
            self.told, self.at_s = told, time.monotonic()


async def join(broker: BrokerClient, name: str, **more: Any) -> Any:
    stream = broker.stub.JoinGroup()
    subscriptions = more.pop("subscriptions", [pb.Subscription(topic="T")])
    request = {"group": "G", "client_id": name, "subscriptions": subscriptions, **more}
    await stream.write(pb.JoinGroupRequest(**request))
    return stream


async def test_members_are_told_of_each_change_of_their_group_within_a_second(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (_, broker):
        watcher = Watcher(await join(broker, "watcher"))
        watching = asyncio.create_task(watcher.watch())

        async def told(
            change: Callable[[], Awaitable[Any]], seen: Callable[[pb.JoinGroupResponse], bool]
        ) -> Any:
            answer = await change()
            began_s = time.monotonic()
            await until(lambda: seen(watcher.told))
            assert watcher.at_s - began_s < NOTICE_S, change
            return answer

        def names(view: pb.JoinGroupResponse) -> list[str]:
            return [one.client_id for one in view.members]

        other = await told(
            lambda: join(broker, "other"), lambda v: names(v) == ["other", "watcher"]
        )

        async def subscribe() -> None:
            await other.write(
                pb.JoinGroupRequest(
                    group="G", client_id="other", subscriptions=[pb.Subscription(topic="U")]
                )
            )

        def reads_u(view: pb.JoinGroupResponse) -> bool:
            return view.members[0].subscriptions[0].topic == "U"

        async def settings() -> None:
            request = pb.PutGroupRequest(settings=pb.GroupSettings(group="G", consume_enable=False))
            await broker.admin.PutGroup(request)

        async def leave() -> None:
            await other.done_writing()

        async def killed() -> None:
            dying.cancel()

        await told(subscribe, reads_u)
        await told(settings, lambda v: v.consume_disabled)
        await told(leave, lambda v: names(v) == ["watcher"])
        dying = await told(
            lambda: join(broker, "dying"), lambda v: names(v) == ["dying", "watcher"]
        )
        await told(killed, lambda v: names(v) == ["watcher"])
        watching.cancel()


async def test_consumers_follow_a_member_that_is_killed_and_new_queues_without_a_timer(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (namesrv, broker), member(namesrv, "a") as one:
        await one.subscribe("T")
        async with member(namesrv, "b") as other:
            await other.subscribe("T")
            await until(lambda: len(one.assigned) == len(other.assigned) == 4)
            await other._share.stop()
            await other._share.leave()  # its stream breaks, and it has not given up its queues
            async with asyncio.timeout(NOTICE_S + 1.0):
                await until(lambda: len(one.assigned) == 8)
        await broker.put_topic("T", 12)
        await until(lambda: len(one.assigned) == 12)


async def test_a_change_that_nobody_tells_is_found_by_timer(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as (namesrv, _),
        member(namesrv, "a", rebalance_interval_ms=100) as one,
    ):
        await one.subscribe("T")
        await until(lambda: len(one.assigned) == 8)
        queue = one.assigned[0]
        await one._queues.revoke([queue])
        await until(lambda: queue in one.assigned)


HELD = pb.HeldQueues(topic="T", broker_group="g1", queue_ids=[0])


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"group": ""}, CometError),
        ({"group": "a.b"}, CometError),
        ({"group": "g" * 256}, CometError),
        ({"client_id": ""}, InvalidRequest),
        ({"client_id": "c" * 256}, InvalidRequest),
        ({"client_id": "c\n"}, InvalidRequest),
        ({"instance_id": "i" * 65}, InvalidRequest),
        ({"allocation": "a\0"}, InvalidRequest),
        ({"session_ms": 1_800_001}, InvalidRequest),
        ({"held": [pb.HeldQueues(topic="../T", broker_group="g1", queue_ids=[0])]}, CometError),
        ({"held": [pb.HeldQueues(topic="T", broker_group="", queue_ids=[0])]}, InvalidRequest),
        ({"held": [pb.HeldQueues(topic="T", broker_group="g1", queue_ids=[-1])]}, InvalidRequest),
        (
            {"held": [pb.HeldQueues(topic="T", broker_group="g1", queue_ids=[2**30])]},
            InvalidRequest,
        ),
        ({"held": [HELD, HELD]}, InvalidRequest),
        ({"held": [pb.HeldQueues(topic="T", broker_group="g1")]}, InvalidRequest),
        (
            {"held": [pb.HeldQueues(topic="T", broker_group="g1", queue_ids=[0] * 16_385)]},
            LimitExceeded,
        ),
    ],
)
async def test_what_a_hostile_member_tells_is_refused_and_leaves_nothing(
    tmp_path: Path, more: dict[str, Any], error: type[CometError]
) -> None:
    async with cluster(tmp_path) as (_, broker):
        good = await join(broker, "good")
        assert isinstance(await good.read(), pb.JoinGroupResponse)
        stream = await join(broker, more.pop("client_id", "hostile"), **more)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert isinstance(error_from(refused.value), error)
        answer = await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group="G"))
        assert [one.client_id for one in answer.members] == ["good"]
        groups = await broker.admin.ListGroups(pb.ListGroupsRequest())
        assert list(groups.groups) == ["G"]


async def test_a_member_that_becomes_hostile_ends_and_the_others_stay(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, broker):
        good, bad = await join(broker, "good"), await join(broker, "bad")
        for stream in (good, bad):
            assert isinstance(await stream.read(), pb.JoinGroupResponse)
        await bad.write(pb.JoinGroupRequest(group="G", client_id="good"))  # another's name
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await Watcher(bad).watch()
        assert isinstance(error_from(refused.value), InvalidRequest)

        async def alone() -> bool:
            answer = await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group="G"))
            return [one.client_id for one in answer.members] == ["good"]

        async with asyncio.timeout(5):
            while not await alone():
                await good.read()


@pytest.mark.slow
async def test_ten_thousand_names_that_come_and_go_leave_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, broker):
        good = Watcher(await join(broker, "good"))
        watching = asyncio.create_task(good.watch())
        limit = asyncio.Semaphore(100)

        async def come_and_go(number: int) -> None:
            async with limit:
                stream = await join(broker, f"name-{number}")
                await stream.read()
                stream.cancel()

        async with asyncio.TaskGroup() as tasks:
            for number in range(10_000):
                tasks.create_task(come_and_go(number))
        await until(lambda: [one.client_id for one in good.told.members] == ["good"])
        clients = await broker.admin.ListClients(pb.ListClientsRequest())
        assert [one.client_id for one in clients.clients] == ["good"]
        watching.cancel()

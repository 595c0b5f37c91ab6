"""A broker and its name servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cometmq.v1 import namesrv_pb2, namesrv_pb2_grpc
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.cluster.pullhold import LivePullhold, running_pullhold
from tests.support.waiting import until_async


class Routes:
    """Asks a name server."""

    def __init__(self, stub: namesrv_pb2_grpc.NameServiceAsyncStub) -> None:
        self._stub = stub

    async def queues(self, topic: str) -> list[int]:
        """Write queues of the topic by broker group; empty when nobody serves it."""
        try:
            request = namesrv_pb2.QueryRouteRequest(topic=topic)
            route = (await self._stub.QueryRoute(request)).route
        except grpc.aio.AioRpcError:
            return []
        return [group.topic.write_queue_count for group in route.groups]

    async def become(self, topic: str, queues: list[int]) -> None:
        """Wait until the route is this."""

        async def same() -> bool:
            return await self.queues(topic) == queues

        await until_async(same)


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[Routes]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Routes(namesrv_pb2_grpc.NameServiceStub(channel))


class NameServer:
    """One that goes, and comes back at the same place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._life = AsyncExitStack()
        self.address = ""

    async def start(self, stack: AsyncExitStack) -> Self:
        port = int(self.address.rpartition(":")[2] or 0)
        running = running_namesrv(self._directory, port=port)
        self.address = await self._life.enter_async_context(running)
        stack.push_async_callback(self.stop)
        return self

    async def stop(self) -> None:
        await self._life.aclose()


async def holds(pullhold: LivePullhold, broker: LiveBroker, queue_id: int) -> None:
    """A hold of a queue that the pullhold does not watch yet is answered."""
    lane = pullhold.lane()
    await lane.hold(1, "T", queue_id, 0)
    await broker.send("T", queue_id, b"x")
    assert (await lane.answer()).response.pull.count == 1
    lane.call.cancel()


async def test_the_name_server_knows_every_change_at_once(tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as address, asking(address) as routes:
        options = {"namesrv": (address,), "auto_create_topic_enable": True}
        async with running_broker(tmp_path, **options) as broker:
            await broker.put_topic("T", 3)
            await routes.become("T", [3])
            await routes.become("TBW102", [4])
            await broker.send("made", 0, b"x")
            await routes.become("made", [4])
            await broker.put_topic("T", 5)
            await routes.become("T", [5])
            await broker.drop_topic("T")
            await routes.become("T", [])
        assert await routes.queues("made") == [], "a stop in order announces its stop"


async def test_a_broker_comes_back(tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as address, asking(address) as routes:
        for life in range(3):
            async with running_broker(tmp_path, namesrv=(address,)) as broker:
                await broker.put_topic("T", life + 1)
                await routes.become("T", [life + 1])
                if life == 1:
                    broker.crash()


async def test_a_name_server_that_comes_back_is_told_soon(tmp_path: Path) -> None:
    """It has forgotten everything, and the next registration would be half a minute away."""
    async with AsyncExitStack() as stack:
        server = await NameServer(tmp_path).start(stack)
        address = server.address
        broker = await stack.enter_async_context(running_broker(tmp_path, namesrv=(address,)))
        await broker.put_topic("T", 3)
        async with asking(address) as routes:
            await routes.become("T", [3])
        for _ in range(2):
            await server.stop()
            await broker.send("T", 0, b"x")
            await server.start(stack)
            async with asking(address) as routes:
                await routes.become("T", [3])


async def test_who_no_name_server_knows_serves_but_is_not_ready(tmp_path: Path) -> None:
    """Else a rollout would go on, and take the next pod, while clients do not find this one."""
    async with AsyncExitStack() as stack:
        server = await NameServer(tmp_path).start(stack)
        address = server.address
        await server.stop()
        broker = await stack.enter_async_context(running_broker(tmp_path, namesrv=(address,)))
        pullhold = await stack.enter_async_context(running_pullhold(address))
        await broker.put_topic("T", 3)
        await broker.send("T", 0, b"x")
        everybody = broker.address, pullhold.address
        assert not any([await is_ready(one) for one in everybody])
        await server.start(stack)
        for one in everybody:
            await until_async(partial(is_ready, one))


async def is_ready(address: str) -> bool:
    """What the kubelet is told."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service="ready")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def test_any_name_server_may_go(tmp_path: Path) -> None:
    """Members and pullholds use those that are left, and at last what they know."""
    async with AsyncExitStack() as stack:
        servers = [await NameServer(tmp_path / f"{n}").start(stack) for n in range(2)]
        addresses = tuple(server.address for server in servers)
        broker = await stack.enter_async_context(running_broker(tmp_path, namesrv=addresses))
        pullhold = await stack.enter_async_context(running_pullhold(";".join(addresses)))
        await broker.put_topic("T", 3)
        for address in addresses:
            async with asking(address) as routes:
                await routes.become("T", [3])
        for number, server in enumerate(servers):
            await holds(pullhold, broker, number)
            await server.stop()
        await holds(pullhold, broker, 2)

"""Real pullholds for tests: the App in the test's own loop, and clients that hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from cometmq.rpc.channels import open_channel
from cometmq.v1 import broker_pb2, common_pb2, hold_pb2, hold_pb2_grpc
from services.pullhold.app import App
from services.pullhold.config import PullholdConfig
from services.pullhold.listen import new_server
from services.pullhold.model import ClusterQueue
from tests.support.waiting import DEADLINE_S


def hold_request(
    topic: str,
    queue_id: int,
    offset: int,
    *,
    group: str = "g1",
    generation: int = 0,
    hold_ms: int = 10_000,
    tags: tuple[str, ...] = (),
    sql: str = "",
    max_count: int = 0,
    max_bytes: int = 0,
    answers_max: int = 0,
    arrivals_of: str = "",
    form: broker_pb2.MessageForm.ValueType = broker_pb2.MESSAGE_FORM_UNSPECIFIED,
) -> hold_pb2.HoldRequest:
    pull = broker_pb2.PullRequest(
        group=arrivals_of,
        queue=common_pb2.QueueRef(topic=topic, queue_id=queue_id),
        position=common_pb2.Position(generation=generation, offset=offset),
        filter=common_pb2.Filter(tags=tags, sql=sql),
        max_count=max_count,
        max_bytes=max_bytes,
        form=form,
    )
    return hold_pb2.HoldRequest(
        broker_group=group,
        pull=pull,
        hold_ms=hold_ms,
        answers_max=answers_max,
        arrival_only=bool(arrivals_of),
    )


class HoldLane:
    """One raw hold stream."""

    def __init__(self, stub: hold_pb2_grpc.HoldServiceAsyncStub) -> None:
        self.call = stub.HoldStream()

    async def hold(self, hold_id: int, *arguments: Any, **options: Any) -> None:
        request = hold_request(*arguments, **options)
        await self.call.write(hold_pb2.HoldStreamRequest(hold_id=hold_id, hold=request))

    async def cancel(self, hold_id: int) -> None:
        cancel = hold_pb2.HoldStreamRequest(hold_id=hold_id, cancel=hold_pb2.CancelHold())
        await self.call.write(cancel)

    async def answer(self) -> hold_pb2.HoldStreamResponse:
        """The next answer."""
        async with asyncio.timeout(DEADLINE_S):
            response = await self.call.read()
        assert isinstance(response, hold_pb2.HoldStreamResponse), "the stream has ended"
        return response

    async def ended(self) -> grpc.StatusCode:
        """Read to the end of the stream, which must come without another answer; its status."""
        async with asyncio.timeout(DEADLINE_S):
            try:
                rest = await self.call.read()
            except grpc.aio.AioRpcError as error:
                return error.code()
            assert rest is grpc.aio.EOF, rest
            return await self.call.code()


class LivePullhold:
    """A pullhold in this process."""

    def __init__(self, app: App, address: str) -> None:
        self.app = app
        self.address = address
        self.channel = open_channel(address)
        self.stub = hold_pb2_grpc.HoldServiceStub(self.channel)

    def lane(self) -> HoldLane:
        return HoldLane(self.stub)

    async def stop(self) -> None:
        """Stop in order, before the block ends."""
        await self.app.__aexit__(None, None, None)

    @property
    def waiting(self) -> int:
        """Held pulls."""
        return int(self.metric("cometmq_holds_waiting"))

    @property
    def safety_finds(self) -> int:
        return int(self.metric("cometmq_hold_safety_finds_total"))

    @property
    def pulls(self) -> int:
        """Pulls at brokers so far."""
        return int(self.metric("cometmq_hold_pulls_total"))

    @property
    def direct(self) -> int:
        """Holds answered out of an arrival so far."""
        return int(self.metric("cometmq_hold_direct_total"))

    @property
    def answered(self) -> int:
        """Holds answered so far."""
        outcomes = ("found", "not_found", "error")
        name = "cometmq_hold_duration_seconds_count"
        return int(sum(self.metric(name, outcome=outcome) for outcome in outcomes))

    @property
    def all_known(self) -> bool:
        """Whether brokers have told of every queue that is waited for."""
        return all(queue.known is not None for queue in self.app.holds.queues.all())

    def known(self, topic: str, queue_id: int, group: str = "g1") -> int:
        """The maximum that is known of a queue."""
        return self.app.holds.queues.known(ClusterQueue(group, topic, queue_id))[1]

    def metric(self, name: str, **labels: str) -> float:
        value = self.app.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value


async def sample(metrics_address: str, name: str, label: str = "") -> float:
    """The sum of a process's samples of this name, of those that have ``label`` (``key="value"``)
    or the end of one.
    """
    pattern = rf"^{name}{{[^}}]*{re.escape(label)}[^}}]*}} (\S+)$"
    text = await scraped(metrics_address)
    return sum(float(number) for number in re.findall(pattern, text, flags=re.M))


async def scraped(metrics_address: str) -> str:
    """All metrics of a process."""
    host, port = metrics_address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    text = (await reader.read()).decode()
    writer.close()
    return text


async def rpc_count(metrics_address: str, method: str) -> int:
    """Unary calls of a method (its last name) that a process has answered, by its metrics."""
    return int(await sample(metrics_address, "rocketmq_rpc_latency_count", f'/{method}"'))


@asynccontextmanager
async def running_pullhold(namesrv: str, **options: Any) -> AsyncIterator[LivePullhold]:
    """A pullhold, ready and registered; stopped in order at the end of the block."""
    config = PullholdConfig(
        **{
            "namesrv": tuple(namesrv.split(";")),
            "port": 0,
            "metrics_port": 0,
            "drain_grace_s": 2.0,
            **options,
        }
    )
    server = new_server(config)
    try:
        await server.start()
        async with App(config, server) as app:
            live = LivePullhold(app, server.address)
            try:
                yield live
            finally:
                await live.channel.close()
    finally:
        await server.stop(0)

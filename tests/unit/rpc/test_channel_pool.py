"""Channels whose peer moves, says nothing, or goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cometmq.errors import PeerUnavailable
from cometmq.rpc import channel_pool
from cometmq.rpc.channel_pool import ChannelPool
from cometmq.rpc.channels import open_channel
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.server import RpcServer
from tests.support.cluster.names import Names, dialled_by, silent_socket
from tests.support.waiting import until

# gRPC looks a name up again after 30 s.
SOON_S = 15.0
NAME = "writer.test"


@asynccontextmanager
async def serving(host: str, port: int = 0) -> AsyncIterator[RpcServer]:
    server = RpcServer(host=host, port=port, services=(), gate=Gate())
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


@asynccontextmanager
async def names_and_channels(
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Names, ChannelPool]]:
    async with Names() as names:
        monkeypatch.setattr(channel_pool, "open_channel", dialled_by(names))
        channels = ChannelPool()
        try:
            yield names, channels
        finally:
            await channels.close()


async def ask(channels: ChannelPool, port: int) -> None:
    stub = health_pb2_grpc.HealthStub(channels.get(f"{NAME}:{port}"))
    with wire_errors():
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=SOON_S)


async def until_answered(channels: ChannelPool, port: int) -> None:
    async with asyncio.timeout(SOON_S):
        while True:
            try:
                return await ask(channels, port)
            except PeerUnavailable:
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("unknown_meanwhile", [False, True])
async def test_who_moved_is_found_by_its_name(
    monkeypatch: pytest.MonkeyPatch, unknown_meanwhile: bool
) -> None:
    async with names_and_channels(monkeypatch) as (names, channels):
        names.move(NAME, "127.0.0.2")
        async with serving("127.0.0.2") as server:
            port = server.port
            await ask(channels, port)
        if unknown_meanwhile:
            names.move(NAME, None)
        for _ in range(3):
            with pytest.raises(PeerUnavailable):
                await ask(channels, port)
            await asyncio.sleep(0.15)
        names.move(NAME, "127.0.0.3")
        async with serving("127.0.0.3", port):
            await until_answered(channels, port)


async def test_an_address_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a pod was, and packets are dropped."""
    async with names_and_channels(monkeypatch) as (names, channels), serving("127.0.0.3") as server:
        names.move(NAME, "127.0.0.2")
        with silent_socket("127.0.0.2", server.port):
            asking = asyncio.create_task(ask(channels, server.port))
            await until(lambda: names.answered)
            names.move(NAME, "127.0.0.3")
            # The attempt fails after 1 s. gRPC may look the name up before it fails the call.
            with suppress(PeerUnavailable):
                await asking
            await until_answered(channels, server.port)


async def test_one_connection_serves_all_who_ask() -> None:
    channels = ChannelPool()
    async with serving("127.0.0.1") as server:
        channel = channels.get(server.address)
        await channel.channel_ready()
        assert channels.get(server.address) is channel
        channels.keep_only({server.address})
        assert channels.get(server.address) is channel
        channels.drop(server.address)
        assert channels.get(server.address) is not channel
        await channels.close()


async def test_an_end_waits_for_channels_that_were_replaced_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another event loop of the process would get what is meant for this one."""
    monkeypatch.setattr(channel_pool, "CANCELLED_S", 0.2)
    channels, now_s = ChannelPool(), asyncio.get_running_loop().time
    channels.get("127.0.0.1:1")
    channels.drop("127.0.0.1:1")
    begun_s = now_s()
    await channels.close()
    assert now_s() - begun_s >= 0.19


async def test_a_call_goes_on_where_its_channel_was_replaced() -> None:
    """A server that stops lets calls in flight end; meanwhile others are made anew."""
    channels = ChannelPool()
    async with serving("127.0.0.1") as server:
        first = channels.get(server.address)
        call = health_pb2_grpc.HealthStub(first).Watch(health_pb2.HealthCheckRequest())
        await call.read()
        channels.drop(server.address)
        second = channels.get(server.address)
        assert second is not first
        await health_pb2_grpc.HealthStub(second).Check(health_pb2.HealthCheckRequest())
        assert not call.done()
        await channels.close()
        assert await call.code() is grpc.StatusCode.CANCELLED


async def test_attempts_get_longer_until_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is far away, or on a busy machine, is reached in the end."""
    limits: list[float] = []

    def noted(address: str, secret: None = None, *, dial_s: float = 0.0) -> grpc.aio.Channel:
        limits.append(dial_s)
        return open_channel(address, secret, dial_s=dial_s)

    monkeypatch.setattr(channel_pool, "open_channel", noted)
    monkeypatch.setattr(channel_pool, "SHARED_S", 0.0)
    channels = ChannelPool()
    async with serving("127.0.0.1") as server:
        port = server.port
    address = f"127.0.0.1:{port}"
    for _ in range(5):
        stub = health_pb2_grpc.HealthStub(channels.get(address))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Check(health_pb2.HealthCheckRequest())
    assert limits == [1.0, 2.0, 4.0, 5.0, 5.0]
    async with serving("127.0.0.1", port):
        await channels.get(address).channel_ready()
        channels.get(address)

    def anew() -> bool:
        channels.get(address)
        return limits[-1] == 1.0

    await until(anew)
    await channels.close()

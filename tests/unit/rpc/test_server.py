"""A server in its three ages, over a real port."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cometmq import errors
from cometmq.rpc.channels import open_channel
from cometmq.rpc.gate import Gate
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.server import READY, RpcServer, ServerLimits, join_address

SERVICE = "tests.Echo"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Echo:
    """Answers with what it gets; waits for ``go`` when told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.waiting = asyncio.Event()

    async def say(self, request: bytes, context: object) -> bytes:
        if request == b"wait":
            self.waiting.set()
            await self.go.wait()
        return request


def _add_echo(servicer: Echo, server: Any) -> None:
    """As the generated ``add_…_to_server``."""
    method = grpc.unary_unary_rpc_method_handler(servicer.say, bytes, bytes)
    server.add_generic_rpc_handlers(())
    server.add_registered_method_handlers(SERVICE, {"Say": method})


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    limits = ServerLimits(message_bytes_max=1_000)
    server = RpcServer(host="127.0.0.1", port=0, services=[SERVICE], gate=Gate(), limits=limits)
    await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(server.address) as channel:
        yield channel


async def _say(channel: grpc.aio.Channel, words: bytes, name: str = "Say") -> bytes:
    call: Any = channel.unary_unary(f"/{SERVICE}/{name}")
    with wire_errors():
        answer: bytes = await call(words, timeout=10)
    return answer


async def _health(channel: grpc.aio.Channel) -> list[int]:
    stub = health_pb2_grpc.HealthStub(channel)
    names = ["", READY, SERVICE]
    return [(await stub.Check(health_pb2.HealthCheckRequest(service=n))).status for n in names]


async def test_before_it_is_ready_only_health_answers(
    server: RpcServer, channel: grpc.aio.Channel
) -> None:
    assert await _health(channel) == [SERVING, NOT_SERVING, NOT_SERVING]
    with pytest.raises(errors.BrokerStarting):
        await _say(channel, b"x")
    server.add(_add_echo, Echo())
    with pytest.raises(errors.BrokerStarting):
        await _say(channel, b"x")


async def test_that_the_start_is_over_is_told_before_it_is_ready(
    server: RpcServer, channel: grpc.aio.Channel
) -> None:
    async def started() -> int:
        request = health_pb2.HealthCheckRequest(service="started")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request)
        return int(answer.status)

    assert await started() == NOT_SERVING
    await server.set_started()
    assert await started() == SERVING
    assert await _health(channel) == [SERVING, NOT_SERVING, NOT_SERVING]
    await server.begin_drain()
    assert await started() == SERVING


async def test_once_ready_it_answers(server: RpcServer, channel: grpc.aio.Channel) -> None:
    server.add(_add_echo, Echo())
    await server.set_ready()

    assert await _say(channel, b"x") == b"x"
    assert await _health(channel) == [SERVING, SERVING, SERVING]
    with pytest.raises(errors.InvalidRequest, match="UNIMPLEMENTED"):
        await _say(channel, b"x", name="Nothing")


async def test_it_serves_while_it_is_held_back_and_a_drain_ends_that(
    server: RpcServer, channel: grpc.aio.Channel
) -> None:
    server.add(_add_echo, Echo())
    await server.hold_ready(True)
    await server.set_ready()
    assert await _health(channel) == [SERVING, NOT_SERVING, SERVING]
    assert await _say(channel, b"x") == b"x"
    await server.hold_ready(False)
    assert await _health(channel) == [SERVING, SERVING, SERVING]
    await server.begin_drain()
    await server.hold_ready(False)
    assert await _health(channel) == [SERVING, NOT_SERVING, NOT_SERVING]


async def test_while_draining_it_refuses_new_calls_and_ends_old_ones(
    server: RpcServer, channel: grpc.aio.Channel
) -> None:
    echo = Echo()
    server.add(_add_echo, echo)
    await server.set_ready()
    old = asyncio.create_task(_say(channel, b"wait"))
    await echo.waiting.wait()
    await server.begin_drain()

    with pytest.raises(errors.BrokerDraining):
        await _say(channel, b"x")
    assert await _health(channel) == [SERVING, NOT_SERVING, NOT_SERVING]
    stopping = asyncio.create_task(server.stop(10))
    echo.go.set()
    assert await old == b"wait"
    await stopping


async def test_after_its_grace_it_cancels(server: RpcServer, channel: grpc.aio.Channel) -> None:
    echo = Echo()
    server.add(_add_echo, echo)
    await server.set_ready()
    old = asyncio.create_task(_say(channel, b"wait"))
    await echo.waiting.wait()
    await server.stop(0)
    with pytest.raises(errors.PeerUnavailable):
        await old


async def test_a_message_above_the_limit_is_refused(
    server: RpcServer, channel: grpc.aio.Channel
) -> None:
    server.add(_add_echo, Echo())
    await server.set_ready()
    with pytest.raises(errors.LimitExceeded):
        await _say(channel, bytes(1_001))


async def test_a_message_that_inflates_above_the_limit_is_refused(
    server: RpcServer, channel: grpc.aio.Channel
) -> None:
    server.add(_add_echo, Echo())
    await server.set_ready()
    call: Any = channel.unary_unary(f"/{SERVICE}/Say")
    with pytest.raises(errors.LimitExceeded), wire_errors():
        await call(bytes(1_000_000), timeout=10, compression=grpc.Compression.Gzip)


async def test_huge_metadata_is_refused(server: RpcServer, channel: grpc.aio.Channel) -> None:
    server.add(_add_echo, Echo())
    await server.set_ready()
    call: Any = channel.unary_unary(f"/{SERVICE}/Say")
    with pytest.raises(errors.LimitExceeded), wire_errors():
        await call(b"x", timeout=10, metadata=(("x-large", "x" * 50_000),))


async def test_a_port_has_one_owner(server: RpcServer) -> None:
    second = RpcServer(host="127.0.0.1", port=server.port, services=[], gate=Gate())
    with pytest.raises(errors.ConfigInvalid, match=str(server.port)):
        await second.start()


def test_addresses_are_joined_with_brackets_for_ipv6() -> None:
    assert join_address("127.0.0.1", 1) == "127.0.0.1:1"
    assert join_address("::1", 1) == "[::1]:1"
    assert join_address("some.host", 1) == "some.host:1"


async def test_a_crowd_of_calls_is_answered_and_none_is_cancelled() -> None:
    """Above 1,000 calls that no loop has taken yet, gRPC would cancel some of them."""
    server = RpcServer(host="127.0.0.1", port=0, services=[SERVICE], gate=Gate())
    await server.start()
    server.add(_add_echo, Echo())
    await server.set_ready()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(server.stop, 0)
        channels = [
            await stack.enter_async_context(open_channel(server.address)) for _ in range(700)
        ]
        codes = Counter[str]()

        async def ask(channel: grpc.aio.Channel) -> None:
            call: Any = channel.unary_unary(f"/{SERVICE}/Say")
            try:
                await call(b"x", timeout=60)
            except grpc.aio.AioRpcError as error:
                codes[error.code().name] += 1
            else:
                codes["OK"] += 1

        await asyncio.gather(*(ask(channel) for channel in channels for _ in range(4)))
    assert codes == {"OK": 2_800}


async def test_a_method_that_is_cancelled_from_inside_answers_with_an_error(
    server: RpcServer, channel: grpc.aio.Channel
) -> None:
    """By the end of another call that it shared its work with."""
    echo = Echo()
    work = asyncio.get_running_loop().create_future()

    async def say(request: bytes, context: object) -> bytes:
        echo.waiting.set()
        await work
        return request

    echo.say = say  # type: ignore[method-assign]
    server.add(_add_echo, echo)
    await server.set_ready()
    asking = asyncio.create_task(_say(channel, b"x"))
    await echo.waiting.wait()
    work.cancel()
    with pytest.raises(errors.InternalError):
        await asking

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from cometmq.errors import StaleEpoch
from cometmq.member.lease.lease_holder import Deposed
from cometmq.member.registration import Registrar
from cometmq.rpc.gate import Gate
from cometmq.rpc.registrar import Registrar as AnyRegistrar
from cometmq.rpc.server import RpcServer
from cometmq.v1 import common_pb2, namesrv_pb2, namesrv_pb2_grpc
from tests.support.waiting import until


class RecordingNamesrv(namesrv_pb2_grpc.NameServiceServicer):
    """Notes what it is told; refuses with ``error`` when there is one."""

    def __init__(self) -> None:
        self.counters: list[int] = []
        self.unregistered: list[int] = []
        self.error: Exception | None = None
        self.told: namesrv_pb2.Member | None = None  # what it says is registered
        self.changed = asyncio.Event()

    async def RegisterMember(self, request: Any, context: Any) -> Any:
        if self.error is not None:
            raise self.error
        self.counters.append(request.data_version.counter)
        self.told = request.member
        return namesrv_pb2.RegisterMemberResponse()

    async def UnregisterMember(self, request: Any, context: Any) -> Any:
        self.unregistered.append(request.epoch)
        return namesrv_pb2.UnregisterMemberResponse()

    async def WatchRegistration(  # type: ignore[override]  # answers with context.write
        self, request: Any, context: Any
    ) -> None:
        """Tells of ``told``, the latest first."""
        while True:
            changed = self.changed
            await context.write(namesrv_pb2.WatchRegistrationResponse(member=self.told))
            await changed.wait()

    def tell(self, member: Any) -> None:
        """Let all watches be told of another registration."""
        self.told = member
        self.changed.set()
        self.changed = asyncio.Event()

    async def _not_asked(self, request: Any, context: Any) -> Any:
        raise AssertionError("a member does not ask this")

    def __getattribute__(self, name: str) -> Any:
        asked = ("RegisterMember", "UnregisterMember", "WatchRegistration")
        own = name in asked or not name[0].isupper()
        return super().__getattribute__(name if own else "_not_asked")


def recording() -> RecordingNamesrv:
    return RecordingNamesrv()  # type: ignore[abstract]  # the others are never asked


async def started(namesrv: RecordingNamesrv, port: int = 0) -> RpcServer:
    server = RpcServer(host="127.0.0.1", port=port, services=[], gate=Gate())
    server.add(namesrv_pb2_grpc.add_NameServiceServicer_to_server, namesrv)
    await server.start()
    await server.set_ready()
    return server


@asynccontextmanager
async def serving(*namesrvs: RecordingNamesrv) -> AsyncIterator[tuple[str, ...]]:
    servers = [await started(namesrv) for namesrv in namesrvs]
    try:
        yield tuple(server.address for server in servers)
    finally:
        for server in servers:
            await server.stop(0)


class Teller:
    """What the member says of itself: counts how often it was asked."""

    def __init__(self) -> None:
        self.counter = 1

    def __call__(self) -> namesrv_pb2.RegisterMemberRequest:
        member = namesrv_pb2.Member(
            cluster="c",
            broker_group="g1",
            role=common_pb2.MEMBER_ROLE_WRITER,
            address="127.0.0.1:1",
            epoch=5,
        )
        version = namesrv_pb2.DataVersion(epoch=5, counter=self.counter)
        return namesrv_pb2.RegisterMemberRequest(member=member, data_version=version)


@asynccontextmanager
async def registering(
    addresses: tuple[str, ...], teller: Teller, period_s: float = 3600.0
) -> AsyncIterator[Registrar]:
    registrar = Registrar(addresses, teller, period_s)
    task = asyncio.create_task(registrar.run())
    try:
        yield registrar
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_registers_everywhere_and_unregisters_everywhere() -> None:
    a, b = recording(), recording()
    async with serving(a, b) as addresses, registering(addresses, Teller()) as registrar:
        await registrar.tried(10)
        await until(lambda: a.counters and b.counters)
        await registrar.unregister()
        assert (a.unregistered, b.unregistered) == ([5], [5])


async def test_a_change_is_told_at_once() -> None:
    namesrv, teller = recording(), Teller()
    async with serving(namesrv) as addresses, registering(addresses, teller) as registrar:
        await until(lambda: namesrv.counters == [1])
        teller.counter = 2
        registrar.changed()
        await until(lambda: namesrv.counters == [1, 2])


async def test_silence_is_broken_each_period() -> None:
    namesrv = recording()
    async with serving(namesrv) as addresses, registering(addresses, Teller(), 0.01):
        await until(lambda: len(namesrv.counters) >= 3)


async def test_one_that_goes_as_soon_as_it_was_told_is_told_again() -> None:
    """It is gone before anybody looks whether the connection lasts."""
    before, after = recording(), recording()
    servers = [await started(before)]

    async def register(stub: namesrv_pb2_grpc.NameServiceAsyncStub) -> None:
        await stub.RegisterMember(Teller()())
        if len(servers) == 1:
            await servers[0].stop(0)
            with suppress(grpc.aio.AioRpcError):
                await stub.RegisterMember(Teller()(), timeout=1)
            servers.append(await started(after, int(servers[0].address.rpartition(":")[2])))

    async def watch(stub: namesrv_pb2_grpc.NameServiceAsyncStub) -> None:
        await asyncio.Event().wait()

    registrar = AnyRegistrar([servers[0].address], register, register, watch, 3600.0)
    task = asyncio.create_task(registrar.run())
    try:
        await until(lambda: after.counters)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await servers[-1].stop(0)


async def test_known_is_who_one_name_server_knows() -> None:
    namesrv, teller = recording(), Teller()
    namesrv.error = RuntimeError("it has troubles of its own")
    async with (
        serving(namesrv) as addresses,
        registering((*addresses, "127.0.0.1:9"), teller, 0.01) as registrar,
    ):
        knowing = asyncio.create_task(registrar.known())
        assert not await registrar.tried(20)
        await asyncio.sleep(0.05)
        assert not knowing.done()
        namesrv.error = None
        await asyncio.wait_for(knowing, 20)
        assert namesrv.counters


async def test_who_has_nothing_to_tell_is_not_known() -> None:
    namesrv, teller = recording(), Teller()
    told: list[namesrv_pb2.RegisterMemberRequest | None] = [None]
    async with serving(namesrv) as addresses:
        registrar = Registrar(addresses, lambda: told[0], 0.01)
        task = asyncio.create_task(registrar.run())
        try:
            assert not await registrar.tried(20)
            told[0] = teller()
            await asyncio.wait_for(registrar.known(), 20)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_one_that_is_away_does_not_hold_up_the_others() -> None:
    namesrv = recording()
    async with serving(namesrv) as addresses:
        everyone = (*addresses, "127.0.0.1:9")
        async with registering(everyone, Teller(), 0.01) as registrar:
            await until(lambda: len(namesrv.counters) >= 3)
            await registrar.unregister()
            assert namesrv.unregistered == [5]


async def test_one_that_comes_back_is_told_again() -> None:
    namesrv = recording()
    namesrv.error = RuntimeError("it has troubles of its own")
    async with serving(namesrv) as addresses, registering(addresses, Teller(), 0.01) as registrar:
        await registrar.tried(10)
        assert namesrv.counters == []
        namesrv.error = None
        await until(lambda: namesrv.counters)


async def test_one_that_has_forgotten_it_is_told_again_at_once() -> None:
    namesrv = recording()
    async with serving(namesrv) as addresses, registering(addresses, Teller()):
        other = Teller()().member
        other.internal_address = "6.6.6.6:2"
        for said in (None, other, namesrv_pb2.Member()):
            before = len(namesrv.counters)
            await until(lambda: namesrv.told == Teller()().member)
            namesrv.tell(said)
            await until(lambda n=before: len(namesrv.counters) > n)  # type: ignore[misc]


async def test_a_newer_incarnation_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    """Nor is it worth a warning: a follower that comes back has not heard of it yet."""
    caplog.set_level(logging.INFO, "cometmq.rpc.registrar")
    namesrv = recording()
    namesrv.error = StaleEpoch("epoch 6 is registered")
    async with serving(namesrv) as addresses, registering(addresses, Teller()) as registrar:
        await registrar.tried(20)
        namesrv.error = None
        await until(lambda: namesrv.counters)
    [line] = [one for one in caplog.records if one.name == "cometmq.rpc.registrar"]
    assert line.levelno == logging.INFO


async def test_without_name_servers_there_is_nothing_to_wait_for() -> None:
    registrar = Registrar((), Teller(), 1.0)
    await registrar.run()
    assert await registrar.tried(10)
    await registrar.known()
    registrar.changed()
    await registrar.unregister()


async def test_who_is_overtaken_decides_what_that_means() -> None:
    namesrv, told = recording(), list[StaleEpoch]()
    namesrv.error = StaleEpoch("epoch 13 is registered", epoch=13)

    async def overtaken(error: StaleEpoch) -> None:
        told.append(error)
        if len(told) == 2:
            raise Deposed("another holds the lease")

    async with serving(namesrv) as addresses:
        registrar = Registrar(addresses, Teller(), 0.01, overtaken=overtaken)
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(registrar.run(), 20)
    assert ended.group_contains(Deposed)
    assert [error.epoch for error in told] == [13, 13], "on the wire, too"

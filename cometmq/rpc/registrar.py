"""How a process makes itself known: to every name server, at start, on every change, and again
each period.

Name servers do not talk to each other, so each has a task of its own here; one that is away is
tried again while the others go on. One that goes away is noticed at once, and told again as soon as
it is back: it has forgotten everything. A headless Service's name stands for all its addresses and
is resolved again every 10 s.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeAlias

import grpc

from cometmq.errors import CometError
from cometmq.rpc.channels import follow_addresses, open_channel, parse_addresses
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.telemetry import fields
from cometmq.v1 import namesrv_pb2_grpc

_log = logging.getLogger(__name__)

LOST_ALREADY_S = 1.0

Call: TypeAlias = "Callable[[namesrv_pb2_grpc.NameServiceAsyncStub], Awaitable[object]]"


class Registrar:
    """``register`` and ``unregister`` are one call each, with its deadline. An error of the kinds
    ``fatal`` ends :meth:`run`; after any other the call is made again.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        register: Call,
        unregister: Call,
        period_s: float,
        *,
        fatal: tuple[type[CometError], ...] = (),
    ) -> None:
        addresses = tuple(addresses)
        self._configured = parse_addresses(addresses) if addresses else ()
        self._register = register
        self._unregister = unregister
        self._period_s = period_s
        self._fatal = fatal
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._tried = asyncio.Event()

    def changed(self) -> None:
        """What there is to tell has changed: tell everyone now."""
        for event in self._wake.values():
            event.set()

    async def run(self) -> None:
        """Register until cancelled."""
        if not self._configured:
            self._tried.set()
            return
        async with asyncio.TaskGroup() as tasks:

            def follow(found: tuple[str, ...]) -> None:
                for address in self._tasks.keys() - set(found):
                    self._tasks.pop(address).cancel()
                    del self._wake[address]
                for address in set(found) - self._tasks.keys():
                    self._wake[address] = asyncio.Event()
                    self._tasks[address] = tasks.create_task(self._keep_registered(address))

            await follow_addresses(self._configured, follow)

    async def tried(self) -> None:
        """Wait until one name server was tried; returns at once when none is configured."""
        await self._tried.wait()

    async def unregister(self) -> None:
        """Say farewell everywhere; a name server that is away finds out by our silence."""
        addresses = list(self._tasks)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*(self._unregister_at(address) for address in addresses))

    async def _keep_registered(self, address: str) -> None:
        backoff = Backoff(BackoffPolicy(), random.Random())
        wake = self._wake[address]
        async with open_channel(address) as channel:
            stub = namesrv_pb2_grpc.NameServiceStub(channel)
            while True:
                wake.clear()
                wait_s, told = self._period_s, True
                try:
                    with wire_errors():
                        await self._register(stub)
                    backoff.reset()
                except CometError as error:
                    if isinstance(error, self._fatal):
                        raise
                    wait_s, told = min(wait_s, backoff.next_s()), False
                    _log.warning("not registered", extra=fields(namesrv=address, error=error))
                self._tried.set()
                lost = [_until_lost(channel)] if told else []
                await _wait_for_any(wait_s, wake.wait(), *lost)

    async def _unregister_at(self, address: str) -> None:
        async with open_channel(address) as channel:
            try:
                with wire_errors():
                    await self._unregister(namesrv_pb2_grpc.NameServiceStub(channel))
            except CometError as error:
                _log.info("not unregistered", extra=fields(namesrv=address, error=error))


async def _until_lost(channel: grpc.aio.Channel) -> None:
    """Until the connection breaks; for a moment when it has broken already, or never was."""
    ready = grpc.ChannelConnectivity.READY
    if channel.get_state() is ready:
        await channel.wait_for_state_change(ready)
    else:
        await asyncio.sleep(LOST_ALREADY_S)


async def _wait_for_any(timeout_s: float, *waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

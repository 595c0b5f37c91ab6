"""How a process makes itself known: to every name server, at start, on every change, and again
each period.

Name servers do not talk to each other, so each has a task of its own here; one that is away is
tried again; the others are not affected. The loss of a connection is noticed at once, and the name
server gets the registration again as soon as it is back: it keeps registrations only in memory.
A name server that has dropped the registration of this process alone gets it again at once. The
name of a headless Service is resolved to all its addresses, again every 2 s.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import grpc

from cometmq.clock import SystemClock
from cometmq.errors import CometError, StaleEpoch
from cometmq.rpc.addresses import follow_addresses, parse_addresses
from cometmq.rpc.authorized import ProvenChannel
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.secret import SharedSecret
from cometmq.rpc.tasks import race
from cometmq.telemetry import ThrottledLog, fields, logger
from cometmq.v1 import namesrv_pb2_grpc

_log = logger(__name__)

LOST_ALREADY_S = 1.0
OTHERS_S = 1.0  # one that has gone says nothing
AGAIN_S = 0.2  # before telling one that has forgotten us: two may use the same name
RETRY = BackoffPolicy(first_s=0.1, max_s=1.0)

Call: TypeAlias = "Callable[[namesrv_pb2_grpc.NameServiceAsyncStub], Awaitable[object]]"
Overtaken: TypeAlias = Callable[[StaleEpoch], Awaitable[None]]
# Gets the address of a name server, what it has answered, and when it was asked (CLOCK_BOOTTIME).
Answered: TypeAlias = Callable[[str, object, float], None]


class Registrar:
    """``register`` and ``unregister`` are one call each, with its deadline. ``watch`` returns when
    the name server no longer has the registration as it was made. After an error the call is made
    again. ``register`` answers False where there is nothing to register yet.

    Name servers that have the ``secret`` get its proof, and give theirs. Others get the
    registration, too, but their refusals are not believed. ``overtaken`` gets StaleEpoch, a
    newer epoch, if it is believed; its exceptions end :meth:`run`. ``answered`` gets what
    ``register`` gave, under the same condition.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        register: Call,
        unregister: Call,
        watch: Call,
        period_s: float,
        *,
        secret: SharedSecret | None = None,
        overtaken: Overtaken | None = None,
        answered: Answered | None = None,
    ) -> None:
        addresses = tuple(addresses)
        self._configured = parse_addresses(addresses) if addresses else ()
        self._register = register
        self._unregister = unregister
        self._watch = watch
        self._period_s = period_s
        self._secret = secret
        self._overtaken = overtaken
        self._answered = answered
        self._forgotten = ThrottledLog(_log, logging.WARNING, SystemClock())
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake: dict[str, asyncio.Event] = {}
        self._tried = asyncio.Event()
        self._known = asyncio.Event()  # to one of them
        self._untried: set[str] = set()
        self._all_tried = asyncio.Event()

    def changed(self) -> None:
        """The registration has changed: send it to all name servers now."""
        for event in self._wake.values():
            event.set()

    async def run(self) -> None:
        """Register until cancelled."""
        if not self._configured:
            for event in (self._tried, self._known, self._all_tried):
                event.set()
            return
        async with asyncio.TaskGroup() as tasks:

            def follow(found: tuple[str, ...]) -> None:
                for address in self._tasks.keys() - set(found):
                    self._tasks.pop(address).cancel()
                    del self._wake[address]
                self._untried |= set(found) - self._tasks.keys()
                for address in set(found) - self._tasks.keys():
                    self._wake[address] = asyncio.Event()
                    self._tasks[address] = tasks.create_task(self._keep_registered(address))

            await follow_addresses(self._configured, follow)

    async def tried(self, timeout_s: float) -> bool:
        """Wait until one name server was tried, so long at most; whether one knows us. Returns at
        once when none is configured.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._tried.wait()
        return self._known.is_set()

    async def known(self) -> None:
        """Wait until a name server knows us, and a little longer for the others; returns at once
        when none is configured.
        """
        await self._known.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_S):
                await self._all_tried.wait()

    async def unregister(self) -> None:
        """Announce the stop everywhere; a name server that is away finds out by our silence."""
        addresses = list(self._tasks)
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*(self._unregister_at(address) for address in addresses))

    async def _keep_registered(self, address: str) -> None:
        backoff = Backoff(RETRY, random.Random())
        refused = ThrottledLog(_log, logging.WARNING, SystemClock())
        behind = ThrottledLog(_log, logging.INFO, SystemClock())
        wake = self._wake[address]
        async with self._open(address) as channel:
            stub = namesrv_pb2_grpc.NameServiceStub(channel)
            while True:
                wake.clear()
                error = await self._attempt(stub, channel, address)
                wait_s = self._period_s
                if error is None:
                    backoff.reset()
                else:
                    if isinstance(error, StaleEpoch) and self._overtaken and _is_believed(channel):
                        await self._overtaken(error)
                    wait_s = min(wait_s, backoff.next_s())
                    if isinstance(error, StaleEpoch) and self._overtaken is None:
                        # A follower that comes back has not heard of the newest epoch yet.
                        behind.log("to be registered in a newer epoch", namesrv=address)
                    else:
                        kind = type(error).__name__
                        refused.log("not registered", kind, namesrv=address, error=error)
                self._tried.set()
                self._untried.discard(address)
                if not self._untried:
                    self._all_tried.set()
                ends: list[Coroutine[Any, Any, object]] = [wake.wait()]
                if error is None:
                    ends += [_until_lost(channel), self._until_forgotten(stub, address)]
                await race(*ends, timeout_s=wait_s)

    async def _attempt(
        self,
        stub: namesrv_pb2_grpc.NameServiceAsyncStub,
        channel: grpc.aio.Channel,
        address: str,
    ) -> CometError | None:
        """Register once; the error if it fails."""
        asked_s = SystemClock().boottime_s()
        try:
            with wire_errors():
                answer = await self._register(stub)
        except CometError as error:
            return error
        if answer is not False:
            self._known.set()
            if self._answered is not None and _is_believed(channel):
                self._answered(address, answer, asked_s)
        return None

    def _open(self, address: str) -> grpc.aio.Channel:
        return open_channel(address, self._secret, insist=False)

    async def _until_forgotten(
        self, stub: namesrv_pb2_grpc.NameServiceAsyncStub, address: str
    ) -> None:
        try:
            with wire_errors():
                await self._watch(stub)
        except CometError:  # the name server is of the release before, or has gone
            await asyncio.Event().wait()
        self._forgotten.log(
            "a name server has forgotten this process: it registers again", address, namesrv=address
        )
        await asyncio.sleep(AGAIN_S)

    async def _unregister_at(self, address: str) -> None:
        async with self._open(address) as channel:
            try:
                with wire_errors():
                    await self._unregister(namesrv_pb2_grpc.NameServiceStub(channel))
            except CometError as error:
                _log.info("not unregistered", extra=fields(namesrv=address, error=error))


def _is_believed(channel: grpc.aio.Channel) -> bool:
    """Whether the server has proven itself, if that can be asked of it."""
    return not isinstance(channel, ProvenChannel) or channel.proven


async def _until_lost(channel: grpc.aio.Channel) -> None:
    """Until the connection breaks; for a moment when it has broken already, or never was."""
    ready = grpc.ChannelConnectivity.READY
    if channel.get_state() is ready:
        await channel.wait_for_state_change(ready)
    else:
        await asyncio.sleep(LOST_ALREADY_S)

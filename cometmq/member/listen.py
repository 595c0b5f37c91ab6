"""A member's two ports, before anything slow is imported: health answers from here on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from cometmq.clock import SystemClock
from cometmq.errors import ConfigInvalid
from cometmq.member.config import MemberConfig
from cometmq.rpc.calls import SilentPeers
from cometmq.rpc.gate import Gate
from cometmq.rpc.secret import SharedSecret, open_secret
from cometmq.rpc.server import RpcServer, limits_of

T = TypeVar("T")

REBIND_TRIES_MAX = 50
REBIND_S = 0.1

CLIENT_SERVICE = "cometmq.v1.BrokerService"
ADMIN_SERVICE = "cometmq.v1.BrokerAdminService"
MEMBER_SERVICE = "cometmq.v1.MemberService"


@dataclass(frozen=True, slots=True)
class Ports:
    """Both servers; they share one gate. ``secret`` is what callers of the internal one have to
    know, and what this member proves to others; None: nothing.
    """

    clients: RpcServer
    internal: RpcServer
    gate: Gate
    secret: SharedSecret | None

    async def start(self) -> None:
        """Bind both."""
        await self.clients.start()
        await self.internal.start()

    async def set_started(self) -> None:
        await self.clients.set_started()
        await self.internal.set_started()

    async def open(self) -> None:
        await self.clients.open()
        await self.internal.open()

    async def set_ready(self) -> None:
        await self.clients.set_ready()
        await self.internal.set_ready()

    async def hold_ready(self, is_held: bool) -> None:
        """As :meth:`RpcServer.hold_ready`."""
        await self.clients.hold_ready(is_held)
        await self.internal.hold_ready(is_held)

    async def stop(self, grace_s: float) -> None:
        """Close both; calls in flight may take ``grace_s``. A second time it does nothing."""
        await asyncio.gather(self.clients.stop(grace_s), self.internal.stop(grace_s))

    async def begin_drain(self) -> None:
        await self.clients.begin_drain()
        await self.internal.begin_drain()


def new_ports(config: MemberConfig) -> Ports:
    """Servers that have not started yet. ConfigInvalid: ``internal_secret_file`` is no good."""
    gate = Gate()
    secret = open_secret(config.internal_secret_file, SystemClock())
    limits = limits_of(config)
    silent = SilentPeers(SystemClock())
    host = config.listen_host
    return Ports(
        RpcServer(
            host=host,
            port=config.port,
            services=[CLIENT_SERVICE],
            gate=gate,
            limits=limits,
            silent=silent,
        ),
        RpcServer(
            host=host,
            port=config.internal_port,
            services=[ADMIN_SERVICE, MEMBER_SERVICE],
            gate=gate,
            limits=limits,
            secret=secret,
            silent=silent,
        ),
        gate,
        secret,
    )


async def rebound(bind: Callable[[], Awaitable[T]]) -> T:
    """What ``bind`` gives: a port that this process had a moment ago. An outgoing connection may
    use it for another, so ConfigInvalid comes after some seconds only.
    """
    for _ in range(REBIND_TRIES_MAX):
        try:
            return await bind()
        except ConfigInvalid:
            await asyncio.sleep(REBIND_S)
    return await bind()

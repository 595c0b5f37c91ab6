"""The last steps of a start: serve, register, be ready, announce."""

from __future__ import annotations

import asyncio
import gc
import logging
from contextlib import AsyncExitStack
from typing import Protocol

from cometmq.rpc.registrar import Registrar

log = logging.getLogger(__name__)

REGISTRATION_WAIT_S = 2.0  # how long the announcement waits for the first name server


class Server(Protocol):
    """One server or several: RpcServer, or the ports of a member."""

    async def open(self) -> None: ...
    async def set_ready(self) -> None: ...


async def open_server(server: Server) -> None:
    """Serve the clients that know this process already."""
    gc.collect()
    gc.freeze()  # objects that live as long as the process are not examined again
    await server.open()


async def await_registration(
    server: Server, registrar: Registrar, tasks: asyncio.TaskGroup, stack: AsyncExitStack
) -> None:
    """The server becomes ready when a name server knows it, because only then others find it.
    Returns then, or when no name server has accepted the registration in REGISTRATION_WAIT_S: the
    registration continues in one of ``tasks``.
    """

    async def set_ready_once_known() -> None:
        await registrar.known()
        await server.set_ready()

    getting_ready = tasks.create_task(set_ready_once_known())
    stack.callback(getting_ready.cancel)
    if await registrar.tried(REGISTRATION_WAIT_S):
        await asyncio.wait([getting_ready])
    else:
        log.warning("serves, and is not ready before a name server knows it")

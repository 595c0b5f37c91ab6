"""When a client may be used: from its opening to its close, in one process and one event loop."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import NoReturn, Self

from cometmq.errors import ClientClosed, ClientForked, ClientLoopMismatch, InvalidRequest
from cometmq.rpc.forks import FORKS
from cometmq.rpc.loop_watch import loop_watch


class Lifecycle(ABC):
    """``_open``: calls may be made. Meanwhile an event loop that does not turn for
    ``loop_stall_ms`` (0: it may) is logged.
    """

    def __init__(self, loop_stall_ms: int) -> None:
        self._open = False
        self._loop_stall_ms = loop_stall_ms
        self._end_watch: Callable[[], None] = lambda: None
        self._made_by = os.getpid()
        self._opened_in: asyncio.AbstractEventLoop | None = None  # this event loop
        self._is_ending = False
        self._is_forked = False

    async def start(self) -> Self:
        """Opens the client, as entering its block does: for a notebook, whose cells share no block.
        :meth:`close` ends it. Raises InvalidRequest (it was opened before), ClientForked.
        """
        if self._opened_in is not None:
            raise InvalidRequest("A client is opened once: make another one.")
        FORKS.check()
        if self._made_by != os.getpid():
            raise ClientForked(f"Process {self._made_by} has made this client.")
        self._opened_in = asyncio.get_running_loop()
        FORKS.watch(self, self._forked)
        if self._loop_stall_ms:
            self._end_watch = loop_watch.watch(self._loop_stall_ms / 1000)
        try:
            await self._enter()
        except BaseException:
            self._end_watch()
            raise
        return self

    async def close(self) -> None:
        """Ends the client, as leaving its block without an error does. Does nothing where it is not
        open. ClientLoopMismatch.
        """
        await self.__aexit__(None, None, None)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        # What a child has inherited stays as it is.
        if self._opened_in is None or self._is_ending or self._is_forked:
            return
        self._check_loop()
        self._is_ending = True
        try:
            await self._leave(error)
        finally:
            self._end_watch()

    @abstractmethod
    async def _enter(self) -> None:
        """Opens the client."""

    @abstractmethod
    async def _leave(self, error: BaseException | None) -> None:
        """Ends the client, whose block ``error`` has ended."""

    def _forked(self) -> None:
        """This process is a child of the one that opened the client."""
        self._open = False
        self._is_forked = True

    def _check_open(self) -> None:
        """ClientClosed, ClientForked, ClientLoopMismatch."""
        if self._is_forked:
            raise ClientForked(f"Process {self._made_by} has opened this client.")
        if not self._open:
            raise ClientClosed("The client is not open.")
        self._check_loop()

    def _check_loop(self) -> None:
        """ClientLoopMismatch: another event loop than this one, or none, has opened the client."""
        if self._opened_in is not None:
            check_loop(self._opened_in)

    def __reduce__(self) -> NoReturn:
        raise ClientForked("A client cannot be sent to another process.")


def check_loop(loop: asyncio.AbstractEventLoop) -> None:
    """ClientLoopMismatch: it is not the one that runs in this thread."""
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is not loop:
        raise ClientLoopMismatch("The client is used in another event loop, or in none.")

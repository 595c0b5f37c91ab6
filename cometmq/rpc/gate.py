"""Whether a process takes calls: it starts, it serves, it drains; it never goes back.

One gate is shared by all servers of a process. A server asks it once per call; health is exempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cometmq.errors import BrokerDraining, BrokerStarting, CometError


class Gate:
    """Closed while the process starts, open while it serves, closed again once it drains.

    ``refusal`` is the error that a call gets now, None while the gate is open.
    """

    def __init__(self) -> None:
        self._refusal: CometError | None = BrokerStarting("the process is not ready yet")
        self._draining = asyncio.Event()
        self._at_drain: list[Callable[[], object]] = []

    @property
    def refusal(self) -> CometError | None:
        return self._refusal

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def open(self) -> None:
        """Take calls from now on; without effect once draining."""
        if not self.draining:
            self._refusal = None

    def drain(self) -> None:
        """Refuse new calls from now on and end what waits in :meth:`when_draining`."""
        self._refusal = BrokerDraining("the process is stopping")
        self._draining.set()
        for end in self._at_drain:
            end()

    def at_drain(self, end: Callable[[], object]) -> None:
        """Calls ``end`` once the process drains, before anything else happens: for many streams of
        one kind, which need no task each.
        """
        self._at_drain.append(end)

    def check(self) -> None:
        """Raise the refusal, if there is one: for streams that take new work in their middle."""
        if self._refusal is not None:
            raise self._refusal

    async def when_draining(self, end: Callable[[], object]) -> None:
        """Calls ``end`` once the process drains: streams that live long end themselves then."""
        await self._draining.wait()
        end()

"""How fast commands that write many messages go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

AT_ONCE_MAX = 256  # messages of a call


class Pace:
    """``rate`` messages a second; 0: as fast as it goes."""

    def __init__(
        self, rate: float, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self.at_once = min(AT_ONCE_MAX, max(1, int(rate))) if rate else AT_ONCE_MAX
        self._rate = rate
        self._sleep = sleep
        self._owed_s = 0.0

    async def take(self, count: int) -> None:
        """Wait until so many messages, :attr:`at_once` at most, may go."""
        assert count <= self.at_once
        if self._owed_s:
            await self._sleep(self._owed_s)
        self._owed_s = count / self._rate if self._rate else 0.0

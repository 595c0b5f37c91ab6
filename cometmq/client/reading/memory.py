"""How many bytes of messages a consumer holds, over all its queues.

A queue may hold as much as is free. So one busy queue gets half of the memory, n of them get a part
of n + 1 each, and something is left for a queue that has nothing yet: no number of queues has to be
known, and none waits for a greedy one. (The dynamic thresholds of switches that share a buffer.)
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


class Memory:
    """Of one consumer: what its queues hold and what was asked for and has not come yet, at most
    ``bytes_max``. One pull is always allowed where there is nothing. Belongs to the event loop.

    The first message of an answer comes whatever its size, and messages that a pull-hold gives come
    unasked: these may lie above it.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used_bytes = 0
        self._waiting: deque[_Waiting] = deque()
        self._is_serving = False  # in the next turn of the event loop

    def share(self) -> MemoryShare:
        """What one more queue holds."""
        return MemoryShare(self)

    def change(self, by_bytes: int) -> None:
        """A share has grown, or shrunk."""
        self.used_bytes += by_bytes
        assert self.used_bytes >= 0
        # Not now: what a pull has asked for becomes what its queue holds, within one turn.
        if by_bytes < 0 and self._waiting and not self._is_serving:
            self._is_serving = True
            asyncio.get_running_loop().call_soon(self._serve)

    async def wait(self, share: MemoryShare, size_bytes: int) -> None:
        """Waits until the share may ask for so many bytes, which it does then. First come, first
        served, but that a share that is too large lets others pass.
        """
        waiting = _Waiting(share, size_bytes, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting.served
        except asyncio.CancelledError:
            if waiting.served.cancelled():
                self._waiting.remove(waiting)
            else:  # in the same turn of the event loop
                share.answered(size_bytes)
            raise

    def _serve(self) -> None:
        self._is_serving = False
        kept: deque[_Waiting] = deque()
        while self._waiting:
            waiting = self._waiting.popleft()
            if waiting.served.cancelled():
                kept.append(waiting)  # its task removes it
            elif waiting.share.try_ask(waiting.size_bytes):
                waiting.served.set_result(None)
            else:
                kept.append(waiting)
        self._waiting = kept


class MemoryShare:
    """Of one queue."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._held_bytes = 0
        self._asked_bytes = 0

    async def ask(self, size_bytes: int) -> int:
        """Waits until so many bytes may come, or as many as the memory has. How many: the caller
        has to tell when they are :meth:`answered`.
        """
        size_bytes = min(size_bytes, self._memory.bytes_max)
        if not self.try_ask(size_bytes):
            await self._memory.wait(self, size_bytes)
        return size_bytes

    def try_ask(self, size_bytes: int) -> bool:
        """Asks for so many bytes, if they may come now."""
        used_bytes = self._memory.used_bytes
        would_have = self._held_bytes + self._asked_bytes + size_bytes
        if used_bytes and would_have > self._memory.bytes_max - used_bytes:
            return False
        self._asked_bytes += size_bytes
        self._memory.change(size_bytes)
        return True

    def answered(self, size_bytes: int) -> None:
        """So many bytes that were asked for have come, or never will. In the same turn of the event
        loop the queue tells what it :meth:`hold` now.
        """
        self._asked_bytes -= size_bytes
        assert self._asked_bytes >= 0
        self._memory.change(-size_bytes)

    def hold(self, held_bytes: int) -> None:
        """The queue holds so many bytes."""
        before, self._held_bytes = self._held_bytes, held_bytes
        self._memory.change(held_bytes - before)


@dataclass(slots=True, eq=False)
class _Waiting:
    share: MemoryShare
    size_bytes: int
    served: asyncio.Future[None]

"""How many bytes a consumer asks of one broker group at a time.

What was asked for and has not come yet may all come at once, and then has to lie in memory. Without
a bound for the whole consumer that is a pull for each queue, of which there may be thousands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

# Smaller pulls cost more for each message than they save.
PULL_BYTES_MIN = 256 * 1024


def worth_asking(backlog_count: int, count_max: int, record_bytes: float) -> int:
    """Bytes to ask for where so many messages of that size were left behind the last answer. Twice
    as much, because more may have come meanwhile, but no more than ``count_max`` messages have.
    """
    return max(PULL_BYTES_MIN, int(min(2 * backlog_count, count_max) * record_bytes))


@dataclass(slots=True)
class _InFlight:
    """Pulls of one broker group: those that run, and those that wait, each with its bytes."""

    pull_count: int = 0
    size_bytes: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque)


class PullBudget:
    """Of one consumer: each broker group has ``bytes_max``, because it has its own connection.
    Pulls wait in their order while there is no room. Belongs to the event loop.

    A queue with much to read keeps its large pulls then, for many small ones would cost more.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._groups: dict[str, _InFlight] = {}

    async def reserve(self, broker_group: str, wanted_bytes: int) -> int:
        """Waits until one pull may ask for so many bytes, or for the whole budget when that is
        less. How many it may ask for; the caller has to :meth:`release` them.
        """
        size_bytes = min(wanted_bytes, self._bytes_max)
        group = self._groups.setdefault(broker_group, _InFlight())
        if not group.waiting and self._take(group, size_bytes):
            return size_bytes
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = size_bytes, waiter
        group.waiting.append(entry)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():  # it was served in the same turn of the event loop
                self.release(broker_group, size_bytes)
            elif entry in group.waiting:
                group.waiting.remove(entry)
                self._serve(group)  # the next one may want less
            raise
        return size_bytes

    def release(self, broker_group: str, size_bytes: int) -> None:
        """The pull that had reserved so much has ended."""
        group = self._groups[broker_group]
        group.pull_count -= 1
        group.size_bytes -= size_bytes
        assert group.pull_count >= 0
        assert group.size_bytes >= 0
        self._serve(group)
        if not group.pull_count:
            assert not group.waiting
            del self._groups[broker_group]

    def in_flight_bytes(self, broker_group: str) -> int:
        """Bytes asked for that have not come yet."""
        group = self._groups.get(broker_group)
        return group.size_bytes if group is not None else 0

    def _serve(self, group: _InFlight) -> None:
        while group.waiting:
            size_bytes, waiter = group.waiting[0]
            if not waiter.cancelled():
                if not self._take(group, size_bytes):
                    return
                waiter.set_result(None)
            group.waiting.popleft()

    def _take(self, group: _InFlight, size_bytes: int) -> bool:
        """Whether there is room."""
        if group.size_bytes + size_bytes > self._bytes_max:
            return False
        group.pull_count += 1
        group.size_bytes += size_bytes
        return True

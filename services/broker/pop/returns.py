"""Tells members that wait when messages come back to their group: their invisible time is over, an
acknowledgement has freed their message group, or the group goes on elsewhere.

Members wait at pull-holds, which hear of it as of messages that arrive. Until the next time of any
lease nothing is looked at.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

from cometmq.member.storage.arrivals import Arrivals
from cometmq.messaging.pop.leases import QueueLeases
from cometmq.messaging.pop.returns import ALL_MEMBERS
from cometmq.messaging.pop.table import PopTable
from cometmq.model import QueueKey
from cometmq.rpc.tasks import wait_at_most

TICK_S = 0.01  # leases that end within it are announced together
_STALE_MAX = 64  # times above twice the number of queues; then those of earlier leases go

_GroupQueue = tuple[str, QueueKey]


class PopReturns:
    """Belongs to the event loop; :meth:`run` is its task. ``next_number`` gives numbers that rise,
    also across writers; ``now_ms`` never goes back.
    """

    def __init__(
        self,
        arrivals: Arrivals,
        pops: PopTable,
        next_number: Callable[[], int],
        now_ms: Callable[[], int],
    ) -> None:
        self._arrivals = arrivals
        self._pops = pops
        self._next_number = next_number
        self._now_ms = now_ms
        self._times: list[tuple[int, _GroupQueue]] = []  # a heap; some are stale
        self._time_of: dict[_GroupQueue, int] = {}  # when to look at it
        self._sooner = asyncio.Event()

    def number(self, group: str, key: QueueKey) -> int:
        """Of the newest return; 0: there was none."""
        return self._arrivals.returns.number(key, group)

    def came_back(self, group: str, key: QueueKey, count: int) -> None:
        """So many messages may be received now."""
        self._arrivals.came_back(key, group, self._next_number(), count)

    def look_again(self, group: str) -> None:
        """All members are to look again: the group goes on elsewhere, or has another topic."""
        for key in self._pops.of_group(group):
            self.came_back(group, key, ALL_MEMBERS)

    def freed(
        self, group: str, key: QueueKey, queue: QueueLeases, count: int, *, has_room: bool
    ) -> None:
        """So many messages are done: others of their message groups may have waited for them, or
        (``has_room``) new ones for room.
        """
        if count and (has_room or queue.oldest_visible(self._now_ms()) is not None):
            self.came_back(group, key, count)

    def expect(self, group: str, key: QueueKey, visible_ms: int) -> None:
        """A lease of the queue ends then, if nothing changes it."""
        pair = group, key
        before_ms = self._time_of.get(pair)
        if before_ms is None or visible_ms < before_ms:
            if not self._times or visible_ms < self._times[0][0]:
                self._sooner.set()
            self._time_of[pair] = visible_ms
            heapq.heappush(self._times, (visible_ms, pair))
            if len(self._times) > 2 * len(self._time_of) + _STALE_MAX:
                self._times = sorted((time_ms, queue) for queue, time_ms in self._time_of.items())

    async def run(self) -> None:
        """Until it is cancelled."""
        for group in self._pops.groups():
            for key, queue in self._pops.of_group(group).items():
                now_ms = self._now_ms()
                if queue.oldest_visible(now_ms) is not None:  # the last writer may not have
                    self.came_back(group, key, max(1, queue.take_returned(now_ms)))
                self._look(group, key, queue)
        while True:
            self._sooner.clear()
            if self._times:
                wait_s = (self._times[0][0] - self._now_ms()) / 1000
                await wait_at_most(self._sooner, max(TICK_S, wait_s))
            else:
                await self._sooner.wait()
            self.tell_due()

    def tell_due(self) -> None:
        """Tell of the leases whose time has come."""
        now_ms = self._now_ms()
        while self._times and self._times[0][0] <= now_ms:
            visible_ms, pair = heapq.heappop(self._times)
            if self._time_of.get(pair) == visible_ms:
                del self._time_of[pair]
                if (queue := self._pops.find(*pair)) is not None:
                    self._look(*pair, queue)

    def _look(self, group: str, key: QueueKey, queue: QueueLeases) -> None:
        now_ms = self._now_ms()
        if count := queue.take_returned(now_ms):
            self.came_back(group, key, count)
        next_ms = queue.next_return_ms(now_ms)
        if next_ms is not None:
            self.expect(group, key, next_ms)

    def forget_group(self, group: str) -> None:
        """The group is gone, or pulls."""
        self._arrivals.returns.forget_group(group)

    def forget_topic(self, topic: str) -> None:
        """The topic is gone."""
        self._arrivals.returns.forget_topic(topic)

"""Gathers what goes to a broker group: the items of one turn of the event loop, and all that come
while a call is on its way, travel together.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Generic, TypeVar

from cometmq.errors import ClientClosed
from cometmq.rpc.tasks import Tasks

Item = TypeVar("Item")


class Accumulator(Generic[Item]):
    """``send`` makes the calls, one at a time for each broker group, with items in their order.
    ``size_of`` an item counts towards ``size_max`` of a call; a larger item goes alone. An error of
    ``send`` is logged as a failure of its task. Belongs to the event loop.
    """

    def __init__(
        self,
        tasks: Tasks,
        send: Callable[[str, list[Item]], Awaitable[None]],
        *,
        size_max: int,
        size_of: Callable[[Item], int] = lambda _: 1,
    ) -> None:
        self._tasks = tasks
        self._send = send
        self._size_max = size_max
        self._size_of = size_of
        self._waiting: defaultdict[str, deque[Item]] = defaultdict(deque)
        self._sending: set[str] = set()  # broker groups with a call on its way
        self._is_closed = False

    def put(self, broker_group: str, item: Item) -> None:
        """Sends the item soon. ClientClosed."""
        if self._is_closed:
            raise ClientClosed("The client is closed.")
        self._waiting[broker_group].append(item)
        if broker_group not in self._sending:
            self._sending.add(broker_group)
            # It begins in the next turn of the loop, when all of this one have put their items.
            self._tasks.start(self._send_all(broker_group), f"send to {broker_group}")

    def close(self) -> list[Item]:
        """Takes no more items; returns those that no call had yet. Calls on their way go on."""
        self._is_closed = True
        left = list(chain.from_iterable(self._waiting.values()))
        self._waiting.clear()
        return left

    async def _send_all(self, broker_group: str) -> None:
        try:
            while some := self._take(self._waiting[broker_group]):
                await self._send(broker_group, some)
        finally:
            self._sending.discard(broker_group)

    def _take(self, waiting: deque[Item]) -> list[Item]:
        """The items of the next call."""
        taken: list[Item] = []
        room = self._size_max
        while waiting and (not taken or self._size_of(waiting[0]) <= room):
            room -= self._size_of(waiting[0])
            taken.append(waiting.popleft())
        return taken

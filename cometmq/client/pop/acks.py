"""Acknowledgements of a simple consumer, one call at a time to each broker group: what the
application acknowledges meanwhile travels with the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cometmq.client.pop.calls import ITEMS_MAX, PopCalls
from cometmq.errors import ClientClosed, CometError
from cometmq.rpc.tasks import stop_all
from cometmq.v1 import broker_pb2

Answers = list[CometError | None]


@dataclass(frozen=True, slots=True)
class _Asked:
    items: Sequence[broker_pb2.AckItem]
    answers: asyncio.Future[Answers]


@dataclass(slots=True)
class _Lane:
    waiting: deque[_Asked] = field(default_factory=deque)
    task: asyncio.Task[None] | None = None  # while it sends


class Acks:
    """Belongs to the event loop."""

    def __init__(self, pop: PopCalls) -> None:
        self._pop = pop
        self._lanes: dict[str, _Lane] = {}

    async def acknowledge(
        self, broker_group: str, items: Sequence[broker_pb2.AckItem]
    ) -> list[CometError | None]:
        """None for each that is acknowledged, as safely as messages of its topic. ClientClosed:
        the consumer was closed meanwhile.
        """
        lane = self._lanes.setdefault(broker_group, _Lane())
        asked = _Asked(items, asyncio.get_running_loop().create_future())
        lane.waiting.append(asked)
        if lane.task is None:  # it begins when all of this turn of the loop have asked
            lane.task = asyncio.create_task(self._send_all(broker_group, lane))
        return await asked.answers

    async def _send_all(self, broker_group: str, lane: _Lane) -> None:
        sent: list[_Asked] = []
        try:
            while lane.waiting:
                sent = _take(lane.waiting)
                items = [item for asked in sent for item in asked.items]
                answers = iter(await self._pop.acknowledge(broker_group, items))
                for asked in sent:
                    mine = [next(answers) for _ in asked.items]
                    if not asked.answers.done():  # its caller is there
                        asked.answers.set_result(mine)
        finally:
            lane.task = None
            for asked in [*sent, *lane.waiting]:
                if not asked.answers.done():
                    asked.answers.set_exception(ClientClosed("The consumer was closed."))
            lane.waiting.clear()

    async def close(self) -> None:
        """Calls that have no answer yet end."""
        await stop_all([lane.task for lane in self._lanes.values() if lane.task is not None])


def _take(waiting: deque[_Asked]) -> list[_Asked]:
    """As many as one call takes, at least one."""
    taken = [waiting.popleft()]
    count = len(taken[0].items)
    while waiting and count + len(waiting[0].items) <= ITEMS_MAX:
        count += len(waiting[0].items)
        taken.append(waiting.popleft())
    return taken

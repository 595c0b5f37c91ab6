"""Groups that begin at the end of a queue (``consume_from`` LAST)."""

from __future__ import annotations

from cometmq.errors import CometError
from tests.sim.clients import Client

PAUSE_S = (0.2, 1.5)


class Newcomer(Client):
    """Asks again and again where a queue ends, as the first member of a new group does."""

    def start(self) -> None:
        self.spawn(self._work())

    async def _work(self) -> None:
        counts, topics = self.world.counts, self.group.rules.topics
        while not self.over:
            await self.sleep(self.world.between(*PAUSE_S))
            index = self.world.rng.randrange(topics.count)
            key, told = topics.keys()[index], self.group.judge.newest_told(index)
            try:
                await self.at_writer(lambda role, key=key, told=told: role.broker.end_of(key, told))  # type: ignore[misc]
                counts["ends told"] += 1
            except CometError as error:
                counts[f"ends not told: {error.name()}"] += 1

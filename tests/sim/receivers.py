"""Members of the group that receives (POP): slow ones, which renew or do not, some that fail, and
some that forget their messages.
"""

from __future__ import annotations

from cometmq.errors import CometError
from tests.sim.clients import Client, ClientMachine
from tests.sim.disk import Record
from tests.sim.member import Group
from tests.sim.services import Delivery
from tests.sim.topics import RECEIVING

INVISIBLE_MS = 10_000
IDLE_S = 1.0
SLOW_SHARE = 0.05  # of the listener calls: they last longer than the time that the message has
SLOW_S = (8.0, 25.0)
RENEW_S = 6.0
RENEWS_SHARE = 0.5  # of slow calls
FORGETS_SHARE = 0.03  # of messages: never acknowledged
FAILED_MS = 10_000


class Receiver(Client):
    """One life of a member."""

    def __init__(self, group: Group, machine: ClientMachine) -> None:
        super().__init__(group, machine)
        self._running = 0

    def start(self) -> None:
        self.spawn(self._work())

    async def _work(self) -> None:
        while not self.over:
            try:
                found = await self.at_writer(
                    lambda role: role.broker.receiving.receive(INVISIBLE_MS)
                )
            except CometError:
                self.world.counts["receives without an answer"] += 1
                found = []
            for delivery in found:
                for message in delivery.messages:
                    self.spawn(self._call(delivery, message))
            if not found:
                await self.sleep(self.world.between(0.5, 1.5) * IDLE_S)

    @property
    def _has_trouble(self) -> bool:
        return bool(self.group.failing)

    async def _call(self, delivery: Delivery, message: Record) -> None:
        rng, counts, handle = self.world.rng, self.world.counts, delivery.handle
        if self._has_trouble and rng.random() < FORGETS_SHARE:
            counts["received and forgotten"] += 1
            return
        if self._has_trouble and rng.random() < SLOW_SHARE:
            handle = await self._slowly(handle, message)
        else:
            await self.sleep(self.world.between(0.01, 1.0) * self.group.work_s)
        if not handle:
            return
        if rng.random() < self.group.failing:
            await self._change(handle, message, FAILED_MS, failed=True)
            return
        self.group.judge.groups.done(RECEIVING, message)
        await self._acknowledge(handle, message)

    async def _slowly(self, handle: str, message: Record) -> str:
        renews = self.world.rng.random() < RENEWS_SHARE
        until_s = self.world.now + self.world.between(*SLOW_S)
        while self.world.now < until_s:
            await self.sleep(min(RENEW_S, until_s - self.world.now) + 0.001)
            if renews:
                handle = await self._change(handle, message, INVISIBLE_MS, failed=False)
                if not handle:
                    return ""
        return handle

    async def _change(
        self, handle: str, message: Record, invisible_ms: int, *, failed: bool
    ) -> str:
        """The new handle; empty: the message is not this member's any more, for all it knows."""
        try:
            return await self.at_writer(
                lambda role: role.broker.receiving.change(
                    handle, message, invisible_ms, failed=failed
                )
            )
        except CometError:
            self.world.counts["changes of invisible times refused or lost"] += 1
            return ""

    async def _acknowledge(self, handle: str, message: Record) -> None:
        try:
            [answer] = await self.at_writer(
                lambda role: role.broker.receiving.acknowledge([(handle, message)])
            )
        except CometError:
            self.world.counts["acknowledgements without an answer"] += 1
            return
        self.world.counts["acknowledgements refused"] += isinstance(answer, CometError)

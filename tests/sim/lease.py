"""The lease of the group as the members reach it: late, not at all, or without an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.lease.stores import NOT_THERE, Reading
from cometmq.replication.lease import LeaseRecord
from tests.sim.world import Process, Wait, World

DEADLINE_S = 5.0
CARRIED_OUT_LATE_S_MAX = 15.0


@dataclass
class OutageLogger:
    """Shares of the calls that go wrong."""

    unanswered: float = 0.0  # carried out, but nobody hears of it
    never: float = 0.0  # not carried out, and nobody hears of it
    late: float = 0.0  # carried out when the caller has given up
    slow_s: float = 0.02  # a call takes up to so long


class LeaseService:
    """Compare-and-swap on one record. ``on_change`` hears of each that is written, with the one
    before.
    """

    def __init__(self, world: World) -> None:
        self.trouble = OutageLogger()
        self.out_for: set[int] = set()  # member ids that cannot reach it
        self.reading = Reading(None, NOT_THERE)
        self.last: LeaseRecord | None = None  # also when it was deleted since
        self.on_change: Callable[[LeaseRecord | None, LeaseRecord], None] = lambda _old, _new: None
        self._world = world
        self._version = 0

    def delete(self) -> None:
        self.reading = Reading(None, NOT_THERE)

    def swap(self, record: LeaseRecord, version: str) -> str:
        """Raises LeaseConflict."""
        if version != self.reading.version:
            raise LeaseConflict(f"version {self.reading.version}, not {version}")
        self._version += 1
        before, self.last = self.last, record
        self.reading = Reading(record, f"v{self._version}")
        self.on_change(before, record)
        return self.reading.version


class LeaseClient:
    """How one process reaches it (the protocol ``cometmq.member.lease.stores.Lease``)."""

    def __init__(self, service: LeaseService, process: Process, member_id: int) -> None:
        self._service = service
        self._process = process
        self._member_id = member_id
        self._world = process.world

    async def read(self) -> Reading:
        await self._arrive()
        found = self._service.reading
        await self._process.sleep(self._delay_s())
        return found

    async def write(self, record: LeaseRecord, version: str) -> str:
        await self._arrive()
        trouble, chance = self._service.trouble, self._world.rng.random()
        for share, carried_out_s in (
            (trouble.never, None),
            (trouble.unanswered, 0.0),
            (trouble.late, self._world.between(DEADLINE_S, CARRIED_OUT_LATE_S_MAX)),
        ):
            if chance < share:
                await self._unanswered(record, version, carried_out_s)
            chance -= share
        return await self._answered(record, version)

    async def _answered(self, record: LeaseRecord, version: str) -> str:
        try:
            found = self._service.swap(record, version)
        except LeaseConflict as error:
            await self._process.sleep(self._delay_s())
            raise error
        await self._process.sleep(self._delay_s())
        return found

    async def _unanswered(
        self, record: LeaseRecord, version: str, carried_out_s: float | None
    ) -> None:
        """The request is on its way whatever becomes of the process."""

        def carry_out() -> None:
            try:
                self._service.swap(record, version)
                self._world.counts["lease writes without an answer, carried out"] += 1
            except LeaseConflict:
                pass

        self._world.counts["lease writes without an answer"] += 1
        self._world.tell(f"n{self._member_id}", "lease write without an answer", carried_out_s)
        if carried_out_s is not None:
            self._world.at(carried_out_s, carry_out)
        await self._process.sleep(DEADLINE_S)
        raise LeaseUnavailable("no answer")

    async def _arrive(self) -> None:
        await self._process.sleep(self._delay_s())
        if self._member_id in self._service.out_for:
            await self._process.sleep(self._world.between(0.1, DEADLINE_S))
            raise LeaseUnavailable("out of reach")

    def _delay_s(self) -> float:
        return self._world.between(0.0005, self._service.trouble.slow_s)


def never(_process: Process) -> Wait[None]:
    """For a task that ends with its process only."""
    return Wait(lambda _done, _failed: None)

"""A lease in memory that does as a test tells it."""

from __future__ import annotations

from collections.abc import Callable

from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.lease.stores import NOT_THERE, Reading
from cometmq.replication.lease import LeaseRecord

HELD = LeaseRecord("g1", 0, "store-0", "host:1", 3)
TAKEN = LeaseRecord("g1", 1, "store-1", "host:2", 3)


class MemoryLease:
    """A lease that does as it is told. ``plan``: what happens to the next writes, by name."""

    def __init__(self) -> None:
        self.record: LeaseRecord | None = HELD
        self.version = 1
        self.plan: list[str] = []
        self.late: list[Callable[[], object]] = []  # writes that are carried out some time later
        self.readable = True

    async def read(self) -> Reading:
        if not self.readable:
            raise LeaseUnavailable("away")
        return Reading(self.record, NOT_THERE if self.record is None else str(self.version))

    async def write(self, record: LeaseRecord, version: str) -> str:
        step = self.plan.pop(0) if self.plan else "done"
        if step == "lost":
            raise LeaseUnavailable("not done")
        if step == "late":
            self.late.append(lambda: self._swap(record, version))
            raise LeaseUnavailable("not done yet")
        if step == "overtaken":
            self.late.pop()()
        if step == "taken":
            self.record, self.version = TAKEN, self.version + 2
        if not self._swap(record, version):
            raise LeaseConflict("changed")
        if step == "unanswered":
            raise LeaseUnavailable("done, but nobody says so")
        return str(self.version)

    def _swap(self, record: LeaseRecord, version: str) -> bool:
        if version != (NOT_THERE if self.record is None else str(self.version)):
            return False
        self.record, self.version = record, self.version + 1
        return True

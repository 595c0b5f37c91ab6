from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member import tenure
from cometmq.member.leases import NOT_THERE, Reading
from cometmq.member.tenure import Deposed, LeaseHolder
from cometmq.replication.lease import LeaseRecord
from tests.support.broker import until

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


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> MemoryLease:
    monkeypatch.setattr(tenure, "RETRY_S", 0.001)
    return MemoryLease()


def holder(lease: MemoryLease) -> LeaseHolder:
    return LeaseHolder(lease, Reading(HELD, "1"), renew_s=0.001)


@pytest.mark.parametrize("plan", [[], ["lost"], ["unanswered"], ["lost", "unanswered", "lost"]])
async def test_an_epoch_is_written_whatever_it_takes(lease: MemoryLease, plan: list[str]) -> None:
    lease.plan = plan
    await holder(lease).begin(4, "host:2")
    assert lease.record is not None
    assert (lease.record.epoch, lease.record.holder_address) == (4, "host:2")


async def test_a_lease_that_was_deleted_is_written_anew(lease: MemoryLease) -> None:
    lease.record = None
    await holder(lease).begin(4, "host:2")
    assert lease.record is not None


async def test_a_writer_that_reads_another_is_deposed(lease: MemoryLease) -> None:
    lease.record, lease.version = replace(HELD, holder_id=1), 2
    with pytest.raises(Deposed):
        await holder(lease).begin(4, "host:2")
    with pytest.raises(Deposed):
        await holder(lease).run()


async def test_it_renews_and_outlives_silence(lease: MemoryLease) -> None:
    held = holder(lease)
    renewing = asyncio.create_task(held.run())
    await until(lambda: lease.record is not None and lease.record.renewals > 2)
    lease.plan, lease.readable = ["lost"] * 1000, False
    await until(lambda: not held.held)
    lease.plan, lease.readable = [], True
    await until(lambda: held.held)
    renewing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await renewing


@pytest.mark.parametrize("plan", [[], ["unanswered"]])
async def test_a_release_that_is_done(lease: MemoryLease, plan: list[str]) -> None:
    lease.plan = plan
    held = holder(lease)
    await held.release(1, 77)
    assert lease.record == replace(HELD, renewals=1, released=True, transfer_to=1, log_end=77)
    await held.run()  # there is nothing left to renew


async def test_a_release_that_is_not_done_never_will_be(lease: MemoryLease) -> None:
    lease.plan = ["late"]
    with pytest.raises(LeaseUnavailable):
        await holder(lease).release(1, 77)
    for carry_out in lease.late:
        carry_out()
    assert lease.record == replace(HELD, renewals=1), "a renewal has made it void"


async def test_a_release_that_is_carried_out_while_we_look(lease: MemoryLease) -> None:
    lease.plan = ["late", "lost", "overtaken"]
    await holder(lease).release(1, 77)
    assert lease.record is not None
    assert lease.record.released


async def test_a_release_that_the_successor_has_taken_already(lease: MemoryLease) -> None:
    lease.plan = ["late", "taken"]
    with pytest.raises(Deposed):
        await holder(lease).release(1, 77)

from __future__ import annotations

from dataclasses import replace

import pytest

from cometmq.replication.lease import Follow, Lead, Reason, Standing
from services.haslave.candidate import Candidate
from tests.support.leases import HELD, MemoryLease
from tests.support.stores import WallClock

ME = Standing("g1", 1, "store-1", "host:2", 3, 77)
RELEASED = replace(HELD, released=True, transfer_to=1, log_end=77)


def candidate(lease: MemoryLease, me: Standing = ME) -> Candidate:
    return Candidate(lease, 15.0, lambda: me, WallClock())


async def test_the_writer_is_followed() -> None:
    assert await candidate(MemoryLease()).look() == Follow("host:1")


@pytest.mark.parametrize("plan", [[], ["lost"], ["unanswered"], ["lost", "unanswered"]])
async def test_what_is_released_to_us_is_taken(plan: list[str]) -> None:
    lease = MemoryLease()
    lease.record, lease.plan = RELEASED, plan
    looking = candidate(lease)
    step = None
    for _ in range(len(plan) + 1):
        step = step or await looking.look()
    assert isinstance(step, Lead)
    assert step.reason is Reason.HANDOVER
    assert lease.record == step.record
    assert (lease.record.holder_id, lease.record.released) == (1, False)


async def test_whoever_comes_second_follows() -> None:
    lease = MemoryLease()
    lease.record, lease.plan = RELEASED, ["taken"]
    looking = candidate(lease)
    assert await looking.look() is None
    assert isinstance(await looking.look(), Lead), "the record names us: an older self took it"


async def test_a_lease_that_cannot_be_read_changes_nothing() -> None:
    lease = MemoryLease()
    lease.readable = False
    assert await candidate(lease).look() is None

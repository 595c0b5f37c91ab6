from __future__ import annotations

import asyncio
from dataclasses import replace
from unittest import mock

import pytest

from cometmq.errors import LeaseUnavailable
from cometmq.member.lease import lease_holder
from cometmq.member.lease.lease_holder import Deposed, LeaseHolder
from cometmq.member.lease.stores import Reading
from cometmq.replication.lease import ReplicaId, ReplicaIds
from cometmq.replication.watermarks import NO_WATERMARKS
from tests.support.cluster.leases import HELD, TAKEN, MemoryLease
from tests.support.stores.small_stores import WallClock
from tests.support.waiting import until


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> MemoryLease:
    monkeypatch.setattr(lease_holder, "RETRY_S", 0.001)
    return MemoryLease()


def holder(lease: MemoryLease) -> LeaseHolder:
    return LeaseHolder(lease, Reading(HELD, "1"), 0.001, WallClock())


@pytest.mark.parametrize("plan", [[], ["lost"], ["unanswered"], ["lost", "unanswered", "lost"]])
async def test_an_epoch_is_written_whatever_it_takes(lease: MemoryLease, plan: list[str]) -> None:
    lease.plan = plan
    await holder(lease).begin([(4, 0)], "host:2")
    assert lease.record is not None
    assert (lease.record.epoch, lease.record.holder_address) == (4, "host:2")


async def test_a_stop_ends_the_attempts(lease: MemoryLease) -> None:
    lease.plan, lease.readable = ["lost"] * 1000, False
    with pytest.raises(LeaseUnavailable):
        await holder(lease).begin([(4, 0)], "host:2", lambda: len(lease.plan) < 997)
    assert len(lease.plan) == 996


async def test_a_lease_that_was_deleted_is_written_anew(lease: MemoryLease) -> None:
    lease.record = None
    await holder(lease).begin([(4, 0)], "host:2")
    assert lease.record is not None


async def test_a_writer_that_reads_another_is_deposed(lease: MemoryLease) -> None:
    lease.record, lease.version = TAKEN, 2
    with pytest.raises(Deposed):
        await holder(lease).begin([(4, 0)], "host:2")
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


async def test_a_lease_that_cannot_be_written_is_told_of_once(
    lease: MemoryLease, caplog: pytest.LogCaptureFixture
) -> None:
    lease.plan = ["lost"] * 5
    with caplog.at_level("INFO", logger="cometmq.member.lease.lease_holder"):
        await holder(lease).begin([(4, 0)], "host:2")
    assert caplog.messages == ["the lease is not written", "the lease is written again"]


@pytest.mark.parametrize("plan", [[], ["unanswered"]])
async def test_a_release_that_is_done(lease: MemoryLease, plan: list[str]) -> None:
    lease.plan = plan
    held = holder(lease)
    await held.release(1, 77)
    assert lease.record == replace(HELD, renewals=1, released=True, transfer_to=1, log_end=77)
    await held.run()  # there is nothing left to renew


async def test_a_renewal_whose_turn_comes_after_the_release_is_left_out(lease: MemoryLease) -> None:
    held = LeaseHolder(lease, Reading(HELD, "1"), 0.0, WallClock())
    async with held._one_at_a_time:
        releasing = asyncio.create_task(held.release(1, 77))
        await asyncio.sleep(0)
        renewing = asyncio.create_task(held.run())
        for _ in range(5):
            await asyncio.sleep(0)
    await releasing
    await renewing
    assert lease.record == replace(HELD, renewals=1, released=True, transfer_to=1, log_end=77)


async def test_a_release_that_is_not_done_never_will_be(lease: MemoryLease) -> None:
    lease.plan = ["late"]
    with pytest.raises(LeaseUnavailable):
        await holder(lease).release(1, 77)
    for carry_out in lease.late:
        carry_out()
    assert lease.record == replace(HELD, renewals=2), "a renewal has made it void"


async def test_a_release_that_is_carried_out_while_we_look(lease: MemoryLease) -> None:
    lease.plan = ["late", "lost", "overtaken"]
    await holder(lease).release(1, 77)
    assert lease.record is not None
    assert lease.record.released


async def test_a_release_that_the_successor_has_taken_already(lease: MemoryLease) -> None:
    lease.plan = ["late", "taken"]
    with pytest.raises(Deposed):
        await holder(lease).release(1, 77)


async def test_who_is_in_sync_is_changed_by_a_write(lease: MemoryLease) -> None:
    held = holder(lease)
    changes: list[int] = []
    settle = mock.Mock(side_effect=lambda: changes.append(len(held.must_acknowledge())))
    held.serve(mock.Mock(settle=settle, shown=NO_WATERMARKS))
    both = (HELD.holder, ReplicaId(1, "store-1"))
    await held.put_sets(lambda: (both, both))
    assert (lease.record and lease.record.in_sync) == both
    assert changes == [2, 2], "who is added is waited for from the attempt on"
    lease.plan = ["unanswered"]
    await held.put_sets(lambda: ((HELD.holder,), (HELD.holder,)))
    assert changes[2:] == [2, 1], "who is removed until it is known"
    assert held.settled


async def test_who_shall_be_in_sync_is_asked_when_the_turn_has_come(lease: MemoryLease) -> None:
    held = holder(lease)
    asked: list[bool] = []

    def wanted() -> tuple[ReplicaIds, ReplicaIds]:
        asked.append(held._one_at_a_time.locked())
        return (HELD.holder,), (HELD.holder,)

    async with held._one_at_a_time:
        changing = asyncio.create_task(held.put_sets(wanted))
        await asyncio.sleep(0)
        assert not asked
    await changing
    assert asked == [True]


async def test_a_set_that_may_or_may_not_be_written_counts_at_its_stricter(
    lease: MemoryLease,
) -> None:
    held = holder(lease)
    lease.plan = ["lost"]
    both = (HELD.holder, ReplicaId(1, "store-1"))
    await held.put_sets(lambda: (both, both))
    assert (set(held.must_acknowledge()), held.settled) == (set(both), False)
    await held.put_sets(lambda: ((HELD.holder,), (HELD.holder,)))
    assert (set(held.must_acknowledge()), held.settled) == ({HELD.holder}, True)


async def test_a_set_that_was_refused_does_not_count(lease: MemoryLease) -> None:
    held = holder(lease)
    lease.version += 1  # somebody has annotated the object
    both = (HELD.holder, ReplicaId(1, "store-1"))
    await held.put_sets(lambda: (both, both))
    assert (set(held.must_acknowledge()), held.settled) == ({HELD.holder}, True)


async def test_it_is_renewed_while_the_store_is_opened(lease: MemoryLease) -> None:
    held = holder(lease)
    async with held.renewed():
        await until(lambda: lease.record is not None and lease.record.renewals > 2)
    assert lease.record is not None
    await held.begin([(4, 0)], "host:2")
    assert lease.record.epoch == 4


async def test_who_is_deposed_meanwhile_finds_out(lease: MemoryLease) -> None:
    lease.record, lease.version = TAKEN, 2
    held = holder(lease)
    async with held.renewed():
        await asyncio.sleep(0)
    with pytest.raises(Deposed):
        await held.begin([(4, 0)], "host:2")


@pytest.mark.parametrize("plan", [[], ["unanswered"]])
async def test_an_epoch_is_passed_over(lease: MemoryLease, plan: list[str]) -> None:
    lease.plan = plan
    assert await holder(lease).pass_over(13)
    assert lease.record is not None
    assert (lease.record.holder, lease.record.epoch) == (HELD.holder, 13)


@pytest.mark.parametrize("told", [HELD.epoch, 13])
async def test_what_nobody_can_read_passes_no_epoch_over(lease: MemoryLease, told: int) -> None:
    """It may be another's by now."""
    lease.plan, lease.readable = ["lost"], False
    assert not await holder(lease).pass_over(told)


async def test_who_wants_to_pass_an_epoch_over_may_find_another(lease: MemoryLease) -> None:
    lease.record, lease.version = TAKEN, 2
    with pytest.raises(Deposed):
        await holder(lease).pass_over(13)

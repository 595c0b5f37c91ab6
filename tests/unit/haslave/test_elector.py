from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from cometmq.errors import LeaseConflict, LeaseUnavailable
from cometmq.member.lease.peers import Peers
from cometmq.replication.election import Follow, Lead, Peer, ReplicaStatus
from cometmq.replication.lease import LeaseRecord, Reason
from services.haslave.elector import Elector
from tests.support.cluster.leases import HELD, MemoryLease
from tests.support.stores.small_stores import WallClock

ME = ReplicaStatus("g1", 1, "store-1", "host:2", 3, 77)
RELEASED = replace(HELD, released=True, transfer_to=1, log_end=77)


def elector(lease: MemoryLease, me: ReplicaStatus = ME, clock: WallClock | None = None) -> Elector:
    peers = Peers("g1", None, None)

    def status(promised_until_s: float, forced: bool) -> ReplicaStatus:
        return replace(me, promised_until_s=promised_until_s, forced=forced)

    return Elector(lease, 15.0, status, peers, clock or WallClock())


async def test_the_writer_is_followed() -> None:
    step = await elector(MemoryLease()).look()
    assert isinstance(step, Follow)
    assert step.address == "host:1"


@pytest.mark.parametrize("plan", [[], ["lost"], ["unanswered"], ["lost", "unanswered"]])
async def test_what_is_released_to_us_is_taken(plan: list[str]) -> None:
    lease = MemoryLease()
    lease.record, lease.plan = RELEASED, plan
    looking = elector(lease)
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
    looking = elector(lease)
    assert await looking.look() is None
    assert isinstance(await looking.look(), Lead), "the record names us: an older self took it"


async def test_a_lease_that_cannot_be_read_changes_nothing() -> None:
    lease = MemoryLease()
    looking = elector(lease)
    await looking.look()
    lease.readable = False
    assert await looking.look() is None
    assert looking.record == lease.record, "operators are told what was read last"


SHARED = replace(
    HELD,
    in_sync=(HELD.holder, ME.replica_id),
    electable=(HELD.holder, ME.replica_id),
    duration_s=0.001,
)


async def abandoned(**fields: Any) -> tuple[Elector, MemoryLease, WallClock]:
    """A candidate that has watched a lease for as long as it takes."""
    lease, clock = MemoryLease(), WallClock()
    lease.record = SHARED
    looking = elector(lease, replace(ME, **fields), clock)
    await looking.look()
    clock.now_ms += 16_000
    return looking, lease, clock


async def test_an_abandoned_lease_is_taken_by_who_is_in_sync() -> None:
    looking, lease, _ = await abandoned()
    step = await looking.look()
    assert isinstance(step, Lead)
    assert step.reason is Reason.FAILOVER
    assert lease.record == step.record


async def test_a_promise_is_kept() -> None:
    looking, _, clock = await abandoned()
    assert looking.promise(6_000) == 6_000
    assert looking.promise(1_000) == 1_000, "which takes nothing back"
    clock.now_ms += 5_999
    assert isinstance(await looking.look(), Follow)
    clock.now_ms += 1
    assert isinstance(await looking.look(), Lead)


async def test_while_a_write_is_without_an_answer_nothing_is_promised() -> None:
    looking, lease, _ = await abandoned()
    lease.plan = ["late"]
    assert await looking.look() is None
    assert looking.promise(6_000) == 0
    lease.record, lease.version = replace(SHARED, renewals=5), 2  # the writer lives
    await looking.look()
    assert looking.promise(6_000) == 6_000


async def test_peers_that_do_not_answer_are_no_answer() -> None:
    looking, _, _ = await abandoned(store_id="new", former_store_id="store-1")
    assert isinstance(await looking.look(), Follow)


async def test_after_peers_were_asked_the_lease_counts_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, lease, _ = await abandoned(store_id="new", former_store_id="store-1")

    async def ask(peers: Peers, member_ids: Iterable[int]) -> dict[int, Peer]:
        lease.record, lease.version = replace(SHARED, holder_address="host:9", renewals=1), 2
        return {}

    monkeypatch.setattr(Peers, "ask", ask)
    step = await looking.look()
    assert isinstance(step, Follow)
    assert step.address == "host:9"


async def test_an_operator_may_force_it() -> None:
    looking, _, _ = await abandoned(store_id="new", member_id=2)
    assert isinstance(await looking.look(), Follow)
    await looking.force()
    assert looking.promise(6_000) == 0
    step = await looking.look()
    assert isinstance(step, Lead)
    assert step.reason is Reason.FORCED


async def test_an_order_is_not_kept_for_another_day() -> None:
    looking, _, clock = await abandoned(store_id="new", member_id=2)
    await looking.force()
    clock.now_ms += 20 * 15_000
    assert isinstance(await looking.look(), Follow)
    assert looking.promise(6_000) == 6_000


@pytest.mark.parametrize(
    "later",
    [
        replace(SHARED, opened=False, reason="restart", renewals=1),
        replace(SHARED, renewals=1),
        None,
    ],
)
async def test_an_order_is_void_once_the_lease_is_written(later: LeaseRecord | None) -> None:
    """Whoever leads since acknowledges what no operator has given away."""
    looking, lease, clock = await abandoned(store_id="new", member_id=2)
    await looking.force()
    lease.record, lease.version = later, 2
    assert isinstance(await looking.look(), Follow)
    assert looking.promise(6_000) == 6_000
    clock.now_ms += 4 * 16_000
    assert isinstance(await looking.look(), Follow)


async def test_what_the_dead_writer_renewed_last_may_not_have_been_read_yet() -> None:
    looking, lease, clock = await abandoned(store_id="new", member_id=2)
    lease.record, lease.version = replace(SHARED, renewals=1), 2
    await looking.force()
    assert isinstance(await looking.look(), Follow)
    clock.now_ms += 16_000
    step = await looking.look()
    assert isinstance(step, Lead)
    assert step.reason is Reason.FORCED


async def test_an_order_that_somebody_forestalled_on_its_way_is_refused() -> None:
    looking, lease, clock = await abandoned(store_id="new", member_id=2)
    lease.record, lease.version = replace(SHARED, epoch=4, renewals=2), 2
    with pytest.raises(LeaseConflict, match="look which member leads"):
        await looking.force()
    await looking.look()
    clock.now_ms += 16_000
    assert isinstance(await looking.look(), Follow)


async def test_an_order_needs_the_lease() -> None:
    looking, lease, _ = await abandoned(store_id="new", member_id=2)
    lease.readable = False
    with pytest.raises(LeaseUnavailable):
        await looking.force()
    assert looking.promise(6_000) == 6_000


async def test_a_lease_that_is_away_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    lease = MemoryLease()
    looking = elector(lease)
    with caplog.at_level("INFO", logger="services.haslave.elector"):
        for readable in (False, False, True, True, False, False):
            lease.readable = readable
            await looking.look()
    away, back = "the lease is not known", "the lease is known again"
    assert caplog.messages == [away, back, away]


async def test_who_comes_second_says_so(caplog: pytest.LogCaptureFixture) -> None:
    looking, lease, _ = await abandoned()
    lease.plan = ["taken"]
    with caplog.at_level("INFO", logger="services.haslave.elector"):
        assert await looking.look() is None
    assert caplog.messages[-1] == "another member has written the lease first"


async def test_who_does_not_take_a_lease_that_is_not_there_says_why_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A folder taken over from RocketMQ is not new, and without peers nobody else can be asked."""
    caplog.set_level(logging.INFO)
    lease = MemoryLease()
    lease.record = None
    looking = elector(lease)
    for _ in range(3):
        assert isinstance(await looking.look(), Follow)
    told = [r for r in caplog.records if "does not take it" in r.getMessage()]
    assert len(told) == 1
    assert "option peers" in str(told[0].fields["error"])  # type: ignore[attr-defined]
    lease.record = HELD
    await looking.look()
    assert caplog.records[-1].getMessage() == "led again"

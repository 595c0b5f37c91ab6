from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cometmq.errors import NoFollower
from cometmq.member.lease.lease_holder import LeaseHolder
from cometmq.member.lease.stores import Reading
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.replication.follower import Ack
from cometmq.replication.lease import ReplicaId
from services.broker.handover import HandOver
from services.broker.replicas import FollowerTable, Replicas, Sender
from tests.support.cluster.leases import HELD, MemoryLease
from tests.support.cluster.members import living_member
from tests.support.stores.small_stores import WallClock
from tests.support.waiting import until


def answer(sender: Sender, end: int, clock: WallClock) -> None:
    """The follower has all of the log."""
    sender.replica.sent_to(end)
    sent_ms = int(clock.boottime_s() * 1000)
    sender.replica.framed(sent_ms, end)
    sender.acked(Ack(end, end, sent_ms, 0))


@pytest.mark.parametrize("wanted", [None, 1])
async def test_nobody_waits_with_a_sealed_log_for_a_follower_that_is_silent(
    tmp_path: Path, wanted: int | None
) -> None:
    clock, ended = WallClock(), list[str]()
    async with living_member(tmp_path) as member:
        replicas = Replicas(member.storage, FollowerTable(), CatchUpThrottle(0), clock)
        holder = LeaseHolder(MemoryLease(), Reading(HELD, "1"), 1.0, clock)
        hand_over = HandOver(member.storage, member.keeper, replicas, holder, ended.append)
        await member.put("T")
        end = member.store.appended_offset
        with replicas.join(ReplicaId(1, "store-1"), 0) as sender:
            answer(sender, end, clock)
            clock.now_ms += 5_000
            member.append("T", 0, b"not copied")
            with pytest.raises(NoFollower):
                await hand_over.step_down(wanted)
            member.storage.check_open()
        replicas.close()
    assert ended == []


async def test_nobody_waits_for_a_follower_that_goes(tmp_path: Path) -> None:
    clock, ended = WallClock(), list[str]()
    async with living_member(tmp_path) as member:
        replicas = Replicas(member.storage, FollowerTable(), CatchUpThrottle(0), clock)
        holder = LeaseHolder(MemoryLease(), Reading(HELD, "1"), 1.0, clock)
        hand_over = HandOver(member.storage, member.keeper, replicas, holder, ended.append)
        await member.put("T")
        with replicas.join(ReplicaId(1, "store-1"), 0) as sender:
            answer(sender, member.store.appended_offset, clock)
            member.append("T", 0, b"not copied")
            handing = asyncio.create_task(hand_over.step_down(None))
            await until(lambda: member.storage.sealed)
        with pytest.raises(NoFollower, match="gone"):
            await handing
        member.storage.check_open()
        replicas.close()
    assert ended == []

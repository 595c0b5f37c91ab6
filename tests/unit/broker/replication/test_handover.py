from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from cometmq.errors import BrokerDraining, NoFollower
from cometmq.member.lease.lease_holder import LeaseHolder
from cometmq.member.lease.stores import Reading
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.member.storage.authority import Replicated
from cometmq.messaging.changes import KINDS
from cometmq.replication.follower import Ack
from cometmq.replication.lease import ReplicaId
from cometmq.replication.watermarks import DurabilityClass
from services.broker.replication.handover import HandOver
from services.broker.replication.replicas import FollowerTable, Replicas, Sender
from tests.support.cluster.leases import HELD, MemoryLease
from tests.support.cluster.members import Member, living_member
from tests.support.stores.gates import HeldFlush
from tests.support.stores.small_stores import WallClock
from tests.support.waiting import until


class Writer:
    """A member that may hand over to member 1, whose stream is ``sender``."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.clock = WallClock()
        self.lease = MemoryLease()
        self.ended: list[str] = []
        self.replicas = Replicas(
            member.storage,
            FollowerTable(),
            CatchUpThrottle(0),
            self.clock,
            AsyncMock(return_value=0),
        )
        holder = LeaseHolder(self.lease, Reading(HELD, "1"), 1.0, self.clock)
        ended = self.ended.append
        self.hand_over = HandOver(member.storage, member.keeper, self.replicas, holder, ended)

    def follower(self) -> AbstractContextManager[Sender]:
        return self.replicas.join(ReplicaId(1, "store-1"), 0, KINDS)

    def answer(self, sender: Sender) -> None:
        """The follower has all of the log on its disk."""
        end = self.member.store.appended_offset
        sender.replica.sent_to(end)
        sent_ms = int(self.clock.boottime_s() * 1000)
        sender.replica.framed(sent_ms, end)
        sender.acked(Ack(end, end, sent_ms, 0))


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldFlush:
    return HeldFlush(monkeypatch)


@pytest.fixture
async def writer(tmp_path: Path, held: HeldFlush) -> AsyncIterator[Writer]:
    async with living_member(tmp_path) as member:
        await member.put("T")
        writer = Writer(member)
        yield writer
        writer.replicas.close()


@pytest.mark.parametrize("wanted", [None, 1])
async def test_nobody_waits_with_a_sealed_log_for_a_follower_that_is_silent(
    writer: Writer, wanted: int | None
) -> None:
    with writer.follower() as sender:
        writer.answer(sender)
        writer.clock.now_ms += 5_000
        writer.member.append("T", 0, b"not copied")
        with pytest.raises(NoFollower):
            await writer.hand_over.step_down(wanted)
        writer.member.storage.check_open()
    assert writer.ended == []


async def test_nobody_waits_for_a_follower_that_goes(writer: Writer) -> None:
    with writer.follower() as sender:
        writer.answer(sender)
        writer.member.append("T", 0, b"not copied")
        handing = asyncio.create_task(writer.hand_over.step_down(None))
        await until(lambda: writer.member.storage.sealed)
    with pytest.raises(NoFollower, match="gone"):
        await handing
    writer.member.storage.check_open()
    assert writer.ended == []


async def test_a_writer_gives_up_its_lease_when_all_is_on_its_own_disk_too(
    writer: Writer, held: HeldFlush
) -> None:
    held.hold()
    writer.member.append("T", 0, b"copied")
    with writer.follower() as sender:
        writer.answer(sender)
        handing = asyncio.create_task(writer.hand_over.step_down(None))
        await until(lambda: held.waiting or handing.done())
        assert (writer.lease.record, writer.ended) == (HELD, [])
        held.release()
        assert (await handing).member_id == 1
    assert writer.ended == ["handover"]


async def test_what_waits_for_others_ends_when_the_lease_is_released(writer: Writer) -> None:
    """It waited for as long as the process lived: the right to acknowledge had gone."""
    storage = writer.member.storage
    writer.member.append("T", 0, b"copied by one of two")
    end = writer.member.store.appended_offset
    authority = writer.member.set_authority
    authority.set_replicated(Replicated(0, 0, is_alone=False))
    waits = asyncio.create_task(storage.stored(end, DurabilityClass.REPLICATED))
    with writer.follower() as sender:
        writer.answer(sender)
        assert (await writer.hand_over.step_down(None)).member_id == 1
    authority.allowed = False
    for refused in (waits, storage.until_certain()):
        with pytest.raises(BrokerDraining):
            await refused

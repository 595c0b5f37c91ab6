"""The in-sync set of a writer over a small store; its followers are told of by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from cometmq.errors import SlaveNotAvailable, VersionUnsupported
from cometmq.member.lease.lease_holder import LeaseHolder
from cometmq.member.lease.stores import Reading
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.member.state.keeper import StateDemands
from cometmq.member.storage.member_storage import Ticket
from cometmq.messaging.changes import KINDS
from cometmq.model import ReplicationMode, TopicConfig
from cometmq.replication.follower import Ack
from cometmq.replication.insync import SetPolicy
from cometmq.replication.lease import ReplicaId
from services.broker.replication.insync import InSyncSet
from services.broker.replication.replicas import FollowerTable, Replicas, Sender
from tests.support.cluster.leases import HELD, MemoryLease
from tests.support.cluster.members import Member, living_member
from tests.support.stores.gates import HeldFlush
from tests.support.stores.small_stores import WallClock
from tests.support.waiting import until

FOLLOWER = ReplicaId(1, "store-1")


@dataclass
class Writer:
    """The parts of a writer around its :class:`InSyncSet`."""

    member: Member
    in_sync: InSyncSet
    lease: MemoryLease
    holder: LeaseHolder
    replicas: Replicas
    clock: WallClock

    def tell(self, sender: Sender, *, appended: int, flushed: int, no_election_ms: int = 0) -> None:
        """The follower has taken everything that was sent, and answers at once."""
        replica = sender.replica
        if appended > replica.sent:
            replica.sent_to(appended)
        sent_ms = int(self.clock.boottime_s() * 1000)
        replica.framed(sent_ms, self.member.store.appended_offset)
        sender.acked(Ack(appended, flushed, sent_ms, no_election_ms))
        self.validate()

    def append(self, topic: str, body: bytes) -> Ticket:
        ticket = self.member.append(topic, 0, body)
        self.validate()
        return ticket

    def validate(self) -> None:
        self.member.storage.validate()
        self.in_sync.validate(self.member.storage.watermarks)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldFlush:
    """Ask for it before the writer."""
    return HeldFlush(monkeypatch)


@pytest.fixture
def policy() -> SetPolicy:
    return SetPolicy()


@pytest.fixture
def mode() -> ReplicationMode:
    """Of topic C."""
    return ReplicationMode.APPENDED


@pytest.fixture
async def writer(tmp_path: Path, policy: SetPolicy, mode: ReplicationMode) -> AsyncIterator[Writer]:
    clock, lease, followers = WallClock(), MemoryLease(), FollowerTable()
    async with living_member(tmp_path) as before:
        await before.keeper.put_topic(TopicConfig("C", 1, 1, replication_mode=mode))
    holder = LeaseHolder(lease, Reading(HELD, "1"), 1.0, clock)
    await holder.begin([(4, 0)], "host:1")

    def authority(demands: StateDemands) -> InSyncSet:
        return InSyncSet(followers, holder, demands, policy, clock)

    async with living_member(tmp_path, authority=authority) as member:
        in_sync = member.storage.authority
        assert isinstance(in_sync, InSyncSet)
        holder.serve(member.storage)
        replicas = Replicas(
            member.storage, followers, CatchUpThrottle(0), clock, AsyncMock(return_value=0)
        )
        writer = Writer(member, in_sync, lease, holder, replicas, clock)
        yield writer
        writer.validate()
        replicas.close()


async def kept(writer: Writer) -> asyncio.Task[None]:
    return asyncio.create_task(writer.in_sync.run(writer.replicas))


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_follower_that_keeps_step_is_waited_for(writer: Writer) -> None:
    in_sync = writer.in_sync
    running = await kept(writer)
    end = writer.member.store.appended_offset
    with writer.replicas.join(FOLLOWER, 0, KINDS) as sender:
        writer.tell(sender, appended=end, flushed=end)
        await until(lambda: in_sync.size == 2)
        ticket = writer.append("C", b"x")
        assert ticket.acked is not None
        await writer.member.on_disk()
        assert not ticket.acked.done()
        writer.tell(sender, appended=ticket.appended.end_offset, flushed=end)
        await ticket.acked
    await ended(running)


async def test_a_follower_whose_disk_is_faster_need_not_answer_again(
    held: HeldFlush, writer: Writer
) -> None:
    """What it told before our own disk was done counts when it is."""
    in_sync = writer.in_sync
    running = await kept(writer)
    await writer.member.keeper.put_topic(
        TopicConfig("F", 1, 1, replication_mode=ReplicationMode.FLUSHED)
    )
    end = writer.member.store.appended_offset
    with writer.replicas.join(FOLLOWER, 0, KINDS) as sender:
        writer.tell(sender, appended=end, flushed=end)
        await until(lambda: in_sync.size == 2)
        held.hold()
        ticket = writer.append("F", b"x")
        assert ticket.acked is not None
        await until(lambda: held.waiting)
        end = ticket.appended.end_offset
        writer.tell(sender, appended=end, flushed=end)
        assert not ticket.acked.done()
        held.release()
        await ticket.acked
    await ended(running)


@pytest.mark.parametrize("policy", [SetPolicy(lag_s_max=1.0)])
async def test_one_that_falls_silent_is_waited_for_until_the_lease_says_otherwise(
    writer: Writer,
) -> None:
    in_sync = writer.in_sync
    running = await kept(writer)
    end = writer.member.store.appended_offset
    with writer.replicas.join(FOLLOWER, 0, KINDS) as sender:
        writer.tell(sender, appended=end, flushed=end)
        await until(lambda: in_sync.size == 2)
        ticket = writer.append("C", b"x")
        assert ticket.acked is not None
        writer.lease.readable, writer.lease.plan = False, ["lost"] * 1000
        writer.clock.now_ms += 5_000
        await until(lambda: not writer.holder.held)
        assert (in_sync.size, ticket.acked.done()) == (2, False)
        writer.lease.readable, writer.lease.plan = True, []
        await until(lambda: in_sync.size == 1)
        await ticket.acked
    assert in_sync.shrinks == 1
    await ended(running)


async def test_one_that_may_have_been_added_is_waited_for_until_that_is_known(
    writer: Writer,
) -> None:
    in_sync = writer.in_sync
    both = (writer.holder.record.holder, FOLLOWER)
    writer.lease.plan = ["lost"]
    await writer.holder.put_sets(lambda: (both, both))
    ticket = writer.append("C", b"x")
    assert ticket.acked is not None
    await writer.member.on_disk_alone()
    assert (in_sync.size, ticket.acked.done()) == (2, False)
    found = in_sync.replicated(writer.member.storage.watermarks)
    assert found is not None
    assert not found.is_alone
    running = await kept(writer)  # it has gone: nobody wants to add it any more
    await until(ticket.acked.done)
    await ended(running)


async def test_one_that_goes_before_the_lease_can_be_written_is_not_added(writer: Writer) -> None:
    end = writer.member.store.appended_offset
    before = writer.lease.version
    async with writer.holder._one_at_a_time:
        with writer.replicas.join(FOLLOWER, 0, KINDS) as sender:
            writer.tell(sender, appended=end, flushed=end)
            running = await kept(writer)
            for _ in range(5):
                await asyncio.sleep(0)
    await until(lambda: writer.lease.version > before)
    assert writer.lease.record is not None
    assert writer.lease.record.in_sync == (writer.holder.record.holder,)
    await ended(running)


async def test_a_new_kind_of_state_waits_until_all_members_have_said_that_they_read_it(
    writer: Writer,
) -> None:
    in_sync = InSyncSet(
        writer.replicas._followers,
        writer.holder,
        writer.member.demands,
        SetPolicy(peers=frozenset({1, 2})),
        writer.clock,
    )
    kinds = frozenset({"new"})
    other = ReplicaId(2, "store-2")
    with pytest.raises(VersionUnsupported, match="member 1 has not followed this writer yet"):
        in_sync.check_kinds(kinds)
    with writer.replicas.join(FOLLOWER, 0, KINDS | kinds):
        with pytest.raises(VersionUnsupported, match="member 2 has not followed this writer yet"):
            in_sync.check_kinds(kinds)
        with writer.replicas.join(other, 0, KINDS):
            pass
        with pytest.raises(VersionUnsupported, match="member 2 runs a release that does not read"):
            in_sync.check_kinds(kinds)
        with writer.replicas.join(other, 0, KINDS | kinds):
            in_sync.check_kinds(kinds)
        in_sync.check_kinds(kinds)  # it is away for a moment
        with writer.replicas.join(FOLLOWER, 0, KINDS):  # rolled back
            pass
        with pytest.raises(VersionUnsupported, match="member 1 runs a release that does not read"):
            in_sync.check_kinds(kinds)


async def test_a_follower_that_is_not_configured_counts_from_when_it_has_followed(
    writer: Writer,
) -> None:
    kinds = frozenset({"new"})
    writer.in_sync.check_kinds(kinds)
    with writer.replicas.join(ReplicaId(7, "store-7"), 0, KINDS):
        pass
    with pytest.raises(VersionUnsupported, match="member 7"):
        writer.in_sync.check_kinds(kinds)


@pytest.mark.parametrize("policy", [SetPolicy(size_min=2)])
async def test_below_the_floor_nothing_counts_as_copied(writer: Writer) -> None:
    in_sync = writer.in_sync
    with pytest.raises(SlaveNotAvailable, match=r"^1 of the broker group's members is in sync, 2 "):
        in_sync.check_in_sync()
    ticket = writer.append("C", b"x")
    assert ticket.acked is not None
    await writer.member.on_disk()
    assert not ticket.acked.done()
    marks = writer.member.storage.watermarks
    assert marks.marks.replicated < marks.flushed


async def test_a_writer_that_may_be_deposed_answers_nobody(writer: Writer) -> None:
    in_sync = writer.in_sync
    running = await kept(writer)
    end = writer.member.store.appended_offset
    with writer.replicas.join(FOLLOWER, 0, KINDS) as sender:
        writer.tell(sender, appended=end, flushed=end)
        await until(lambda: in_sync.size == 2)
        await ended(running)
        writer.clock.now_ms += 60_000  # nobody has renewed the lease
        ticket = writer.append("C", b"x")
        assert ticket.acked is not None
        end = ticket.appended.end_offset
        writer.tell(sender, appended=end, flushed=end)
        await writer.member.on_disk_alone()
        assert not ticket.acked.done()
        assert writer.member.storage.shown.replicated < end
        writer.tell(sender, appended=end, flushed=end, no_election_ms=6_000)
        await ticket.acked
        assert writer.member.storage.shown.replicated == end


@pytest.mark.parametrize("policy", [SetPolicy(size_min=2)])
async def test_what_is_told_of_it(writer: Writer) -> None:
    in_sync = writer.in_sync
    writer_status = in_sync.writer_status()
    assert writer_status is not None
    assert (list(writer_status.in_sync), writer_status.min_in_sync, writer_status.only_writer) == (
        [0],
        2,
        True,
    )


async def test_while_somebody_may_lead_who_is_not_in_sync_nothing_counts_as_copied(
    writer: Writer,
) -> None:
    """In a group without copies a follower that lags may lead; then a topic asks for copies."""
    await writer.member.keeper.put_topic(TopicConfig("C", 1, 1))
    itself = writer.holder.record.holder
    await writer.holder.put_sets(lambda: ((itself,), (itself, FOLLOWER)))
    await writer.member.put("C2")
    config = TopicConfig("C", 1, 1, replication_mode=ReplicationMode.APPENDED)
    before = writer.member.store.appended_offset
    putting = asyncio.create_task(writer.member.keeper.put_topic(config))
    await until(lambda: writer.member.store.appended_offset > before)
    await writer.member.on_disk()
    assert not putting.done(), "the one who may lead would not know that it asks for copies"
    await writer.holder.put_sets(lambda: ((itself,), (itself,)))
    assert not await putting

    await writer.holder.put_sets(lambda: ((itself,), (itself, FOLLOWER)))
    ticket = writer.append("C", b"x")
    assert ticket.acked is not None
    await writer.member.on_disk()
    assert not ticket.acked.done()
    await writer.holder.put_sets(lambda: ((itself,), (itself,)))
    await ticket.acked


@pytest.mark.parametrize("mode", [ReplicationMode.ASYNC])
@pytest.mark.parametrize("policy", [SetPolicy(size_min=2)])
async def test_where_nobody_waits_for_copies_there_is_no_floor(writer: Writer) -> None:
    """What a follower has when it starts it shows when that is known to be copied."""
    itself = writer.holder.record.holder
    await writer.holder.put_sets(lambda: ((itself,), (itself, FOLLOWER)))  # nor who may lead
    writer.append("C", b"x")
    await writer.member.on_disk()
    marks = writer.member.storage.watermarks.marks
    assert marks.replicated == marks.replicated_flushed == marks.flushed

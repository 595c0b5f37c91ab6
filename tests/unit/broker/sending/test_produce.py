from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from unittest import mock

import pytest

from cometmq.clock import SystemClock
from cometmq.errors import (
    BatchChecksumMismatch,
    CometError,
    FlowControl,
    NoPermission,
    QueueNotFound,
    SlaveNotAvailable,
    TopicNameInvalid,
    TopicNotFound,
)
from cometmq.member.storage.authority import Replicated
from cometmq.member.storage.member_storage import Ticket
from cometmq.messaging.quotas import Scope, Way
from cometmq.model import FlushMode, ReplicationMode, SendStatus, TopicConfig
from services.broker.sending.produce import Accepted, Claim, ProduceHandler, ProducePolicy
from tests.support.cluster.broker import encoded
from tests.support.cluster.members import Member, living_member
from tests.support.stores.gates import HeldFlush
from tests.support.stores.small_stores import HOST
from tests.support.waiting import until


class Counter:
    def __init__(self) -> None:
        self.counted: list[tuple[str, int, int]] = []
        self.appends = self.acknowledgements = self.lates = self.again = 0

    def messages_in(self, topic: str, count: int, size_bytes: int) -> None:
        self.counted.append((topic, count, size_bytes))

    def appended(self, seconds: float) -> None:
        self.appends += 1

    def acknowledged(self, seconds: float) -> None:
        self.acknowledgements += 1

    def late(self) -> None:
        self.lates += 1

    def known(self, count: int) -> None:
        self.again += count

    def throttled(self, way: Way, scope: Scope) -> None:
        raise AssertionError("no test here has quotas")

    def sender_forgotten(self) -> None:
        raise AssertionError("no test here has so many senders")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> HeldFlush:
    return HeldFlush(monkeypatch)


@pytest.fixture
async def member(tmp_path: Path, held: HeldFlush) -> AsyncIterator[Member]:
    async with living_member(tmp_path) as member:
        await member.put("A", 2)
        await member.put("S", 2, FlushMode.SYNC)
        yield member


def produce(
    member: Member,
    *,
    room: int = 10_000,
    create: bool = False,
    counter: Counter | None = None,
    timeout_s: float = 30.0,
    copies_timeout_s: float | None = None,
) -> ProduceHandler:
    policy = ProducePolicy(
        room,
        create,
        TopicConfig("", 2, 2, flush_mode=FlushMode.SYNC),
        timeout_s,
        timeout_s if copies_timeout_s is None else copies_timeout_s,
    )
    observer = counter or Counter()
    return ProduceHandler(member.storage, member.keeper, policy, HOST, observer, SystemClock())


Run = tuple[str, int, int]


async def accept(
    into: ProduceHandler, *runs: Run, body: bytes = b"x", checksum: int | None = None
) -> Accepted:
    records = b"".join(encoded(t, q, body) for t, q, count in runs for _ in range(count))
    return await into.take(records, [Claim(*run) for run in runs], HOST, checksum)


async def take(
    into: ProduceHandler, *runs: Run, body: bytes = b"x", checksum: int | None = None
) -> Ticket:
    return (await accept(into, *runs, body=body, checksum=checksum)).ticket


async def refused(into: ProduceHandler, *runs: Run, body: bytes = b"x") -> CometError:
    with pytest.raises(CometError) as found:
        await take(into, *runs, body=body)
    return found.value


async def test_messages_are_counted_by_topic(member: Member) -> None:
    counter = Counter()
    await take(produce(member, counter=counter), ("A", 0, 2), ("S", 1, 1), ("A", 1, 3))
    one = len(encoded("A", 0, b"x"))
    assert counter.counted == [("A", 2, 2 * one), ("S", 1, one), ("A", 3, 3 * one)]


async def test_bytes_wait_until_their_acknowledgement(member: Member, held: HeldFlush) -> None:
    size = len(encoded("S", 0, b"x" * 1_000))
    into = produce(member, room=2 * size + 1)
    held.hold()
    first = await take(into, ("S", 0, 1), body=b"x" * 1_000)
    await take(into, ("S", 0, 1), body=b"x" * 1_000)
    assert into.in_flight_bytes == 2 * size
    error = await refused(into, ("S", 0, 1), body=b"x" * 1_000)
    assert isinstance(error, FlowControl)
    assert isinstance(await refused(into, ("A", 0, 1), body=b"x" * 1_000), FlowControl)
    held.release()
    assert first.acked is not None
    await first.acked
    await until(lambda: into.in_flight_bytes == 0)
    await take(into, ("S", 0, 1), body=b"x" * 1_000)
    assert member.store.queue_bounds("S", 0) == (0, 3)


async def test_what_waits_for_copies_keeps_nobody_else_out(member: Member) -> None:
    """Also when it was answered late: copies may lag for as long as they like."""
    await put_copied(member)
    size = len(encoded("C", 0, b"x" * 1_000))
    into = produce(member, room=2 * size + 1, timeout_s=0.0)
    member.set_authority.set_replicated(None)
    member.storage.settle()
    late = [await accept(into, ("C", 0, 1), body=b"x" * 1_000) for _ in range(2)]
    assert await into.settled(late[0]) is SendStatus.FLUSH_SLAVE_TIMEOUT
    assert into.in_flight_bytes == 2 * size
    assert isinstance(await refused(into, ("C", 0, 1), body=b"x" * 1_000), FlowControl)
    assert isinstance(await refused(into, ("C", 0, 1), ("A", 0, 1)), FlowControl)
    for topic in ("A", "S"):
        await take(into, (topic, 0, 2), body=b"x" * 1_000)
    end = member.store.appended_offset
    await member.on_disk()
    member.set_authority.set_replicated(Replicated(end, end, is_alone=True))
    member.storage.settle()
    await until(lambda: into.in_flight_bytes == 0)
    await take(into, ("C", 0, 1), body=b"x" * 1_000)


async def test_a_single_batch_always_gets_in(member: Member) -> None:
    into = produce(member, room=1)
    ticket = await take(into, ("S", 0, 1), body=b"x" * 1_000)
    assert ticket.acked is not None
    await ticket.acked


async def test_a_batch_is_timed_when_it_is_written_and_when_it_is_acknowledged(
    member: Member, held: HeldFlush
) -> None:
    counter = Counter()
    into = produce(member, counter=counter)
    await take(into, ("A", 0, 1))
    assert (counter.appends, counter.acknowledgements) == (1, 1)
    held.hold()
    ticket = await take(into, ("S", 0, 1))
    assert (counter.appends, counter.acknowledgements) == (2, 1)
    held.release()
    assert ticket.acked is not None
    await ticket.acked
    await until(lambda: counter.acknowledgements == 2)


async def test_what_the_disk_has_is_ok(member: Member) -> None:
    into = produce(member)
    assert await into.settled(await accept(into, ("A", 0, 1))) is SendStatus.SEND_OK
    assert await into.settled(await accept(into, ("S", 0, 1))) is SendStatus.SEND_OK


async def test_a_disk_that_takes_too_long_is_told_and_the_batch_stays(
    member: Member, held: HeldFlush
) -> None:
    counter = Counter()
    into = produce(member, counter=counter, timeout_s=0.01)
    held.hold()
    late = await accept(into, ("S", 0, 1))
    assert await into.settled(late) is SendStatus.FLUSH_DISK_TIMEOUT
    assert (counter.lates, counter.acknowledgements) == (1, 0)
    assert into.in_flight_bytes > 0  # it still waits for the disk
    assert member.storage.bounds(("S", 0)) == (0, 0, 1)
    held.release()
    assert late.ticket.acked is not None
    await late.ticket.acked
    assert await into.settled(late) is SendStatus.SEND_OK
    assert member.storage.bounds(("S", 0)) == (0, 1, 1)


async def test_what_is_acknowledged_at_once_never_waits(member: Member) -> None:
    into = produce(member, room=1)
    for _ in range(3):
        assert (await take(into, ("A", 0, 1))).acked is None
    assert into.in_flight_bytes == 0


async def test_the_checksum_is_compared_when_there_is_one(member: Member) -> None:
    into = produce(member)
    good = zlib.crc32(encoded("A", 0, b"x"))
    await take(into, ("A", 0, 1), checksum=good)
    for wrong in (good ^ 1, 0):
        with pytest.raises(BatchChecksumMismatch):
            await take(into, ("A", 0, 1), checksum=wrong)
    assert member.store.queue_bounds("A", 0) == (0, 1)


@pytest.mark.parametrize(
    ("claim", "error"),
    [
        (("N", 0, 1), TopicNotFound),
        (("A", 2, 1), QueueNotFound),
        (("../x", 0, 1), TopicNameInvalid),
        (("rmq_sys_x", 0, 1), NoPermission),
    ],
)
async def test_an_error_names_its_segment(
    member: Member, claim: Run, error: type[CometError]
) -> None:
    found = await refused(produce(member), ("A", 0, 1), claim)
    assert (type(found), found.segment) == (error, 1)
    assert member.store.queue_bounds("A", 0) == (0, 0)


async def test_missing_topics_are_created_one_after_the_other(member: Member) -> None:
    into = produce(member, create=True)
    await take(into, ("N", 0, 1), ("A", 0, 1), ("M", 1, 1))
    for name in ("N", "M"):
        config = member.state.topics.get(name)
        assert (config.write_queue_count, config.flush_mode) == (2, FlushMode.SYNC)


async def test_only_names_that_are_allowed_are_created(member: Member) -> None:
    into = produce(member, create=True)
    assert isinstance(await refused(into, ("../x", 0, 1)), TopicNameInvalid)
    assert isinstance(await refused(into, ("rmq_sys_x", 0, 1)), NoPermission)
    assert len(member.state.topics) == 2


async def test_a_topic_that_is_being_deleted_is_neither_written_nor_created(
    member: Member, held: HeldFlush
) -> None:
    into = produce(member, create=True)
    held.hold()
    dropping = asyncio.create_task(member.keeper.drop_topic("A"))
    await until(lambda: held.waiting)
    found = await refused(into, ("A", 0, 1))
    assert (type(found), found.segment) == (TopicNotFound, 0)
    held.release()
    await dropping
    await take(into, ("A", 0, 1))  # now it is a new one
    assert member.store.queue_bounds("A", 0) == (0, 1)


async def test_a_topic_that_cannot_be_created_is_told(member: Member) -> None:
    member.state.topics.topics_max = 2
    found = await refused(produce(member, create=True), ("A", 0, 1), ("N", 0, 1))
    assert (found.name(), found.segment) == ("LIMIT_EXCEEDED", 1)


async def put_copied(member: Member, flush: FlushMode = FlushMode.ASYNC) -> None:
    appended = ReplicationMode.APPENDED
    await member.keeper.put_topic(
        TopicConfig("C", 1, 1, flush_mode=flush, replication_mode=appended)
    )


async def test_without_enough_members_in_sync_nothing_is_stored(member: Member) -> None:
    await put_copied(member)
    member.set_authority.check = mock.Mock(side_effect=SlaveNotAvailable("1 of 2"))
    into = produce(member)
    end = member.store.appended_offset
    with pytest.raises(SlaveNotAvailable):
        await accept(into, ("A", 0, 1), ("C", 0, 1))
    assert member.store.appended_offset == end
    await accept(into, ("A", 0, 1))


@pytest.mark.parametrize("flush", FlushMode)
async def test_copies_that_take_too_long_are_told_and_the_batch_stays(
    member: Member, flush: FlushMode
) -> None:
    await put_copied(member, flush)
    member.set_authority.set_replicated(Replicated(0, 0, is_alone=False))
    member.storage.settle()
    counter = Counter()
    into = produce(member, copies_timeout_s=0.01, counter=counter)
    accepted = await accept(into, ("C", 0, 1))
    if flush is FlushMode.SYNC:
        await until(lambda: member.storage.watermarks.flushed == member.store.appended_offset)
    async with asyncio.timeout(10):
        assert await into.settled(accepted) is SendStatus.FLUSH_SLAVE_TIMEOUT
    assert counter.lates == 1
    end = accepted.ticket.appended.end_offset
    await member.on_disk()
    member.set_authority.set_replicated(Replicated(end, end, is_alone=False))
    member.storage.settle()
    assert await into.settled(accepted) is SendStatus.SEND_OK

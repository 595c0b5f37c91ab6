from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import accumulate
from pathlib import Path

import pytest

from cometmq.clock import SystemClock
from cometmq.errors import (
    MessageNotFound,
    NoPermission,
    NotWriter,
    OffsetInvalid,
    PositionFenced,
    QueueNotFound,
    TopicNotFound,
)
from cometmq.filters import sql
from cometmq.format import record
from cometmq.format.taghash import tags_code
from cometmq.member.read.reader import PullAnswer, PullQuery, Reader
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.messaging import inline_messages
from cometmq.messaging.pull import PullStatus
from cometmq.model import Position, TopicConfig
from tests.support.cluster.members import NEVER, Member, living_member
from tests.support.stores.gates import ColdDisk
from tests.support.waiting import until


@pytest.fixture
async def member(tmp_path: Path) -> AsyncIterator[Member]:
    async with living_member(tmp_path, policy=NEVER) as member:
        await member.put("T", 2)
        yield member


def query(offset: int, generation: int = 0, tag: str = "", **changes: object) -> PullQuery:
    codes = frozenset({tags_code(tag.encode()) & 0xFFFFFFFF}) if tag else frozenset[int]()
    fields = {"topic": "T", "queue_id": 0, "max_count": 0, "max_bytes": 0, **changes}
    return PullQuery(position=Position(generation, offset), codes=codes, **fields)  # type: ignore[arg-type]


async def pull(member: Member, offset: int, **fields: object) -> PullAnswer:
    async def room(size_bytes: int) -> None:
        """As much as anybody wants."""

    return await member.reader.pull(query(offset, **fields), room)  # type: ignore[arg-type]


@pytest.mark.parametrize("cold", [False, True])
async def test_what_is_stored_is_answered(
    member: Member, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ColdDisk(monkeypatch)
    member.append("T", 0, b"a", b"b", tag="x")
    member.append("T", 0, b"c", tag="y")
    await member.on_disk()
    if cold:
        disk.go_cold()
    answer = await pull(member, 1)
    assert answer.status is PullStatus.FOUND
    assert [r.body for r in record.decode_all(answer.records)] == [b"b", b"c"]
    assert (answer.count, answer.next_position.offset, answer.max_offset) == (2, 3, 3)
    filtered = await pull(member, 0, tag="y")
    assert [r.body for r in record.decode_all(filtered.records)] == [b"c"]
    assert bool(disk.refused) == cold


@pytest.mark.parametrize("cold", [False, True])
async def test_an_sql_filter_looks_at_one_mebibyte_a_pull(
    member: Member, cold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = ColdDisk(monkeypatch)
    for number in range(24):
        member.append("T", 0, bytes(100_000), tag="last" if number in (20, 22, 23) else "x")
    await member.on_disk()
    if cold:
        disk.go_cold()
    program = sql.compile_expression("TAGS = 'last'")
    looked_at, offset, found = [], 0, list[int]()
    while offset < 24:
        answer = await pull(member, offset, program=program, max_count=2)
        assert (answer.status is PullStatus.FOUND) == bool(answer.count)
        found += [r.queue_offset for r in record.decode_all(answer.records)]
        looked_at.append(answer.next_position.offset - offset)
        offset = answer.next_position.offset
    assert found == [20, 22, 23]
    assert looked_at == [10, 10, 3, 1]  # whole records of up to 1 MiB; then there is no room


async def test_an_sql_filter_looks_at_many_messages_beside_the_loop(member: Member) -> None:
    bodies = [b"%d" % number for number in range(1_000)]
    for number, body in enumerate(bodies):
        member.append("T", 0, body, tag="rare" if number % 10 == 9 else "x")
    await member.on_disk()
    program = sql.compile_expression("TAGS = 'rare'")
    for limits in ({}, {"max_count": 1}, {"max_bytes": 1}):
        offset, found = 0, list[bytes]()
        while offset < 1_000:
            answer = await pull(member, offset, program=program, **limits)
            assert offset < answer.next_position.offset <= 1_000
            assert answer.count <= 1 or not limits
            found += [r.body for r in record.decode_all(answer.records)]
            offset = answer.next_position.offset
        assert found == bodies[9::10]


async def test_between_readable_and_appended_one_waits(member: Member) -> None:
    member.append("T", 0, b"a")
    await member.on_disk()
    member.append("T", 0, b"b", b"c")
    statuses = [(await pull(member, offset)).status for offset in range(5)]
    waits = PullStatus.NOT_FOUND
    assert statuses == [PullStatus.FOUND, waits, waits, waits, PullStatus.OFFSET_MOVED]
    assert (await pull(member, 0)).count == 1  # what is not readable is not part of it
    await member.on_disk()
    assert (await pull(member, 0)).count == 3


async def test_positions_are_checked(member: Member) -> None:
    member.append("T", 0, b"a")
    await member.on_disk()
    with pytest.raises(OffsetInvalid):
        await pull(member, -1)
    generation = member.state.generations.of("T", 0).current
    for change in member.state.plan_raise(lambda *_: 1):
        member.state.apply(change)
    assert (await pull(member, 1, generation=generation)).status is PullStatus.NOT_FOUND
    with pytest.raises(PositionFenced) as fenced:
        await pull(member, 2, generation=generation)
    assert fenced.value.fence == (generation + 1, 1)


async def test_what_may_not_be_read(member: Member) -> None:
    with pytest.raises(TopicNotFound):
        await pull(member, 0, topic="U")
    with pytest.raises(QueueNotFound):
        await pull(member, 0, queue_id=2)
    with pytest.raises(NoPermission):
        await pull(member, 0, topic="rmq_sys_cometmq_state")
    await member.keeper.put_topic(TopicConfig("W", 1, 1, permission=2))
    with pytest.raises(NoPermission):
        await pull(member, 0, topic="W")


async def test_a_message_by_its_log_offset(member: Member) -> None:
    ticket = member.append("T", 0, b"a")
    with pytest.raises(MessageNotFound):  # not readable yet
        await member.reader.message(ticket.appended.log_offset)
    await member.on_disk()
    assert (await member.reader.message(ticket.appended.log_offset)).body == b"a"
    for wrong in (ticket.appended.log_offset + 1, member.store.appended_offset, 0):
        with pytest.raises(MessageNotFound):
            await member.reader.message(wrong)


async def test_a_body_that_looks_like_a_record_is_no_message(member: Member) -> None:
    """The forger knows where the body will stand, and claims the offset of a real message."""
    at = member.store.appended_offset
    head = len(
        record.encode(b"T", 0, b"", b"", born_time_ms=0, born_host=b"\0" * 8, store_host=b"\0" * 8)
    )
    inner_at = at + head - len(b"T") - 3
    inner = record.encode(
        b"T", 0, b"forged", b"", born_time_ms=1, born_host=b"\0" * 8, store_host=b"\0" * 8,
        log_offset=inner_at, queue_offset=0, store_time_ms=1,
    )  # fmt: skip
    ticket = member.append("T", 0, inner)
    assert ticket.appended.log_offset == at
    await member.on_disk()
    assert member.store.read_record(inner_at, nowait=False) == inner, "the forgery is well made"
    with pytest.raises(MessageNotFound):
        await member.reader.message(inner_at)
    assert (await member.reader.message(at)).body == inner


async def test_a_message_of_a_deleted_topic_is_gone(member: Member) -> None:
    old = member.append("T", 0, b"old").appended.log_offset
    await member.on_disk()
    await member.keeper.drop_topic("T")
    with pytest.raises(MessageNotFound):
        await member.reader.message(old)
    await member.put("T", 2)
    new = member.append("T", 0, b"new").appended.log_offset
    await member.on_disk()
    with pytest.raises(MessageNotFound):  # another message has its offset now
        await member.reader.message(old)
    assert (await member.reader.message(new)).body == b"new"


async def test_a_topic_deleted_during_a_cold_read(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_offset = member.append("T", 0, b"a").appended.log_offset
    await member.on_disk()
    disk = ColdDisk(monkeypatch)
    disk.go_cold()
    disk.before_cold_read = lambda: member.store.drop_topic("T")
    assert await member.reader.last_store_time_ms("T", 0) == 0
    with pytest.raises(MessageNotFound):
        await member.reader.message(log_offset)


async def test_what_retention_takes_during_a_cold_read_has_moved(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader is told where the queue begins now, as if it had asked a moment later."""
    while member.store.appended_offset < 600_000:  # in the third log file
        member.append("T", 0, bytes(50_000))
    await member.on_disk()
    await until(lambda: len(member.store.cleaner.log_files()) == 2)
    disk = ColdDisk(monkeypatch)
    disk.go_cold()

    def remove() -> None:
        disk.before_cold_read = lambda: None
        cleaner = member.store.cleaner
        cleaner.forget_before(cleaner.log_files()[1].end)
        cleaner.remove_first()
        cleaner.remove_first()

    disk.before_cold_read = remove
    answer = await pull(member, 0)
    assert answer.status is PullStatus.OFFSET_MOVED
    assert answer.next_position.offset == answer.min_offset > 0
    assert (await pull(member, answer.min_offset)).status is PullStatus.FOUND


async def test_store_time_of_the_last_readable_message(member: Member) -> None:
    assert await member.reader.last_store_time_ms("T", 0) == 0
    ticket = member.append("T", 0, b"a")
    assert await member.reader.last_store_time_ms("T", 0) == 0
    await member.on_disk()
    assert await member.reader.last_store_time_ms("T", 0) == ticket.appended.store_time_ms


async def test_a_reader_that_finds_nothing_makes_the_flusher_hurry(member: Member) -> None:
    """The policy alone would not sync within an hour."""
    assert (await pull(member, 0)).status is PullStatus.NOT_FOUND
    member.append("T", 0, b"a")
    await until(lambda: member.storage.bounds(("T", 0))[1] == 1)


async def test_a_follower_knows_no_end(member: Member) -> None:
    copy = Reader(member.storage, member.state, CatchUpThrottle(0), SystemClock(), copy=True)
    [error] = (await copy.uncertain_ends([("T", 0)])).values()
    assert isinstance(error, NotWriter)
    assert not await member.reader.uncertain_ends([("T", 0)])


# --- inline messages
# -----------------------------------------------------------------------------------------


async def test_inline_messages_are_what_a_pull_finds(member: Member) -> None:
    member.append("T", 0, b"a", b"b", tag="x")
    member.append("T", 1, b"between them in the log")
    member.append("T", 0, b"c", tag="y")
    await member.on_disk()
    found = member.reader.inline_messages("T", 0, 1, 3)
    assert found is not None
    answer = await pull(member, 1)
    assert (found.records, found.end_offset) == (answer.records, answer.next_position.offset)
    starts = [0, *accumulate(found.sizes)]
    bodies = [record.decode(found.records, start).body for start in starts[:-1]]
    assert (bodies, starts[-1]) == ([b"b", b"c"], len(found.records))
    assert found.codes == [tags_code(tag) & 0xFFFFFFFF for tag in (b"x", b"y")]


async def test_what_an_arrival_carries_is_not_read_again(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals, recent = member.storage.arrivals, member.storage.recent
    watch = arrivals.open(lambda: None)
    arrivals.add(watch, [("T", 0)])
    member.append("T", 0, b"nobody waits")
    arrivals.want(watch, [("T", 0)])
    member.append("T", 0, b"a", b"b", tag="x")
    member.append("T", 1, b"between them in the log")
    member.append("T", 0, b"c", tag="y")
    await member.on_disk()
    assert recent.take(("T", 0), 0, 1) is None
    ColdDisk(monkeypatch).go_cold()
    found = member.reader.inline_messages("T", 0, 1, 4)
    assert found is not None
    monkeypatch.undo()
    assert found == member.reader.inline_messages("T", 0, 1, 4), "from the files"
    member.append("T", 0, b"d")
    member.storage.drop_topic("T")
    assert recent.take(("T", 0), 4, 5) is None


async def test_inline_messages_are_few(tmp_path: Path) -> None:
    async with living_member(tmp_path, mapped_file_size_consume_queue=6_000) as member:
        await member.put("T")
        for _ in range(inline_messages.COUNT_MAX + 1):
            member.append("T", 0, b"a")
        await member.on_disk()
        assert member.reader.inline_messages("T", 0, 1, inline_messages.COUNT_MAX + 1) is not None
        assert member.reader.inline_messages("T", 0, 0, inline_messages.COUNT_MAX + 1) is None, (
            "too many"
        )
        assert member.reader.inline_messages("T", 0, 1, 1) is None, "none"


async def test_what_is_no_inline_message(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    member.append("T", 0, b"a", b"b")
    member.append("T", 1, bytes(inline_messages.BYTES_MAX))
    await member.on_disk()
    reader = member.reader
    assert reader.inline_messages("T", 0, 1, 2) is not None
    assert reader.inline_messages("T", 1, 0, 1) is None, "too large"
    assert reader.inline_messages("rmq_sys_cometmq_state", 0, 0, 1) is None, "not for clients"
    ColdDisk(monkeypatch).go_cold()
    assert reader.inline_messages("T", 0, 1, 2) is None, "not in memory"
    monkeypatch.undo()
    await member.keeper.put_topic(TopicConfig("T", 2, 2, permission=2))
    assert reader.inline_messages("T", 0, 1, 2) is None, "not to be read"

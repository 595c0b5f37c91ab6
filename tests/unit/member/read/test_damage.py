from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from cometmq.errors import CometError, DescriptorsExhausted, StoreDamaged
from cometmq.filters import sql
from cometmq.format import queueunit, record
from cometmq.format.taghash import tags_code
from cometmq.member.read.reader import PullAnswer, PullQuery
from cometmq.member.read.received import read_offsets
from cometmq.member.read.records import find_spans, read_each, read_joined
from cometmq.messaging.pull import PullStatus
from cometmq.model import Position
from tests.support.cluster.members import NEVER, Member, living_member

COUNT = 8


@pytest.fixture
async def member(tmp_path: Path) -> AsyncIterator[Member]:
    """A queue of :data:`COUNT` messages, whose tags are x and y in turn."""
    async with living_member(tmp_path, policy=NEVER) as member:
        await member.put("T", 1)
        for number in range(COUNT):
            member.append("T", 0, b"body %d" % number, tag="xy"[number % 2])
        await member.on_disk()
        yield member


async def pull(
    member: Member, offset: int, tag: str = "", count: int = 0, expression: str = ""
) -> PullAnswer:
    codes = frozenset({tags_code(tag.encode()) & 0xFFFFFFFF}) if tag else frozenset[int]()

    async def room(size_bytes: int) -> None:
        """As much as anybody wants."""

    program = sql.program_of(expression, ())
    query = PullQuery("T", 0, Position(0, offset), codes, count, 0, program)
    return await member.reader.pull(query, room)


def damage(member: Member, *offsets: int) -> None:
    """Flip a bit in the bodies of these messages, on the disk, behind the store's back."""
    store = member.store
    for offset in offsets:
        at = int.from_bytes(store.read_units("T", 0, offset, 1)[:8], "big") + 90
        segment = store._log.segments.find(at)
        assert segment is not None
        byte = segment.pread(at, 1)[0]
        segment.pwrite(at, bytes([byte ^ 1]))
    store._log.trusted_from = store.appended_offset  # as after a restart


def numbers(answer: PullAnswer) -> list[int]:
    return [int(found.body.split()[1]) for found in record.decode_all(answer.records)]


async def test_what_comes_before_is_answered_and_what_follows_is_named(member: Member) -> None:
    damage(member, 3, 4)
    before = await pull(member, 1)
    assert (numbers(before), before.next_position.offset) == ([1, 2], 3)
    for offset in (3, 4):
        with pytest.raises(StoreDamaged, match=f"message {offset} of queue 0 of T.* is 5: go on"):
            await pull(member, offset)
    behind = await pull(member, 5)
    assert numbers(behind) == [5, 6, 7]
    assert member.storage.damaged_pulls == 3


@pytest.mark.parametrize("place", [1 << 45, (1 << 64) - 100])
async def test_a_unit_that_points_out_of_the_log_is_written_again(
    member: Member, place: int
) -> None:
    queue = member.store._dispatcher.find("T", 0)
    assert queue is not None
    next(iter(queue.segments)).pwrite(2 * queueunit.UNIT_BYTES, place.to_bytes(8, "big"))
    assert numbers(await pull(member, 1)) == [1, 2, 3, 4, 5, 6, 7]
    assert numbers(await pull(member, 2, count=1)) == [2]
    assert member.storage.damaged_pulls == 1


@pytest.mark.parametrize("expression", ["", "TAGS IS NOT NULL"])
@pytest.mark.parametrize("tag", ["", "x"])
@pytest.mark.parametrize("other", ["U", "T"])
async def test_no_message_of_another_place_is_served(
    member: Member, other: str, tag: str, expression: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of another topic, and of another offset: as where a queue's file was exchanged."""
    await member.put("U", 1)
    for number in range(COUNT):
        member.append("U", 0, b"wrong %d" % number, tag="x")
    await member.on_disk()
    units = member.store.read_units(other, 0, 0, COUNT)
    queue = member.store._dispatcher.find("T", 0)
    assert queue is not None
    shift = 1 if other == "T" else 0  # its own units, at other offsets
    next(iter(queue.segments)).pwrite(2 * 20, units[shift * 20 : (shift + 4) * 20])
    found: list[int] = []
    offset = 0
    while offset < COUNT:
        answer = await pull(member, offset, "" if expression else tag, expression=expression)
        found += numbers(answer)
        offset = answer.next_position.offset
    assert found == [n for n in range(COUNT) if expression or not tag or n % 2 == 0]
    assert "is written again from the log; lost: 0" in caplog.text


async def test_single_messages_are_those_that_were_asked_for(member: Member) -> None:
    queue = member.store._dispatcher.find("T", 0)
    assert queue is not None
    units = member.store.read_units("T", 0, 0, COUNT)
    next(iter(queue.segments)).pwrite(0, units[20:])  # each points to the next message
    places = [(("T", 0), offset) for offset in (1, 4)]
    spans = [span for span in await find_spans(member.storage, places) if isinstance(span, tuple)]
    assert await read_joined(member.store, spans, places) is None
    found = await read_each(member.store, spans, places)
    assert [one.body for one in found if isinstance(one, record.Record)] == [b"body 1", b"body 4"]
    next(iter(queue.segments)).pwrite(0, units[20:40])
    queue.mended = range(0)
    [(_, raw)] = await read_offsets(member.storage, ("T", 0), [0], 1 << 20)
    assert isinstance(raw, bytes)
    assert record.decode(raw).body == b"body 0"


async def test_a_message_that_nothing_names_any_more_is_lost_alone(member: Member) -> None:
    """Its unit names another message, and its record is damaged."""
    damage(member, 3)
    queue = member.store._dispatcher.find("T", 0)
    assert queue is not None
    units = member.store.read_units("T", 0, 0, COUNT)
    next(iter(queue.segments)).pwrite(3 * 20, units[5 * 20 : 6 * 20])
    assert numbers(await pull(member, 0)) == [0, 1, 2]
    with pytest.raises(StoreDamaged, match=r"message 3 .* the next one that can is 4"):
        await pull(member, 3)
    assert numbers(await pull(member, 4)) == [4, 5, 6, 7]


async def test_nothing_good_may_follow(member: Member) -> None:
    damage(member, 6, 7)
    with pytest.raises(StoreDamaged, match="none of the 2 from there on can"):
        await pull(member, 6)


async def test_a_filter_passes_over_what_it_would_not_have_shown(member: Member) -> None:
    damage(member, 3)
    assert numbers(await pull(member, 0, "x")) == [0, 2, 4, 6]
    odd = await pull(member, 0, "y")
    assert (numbers(odd), odd.next_position.offset) == ([1], 3)
    with pytest.raises(StoreDamaged, match="the next one that can is 5"):
        await pull(member, 3, "y")


async def test_a_filter_that_matches_nothing_before_goes_on_to_the_damage(member: Member) -> None:
    damage(member, 3)
    answer = await pull(member, 2, "y")
    assert (answer.status, answer.next_position.offset) == (PullStatus.NO_MATCHED_MESSAGE, 3)


async def test_limits_hold_before_damage_too(member: Member) -> None:
    damage(member, 3)
    answer = await pull(member, 0, count=2)
    assert (numbers(answer), answer.next_position.offset) == ([0, 1], 2)


def wipe(member: Member, *offsets: int) -> None:
    """Put zeros over the units of these messages, on the disk, behind the store's back."""
    queue = member.store._dispatcher.find("T", 0)
    assert queue is not None
    for offset in offsets:
        segment = queue.segments.find(offset * 20)
        assert segment is not None
        segment.pwrite(offset * 20, bytes(20))


@pytest.mark.parametrize("tag", ["", "x", "y"])
async def test_a_hole_in_the_queue_is_never_passed_over_in_silence(
    member: Member, tag: str, caplog: pytest.LogCaptureFixture
) -> None:
    wipe(member, 4, 5)
    before = await pull(member, 0, tag)
    assert set(numbers(before)) <= {0, 1, 2, 3}
    assert before.next_position.offset in (3, 4)
    behind = await pull(member, 4, tag)
    assert numbers(behind) == [n for n in (4, 5, 6, 7) if not tag or "xy"[n % 2] == tag]
    assert member.storage.damaged_pulls == 1
    assert "from message 4 on" in caplog.text


async def test_an_sql_filter_sees_all_before_the_damage_and_names_what_follows(
    member: Member,
) -> None:
    damage(member, 3)
    odd = await pull(member, 0, expression="TAGS = 'y'")
    assert (numbers(odd), odd.next_position.offset) == ([1], 3)
    nothing = await pull(member, 2, expression="TAGS = 'y'")
    assert (nothing.status, nothing.next_position.offset) == (PullStatus.NO_MATCHED_MESSAGE, 3)
    with pytest.raises(StoreDamaged, match=r"message 3 of queue 0 of T.* is 4: go on"):
        await pull(member, 3, expression="TAGS = 'x'")
    assert numbers(await pull(member, 4, expression="TAGS = 'x'")) == [4, 6]


async def test_a_shortage_among_single_messages_is_no_damage(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taken for damage, it would lose a message that the disk has."""
    damage(member, 3)
    places = [(("T", 0), offset) for offset in range(5)]
    found_spans = await find_spans(member.storage, places)
    spans = [span for span in found_spans if not isinstance(span, CometError)]
    found = await read_each(member.store, spans, places)
    bodies = [one.body if isinstance(one, record.Record) else type(one) for one in found]
    assert bodies == [b"body 0", b"body 1", b"body 2", StoreDamaged, b"body 4"]

    read_records = member.store.read_records

    def without_descriptors(wanted: Sequence[tuple[int, int]], *, nowait: bool = False) -> bytes:
        if wanted == spans[4:]:
            raise DescriptorsExhausted("no file can be opened")
        return read_records(wanted, nowait=nowait)

    monkeypatch.setattr(member.store, "read_records", without_descriptors)
    with pytest.raises(DescriptorsExhausted):
        await read_each(member.store, spans, places)

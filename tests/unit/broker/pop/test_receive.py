"""Receives at class level: whatever happens while a call waits, it ends, holds up nobody, and gives
its member the time that it asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq.errors import AnswersUnread, BrokerDraining, DiskFull, GroupNotFound, TopicNotFound
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.authority import Replicated
from cometmq.messaging.changes import OffsetsReset
from cometmq.messaging.offsets import CommittedOffset
from cometmq.model import Position, ReplicationMode, TopicConfig
from services.broker.pop import receive
from services.broker.retry.retries import RetryService
from tests.support.cluster.pop_parts import ASK, KEY, Pop, Room, living_pop
from tests.support.waiting import until


@pytest.fixture
async def pop(tmp_path: Path) -> AsyncIterator[Pop]:
    async with living_pop(tmp_path) as pop:
        yield pop


@pytest.fixture
async def orderly(tmp_path: Path) -> AsyncIterator[Pop]:
    async with living_pop(tmp_path, orderly=True) as pop:
        yield pop


@pytest.fixture(params=["free", "orderly"])
async def each(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pop]:
    async with living_pop(tmp_path, orderly=request.param == "orderly") as pop:
        yield pop


def reset(pop: Pop) -> None:
    commit = CommittedOffset("G", *KEY, Position(pop.member.state.pop_generation(KEY), 0))
    pop.member.keeper.write_doings()
    pop.member.keeper.write(OffsetsReset(1, (commit,)))


async def is_reset(pop: Pop) -> None:
    reset(pop)


async def topic_goes(pop: Pop) -> None:
    await pop.member.keeper.drop_topic("T")


async def topic_is_made_again(pop: Pop) -> None:
    await pop.member.keeper.drop_topic("T")
    await pop.member.put("T")


async def group_goes(pop: Pop) -> None:
    await pop.member.keeper.drop_group("G")


EVENTS = (is_reset, topic_goes, topic_is_made_again, group_goes)


class SlowReads:
    """Holds back reads of messages that come again, as a cold disk does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_reading, self.go_on = asyncio.Event(), asyncio.Event()
        read_offsets = vars(receive)["read_offsets"]

        async def slow(*args: Any, **options: Any) -> Any:
            found = await read_offsets(*args, **options)
            self.is_reading.set()
            await self.go_on.wait()
            return found

        patch.setattr(receive, "read_offsets", slow)


@pytest.mark.parametrize("happens", EVENTS)
@pytest.mark.parametrize("where", ["reads", "buries", "waits for room"])
async def test_a_reset_or_a_deletion_while_messages_come_again_ends_the_call(
    each: Pop, monkeypatch: pytest.MonkeyPatch, happens: Any, where: str
) -> None:
    """The queue's leases lay there as before, and the loop of the broker never got past them."""
    pop = each
    if where == "buries":
        settings = pop.member.keeper.group("G")
        await pop.member.keeper.put_group(replace(settings, retry_times_max=0))
    await pop.send(b"0", b"1", b"2")
    first = await pop.receive(max_count=2)
    assert first.count == 2
    pop.clock.now_ms += 11_000
    room, slow = Room(), SlowReads(monkeypatch)
    if where == "waits for room":
        slow.go_on.set()
        waits, go_on = room.is_waited_for, room.is_there
    elif where == "reads":
        waits, go_on = slow.is_reading, slow.go_on
        room.is_there.set()
    else:
        slow.go_on.set()
        room.is_there.set()
        waits, go_on = hold_send_backs(pop, monkeypatch)
    call = asyncio.create_task(pop.receive(room, max_count=2))
    await waits.wait()
    await happens(pop)
    go_on.set()
    try:
        answer = await call
    except (TopicNotFound, GroupNotFound):
        assert happens is not is_reset
    else:
        assert not answer.count or happens is is_reset
        assert answer.has_more, "the member asks again at once"
    pop.member.state.pops.validate()


def hold_send_backs(pop: Pop, patch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    waits, go_on = asyncio.Event(), asyncio.Event()
    send_back = RetryService.send_back

    async def held(retries: RetryService, *args: Any) -> Any:
        waits.set()
        await go_on.wait()
        return await send_back(retries, *args)

    patch.setattr(RetryService, "send_back", held)
    return waits, go_on


async def test_the_time_counts_from_the_answer(pop: Pop) -> None:
    """A lease was over when its member got it, and a second one had the message as well."""
    await pop.send(b"0")

    async def slow(_size_bytes: int) -> None:
        await asyncio.sleep(0)
        pop.clock.now_ms += 10_500

    first = await pop.receive(slow)
    assert pop.left_ms(first) == ASK.invisible_ms
    assert not (await pop.receive()).runs
    assert await pop.ack(first) == [None]


async def test_the_time_counts_from_the_answer_of_a_call_that_waited_for_its_turn(pop: Pop) -> None:
    await pop.send(b"0")
    await pop.receive(max_count=0)
    async with pop.groups.turn("G", KEY).lock:
        call = asyncio.create_task(pop.receive())
        await asyncio.sleep(0)
        pop.clock.now_ms += 60_000
    assert pop.left_ms(await call) == ASK.invisible_ms


async def test_a_slow_reader_holds_up_nobody_else(pop: Pop) -> None:
    await pop.send(b"0", b"1")
    room = Room()
    slow = asyncio.create_task(pop.receive(room))
    await room.is_waited_for.wait()
    other = await pop.receive()
    assert not slow.done()
    room.is_there.set()
    mine = await slow
    assert (mine.count, other.count) == (1, 1)
    assert await pop.ack(mine) == await pop.ack(other) == [None]


async def test_what_waits_for_room_takes_no_memory(pop: Pop) -> None:
    await pop.send(*[bytes(1_000)] * 3)
    room, calls = Room(), []
    forget = receive._Call.forget_records

    def noted(call: Any) -> None:
        forget(call)
        calls.append(call)

    with mock.patch.object(receive._Call, "forget_records", noted):
        slow = asyncio.create_task(pop.receive(room, max_count=3))
        await room.is_waited_for.wait()
        await until(lambda: calls)
        assert [one.records for one in calls[0].taken] == [None]
        room.is_there.set()
        answer = await slow
    [run] = answer.runs
    assert (run.count, len(run.records) > 3_000) == (3, True)
    assert await pop.ack(answer) == [None]


async def test_what_others_took_while_a_call_waited_for_room_is_not_in_its_answer(pop: Pop) -> None:
    await pop.send(b"0", b"1")
    room = Room()
    slow = asyncio.create_task(pop.receive(room, max_count=2))
    await room.is_waited_for.wait()
    pop.clock.now_ms += 10_500
    other = await pop.receive()
    room.is_there.set()
    mine = await slow
    assert (mine.count, other.count) == (1, 1)
    assert await pop.ack(mine) == await pop.ack(other) == [None]


async def test_a_call_that_finds_no_room_gives_its_messages_back(pop: Pop) -> None:
    await pop.send(b"0", b"1")

    async def none(_size_bytes: int) -> None:
        raise AnswersUnread("no room for the answer")

    with pytest.raises(AnswersUnread):
        await pop.receive(none, attempt_id="a", max_count=2)
    answer = await pop.receive(max_count=2)
    [run] = answer.runs
    assert (run.count, run.attempt) == (2, 1), "it was not delivered before"


async def test_a_writer_that_may_not_be_the_only_one_gives_nothing_away(each: Pop) -> None:
    """It gave messages that its successor had given to others already."""
    await each.send(b"0", b"1", key="k")
    mine = await each.receive()
    each.member.set_authority.allowed = False
    acked = asyncio.create_task(each.ack(mine))
    await until(lambda: sum(one.open_count for one in each.queues()) <= 1)
    received = asyncio.create_task(each.receive())
    await asyncio.wait({acked, received}, timeout=0.05)
    assert not acked.done()
    assert not received.done()
    each.clock.now_ms += 30_000
    each.member.set_authority.allowed = True
    each.member.storage.settle()
    assert await acked == [None]
    assert each.left_ms(await received) == ASK.invisible_ms


async def test_a_call_at_a_writer_that_was_deposed_is_refused(pop: Pop) -> None:
    await pop.send(b"0")
    pop.member.set_authority.allowed = False
    waits = asyncio.create_task(pop.receive())
    await asyncio.wait({waits}, timeout=0.05)
    assert not waits.done()
    pop.member.storage.depose()
    with pytest.raises(BrokerDraining):
        await waits
    with pytest.raises(BrokerDraining):
        await pop.member.storage.until_certain()


async def test_messages_without_a_key_wait_for_nobody(orderly: Pop) -> None:
    pop = orderly
    await pop.send(b"0", b"1", b"2")
    await pop.send(b"3", b"4", key="k")
    kept = await pop.receive()
    others = await pop.receive(max_count=9)
    assert others.count == 3
    assert await pop.ack(kept) == [None]
    pop.clock.now_ms += 11_000
    again = await pop.receive(max_count=9)
    assert [run.attempt for run in again.runs] == [2]
    assert again.count == 3, "those without a key wait for nobody the second time either"


@pytest.mark.parametrize("is_orderly", [True, False])
async def test_a_key_is_given_on_when_followers_know_what_freed_it(
    tmp_path: Path, is_orderly: bool
) -> None:
    """A successor gave the message before it to another member, out of order. Groups without order
    do not wait: their messages may come to two members after a fault.
    """
    async with living_pop(tmp_path, orderly=is_orderly) as pop:
        copied = TopicConfig("T", 1, 1, replication_mode=ReplicationMode.APPENDED)
        await pop.member.keeper.put_topic(copied)
        await pop.send(b"0", b"1", key="k")
        mine = await pop.receive()
        await pop.member.on_disk()
        authority, end = pop.member.set_authority, pop.member.store.appended_offset
        authority.set_replicated(Replicated(end, end, is_alone=False))
        acked = asyncio.create_task(pop.ack(mine))
        await until(lambda: pop.member.store.appended_offset > end)
        received = asyncio.create_task(pop.receive())
        appended = pop.member.store.appended_offset
        await until(lambda: pop.member.store.appended_offset > appended)
        await pop.member.on_disk_alone()
        assert not acked.done()
        assert received.done() is not is_orderly
        end = pop.member.store.appended_offset
        authority.set_replicated(Replicated(end, end, is_alone=False))
        pop.member.storage.settle()
        assert await acked == [None]
        assert (await received).count == 1


async def test_a_receive_that_cannot_be_written_gives_its_messages_back(pop: Pop) -> None:
    await pop.send(b"0")
    with (
        mock.patch.object(StateKeeper, "pops_written", side_effect=DiskFull("no room")),
        pytest.raises(DiskFull),
    ):
        await pop.receive()
    [run] = (await pop.receive()).runs
    assert run.attempt == 1

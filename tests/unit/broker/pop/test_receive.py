"""Receives at class level: whatever happens while a call waits, it ends, holds up nobody, and gives
its member the time that it asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq.errors import AnswersUnread, GroupNotFound, HandleInvalid, TopicNotFound
from cometmq.format import properties
from cometmq.format.properties import SHARDING_KEY
from cometmq.member.relay import RelayWriter
from cometmq.messaging.changes import OffsetsReset
from cometmq.messaging.group_policy import ConsumeMode, GroupPolicy
from cometmq.messaging.groups import GroupSettings, MemberTable
from cometmq.messaging.offsets import CommittedOffset
from cometmq.model import Position
from services.broker.groups.resets import Bound, ResetTarget
from services.broker.pop import receive
from services.broker.pop.acks import AckItem, AckService, Changed, ChangeItem
from services.broker.pop.groups import PopGroups
from services.broker.pop.receive import ReceiveAsk, Received, ReceiveService, Wanted
from services.broker.retry.retries import RetryService
from tests.support.cluster.members import Member, living_member
from tests.support.stores.small_stores import HOST, WallClock
from tests.support.waiting import until

KEY = ("T", 0)
ASK = ReceiveAsk(
    "G", (Wanted("T"),), None, 1, 1 << 20, 10_000, ResetTarget(bound=Bound.FIRST)
)


async def fast(_size_bytes: int) -> None:
    """There is room at once."""


class Room:
    """A peer that takes its answers late."""

    def __init__(self) -> None:
        self.is_waited_for, self.is_there = asyncio.Event(), asyncio.Event()

    async def __call__(self, _size_bytes: int) -> None:
        self.is_waited_for.set()
        await self.is_there.wait()


class Pop:
    """A topic, a group that receives from it, and the services of a broker over a real store."""

    def __init__(self, member: Member) -> None:
        self.member, self.clock = member, WallClock()
        metrics, storage, keeper = mock.MagicMock(), member.storage, member.keeper
        relays = RelayWriter(storage, member.state.topics, HOST, metrics)
        retries = RetryService(storage, keeper, relays, metrics, MemberTable(), self.clock)
        self.groups = PopGroups(storage, keeper, retries, metrics, self.clock)
        self.acks = AckService(self.groups)
        self.receives = ReceiveService(self.groups, storage, member.reader)

    async def send(self, *bodies: bytes, key: str = "") -> None:
        pairs = properties.encode({SHARDING_KEY: key}) if key else b""
        self.member.append("T", 0, *bodies, properties=pairs)
        await self.member.on_disk()

    async def receive(
        self, room: Callable[[int], Awaitable[None]] = fast, **asked: Any
    ) -> Received:
        return await self.receives.receive(replace(ASK, **asked), room)

    async def ack(self, answer: Received) -> list[object]:
        items = [AckItem(run.handle) for run in answer.runs]
        return list(await self.acks.acknowledge("G", items))

    def left_ms(self, answer: Received) -> int:
        [run] = answer.runs
        return run.visible_ms - self.groups.now_ms()


@pytest.fixture
async def pop(tmp_path: Path) -> AsyncIterator[Pop]:
    async with living_member(tmp_path) as member:
        await member.put("T")
        policy = GroupPolicy(mode=ConsumeMode.POP)
        await member.keeper.put_group(GroupSettings("G", policy=policy))
        yield Pop(member)


async def make_orderly(pop: Pop) -> None:
    policy = GroupPolicy(mode=ConsumeMode.POP, is_orderly=True)
    await pop.member.keeper.put_group(GroupSettings("G", policy=policy))


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
        read_offsets = receive.read_offsets

        async def slow(*args: Any, **options: Any) -> Any:
            found = await read_offsets(*args, **options)
            self.is_reading.set()
            await self.go_on.wait()
            return found

        patch.setattr(receive, "read_offsets", slow)


@pytest.mark.parametrize("orderly", [False, True])
@pytest.mark.parametrize("happens", EVENTS)
@pytest.mark.parametrize("where", ["reads", "buries", "waits for room"])
async def test_a_reset_or_a_deletion_while_messages_come_again_ends_the_call(
    pop: Pop, monkeypatch: pytest.MonkeyPatch, happens: Any, where: str, orderly: bool
) -> None:
    """The queue's leases lay there as before, and the loop of the broker never got past them."""
    if orderly:
        await make_orderly(pop)
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

    async def held(retries: RetryService, group: str, items: Any) -> Any:
        waits.set()
        await go_on.wait()
        return await send_back(retries, group, items)

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


@pytest.mark.parametrize("orderly", [False, True])
async def test_a_writer_that_may_not_be_the_only_one_gives_nothing_away(
    pop: Pop, orderly: bool
) -> None:
    """It gave messages that its successor had given to others already."""
    if orderly:
        await make_orderly(pop)
    await pop.send(b"0", b"1", key="k")
    mine = await pop.receive()
    pop.member.set_authority.allowed = False
    acked = asyncio.create_task(pop.ack(mine))
    change = [ChangeItem(AckItem(mine.runs[0].handle), 60_000)]
    await until(lambda: not pop.member.state.pops.open_count)
    received = asyncio.create_task(pop.receive())
    changed = asyncio.create_task(pop.acks.change("G", change))
    done, _ = await asyncio.wait({acked, received, changed}, timeout=0.05)
    assert not done - {changed}
    assert all(isinstance(one, HandleInvalid) for one in await changed)
    pop.clock.now_ms += 30_000
    pop.member.set_authority.allowed = True
    pop.member.storage.settle()
    assert await acked == [None]
    assert pop.left_ms(await received) == ASK.invisible_ms


async def test_a_changed_time_is_answered_under_the_lease_only(pop: Pop) -> None:
    await pop.send(b"0")
    [run] = (await pop.receive()).runs
    pop.member.set_authority.allowed = False
    item = ChangeItem(AckItem(run.handle), 60_000)
    changed = asyncio.create_task(pop.acks.change("G", [item]))
    await asyncio.wait({changed}, timeout=0.05)
    assert not changed.done()
    pop.member.set_authority.allowed = True
    pop.member.storage.settle()
    [answer] = await changed
    assert isinstance(answer, Changed)


async def test_messages_without_a_key_wait_for_nobody(pop: Pop) -> None:
    await make_orderly(pop)
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

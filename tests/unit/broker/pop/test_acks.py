"""Acknowledgements and changes of invisible times at class level."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from cometmq.errors import CometError
from cometmq.member.storage.authority import Replicated
from cometmq.model import FlushMode, ReplicationMode, TopicConfig
from services.broker.pop import groups
from services.broker.pop.acks import AckItem, Changed, ChangeItem
from services.broker.pop.groups import PopGroups
from services.broker.pop.receive import Received
from tests.support.cluster.pop_parts import KEY, Pop, living_pop
from tests.support.stores.gates import HeldFlush
from tests.support.waiting import until


async def change(pop: Pop, answer: Received) -> list[Changed | CometError]:
    items = [ChangeItem(AckItem(run.handle), 60_000) for run in answer.runs]
    return await pop.acks.change("G", items)


@pytest.mark.parametrize("asks", [Pop.ack, change])
async def test_what_a_member_says_is_answered_when_it_is_on_the_disk_of_a_synced_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: object
) -> None:
    held = HeldFlush(monkeypatch)
    async with living_pop(tmp_path, flush=FlushMode.SYNC) as pop:
        await pop.send(b"0")
        answer = await pop.receive()
        await pop.member.on_disk()
        held.hold()
        said = asyncio.create_task(asks(pop, answer))  # type: ignore[operator]
        await until(lambda: held.waiting)
        assert not said.done()
        end = pop.member.store.appended_offset
        held.release()
        assert not isinstance((await said)[0], CometError)
        assert pop.member.store.flushed_offset >= end


@pytest.mark.parametrize("asks", [Pop.ack, change])
async def test_what_a_member_says_is_answered_when_followers_have_it_of_a_copied_topic(
    tmp_path: Path, asks: object
) -> None:
    async with living_pop(tmp_path) as pop:
        copied = TopicConfig("T", 1, 1, replication_mode=ReplicationMode.APPENDED)
        await pop.member.keeper.put_topic(copied)
        await pop.send(b"0")
        answer = await pop.receive()
        await pop.member.on_disk()
        authority, end = pop.member.set_authority, pop.member.store.appended_offset
        authority.set_replicated(Replicated(end, end, is_alone=False))
        said = asyncio.create_task(asks(pop, answer))  # type: ignore[operator]
        await until(lambda: pop.member.store.appended_offset > end)
        await pop.member.on_disk_alone()
        assert not said.done()
        end = pop.member.store.appended_offset
        authority.set_replicated(Replicated(end, end, is_alone=False))
        pop.member.storage.settle()
        assert not isinstance((await said)[0], CometError)


async def test_a_changed_time_is_answered_under_the_lease_only(tmp_path: Path) -> None:
    async with living_pop(tmp_path) as pop:
        await pop.send(b"0")
        answer = await pop.receive()
        pop.member.set_authority.allowed = False
        changed = asyncio.create_task(change(pop, answer))
        await asyncio.wait({changed}, timeout=0.05)
        assert not changed.done()
        pop.member.set_authority.allowed = True
        pop.member.storage.settle()
        assert isinstance((await changed)[0], Changed)


async def test_a_changed_time_counts_from_when_what_failed_was_sent_away(tmp_path: Path) -> None:
    """Another item of the call was buried first, which took 30 s of the time."""
    async with living_pop(tmp_path) as pop:
        settings = pop.member.keeper.group("G")
        await pop.send(b"0", b"1")
        kept, dead = await pop.receive(), await pop.receive()
        send_away = PopGroups.send_away

        async def slow(*args: object) -> None:
            pop.clock.now_ms += 5_000
            await send_away(*args)  # type: ignore[arg-type]

        items = [
            ChangeItem(AckItem(kept.runs[0].handle), 60_000),
            ChangeItem(AckItem(dead.runs[0].handle), 0, failed=True),
        ]
        with (
            mock.patch.object(PopGroups, "send_away", slow),
            mock.patch.object(PopGroups, "is_dead", return_value=True),
        ):
            longer, buried = await pop.acks.change(settings.name, items)
        assert isinstance(longer, Changed)
        assert longer.visible_ms - pop.groups.now_ms() == 60_000
        assert buried == Changed("", 0)


async def test_what_is_sent_away_leaves_its_lease_though_its_member_goes_away(
    tmp_path: Path,
) -> None:
    """While the copy waits for followers: else the message would come a second time."""
    async with living_pop(tmp_path) as pop:
        copied = TopicConfig("T", 1, 1, replication_mode=ReplicationMode.APPENDED)
        await pop.member.keeper.put_topic(copied)
        await pop.member.keeper.create_system_topic("%DLQ%G", 1)
        await pop.send(b"0")
        answer = await pop.receive()
        await pop.member.on_disk()
        authority, store = pop.member.set_authority, pop.member.store
        end = store.appended_offset
        authority.set_replicated(Replicated(end, end, is_alone=False))
        item = ChangeItem(AckItem(answer.runs[0].handle), 0, failed=True)
        with mock.patch.object(PopGroups, "is_dead", return_value=True):
            said = asyncio.create_task(pop.acks.change("G", [item]))
            await until(lambda: store.queue_bounds("%DLQ%G", 0)[1] == 1)
            said.cancel()
            await asyncio.wait({said})
        queue = pop.member.state.pops.find("G", KEY)
        assert queue is not None
        assert queue.open_count == 0


async def test_an_acknowledgement_tells_those_that_wait_for_its_key(tmp_path: Path) -> None:
    async with living_pop(tmp_path, orderly=True) as pop:
        await pop.send(b"0", b"1", key="k")
        mine = await pop.receive()
        assert (await pop.receive()).is_blocked
        before = pop.groups.returns.number("G", KEY)
        assert await pop.ack(mine) == [None]
        assert pop.groups.returns.number("G", KEY) > before


async def test_an_acknowledgement_tells_those_that_wait_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "OPEN_MAX", 1)
    async with living_pop(tmp_path) as pop:
        await pop.send(b"0", b"1")
        mine = await pop.receive()
        before = pop.groups.returns.number("G", KEY)
        assert await pop.ack(mine) == [None]
        assert pop.groups.returns.number("G", KEY) > before

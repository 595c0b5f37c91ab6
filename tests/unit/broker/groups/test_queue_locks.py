"""A lock is answered only while no successor can have given it to another client."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cometmq.errors import QueueLocked
from cometmq.messaging.groups import GroupSettings
from cometmq.model import FlushMode
from services.broker.groups.queue_locks import QueueLocks
from tests.support.cluster.members import Member, living_member
from tests.support.stores.gates import HeldFlush
from tests.support.stores.small_stores import WallClock
from tests.support.waiting import until

KEY = ("T", 0)


async def locks_of(member: Member) -> QueueLocks:
    await member.put("T", mode=FlushMode.SYNC)
    await member.keeper.put_group(GroupSettings("G"))
    return QueueLocks(member.keeper, member.storage, WallClock())


async def test_who_may_not_acknowledge_renews_no_lock(tmp_path: Path) -> None:
    """A writer that was cut off renewed for ever: its successor counted a lease and gave the queue
    to another client, and both had it.
    """
    async with living_member(tmp_path) as member:
        locks = await locks_of(member)
        [number] = await locks.lock("G", "a", [KEY])
        member.set_authority.allowed = False
        renewing = asyncio.create_task(locks.lock("G", "a", [KEY]))
        refused = await locks.lock("G", "b", [KEY])
        assert isinstance(refused[0], QueueLocked)
        await asyncio.wait({renewing}, timeout=0.01)
        assert not renewing.done()
        member.set_authority.allowed = True
        member.storage.settle()
        assert await renewing == [number]


async def test_a_grant_that_is_not_on_disk_is_not_answered_when_it_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second call took the first one's grant for its own and was answered at once: a crash
    took the grant away, and the next client got the queue as well.
    """
    held = HeldFlush(monkeypatch)
    async with living_member(tmp_path) as member:
        locks = await locks_of(member)
        held.hold()
        calls = [asyncio.create_task(locks.lock("G", "a", [KEY])) for _ in range(2)]
        await until(lambda: held.waiting)
        assert not any(call.done() for call in calls)
        held.release()
        first, second = await asyncio.gather(*calls)
        assert first == second

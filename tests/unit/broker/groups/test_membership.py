from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from cometmq.errors import InvalidRequest, TopicNameInvalid
from cometmq.messaging.groups import Membership, MemberTable
from cometmq.model import Subscription
from cometmq.v1 import broker_pb2
from services.broker.groups.membership import Groups

T, U = Subscription("T"), Subscription("U")


@pytest.fixture
def groups() -> Groups:
    return Groups(MemberTable())


Told = AsyncIterator[Membership | broker_pb2.ClientQuestion]


async def following(views: Told) -> list[str]:
    view = await asyncio.wait_for(anext(views), 10)
    assert isinstance(view, Membership)
    return [member.client_id for member in view.members]


async def ended(views: Told) -> bool:
    async with asyncio.timeout(10):
        return [view async for view in views] == []


async def test_everybody_sees_everybody(groups: Groups) -> None:
    a = groups.join("g", "a", [T])
    seen_by_a = a.outgoing()
    assert await following(seen_by_a) == ["a"]
    b = groups.join("g", "b", [T])
    seen_by_b = b.outgoing()
    assert await following(seen_by_a) == ["a", "b"]
    assert await following(seen_by_b) == ["a", "b"]
    b.leave()
    assert await following(seen_by_a) == ["a"]
    assert len(groups) == 1


async def test_a_question_comes_between_the_views_and_only_to_its_member(groups: Groups) -> None:
    a, b = groups.join("g", "a", [T]), groups.join("g", "b", [T])
    told_a, told_b = a.outgoing(), b.outgoing()
    assert await following(told_a) == await following(told_b) == ["a", "b"]
    found = groups.stream("g", "a")
    assert found is a
    asked = broker_pb2.ClientQuestion(question_id=b"1")
    a.questioned.put(asked)
    assert await asyncio.wait_for(anext(told_a), 10) == asked
    b.leave()
    assert await following(told_a) == ["a"]
    assert groups.stream("g", "b") is None


async def test_a_slow_reader_gets_the_latest_only(groups: Groups) -> None:
    seen = groups.join("g", "a", [T]).outgoing()
    await following(seen)
    for number in range(5):
        groups.join("g", f"b{number}", [T])
    assert len(await following(seen)) == 6
    waiting = asyncio.ensure_future(anext(seen))
    await asyncio.sleep(0)
    assert not waiting.done(), "the changes in between are not queued up"
    waiting.cancel()


async def test_the_newer_stream_wins(groups: Groups) -> None:
    old = groups.join("g", "a", [T])
    seen = old.outgoing()
    await following(seen)
    new = groups.join("g", "a", [U])
    assert await ended(seen)
    old.subscribe("g", "a", [T])  # it can no longer change anything
    old.leave()  # … nor end it
    [member] = groups.table.view("g").members
    assert (member.stream, member.subscriptions) == (new.number, (U,))
    assert len(groups) == 1


async def test_a_new_subscription_is_told_the_same_one_is_not(groups: Groups) -> None:
    stream = groups.join("g", "a", [T])
    seen = stream.outgoing()
    first = await anext(seen)
    assert isinstance(first, Membership)
    stream.subscribe("g", "a", [T])
    waiting = asyncio.ensure_future(anext(seen))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done(), "nothing has changed"
    stream.subscribe("g", "a", [U])
    second = await waiting
    assert isinstance(second, Membership)
    assert second.version > first.version
    assert second.members[0].subscriptions == (U,)


async def test_ending_ends_the_views(groups: Groups) -> None:
    stream = groups.join("g", "a", [T])
    seen = stream.outgoing()
    await following(seen)
    stream.end()
    assert await ended(seen)


@pytest.mark.parametrize(("group", "client_id"), [("h", "a"), ("g", "b")])
async def test_a_stream_stays_who_it_is(groups: Groups, group: str, client_id: str) -> None:
    stream = groups.join("g", "a", [T])
    with pytest.raises(InvalidRequest):
        stream.subscribe(group, client_id, [T])


async def test_who_is_refused_leaves_nothing_behind(groups: Groups) -> None:
    with pytest.raises(TopicNameInvalid):
        groups.join("g", "a", [Subscription("../x")])
    assert len(groups) == 0
    assert groups.table.groups() == []


async def test_ten_thousand_member_names_leave_nothing_behind() -> None:
    groups = Groups(MemberTable())
    for n in range(10_000):
        groups.join("g", f"member-{n}", []).leave()
    assert len(groups) == len(groups._streams) == len(groups._notices) == 0
    assert groups.table.groups() == []
    assert groups.table.view("g").members == ()

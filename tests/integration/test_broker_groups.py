"""Consumer groups come and go: which are made, who may make how many, how one is deleted."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.client.names import own_group
from cometmq.member.state.keeper import StateKeeper
from cometmq.messaging.state import STATE_TOPIC
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from services.broker.groups.coordinator import GroupCoordinator
from tests.support.cluster.broker import SYNC, BrokerClient, LiveBroker, running_broker
from tests.support.stores.gates import HeldFlush
from tests.support.waiting import until, until_async


async def groups(broker: BrokerClient) -> dict[str, pb.GroupSummary]:
    answer = await broker.admin.ListGroups(pb.ListGroupsRequest())
    assert list(answer.groups) == [summary.group for summary in answer.summaries]
    return {summary.group: summary for summary in answer.summaries}


async def delete(broker: BrokerClient, group: str) -> str:
    """The name of the error; empty: it is done."""
    try:
        await broker.admin.DeleteGroup(pb.DeleteGroupRequest(group=group))
    except grpc.aio.AioRpcError as error:
        return error_from(error).name()
    return ""


async def join(broker: BrokerClient, group: str, client: str = "c") -> tuple[grpc.aio.Call, str]:
    """The stream, and the name of the error that it ended with."""
    stream = broker.stub.JoinGroup()
    request = pb.JoinGroupRequest(
        group=group, client_id=client, subscriptions=[pb.Subscription(topic="T")]
    )
    try:
        await stream.write(request)
        await stream.read()
    except grpc.aio.AioRpcError as error:
        return stream, error_from(error).name()
    return stream, ""


async def prepared(broker: LiveBroker) -> None:
    await broker.put_topic("T", 2)
    await broker.send("T", 0, *[b"."] * 5)
    assert len(await broker.read_queue("T", 0)) == 5


async def test_garbage_commits_make_no_group_and_write_nothing(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await prepared(broker)
        records = broker.store.queue_bounds(STATE_TOPIC, 0)[1]
        for number in range(200):
            results = await broker.commit(
                f"garbage-{number}", ("U", 0, 0, 0), ("T", 9, 0, 0), ("T", 0, 0, 6), ("T", 0, 0, -1)
            )
            errors = [result.error.name for result in results]
            assert errors == [
                "TOPIC_NOT_FOUND",
                "QUEUE_NOT_FOUND",
                "OFFSET_INVALID",
                "OFFSET_INVALID",
            ]
            assert await broker.commit(f"empty-{number}") == []
        assert not await groups(broker)
        assert broker.store.queue_bounds(STATE_TOPIC, 0)[1] == records
        # One that is real makes the group, and of a known group any is taken as far as it goes.
        results = await broker.commit("real", ("T", 0, 0, 99), ("U", 0, 0, 0), ("T", 1, 0, 0))
        assert [r.position.offset for r in results if not r.HasField("error")] == [5, 0]
        assert list(await groups(broker)) == ["real"]


async def test_one_address_makes_so_many_groups_and_then_one_at_a_time(tmp_path: Path) -> None:
    limits = {"group_creations_per_peer_max": 3, "group_creation_interval_s": 86_400.0}
    async with running_broker(tmp_path, **limits) as broker:
        await prepared(broker)
        streams = []
        for number in range(5):
            stream, error = await join(broker, f"joined-{number}")
            streams.append(stream)
            assert error == ("" if number < 3 else "LIMIT_EXCEEDED")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await broker.commit("committed", ("T", 0, 0, 1))
        assert error_from(refused.value).name() == "LIMIT_EXCEEDED"
        assert "group_creations_per_peer_max" in str(error_from(refused.value))
        await broker.commit("joined-0", ("T", 0, 0, 1))  # one that is there costs nothing
        _, error = await join(broker, "joined-1", "another")
        assert not error
        assert list(await groups(broker)) == ["joined-0", "joined-1", "joined-2"]


async def test_members_that_start_together_make_one_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldFlush(monkeypatch)
    limits = {"group_creations_per_peer_max": 1, "group_creation_interval_s": 86_400.0}
    async with running_broker(tmp_path, **limits) as broker:
        await broker.put_topic("T", 1, SYNC)
        held.hold()
        joining = [asyncio.create_task(join(broker, "G", f"{number}")) for number in range(4)]
        await asyncio.wait(joining, timeout=0.2)
        held.release()
        assert {error for _, error in await asyncio.gather(*joining)} == {""}


async def test_one_address_makes_so_many_topics_by_sending(tmp_path: Path) -> None:
    limits = {"topic_creations_per_peer_max": 2, "topic_creation_interval_s": 86_400.0}
    async with running_broker(tmp_path, auto_create_topic_enable=True, **limits) as broker:
        for topic in ("A", "B", "A"):
            await broker.send(topic, 0, b"x")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await broker.send("C", 0, b"x")
        assert error_from(refused.value).name() == "LIMIT_EXCEEDED"
        await broker.put_topic("C", 1)  # an operator's are not counted
        await broker.send("C", 0, b"x")


async def test_one_address_has_so_many_streams_open(tmp_path: Path) -> None:
    async with running_broker(tmp_path, streams_per_peer_max=2) as broker:
        await prepared(broker)
        lanes = [await broker.lane() for _ in range(2)]
        third = broker.stub.SendStream()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await third.read()
        assert error_from(refused.value).name() == "LIMIT_EXCEEDED"
        members = [await join(broker, "g", f"c{number}") for number in range(3)]
        assert [error for _, error in members] == ["", "", "LIMIT_EXCEEDED"]
        await lanes[0].call.done_writing()
        await lanes[0].ended()

        async def there_is_room() -> bool:
            with suppress(grpc.aio.AioRpcError):
                await (await broker.lane()).send(("T", 0, [b"x"]))
                return True
            return False

        await until_async(there_is_room)


async def test_a_group_is_deleted_with_what_it_committed(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await prepared(broker)
        stream, _ = await join(broker, "g")
        await broker.commit("g", ("T", 0, 0, 3))
        await broker.commit("other", ("T", 0, 0, 2))
        summary = (await groups(broker))["g"]
        assert (summary.member_count, summary.queue_count, summary.idle_ms) == (1, 1, 0)
        assert await delete(broker, "g") == "GROUP_IN_USE"
        stream.cancel()

        async def left() -> bool:
            return (await groups(broker))["g"].member_count == 0

        await until_async(left)
        assert await delete(broker, "g") == ""
        assert await delete(broker, "g") == "GROUP_NOT_FOUND"
        assert await delete(broker, "a b") == "GROUP_NAME_INVALID"
        assert list(await groups(broker)) == ["other"]
        assert await broker.committed("g", "T", 0) is None
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert list(await groups(broker)) == ["other"]
        assert await broker.committed("g", "T", 0) is None
        assert await broker.committed("other", "T", 0) is not None
        await broker.commit("g", ("T", 0, 0, 1))  # made anew
        position = await broker.committed("g", "T", 0)
        assert position is not None
        assert position.offset == 1


async def test_what_comes_while_a_group_is_deleted_makes_it_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that was taken before counts for the old group, whatever order the log has."""
    held = HeldFlush(monkeypatch)
    async with running_broker(tmp_path) as broker:
        await prepared(broker)
        await broker.commit("g", ("T", 0, 0, 4))
        held.hold()
        held.waiting = 0
        deleting = asyncio.create_task(delete(broker, "g"))
        await until(lambda: held.waiting)
        committing = [
            asyncio.create_task(broker.commit("g", ("T", 0, 0, offset))) for offset in (1, 2)
        ]
        joining = asyncio.create_task(join(broker, "g"))
        assert not (await asyncio.wait([deleting, *committing, joining], timeout=0.1))[0]
        held.release()
        assert await deleting == ""
        await asyncio.gather(*committing)
        assert (await joining)[1] == ""
        assert (await groups(broker))["g"].member_count == 1
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert list(await groups(broker)) == ["g"]
        position = await broker.committed("g", "T", 0)
        assert position is not None
        assert position.offset == 2, "not the 4 of the group before"


async def test_a_broadcasting_client_that_comes_back_in_time_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits while others are forgotten."""
    coordinators: list[GroupCoordinator] = []
    init, drop_group = GroupCoordinator.__init__, StateKeeper.drop_group

    def kept(coordinator: GroupCoordinator, *arguments: Any, **more: Any) -> None:
        init(coordinator, *arguments, **more)
        coordinators.append(coordinator)

    monkeypatch.setattr(GroupCoordinator, "__init__", kept)
    away, back = own_group("G", "a"), own_group("G", "b")
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0")
        await broker.read_queue("T", 0)
        for name in (away, back):
            [result] = await broker.commit(name, ("T", 0, 0, 0))
            assert not result.HasField("error")

        async def drop(keeper: StateKeeper, group: str) -> None:
            await broker.commit(back, ("T", 0, 0, 1))
            await drop_group(keeper, group)

        monkeypatch.setattr(StateKeeper, "drop_group", drop)
        await asyncio.sleep(0.3)
        assert await coordinators[0].drop_idle_broadcasters(0.3) == [away]
        assert await broker.committed(away, "T", 0) is None
        position = await broker.committed(back, "T", 0)
        assert position is not None
        assert position.offset == 1

"""Static members that are away: an operator sees what they keep, and gives it to the others."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from cometmq.messaging import groups
from services.broker.groups import changed_ids
from tests.integration.test_client_static import QUEUES, cluster, join, names, pod
from tests.support.cluster.broker import LiveBroker, running_broker
from tests.support.cluster.commands import Commands
from tests.support.waiting import until, until_async

SESSION_MS = 1_800_000


async def leave_behind(broker: LiveBroker, count: int, group: str = "G") -> list[str]:
    """Static members that join and go; their names."""
    gone = [f"gone-{n:02}" for n in range(count)]
    for stream in [await join(broker, name, group, session_ms=SESSION_MS) for name in gone]:
        stream.cancel()

    async def all_away() -> bool:
        known = await names(broker, group)
        return all(known[name] for name in gone)

    await until_async(all_away)
    return gone


async def test_the_queues_of_members_that_are_removed_go_to_the_others(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, broker), pod(namesrv, "stays") as stays:
        command = Commands(namesrv)
        await stays.subscribe("T")
        gone = await leave_behind(broker, 20)
        await until(lambda: not stays.assigned)
        away = await command("group", "members", "G", "--away")
        assert [one["client_id"] for one in away] == gone
        for one in away:
            assert one["address"].startswith("127.0.0.1:")
            assert SESSION_MS - 60_000 < one["session_left_ms"] <= SESSION_MS
            assert one["away_ms"] + one["session_left_ms"] == SESSION_MS
        [row] = await command("group", "list")
        assert (row["member_count"], row["away_count"]) == (21, 20)
        [removed] = await command("group", "members", "G", "--remove", "gone-00")
        assert (removed["client_id"], removed["broker_groups"]) == ("gone-00", ["g1"])
        assert len(await command("group", "members", "G", "--away")) == 19
        assert len(await command("group", "members", "G", "--remove-away")) == 19
        await until(lambda: len(stays.assigned) == QUEUES)
        assert await command("group", "members", "G", "--remove-away") == []
        for stream in [await join(broker, name) for name in gone]:  # each joins anew
            stream.cancel()
        await until(lambda: len(stays.assigned) == QUEUES)


async def test_a_member_that_is_connected_is_not_removed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (namesrv, broker), pod(namesrv, "stays") as stays:
        command = Commands(namesrv)
        await stays.subscribe("T")
        await until(lambda: len(stays.assigned) == QUEUES)
        [row] = await command("group", "members", "G", "--remove", "stays", code=3)
        assert (row["broker_groups"], row["connected"]) == ([], ["g1"])
        unknown = await command("group", "members", "G", "--remove", "nobody", code=1)
        assert "CLIENT_NOT_FOUND" in unknown
        assert len(stays.assigned) == QUEUES
        assert await names(broker) == {"stays": False}


async def test_a_group_that_cannot_be_deleted_names_its_members_and_what_removes_them(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path) as (namesrv, broker):
        command = Commands(namesrv)
        await leave_behind(broker, 7)
        living = await join(broker, "living")
        refused = await command("group", "delete", "G", "--yes", code=1)
        assert "living is connected" in refused
        assert "gone-00, gone-01, gone-02, gone-03, gone-04 and 2 more are away" in refused
        assert "cometmq group members G --remove-away" in refused
        living.cancel()
        await command("group", "members", "G", "--remove-away")

        async def deleted() -> bool:
            return not await names(broker)

        await until_async(deleted)
        assert (await command("group", "delete", "G", "--yes"))[0]["group"] == "G"


async def test_what_was_removed_gives_its_place_back(tmp_path: Path) -> None:
    async with cluster(tmp_path, streams_per_peer_max=3) as (namesrv, broker):
        await leave_behind(broker, 3)
        await Commands(namesrv)("group", "members", "G", "--remove-away")
        for stream in [await join(broker, f"c{n}") for n in range(3)]:
            stream.cancel()


async def test_a_static_member_that_reads_a_broker_group_no_more_is_not_away_there(
    tmp_path: Path,
) -> None:
    """Else nobody would get its queues there before its session is over."""
    async with (
        cluster(tmp_path) as (namesrv, _),
        running_broker(tmp_path / "2", broker_group="g2", namesrv=(namesrv,)) as other,
        pod(namesrv, "leaves") as leaves,
        pod(namesrv, "stays") as stays,
    ):
        await other.put_topic("U", QUEUES)
        for one in (leaves, stays):
            await one.subscribe("T")
            await one.subscribe("U")
        await until(lambda: len(leaves.assigned) == len(stays.assigned) == QUEUES)
        await leaves.unsubscribe("U")
        await until(lambda: len([q for q in stays.assigned if q.topic == "U"]) == QUEUES)
        assert await names(other) == {"stays": False}


async def test_client_ids_that_change_at_a_deploy_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for where in (groups, changed_ids):
        monkeypatch.setattr(where, "BACK_S", 0.1)
    async with cluster(tmp_path) as (namesrv, _):
        command = Commands(namesrv)

        async def deploy(version: str) -> None:
            """Consumers with ids of their own, which stop again."""
            async with AsyncExitStack() as stack:
                pods = [
                    await stack.enter_async_context(pod(namesrv, f"{version}-{n}"))
                    for n in range(2)
                ]
                for one in pods:
                    await one.subscribe("T")
                await until(lambda: all(one.assigned for one in pods))
                if version == "v1":
                    assert not (await command("group", "status", "G"))["changed_ids"]
                    return
                await until(lambda: "client ids of a group seem to change" in caplog.text)
                report = await command("group", "status", "G", code=3)
                assert "v1-0, v1-1 are away" in report["changed_ids"]
                assert len(await command("group", "members", "G", code=3)) == 4
                await command("group", "members", "G", "--remove-away")
                await until(lambda: sum(len(one.assigned) for one in pods) == QUEUES)
                assert len(await command("group", "members", "G")) == 2

        await deploy("v1")
        await deploy("v2")

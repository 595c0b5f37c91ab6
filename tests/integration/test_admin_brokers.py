"""``cometmq broker`` over a live group."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.admin import brokers, group_status, ops
from cometmq.admin.connection import Connection
from cometmq.errors import GroupNotFound, InvalidRequest, NoFollower
from cometmq.v1 import member_pb2, namesrv_pb2
from tests.support.cluster.broker import SYNC, running_namesrv
from tests.support.cluster.live_group import live_group
from tests.support.waiting import until_async


async def test_status_hand_over_checksum(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,)) as group,
        Connection(namesrv) as connection,
    ):
        await group[0].client.put_topic("T", 1, SYNC)
        await group[0].client.send("T", 0, b"x" * 1000)

        async def in_step() -> bool:
            views = await brokers.describe(connection)
            return [view.behind_bytes for view in views] == [0, 0]

        await until_async(in_step)
        views = await brokers.describe(connection)
        assert [(v.member_id, v.role, v.epoch) for v in views] == [
            (0, "writer", 1),
            (1, "follower", 1),
        ]
        with pytest.raises(NoFollower, match="member 9"):
            await brokers.step_down(connection, "g1", 9)
        with pytest.raises(GroupNotFound):
            await brokers.step_down(connection, "g2")
        end = views[0].log_appended_offset
        done = await brokers.step_down(connection, "g1", 1)
        assert (done.from_member, done.to_member, done.epoch) == (0, 1, 2)
        assert done.log_end_offset >= (end or 0) > 1000
        await group[0].until_role("follower")

        async def both_there() -> bool:
            return len(await brokers.describe(connection)) == 2

        await until_async(both_there)
        sums = await brokers.compare_logs(connection, ("g1",))
        assert [(view.member_id, view.role) for view in sums] == [(0, "follower"), (1, "writer")]
        assert all(view.equal and view.to_offset > done.log_end_offset - 1 for view in sums)
        with pytest.raises(GroupNotFound, match="g7"):
            await brokers.compare_logs(connection, ("g7",))


async def test_who_was_in_sync_is_known_without_a_writer(tmp_path: Path) -> None:
    """The follower tells what it has read in the lease."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,), lease_duration_s=60.0) as group,
        Connection(namesrv) as connection,
    ):
        await group[0].client.put_topic("T", 1, SYNC)
        await group.all_in_sync(0, 1)

        async def well() -> bool:
            return [view.status for view in await group_status.describe(connection)] == ["ok"]

        await until_async(well)
        [writer, follower] = [
            await group[each].members.DescribeReplica(member_pb2.DescribeReplicaRequest())
            for each in (0, 1)
        ]
        replica_ids = [(0, writer.store_id), (1, follower.store_id)]
        assert [(s.member_id, s.store_id) for s in writer.lease.in_sync] == replica_ids
        await group[0].crash()
        # The name server would take it out after two minutes of silence.
        gone = namesrv_pb2.UnregisterMemberRequest(
            cluster=group[0].config.cluster,
            broker_group=writer.broker_group,
            member_id=writer.member_id,
            epoch=writer.epoch,
            store_id=writer.store_id,
        )
        await connection.ask_namesrv(lambda stub: stub.UnregisterMember, gone)

        async def told() -> bool:
            [view] = await group_status.describe(connection)
            return (view.status, view.in_sync, view.electable) == ("no writer", [0, 1], [0, 1])

        await until_async(told)
        [view] = await group_status.describe(connection)
        assert view.troubles == ["member 0 is not registered"]
        assert "member 1 takes over" in view.advice


async def test_cleaning_asks_every_member_for_its_own_disk(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,)) as group,
        Connection(namesrv) as connection,
    ):
        await group[0].client.put_topic("T", 1, SYNC)
        store = group[0].store
        assert store is not None
        store._dispatcher.get("orphan", 0)  # as a crash in the middle of a deletion leaves it

        async def both_there() -> bool:
            return len(await brokers.describe(connection)) == 2

        await until_async(both_there)
        cleaned = await brokers.clean(connection)
        assert [(view.member_id, view.role, view.topics) for view in cleaned] == [
            (0, "writer", ["orphan"]),
            (1, "follower", []),
        ]
        assert all(view.log_file_count == view.log_min_offset == 0 for view in cleaned)
        assert [view.refusal for view in await brokers.describe(connection)] == ["", ""]
        with pytest.raises(GroupNotFound, match="g7"):
            await brokers.clean(connection, ("g7",))


async def test_a_topic_gets_and_keeps_its_reserve_time(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, members=1, namesrv=(namesrv,)),
        Connection(namesrv) as connection,
    ):
        with pytest.raises(InvalidRequest, match="time of 100 h is more than the 72 h for which"):
            await ops.create_topic(connection, "T", reserve_time_ms=100 * 3_600_000)
        [created] = await ops.create_topic(connection, "T", reserve_time_ms=3_600_000)
        assert created.reserve_time_ms == 3_600_000
        [kept] = await ops.create_topic(connection, "T", read_queue_count=2)
        assert (kept.reserve_time_ms, kept.read_queue_count) == (3_600_000, 2)
        [topic] = await ops.list_topics(connection)
        assert topic.reserve_time_ms == 3_600_000
        [none] = await ops.create_topic(connection, "T", reserve_time_ms=0)
        assert none.reserve_time_ms == 0

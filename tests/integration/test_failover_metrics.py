"""What Prometheus sees of a take-over, at who leads now and at who comes back."""

from __future__ import annotations

from pathlib import Path

from cometmq.v1 import member_pb2
from tests.integration.test_failover import (
    QUICK,
    REPLICATED,
)
from tests.support.cluster.live_group import LiveMember, live_group
from tests.support.cluster.pullhold import sample


async def told(member: LiveMember, name: str, label: str = "") -> float:
    return await sample(member.metrics_address, f"cometmq_{name}", label)


async def test_a_take_over_is_counted_and_timed(tmp_path: Path) -> None:
    async with live_group(tmp_path, 2, **REPLICATED, min_in_sync_replicas=2) as group:
        await group.all_in_sync(0, 1)
        assert await told(group[0], "elections_total", 'reason="first"') == 1
        assert await told(group[0], "in_sync_members") == 2
        assert await told(group[0], "in_sync_members_min") == 2
        assert await told(group[0], "electable_members") == 2
        assert await told(group[0], "writer_valid") == 1
        assert await told(group[1], "elections_total") == 0
        await group[0].crash()
        await group[1].until_role("writer")
        assert await told(group[1], "elections_total", 'reason="failover"') == 1
        assert await told(group[1], "elections_total") == 1
        assert await told(group[1], "in_sync_members") == 1
        silent_s = await told(group[1], "failover_seconds", 'since="writer_heard"')
        leading_s = await told(group[1], "failover_seconds", 'since="lease_taken"')
        # It promised not to stand for a duration after what it heard last.
        assert silent_s > QUICK["lease_duration_s"]
        assert 0 < leading_s < silent_s


async def test_counts_of_elections_outlive_a_change_of_role(tmp_path: Path) -> None:
    async with live_group(tmp_path, 2, **REPLICATED) as group:
        await group.all_in_sync(0, 1)
        for old, new in ((0, 1), (1, 0)):
            await group[old].members.StepDown(member_pb2.StepDownRequest())
            await group[new].until_role("writer")
            await group.all_in_sync(0, 1)
        assert await told(group[0], "elections_total", 'reason="first"') == 1
        assert await told(group[0], "elections_total", 'reason="handover"') == 1


async def test_a_planned_change_of_role_is_no_unplanned_start_and_a_crash_is_one(
    tmp_path: Path,
) -> None:
    """The next role may go on with the open store: that is no store that a crash has left."""
    async with live_group(tmp_path, 2, **REPLICATED) as group:
        await group.all_in_sync(0, 1)
        for old, new in ((0, 1), (1, 0)):
            await group[old].members.StepDown(member_pb2.StepDownRequest())
            await group[new].until_role("writer")
            await group.all_in_sync(0, 1)
        assert [
            await told(one, "unplanned_start_time_seconds") for one in (group[0], group[1])
        ] == [
            0,
            0,
        ]
        await group[0].crash()
        await group[1].until_role("writer")
        await group[0].start("follower")
        for one in (group[0], group[1]):
            assert await told(one, "unplanned_start_time_seconds") > 1_700_000_000

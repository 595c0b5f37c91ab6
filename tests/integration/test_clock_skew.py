"""A broker group in which the clock of one machine is wrong: who says so, who leads, when messages
that wait are delivered.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from cometmq.model import ReplicationMode
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import member_pb2
from tests.support.cluster.broker import WrongClock, running_namesrv
from tests.support.cluster.live_group import LiveGroup, LiveMember, live_group
from tests.support.cluster.pullhold import sample
from tests.support.waiting import until, until_async

AHEAD_S = 600
QUICK: dict[str, Any] = {
    "lease_duration_s": 1.0,
    "lease_renew_s": 0.1,
    "lease_poll_s": 0.05,
    "in_sync_lag_s_max": 0.5,
    "replication_mode": ReplicationMode.APPENDED,
}


def wrong_by(seconds: int) -> WrongClock:
    return WrongClock(seconds * 1000)


async def knows_skew(member: LiveMember, seconds: float, other: int | None = None) -> None:
    """How far the clock of the member is ahead of most, or that of another one of its own."""
    name, label = "cometmq_clock_skew_seconds", ""
    if other is not None:
        name, label = "cometmq_member_clock_skew_seconds", f'member="{other}"'

    async def is_near() -> bool:
        return abs(await sample(member.metrics_address, name, label) - seconds) < 1.0

    await until_async(is_near)


async def is_off(member: LiveMember) -> bool:
    status = await member.members.DescribeReplica(member_pb2.DescribeReplicaRequest())
    return status.clock_is_off


@pytest.mark.parametrize("ahead_s", [AHEAD_S, -AHEAD_S])
async def test_both_sides_know_by_how_much_a_clock_is_off(tmp_path: Path, ahead_s: int) -> None:
    """Name servers tell which of the two it is."""
    async with running_namesrv(tmp_path) as namesrv:
        options = {**QUICK, "namesrv": (namesrv,), "register_namesrv_period": 1000}
        async with live_group(tmp_path, clocks={1: wrong_by(ahead_s)}, **options) as group:
            await group.all_in_sync(0, 1)
            await knows_skew(group[0], 0.0)
            await knows_skew(group[1], ahead_s)
            assert [await is_off(group[number]) for number in (0, 1)] == [False, True]
            described = await group[1].client.admin.DescribeBroker(pb.DescribeBrokerRequest())
            assert abs(described.clock_skew_ms - 1000 * ahead_s) < 1000, "for broker status"
            await knows_skew(group[0], ahead_s, other=1)
            await knows_skew(group[1], -ahead_s, other=0)


async def test_a_member_whose_clock_is_ahead_takes_over_and_delivers_nothing_early(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No other member can. It was told by the writer before it how far its clock is off."""
    async with live_group(tmp_path, clocks={1: wrong_by(AHEAD_S)}, **QUICK) as group:
        await group.all_in_sync(0, 1)
        await knows_skew(group[1], AHEAD_S)
        await group[0].client.put_topic("T", 1)
        near_ms = 3_000
        sent_s = time.time()
        messages = [
            pb.OutgoingMessage(topic="T", queue_id=0, body=b"near", delay_ms=near_ms),
            pb.OutgoingMessage(topic="T", queue_id=0, body=b"far", delay_ms=AHEAD_S * 500),
            pb.OutgoingMessage(
                topic="T", queue_id=0, body=b"at", deliver_at_ms=round(sent_s * 1000) + 300_000
            ),
            pb.OutgoingMessage(topic="T", queue_id=0, body=b"level", delay_level=9),
        ]
        await group[0].client.stub.Send(pb.SendRequest(messages=messages))
        with caplog.at_level(logging.WARNING):
            await group[0].crash()
            await group[1].until_role("writer")
        assert "this member's clock is off, and no other member has taken the lease" in caplog.text
        await arrives(group, b"near")
        assert time.time() - sent_s >= near_ms / 1000, "early"
        late = pb.OutgoingMessage(topic="T", queue_id=0, body=b"new", delay_ms=300)
        await group[1].client.stub.Send(pb.SendRequest(messages=[late]))
        await arrives(group, b"new")
        assert await group[1].client.bodies("T", 0) == [b"near", b"new"]


async def arrives(group: LiveGroup, body: bytes) -> None:
    async def is_there() -> bool:
        return body in await group[1].client.bodies("T", 0)

    await until_async(is_there)


async def test_a_member_whose_clock_is_off_does_not_lead_while_another_can(tmp_path: Path) -> None:
    async with live_group(tmp_path, 3, clocks={1: wrong_by(AHEAD_S)}, **QUICK) as group:
        await group.all_in_sync(0, 1, 2)
        await knows_skew(group[1], AHEAD_S)
        await group[0].client.put_topic("T", 1)
        await group[0].crash()
        await until(lambda: "writer" in (group[1].role, group[2].role))
        assert group[2].role == "writer"


async def test_a_planned_hand_over_goes_to_a_member_with_a_right_clock(tmp_path: Path) -> None:
    async with live_group(tmp_path, 3, clocks={1: wrong_by(AHEAD_S)}, **QUICK) as group:
        await group.all_in_sync(0, 1, 2)
        await knows_skew(group[0], AHEAD_S, other=1)
        await knows_skew(group[0], 0, other=2)
        await group[0].client.put_topic("T", 1)
        done = await group[0].members.StepDown(member_pb2.StepDownRequest())
        assert done.member_id == 2

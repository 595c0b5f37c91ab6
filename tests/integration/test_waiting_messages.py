"""Messages that wait for their time or their end, while retention removes the log files that have
them: neither fail-overs nor a full quota nor a wrong clock loses one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.clock import SystemClock
from cometmq.messaging import believed_clock
from cometmq.model import ReplicationMode
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import RATIOS, BrokerClient, running_broker
from tests.support.cluster.live_group import LiveMember, live_group
from tests.support.waiting import until, until_async

FILE_BYTES = 64 * 1024
OPTIONS: dict[str, Any] = {
    "mapped_file_size_commit_log": FILE_BYTES,
    "store_quota_bytes": 16 * FILE_BYTES,
    "clean_resource_interval": 20,
    "delete_commit_log_files_interval": 0,
    "replication_mode": ReplicationMode.ASYNC,  # of topic U
    **RATIOS,
}
BODY = b"." * 5_000
COUNT = 3


def now_ms() -> int:
    return SystemClock().wall_ms()


async def fill(client: BrokerClient, enough: Callable[[int], bool]) -> None:
    """Send to U until there is enough; ``enough`` gets how often that was refused."""
    refused = 0
    while not enough(refused):
        message = pb.OutgoingMessage(topic="U", queue_id=0, body=BODY)
        try:
            await client.stub.Send(pb.SendRequest(messages=[message]))
        except grpc.aio.AioRpcError:
            refused += 1
            await asyncio.sleep(0.01)


async def count_in(client: BrokerClient, topic: str) -> int:
    return (await client.status(topic, 0)).max_offset


async def put_topic(client: BrokerClient, mode: common.ReplicationMode.ValueType) -> None:
    config = common.TopicConfig(
        name="T", read_queue_count=1, write_queue_count=1, replication_mode=mode
    )
    await client.admin.PutTopic(pb.PutTopicRequest(topic=config))
    await client.put_topic("U", 1)


class Ahead:
    """How far the wall clock of all members is ahead."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ms = 0
        real = SystemClock.wall_ms
        patch.setattr(SystemClock, "wall_ms", lambda clock: real(clock) + self.ms)
        patch.setattr(believed_clock, "JUMP_BELIEVED_AFTER_MS", 200)
        patch.setattr(believed_clock, "PROMISE_MS_MAX", 0)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    return Ahead(monkeypatch)


# --- two fail-overs -------------------------------------------------------------------------------

HOUR_MS = 3_600_000
WAYS: dict[str, dict[str, Any]] = {
    "timers": {"delay_ms": HOUR_MS},
    "levels": {"delay_level": 17},
    "halves": {"producer_group": "P"},
}


async def crash(member: LiveMember) -> None:
    """When nothing is on its way to the disk."""
    store = member.opened
    await until(lambda: store.flushed_offset == store.appended_offset)
    await member.crash()


def first(member: LiveMember) -> int:
    return member.opened.min_offset


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_copied", [True, False])
async def test_two_fail_overs_around_a_full_quota_lose_nothing_that_waits(
    tmp_path: Path, ahead: Ahead, way: str, is_copied: bool
) -> None:
    """The follower is away, but may take over. Where a topic asks for copies no file goes without
    it. Else the writer comes back without what it had stored again, and copies all of the log.
    """
    lease = {"lease_duration_s": 1.0, "in_sync_lag_s_max": 60.0}
    async with live_group(tmp_path, 2, **OPTIONS, **lease) as group:
        a, b = group[0], group[1]
        await group.all_in_sync(0, 1)
        modes = common.REPLICATION_MODE_ASYNC, common.REPLICATION_MODE_APPENDED
        await put_topic(a.client, modes[is_copied])
        waiting = pb.OutgoingMessage(topic="T", queue_id=0, body=b"waits", **WAYS[way])
        sent = await a.client.stub.Send(pb.SendRequest(messages=[waiting] * COUNT))
        await fill(a.client, lambda _: a.opened.appended_offset > 6 * FILE_BYTES)
        await group.in_step()
        assert first(a) == first(b) == 0
        await crash(b)
        await fill(a.client, lambda refused: first(a) >= FILE_BYTES or refused > 50)
        assert (first(a) == 0) is is_copied
        await crash(a)
        await b.start("writer")
        await a.start("follower")
        await group.all_in_sync(0, 1)
        await group.in_step()
        await crash(b)
        await a.until_role("writer")
        if way == "halves":
            assert await ended_or_resumed(a.client, [one.half for one in sent.sent]) == COUNT
        else:
            ahead.ms = 2 * HOUR_MS + 60_000
            await a.stop()
            await a.start("writer")  # it believes the first clock that it meets
            await until_async(lambda: shows(a.client, COUNT))


async def shows(client: BrokerClient, count: int) -> bool:
    return await count_in(client, "T") == count


async def ended_or_resumed(client: BrokerClient, halves: list[pb.HalfRef]) -> int:
    """How many of these half messages can be committed, or were given up and can be resumed."""
    ends = [
        pb.TransactionEnd(half=half, resolution=pb.TRANSACTION_RESOLUTION_COMMIT) for half in halves
    ]
    ended = await client.stub.EndTransactions(
        pb.EndTransactionsRequest(producer_group="P", ends=ends)
    )
    resumed = await client.admin.ResumeChecks(pb.ResumeChecksRequest(offsets=range(COUNT)))
    return sum(not one.HasField("error") for one in (*ended.results, *resumed.results))


async def test_a_follower_that_is_away_holds_up_no_sends_while_halves_are_given_up(
    tmp_path: Path,
) -> None:
    """Their topic is made with the first half: later that would wait for the follower, with all
    sends behind it.
    """
    async with live_group(tmp_path, 2, **OPTIONS, in_sync_lag_s_max=60.0) as group:
        a, b = group[0], group[1]
        await group.all_in_sync(0, 1)
        await put_topic(a.client, common.REPLICATION_MODE_ASYNC)
        for way in ("levels", "halves"):
            waiting = pb.OutgoingMessage(topic="T", queue_id=0, body=b"waits", **WAYS[way])
            await a.client.stub.Send(pb.SendRequest(messages=[waiting]))
        await crash(b)
        await fill(a.client, lambda _: first(a) >= 4 * FILE_BYTES)
        assert group.in_sync() == [0, 1]


# --- a full quota ---------------------------------------------------------------------------------


@pytest.mark.parametrize("quota_files", [5, 16])
async def test_a_quota_full_of_timers_refuses_sends_and_delivers_each(
    tmp_path: Path, ahead: Ahead, quota_files: int
) -> None:
    """Their producer goes on trying. When they are due, they come, although each needs room."""
    options = OPTIONS | {"store_quota_bytes": quota_files * FILE_BYTES}
    async with running_broker(tmp_path, **options) as broker:
        await broker.put_topic("T", 1)
        due_ms = now_ms() + HOUR_MS
        sent = refused = 0
        while refused < 200:
            message = pb.OutgoingMessage(
                topic="T", queue_id=0, body=b"%d" % sent + BODY[:2_000], deliver_at_ms=due_ms + sent
            )
            try:
                await broker.stub.Send(pb.SendRequest(messages=[message]))
                sent += 1
            except grpc.aio.AioRpcError:
                refused += 1
                await asyncio.sleep(0.01)
        written = broker.store.appended_offset
        ahead.ms = HOUR_MS + 60_000
        await until_async(lambda: delivered(broker, sent))
        assert written < 3 * quota_files * FILE_BYTES, "it did not write the same again and again"


async def delivered(broker: BrokerClient, count: int) -> bool:
    return await count_in(broker, "T") == count


# --- a clock that was ahead -----------------------------------------------------------------------


async def test_a_clock_that_was_ahead_loses_no_timer_to_retention(
    tmp_path: Path, ahead: Ahead
) -> None:
    """One timer came by it. Those that are sent afterwards lie behind the watermark, and wait."""
    async with running_broker(tmp_path, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        await broker.put_topic("U", 1)

        async def send(delay_ms: int, count: int) -> None:
            message = pb.OutgoingMessage(
                topic="T", queue_id=0, body=b"t", deliver_at_ms=now_ms() + delay_ms
            )
            await broker.stub.Send(pb.SendRequest(messages=[message] * count))

        await send(2 * HOUR_MS, 1)
        ahead.ms = 2 * HOUR_MS + 10_000
        await until_async(lambda: delivered(broker, 1))
        ahead.ms = 0
        await send(HOUR_MS, 20)
        await fill(broker, lambda _: broker.store.min_offset >= 2 * FILE_BYTES)
        ahead.ms = HOUR_MS + 10_000
        await until_async(lambda: delivered(broker, 21))

"""Retention of a running broker: what consumers and producers notice of it."""

from __future__ import annotations

import asyncio
import os
from datetime import datetime
from pathlib import Path

import pytest

from cometmq.admin import group_status
from cometmq.admin.connection import Connection
from cometmq.client import Message, Producer, ProducerOptions
from cometmq.clock import SystemClock
from cometmq.errors import DiskFull, InvalidRequest, SendTimeout
from cometmq.format import record
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import (
    RATIOS,
    LaterClock,
    LiveBroker,
    SendLane,
    WrongClock,
    batch,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.pullhold import scraped
from tests.support.stores.small_disk import small_disk
from tests.support.waiting import until, until_async

FILE_BYTES = 64 * 1024
HOUR_MS = 3_600_000


def never() -> tuple[str, ...]:
    """An hour of the day that is not now, nor soon: files go by command, or for want of room."""
    now = datetime.fromtimestamp(SystemClock().wall_ms() / 1000)
    return (f"{(now.hour + 12) % 24:02}",)


OPTIONS = {
    "mapped_file_size_commit_log": FILE_BYTES,
    "file_reserved_time": 1,
    "clean_resource_interval": 20,
    "delete_commit_log_files_interval": 0,
    "delete_when": never(),
    **RATIOS,
}
BODY = b"." * 10_000
DISK_BYTES = 4 * 1024 * 1024


async def fill(broker: LiveBroker, messages: int) -> None:
    lane = await broker.lane()
    for _ in range(messages):
        await lane.send(("T", 0, [BODY]))
    await on_disk(broker)


async def on_disk(broker: LiveBroker) -> None:
    """Wait until all that is there now is on the disk, log and queues."""
    end = broker.store.appended_offset
    await until(lambda: broker.store._opened.checkpoint.durable >= end)


async def clean(broker: LiveBroker) -> pb.CleanStoreResponse:
    """Clean until nothing more goes: the state has to be copied further up first."""
    total = pb.CleanStoreResponse()
    for _ in range(4):
        done = await broker.admin.CleanStore(pb.CleanStoreRequest())
        total.log_file_count += done.log_file_count
        total.topics.extend(done.topics)
        total.log_min_offset = done.log_min_offset
        await on_disk(broker)
    return total


async def offsets_from(broker: LiveBroker, topic: str, offset: int) -> list[int]:
    """All that can be read from there on."""
    found: list[int] = []
    while records := record.decode_all((await broker.pull(topic, 0, offset)).records):
        found += [r.queue_offset for r in records]
        offset = found[-1] + 1
    return found


async def first_offset(broker: LiveBroker, topic: str) -> int:
    """Where a consumer is sent that asks for the queue's very first message."""
    answer = await broker.pull(topic, 0, 0)
    moved = answer.status == pb.PULL_STATUS_OFFSET_MOVED
    return answer.next_position.offset if moved else 0


@pytest.mark.parametrize("crash", [False, True])
async def test_what_is_expired_goes_and_nothing_else(tmp_path: Path, crash: bool) -> None:
    clock = LaterClock()
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        await broker.put_topic("idle", 1)
        await broker.send("idle", 0, b"a", b"b")
        await fill(broker, 20)
        await broker.commit("g", ("T", 0, 0, 20))
        clock.later_ms = 2 * HOUR_MS
        await fill(broker, 8)
        done = await clean(broker)
        assert done.log_file_count == done.log_min_offset // FILE_BYTES > 0
        first = await first_offset(broker, "T")
        assert 0 < first <= 20, "the young ones are all there"
        assert await offsets_from(broker, "T", first) == [*range(first, 28)]
        assert await first_offset(broker, "idle") == 2
        if crash:
            broker.crash()
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        assert await first_offset(broker, "T") == first
        position = await broker.committed("g", "T", 0)
        assert position is not None
        assert position.offset == 20
        await broker.send("idle", 0, b"c")
        assert (await broker.status("idle", 0)).appended_offset == 3, "it counts on"


async def test_a_jump_of_the_clock_expires_nothing(tmp_path: Path) -> None:
    clock = WrongClock()
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        await fill(broker, 20)
        clock.wrong_ms = 2 * HOUR_MS
        await fill(broker, 8)
        assert (await clean(broker)).log_file_count == 0
        assert await first_offset(broker, "T") == 0


async def test_a_quota_is_kept_and_sends_go_on(tmp_path: Path) -> None:
    quota = 8 * FILE_BYTES
    async with running_broker(tmp_path, **OPTIONS, store_quota_bytes=quota) as broker:
        await broker.put_topic("T", 1)
        lane = await broker.lane()
        sizes = []
        for _ in range(150):
            await send_patiently(lane)
            sizes.append(broker.store.cleaner.store_bytes())
        await until(lambda: broker.store.cleaner.store_bytes() <= 0.85 * quota)
        assert max(sizes) <= quota
        assert broker.store.min_offset > quota
    async with running_broker(tmp_path, **OPTIONS, store_quota_bytes=quota) as broker:
        assert (await broker.status("T", 0)).appended_offset == 150, "the state is still known"


async def send_patiently(lane: SendLane) -> None:
    """As the SDK does: a refusal for want of room is waited out."""
    async with asyncio.timeout(20):
        while (await lane.exchange(*batch(("T", 0, [BODY])))).HasField("error"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_nearly_full_disk_refuses_sends_and_recovers_by_itself(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        async with running_broker(disk, **OPTIONS) as broker:
            await broker.put_topic("T", 1)
            await fill(broker, 5)
            filler = disk / "filler"
            filler.write_bytes(bytes(_left(disk) - 300_000))
            await until_async(lambda: is_refusing(broker))
            refused = await refusal(broker.send("T", 0, b"x"))
            assert isinstance(refused, DiskFull)
            assert "GiB are free" in str(refused)
            assert "sends are refused above 90%" in str(refused)
            # Consumption goes on: reads, commits, and the changes of topics that free room.
            assert len(await broker.bodies("T", 0)) == 5
            await broker.commit("g", ("T", 0, 0, 5))
            await broker.put_topic("U", 1)
            await broker.drop_topic("U")
            filler.unlink()
            await until_async(lambda: is_taking(broker))
            await broker.send("T", 0, b"again")
            assert (await broker.committed("g", "T", 0)).offset == 5  # type: ignore[union-attr]


async def test_a_full_disk_is_told_to_the_application_and_to_the_operator(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        async with (
            running_namesrv(tmp_path) as namesrv,
            running_broker(disk, namesrv=(namesrv,), **OPTIONS) as broker,
            Connection(namesrv) as connection,
        ):
            await broker.put_topic("T", 1)
            filler = disk / "another program's"
            filler.write_bytes(bytes(_left(disk) * 95 // 100))
            await until_async(lambda: is_refusing(broker))
            options = ProducerOptions(delivery_timeout_ms=1_500)
            async with Producer(namesrv, options=options) as producer:
                with pytest.raises(SendTimeout, match=r"DISK_FULL: .* GiB are free") as refused:
                    await producer.send_and_wait(Message("T", b"x"))
            assert not refused.value.may_be_stored
            [told] = await group_status.describe(connection)
            assert told.status == "degraded"
            assert "GiB are free" in told.troubles[0].removeprefix("member 0 refuses sends: ")
            filler.unlink()
            await until_async(lambda: is_taking(broker))
            [told] = await group_status.describe(connection)
            assert (told.status, told.troubles) == ("ok", [])


def _left(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


async def is_refusing(broker: LiveBroker) -> bool:
    said = await broker.admin.DescribeBroker(pb.DescribeBrokerRequest())
    return bool(said.refusal)


async def is_taking(broker: LiveBroker) -> bool:
    return not await is_refusing(broker)


async def test_old_messages_make_room_for_new_ones(tmp_path: Path) -> None:
    """A disk that fills with messages alone never refuses for long."""
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        async with running_broker(disk, **OPTIONS) as broker:
            await broker.put_topic("T", 1)
            lane = await broker.lane()
            count = 2 * DISK_BYTES // len(BODY)
            for _ in range(count):
                await send_patiently(lane)
            assert broker.store.min_offset > 0
        async with running_broker(disk, **OPTIONS) as broker:
            assert (await broker.status("T", 0)).appended_offset == count


async def test_a_topic_shows_its_messages_for_its_own_time(tmp_path: Path) -> None:
    clock = LaterClock()
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        await broker.put_topic("U", 1)
        config = common.TopicConfig(name="T", reserve_time_ms=60_000)
        answer = await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))
        assert answer.topic.reserve_time_ms == 60_000
        for topic in "TU":
            await broker.send(topic, 0, b"old")
        clock.later_ms = 61_000
        await broker.send("T", 0, b"new")
        await until_async(lambda: shows_from(broker, "T", 1))
        assert await shows_from(broker, "U", 0)
        assert [r.body for r in await broker.read_queue("T", 0, 1)] == [b"new"]
        # What is not said stays, also over a restart.
        await broker.put_topic("T", 1)
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        described = await broker.admin.DescribeTopic(pb.DescribeTopicRequest(topic="T"))
        assert described.topic.reserve_time_ms == 60_000
        await until_async(lambda: shows_from(broker, "T", 1))


async def shows_from(broker: LiveBroker, topic: str, offset: int) -> bool:
    return await first_offset(broker, topic) == offset


async def test_no_topic_is_kept_longer_than_the_log(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        config = common.TopicConfig(name="T", reserve_time_ms=HOUR_MS + 1)
        refused = await refusal(broker.admin.PutTopic(pb.PutTopicRequest(topic=config)))
        assert isinstance(refused, InvalidRequest)
        assert "file_reserved_time" in str(refused)
        config.reserve_time_ms = -1
        refused = await refusal(broker.admin.PutTopic(pb.PutTopicRequest(topic=config)))
        assert isinstance(refused, InvalidRequest)
        config.reserve_time_ms = HOUR_MS
        await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))


async def test_queues_that_belong_to_no_topic_are_cleaned(tmp_path: Path) -> None:
    async with running_broker(tmp_path, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"kept")
        # As a crash in the middle of a deletion leaves it.
        broker.store._dispatcher.get("orphan", 0)
        assert list((await clean(broker)).topics) == ["orphan"]
        assert list((await clean(broker)).topics) == []
        assert await broker.bodies("T", 0) == [b"kept"]


async def test_metrics_tell_of_room(tmp_path: Path) -> None:
    clock = LaterClock()
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        await fill(broker, 10)
        clock.later_ms = 2 * HOUR_MS
        done = await clean(broker)
        text = await scraped(broker.metrics_address)
        node = '{cluster="DefaultCluster",node_id="g1",node_type="broker"'
        assert f'cometmq_log_files_removed_total{node},reason="age"}} {done.log_file_count}.0' in (
            text
        )
        assert f"cometmq_sends_refused{node}}} 0.0" in text
        assert "rocketmq_storage_message_reserve_time{" in text


async def test_open_half_messages_are_given_up_before_their_log_goes(tmp_path: Path) -> None:
    """They can be resumed; RocketMQ drops them."""
    clock = LaterClock()
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        halves = [
            pb.OutgoingMessage(topic="T", queue_id=0, body=b"%d" % n, producer_group="P")
            for n in range(3)
        ]
        await broker.stub.Send(pb.SendRequest(messages=halves))
        await fill(broker, 20)
        clock.later_ms = 2 * HOUR_MS
        await fill(broker, 8)
        await broker.stub.Send(pb.SendRequest(messages=halves[:1]))
        assert (await clean(broker)).log_file_count > 0
        assert await broker.bodies("TRANS_CHECK_MAX_TIME_TOPIC", 0) == [b"0", b"1", b"2"]
        assert len(broker.state.halves) == 1
        resumed = await broker.admin.ResumeChecks(pb.ResumeChecksRequest(offsets=[0, 1, 2]))
        assert not any(one.HasField("error") for one in resumed.results)
        assert len(broker.state.halves) == 4


@pytest.mark.parametrize("crash", [False, True])
async def test_a_delay_level_may_be_longer_than_the_log_is_kept(
    tmp_path: Path, crash: bool
) -> None:
    clock = LaterClock()
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await broker.put_topic("T", 2)
        for n in range(20):
            late = pb.OutgoingMessage(topic="T", queue_id=1, body=b"%d" % n, delay_level=18)
            await broker.stub.Send(pb.SendRequest(messages=[late]))
        await fill(broker, 20)
        clock.later_ms = HOUR_MS + HOUR_MS // 2
        await fill(broker, 8)
        assert (await clean(broker)).log_file_count > 0
        assert broker.store.queue_bounds(SCHEDULE_TOPIC, 17) == (20, 20)
        if crash:
            broker.crash()
    clock.later_ms = 2 * HOUR_MS + 1_000
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await until_async(lambda: shows_until(broker, "T", 20, queue_id=1))
        assert await broker.bodies("T", 1) == [b"%d" % n for n in range(20)]


async def test_what_waits_in_old_files_moves_in_batches_that_fit_a_file(tmp_path: Path) -> None:
    """All of it together is several files."""
    clock = LaterClock()
    count = 3 * FILE_BYTES // len(BODY)
    ways = ({"delay_ms": 3 * HOUR_MS}, {"producer_group": "P"})
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await broker.put_topic("T", 1)
        for way in ways:
            waiting = pb.OutgoingMessage(topic="T", queue_id=0, body=BODY, **way)
            for _ in range(count):
                await broker.stub.Send(pb.SendRequest(messages=[waiting]))
        await fill(broker, 8)
        clock.later_ms = 2 * HOUR_MS
        await fill(broker, 8)
        assert (await clean(broker)).log_min_offset > 2 * count * len(BODY)
        assert await broker.bodies("TRANS_CHECK_MAX_TIME_TOPIC", 0) == [BODY] * count
        offsets = range(count)
        resumed = await broker.admin.ResumeChecks(pb.ResumeChecksRequest(offsets=offsets))
        assert not any(one.HasField("error") for one in resumed.results)
        assert len(broker.state.halves) == count
    clock.later_ms = 4 * HOUR_MS
    async with running_broker(tmp_path, clock=clock, **OPTIONS) as broker:
        await until_async(lambda: shows_until(broker, "T", 16 + count))


async def shows_until(broker: LiveBroker, topic: str, offset: int, queue_id: int = 0) -> bool:
    return (await broker.status(topic, queue_id)).max_offset == offset

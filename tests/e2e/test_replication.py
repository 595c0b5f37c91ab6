"""A slave of a real group: it catches up late, serves what is visible, and is a copy byte for byte.

Counts are printed (pytest -s).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cometmq.errors import NotWriter
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import SYNC, BrokerClient, batch, refusal
from tests.support.cluster.groups import LocalGroup, local_group
from tests.support.waiting import until_async

pytestmark = pytest.mark.timeout(120)

BATCHES = 400
PER_BATCH = 50


async def fill(client: BrokerClient, start: int) -> None:
    lane = await client.lane()
    for number in range(start, start + BATCHES):
        bodies = [b"%d/%d" % (number, n) + b"x" * (n * 5) for n in range(PER_BATCH)]
        records, segments = batch(("T", number % 2, bodies))
        await lane.put(records, segments)
        assert not (await lane.result()).HasField("error")
    await lane.call.done_writing()


async def pulled(client: BrokerClient, queue_id: int) -> bytes:
    """The record bytes of a queue, as pulls answer them."""
    found, offset = b"", 0
    while True:
        answer = await client.pull("T", queue_id, offset, max_count=500)
        if answer.status != pb.PULL_STATUS_FOUND:
            return found
        found += answer.records
        offset = answer.next_position.offset


async def visible(client: BrokerClient, count: int) -> None:
    async def readable() -> bool:
        bounds = await client.stub.QueryQueues(
            pb.QueryQueuesRequest(queues=[common.QueueRef(topic="T", queue_id=n) for n in (0, 1)])
        )
        return sum(queue.max_offset for queue in bounds.queues) == count

    await until_async(readable)


async def start_late(group: LocalGroup, member_id: int, *, empty: bool) -> None:
    """Let a slave miss something, and come back."""
    await group.kill(member_id)
    store = group.cluster.directory / group.process(member_id).name / "store"
    if empty:
        shutil.rmtree(store)
    await fill(group.client(0), BATCHES)
    await group.start()
    await group.in_step()


@pytest.mark.parametrize("empty", [False, True], ids=["behind", "empty"])
async def test_a_slave_that_comes_late_catches_up_and_serves(tmp_path: Path, empty: bool) -> None:
    async with local_group(tmp_path / "cluster") as group:
        writer, slave = group.client(0), group.client(1)
        await writer.put_topic("T", 2, SYNC)
        await fill(writer, 0)
        await start_late(group, 1, empty=empty)
        compared = await group.assert_logs_equal()
        await visible(slave, 2 * BATCHES * PER_BATCH)
        for queue_id in (0, 1):
            expected = await pulled(writer, queue_id)
            assert await pulled(slave, queue_id) == expected
            assert expected.count(b"/0x") or expected
        print(f"{2 * BATCHES * PER_BATCH} messages, {compared} bytes of log equal")


async def test_a_slave_refuses_what_only_the_writer_does(tmp_path: Path) -> None:
    async with local_group(tmp_path / "cluster") as group:
        await group.client(0).put_topic("T", 1, SYNC)
        await group.in_step()
        slave = group.client(1)
        assert isinstance(await refusal(slave.send("T", 0, b"x")), NotWriter)
        assert isinstance(await refusal(slave.put_topic("U")), NotWriter)
        assert isinstance(await refusal(slave.commit("G", ("T", 0, 0, 0))), NotWriter)
        topics = await slave.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
        assert [topic.name for topic in topics.topics] == ["T"]

"""Messages that a group sends back, over real gRPC: they come again, die, and are stored once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from cometmq.errors import (
    CometError,
    DelayLevelInvalid,
    GroupNotFound,
    LimitExceeded,
    MessageNotFound,
    NoPermission,
    OffsetInvalid,
    PositionFenced,
    QueueNotFound,
    TopicNotFound,
)
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.timers import TIMER_TOPIC
from cometmq.member.read import records
from cometmq.messaging.state import STATE_TOPIC
from cometmq.model import PROPERTIES_BYTES_MAX
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from services.broker.retry import retries
from tests.support.cluster.broker import BrokerClient, encoded, numbered, refusal, running_broker
from tests.support.waiting import until, until_async

RETRY, DLQ = "%RETRY%G", "%DLQ%G"


def item(
    offset: int, topic: str = "T", queue_id: int = 0, generation: int = 0, **fields: Any
) -> pb.SendBackItem:
    return pb.SendBackItem(
        queue=common.QueueRef(topic=topic, queue_id=queue_id),
        position=common.Position(generation=generation, offset=offset),
        **fields,
    )


async def send_back(broker: BrokerClient, *items: pb.SendBackItem) -> list[int | CometError]:
    """The levels after which the messages come again; 0: a dead letter."""
    answer = await broker.stub.SendBack(pb.SendBackRequest(group="G", items=items))
    return [from_proto(r.error) if r.HasField("error") else r.delay_level for r in answer.results]


async def prepare(broker: BrokerClient, *bodies: bytes) -> None:
    await broker.put_topic("T", 1)
    await broker.send("T", 0, *bodies)
    assert len(await broker.read_queue("T", 0)) == len(bodies)
    await broker.commit("G", ("T", 0, 0, 0))  # makes the group


async def test_what_is_sent_back_fits_a_log_file(tmp_path: Path) -> None:
    count = 20
    async with running_broker(tmp_path, mapped_file_size_commit_log=64 * 1024) as broker:
        await broker.put_topic("T", 1)
        for _ in range(count):
            await broker.send("T", 0, b"." * 10_000)
        assert len(await broker.read_queue("T", 0)) == count
        await broker.commit("G", ("T", 0, 0, 0))
        assert await send_back(broker, *map(item, range(count))) == [3] * count
        places = [pb.ResendItem(position=item(offset).position) for offset in range(count)]
        request = pb.ResendMessagesRequest(topic="T", items=places)
        resent = await broker.admin.ResendMessages(request)
        assert not any(one.HasField("error") for one in resent.results)
        assert len(await broker.read_queue("T", 0)) == 2 * count


async def ends(broker: BrokerClient, topic: str, count: int) -> bool:
    return (await broker.status(topic, 0)).max_offset == count


async def test_a_message_comes_again_and_dies_as_it_was_sent(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await prepare(broker, b"0", b"1")
        assert await send_back(broker, item(1, delay_level=1)) == [1]
        await until_async(lambda: ends(broker, RETRY, 1))
        [again] = await broker.read_queue(RETRY, 0)
        original = (await broker.read_queue("T", 0))[1]
        assert (again.body, again.unique_id) == (b"1", original.unique_id)
        assert (again.reconsume_times, again.properties["RETRY_TOPIC"]) == (1, "T")
        again_item = item(0, RETRY, retry_times_max=1)
        assert await send_back(broker, again_item, item(0, delay_level=-1)) == [0, 0]
        await until_async(lambda: ends(broker, DLQ, 2))
        dead = await broker.read_queue(DLQ, 0)
        assert [(one.body, one.reconsume_times) for one in dead] == [(b"1", 2), (b"0", 1)]
        for one, first in zip(dead, (original, None), strict=True):
            assert one.properties["DLQ_ORIGIN_TOPIC"] == "T"
            assert "DELAY" not in one.properties
            if first is not None:
                assert one.unique_id == first.unique_id


async def test_a_send_back_that_is_sent_twice_is_stored_once(tmp_path: Path) -> None:
    """Also when the writer dies between the two, soon or after it has written its progress."""
    async with running_broker(tmp_path) as broker:
        await prepare(broker, *(b"%d" % n for n in range(300)))
        items = [item(n) for n in range(300)]
        assert await send_back(broker, *items) == [3] * 300
        assert await send_back(broker, *items, item(0, delay_level=-1)) == [3] * 300 + [0]
        records = partial(broker.store.queue_bounds, STATE_TOPIC, 0)
        _, before = records()
        await (await broker.lane()).exchange(*numbered(0, b"."))
        await until(lambda: records()[1] > before)
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await send_back(broker, *items[:5], items[4]) == [3] * 6
        assert (await broker.status(SCHEDULE_TOPIC, 2)).appended_offset == 300
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await send_back(broker, *items) == [3] * 300
        assert (await broker.status(SCHEDULE_TOPIC, 2)).appended_offset == 300
        assert (await broker.status(DLQ, 0)).appended_offset == 0


async def test_a_send_back_is_stored_once_where_the_writer_dies_before_the_state_knows_it(
    tmp_path: Path,
) -> None:
    """Only the log's end tells of it: for a delay level, for a time, for the dead letters."""
    items = [item(0), item(1, delay_ms=600_000), item(2, delay_level=-1)]
    async with running_broker(tmp_path, offset_record_interval_s=3_600) as broker:
        await prepare(broker, b"0", b"1", b"2")
        first = await send_back(broker, *items)
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await send_back(broker, *items) == first
        ends = [(SCHEDULE_TOPIC, 2), (TIMER_TOPIC, 0), (DLQ, 0)]
        assert [(await broker.status(*one)).appended_offset for one in ends] == [1, 1, 1]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (item(2), OffsetInvalid),
        (item(-1), OffsetInvalid),
        (item(0, generation=1 << 60), OffsetInvalid),
        (item(0, "nowhere"), TopicNotFound),
        (item(0, queue_id=7), QueueNotFound),
        (item(0, delay_level=19), DelayLevelInvalid),
        (item(0, delay_level=-2), DelayLevelInvalid),
        (item(0, "%RETRY%other"), NoPermission),
        (item(0, DLQ), NoPermission),
        (item(0, SCHEDULE_TOPIC), NoPermission),
    ],
)
async def test_a_wrong_item_is_refused_alone(
    tmp_path: Path, wrong: pb.SendBackItem, error: type[CometError]
) -> None:
    async with running_broker(tmp_path) as broker:
        await prepare(broker, b"0", b"1")
        first, refused, last = await send_back(broker, item(0), wrong, item(1))
        assert (first, last) == (3, 3)
        assert isinstance(refused, error | PositionFenced)
        assert (await broker.status(SCHEDULE_TOPIC, 2)).appended_offset == 2


async def test_a_message_without_room_for_what_a_retry_adds_is_a_dead_letter(
    tmp_path: Path,
) -> None:
    """Else it would come to the listener for ever."""
    async with running_broker(tmp_path) as broker:
        await prepare(broker, b"0")
        properties = b"k\x01" + b"v" * (PROPERTIES_BYTES_MAX - 3) + b"\x02"
        records = encoded("T", 0, b"large", properties=properties)
        segment = pb.Segment(topic="T", queue_id=0, count=1)
        await (await broker.lane()).exchange(records, [segment])
        assert len(await broker.read_queue("T", 0)) == 2
        assert await send_back(broker, item(1), item(0), item(1)) == [0, 3, 0]
        await until_async(lambda: ends(broker, DLQ, 1))
        [dead] = await broker.read_queue(DLQ, 0)
        assert (dead.body, dead.raw_properties) == (b"large", properties)


async def test_a_message_that_is_gone_cannot_be_sent_back(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await prepare(broker, b"0")
        config = common.TopicConfig(name="T", reserve_time_ms=1)
        await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))
        await broker.send("T", 0, b"1")

        async def is_gone() -> bool:
            await broker.admin.CleanStore(pb.CleanStoreRequest())
            return (await broker.status("T", 0)).min_offset > 0

        await until_async(is_gone)
        [refused] = await send_back(broker, item(0))
        assert isinstance(refused, MessageNotFound)
        listed = await broker.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
        assert [topic.name for topic in listed.topics] == ["T"], "no topic is made for nothing"


async def test_large_messages_are_read_a_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call with 1,024 messages of 4 MiB would be gibibytes in memory."""
    sizes: list[int] = []

    async def watched(store: Any, spans: Any, places: Any) -> Any:
        sizes.append(sum(size for _, size in spans))
        return await records.read_each(store, spans, places)

    monkeypatch.setattr(retries, "read_each", watched)
    async with running_broker(tmp_path, mapped_file_size_commit_log=1 << 23) as broker:
        await prepare(broker, *[b"x" * 600_000] * 5)
        items = [item(offset) for offset in range(5)]
        assert await send_back(broker, *items, item(99)) == [3] * 5 + [ANY]
        assert len(sizes) == 5
        assert max(sizes) < retries.SLICE_BYTES_MAX


async def test_a_wrong_call_makes_nothing(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        request = pb.SendBackRequest(group="G", items=[item(0)])
        assert isinstance(await refusal(broker.stub.SendBack(request)), GroupNotFound)
        request = pb.SendBackRequest(group="G", items=[item(0)] * 1_025)
        assert isinstance(await refusal(broker.stub.SendBack(request)), LimitExceeded)
        listed = await broker.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
        assert [topic.name for topic in listed.topics] == ["T"]


@pytest.mark.parametrize("again", ["reset", "deleted"])
async def test_a_group_that_begins_again_may_send_back_again(tmp_path: Path, again: str) -> None:
    """What it sent back before is no repetition; also after a crash."""
    async with running_broker(tmp_path) as broker:
        await prepare(broker, b"0")
        assert await send_back(broker, item(0, delay_level=-1)) == [0]
        if again == "reset":
            await broker.admin.ResetOffsets(
                pb.ResetOffsetsRequest(group="G", topic="T", bound=pb.RESET_BOUND_FIRST)
            )
        else:
            await broker.admin.DeleteGroup(pb.DeleteGroupRequest(group="G"))
            await broker.commit("G", ("T", 0, 0, 0))
        broker.crash()
    async with running_broker(tmp_path) as broker:
        for _ in range(2):
            assert await send_back(broker, item(0, delay_level=-1)) == [0]
        assert (await broker.status(DLQ, 0)).appended_offset == 2


@pytest.mark.parametrize("deleted", ["dead letters", "group"])
async def test_what_is_deleted_while_messages_are_sent_back_takes_none_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    async with running_broker(tmp_path) as broker:
        await prepare(broker, b"0", b"1")
        assert await send_back(broker, item(0, delay_level=-1)) == [0]

        async def read_each(*arguments: Any) -> Any:
            if deleted == "group":
                await broker.admin.DeleteGroup(pb.DeleteGroupRequest(group="G"))
            else:
                await broker.admin.PurgeDeadLetters(pb.PurgeDeadLettersRequest(group="G"))
            return await records.read_each(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(retries, "read_each", read_each)
            again = send_back(broker, item(1, delay_level=-1))
            if deleted == "group":
                assert isinstance(await refusal(again), GroupNotFound)
                assert await broker.bodies(DLQ, 0) == [b"0"]
            else:
                assert await again == [0]
                assert await broker.bodies(DLQ, 0) == [b"1"]

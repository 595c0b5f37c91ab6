"""Messages by key, by unique id and by time, over the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cometmq.errors import IndexDisabled, InvalidRequest, NoPermission, TopicNotFound
from cometmq.format import properties, record
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.halves import HALF_TOPIC
from cometmq.format.timers import TIMER_TOPIC
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import BrokerClient, SendLane, encoded, refusal, running_broker
from tests.support.cluster.live_group import live_group
from tests.support.stores.small_disk import small_disk
from tests.support.waiting import until, until_async


async def send(lane: SendLane, topic: str, body: bytes = b"x", **pairs: str) -> int:
    """One message with these properties; its log offset."""
    data = encoded(topic, 0, body, properties=properties.encode(pairs))
    result = await lane.exchange(data, [pb.Segment(topic=topic, queue_id=0, count=1)])
    assert not result.HasField("error"), result.error
    return result.log_offset


async def query(broker: BrokerClient, topic: str, **fields: Any) -> pb.QueryMessagesResponse:
    return await broker.stub.QueryMessages(pb.QueryMessagesRequest(topic=topic, **fields))


async def indexed(broker: BrokerClient, end: int) -> None:
    """Wait until the messages before ``end`` are in the index."""

    async def there() -> bool:
        return (await query(broker, "T", key="-")).indexed_offset >= end

    await until_async(there)


def offsets(answer: pb.QueryMessagesResponse) -> list[int]:
    return [message.log_offset for message in answer.messages]


async def test_messages_are_found_by_key_and_by_id(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T")
        await broker.put_topic("U")
        lane = await broker.lane()
        places = [await send(lane, "T", KEYS=f"all k{n}", UNIQ_KEY=f"ID{n}") for n in range(5)]
        other = await send(lane, "U", KEYS="all ID3")
        await indexed(broker, other + 1)
        form = pb.MESSAGE_FORM_MESSAGES
        assert offsets(await query(broker, "T", key="all", form=form)) == places[::-1]
        assert offsets(await query(broker, "U", key="all", form=form)) == [other]
        (found,) = (await query(broker, "T", key="k2", form=form)).messages
        assert (found.log_offset, list(found.keys), found.unique_id) == (
            places[2],
            ["all", "k2"],
            "ID2",
        )
        assert offsets(await query(broker, "T", unique_id="ID3", form=form)) == [places[3]]
        assert offsets(await query(broker, "T", key="ID3", form=form)) == [places[3]]
        assert offsets(await query(broker, "U", unique_id="ID3", form=form)) == []  # it is a key
        answer = await query(broker, "T", key="all")
        assert [r.log_offset for r in record.decode_all(answer.records)] == places[::-1]
        assert (answer.count, answer.has_more, list(answer.messages)) == (5, False, [])


async def test_an_answer_has_bounds(tmp_path: Path) -> None:
    async with running_broker(tmp_path, mapped_file_size_commit_log=1 << 23) as broker:
        await broker.put_topic("T")
        lane = await broker.lane()
        places = [await send(lane, "T", KEYS="k") for _ in range(70)]
        large = [await send(lane, "T", bytes(1 << 20), KEYS="large") for _ in range(5)]
        await indexed(broker, large[-1] + 1)
        few = await query(broker, "T", key="k", max_count=3, form=pb.MESSAGE_FORM_MESSAGES)
        assert (offsets(few), few.count, few.has_more) == (places[:-4:-1], 3, True)
        assert (await query(broker, "T", key="k")).count == 32
        most = await query(broker, "T", key="k", max_count=1000, form=pb.MESSAGE_FORM_MESSAGES)
        assert (offsets(most), most.has_more) == (places[:5:-1], True)
        some = await query(broker, "T", key="large", form=pb.MESSAGE_FORM_MESSAGES)
        assert (offsets(some), some.has_more) == (large[:1:-1], True)


async def test_messages_are_found_by_key_within_a_time(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T")
        lane = await broker.lane()
        for _ in range(20):
            await send(lane, "T", KEYS="k")
        await indexed(broker, broker.store.appended_offset)
        form = pb.MESSAGE_FORM_MESSAGES
        everything = list((await query(broker, "T", key="k", form=form)).messages)
        first, last = everything[12].store_time_ms, everything[4].store_time_ms
        answer = await query(broker, "T", key="k", begin_ms=first, end_ms=last, form=form)
        assert list(answer.messages) == [m for m in everything if first <= m.store_time_ms <= last]


@pytest.mark.parametrize(
    ("topic", "waits"),
    [
        (SCHEDULE_TOPIC, {"delay_level": 5}),
        (TIMER_TOPIC, {"delay_ms": 3_600_000}),
        (HALF_TOPIC, {"producer_group": "P"}),
    ],
)
async def test_of_a_message_that_waits_nobody_reads_the_content(
    tmp_path: Path, topic: str, waits: dict[str, Any]
) -> None:
    """What a pull refuses is not read by id or by key either; where the message lies is told."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T")
        outgoing = pb.OutgoingMessage(
            topic="T", queue_id=0, body=b"secret", tag="secret", keys=["k"],
            properties={"p": "secret"}, **waits,
        )  # fmt: skip
        await broker.stub.Send(pb.SendRequest(messages=[outgoing]))
        await indexed(broker, broker.store.appended_offset)
        form = pb.MESSAGE_FORM_MESSAGES
        (by_key,) = (await query(broker, topic, key="k", form=form)).messages
        asked = pb.GetMessageRequest(message_id=by_key.message_id)
        by_id = (await broker.stub.GetMessage(asked)).message
        for found in (by_id, by_key):
            assert (found.queue.topic, found.log_offset, found.withheld) == (
                topic,
                by_key.log_offset,
                True,
            )
            assert found.properties["REAL_TOPIC"] == "T"
            assert b"secret" not in found.SerializeToString()
        assert isinstance(await refusal(query(broker, topic, key="k")), NoPermission)


async def test_what_cannot_be_asked(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T")
        assert isinstance(await refusal(query(broker, "Nowhere", key="k")), TopicNotFound)
        for fields in ({}, {"key": ""}, {"key": "k", "max_count": -1}):
            assert isinstance(await refusal(query(broker, "T", **fields)), InvalidRequest)
        backwards = query(broker, "T", key="k", begin_ms=2, end_ms=1)
        assert isinstance(await refusal(backwards), InvalidRequest)


async def test_without_an_index_it_says_so(tmp_path: Path) -> None:
    async with running_broker(tmp_path, message_index_enable=False) as broker:
        await broker.put_topic("T")
        assert isinstance(await refusal(query(broker, "T", key="k")), IndexDisabled)


async def test_messages_of_a_deleted_topic_are_not_found(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T")
        lane = await broker.lane()
        await send(lane, "T", KEYS="k")
        await broker.drop_topic("T")
        await broker.put_topic("T")
        again = await send(lane, "T", KEYS="k")
        await indexed(broker, again + 1)
        assert offsets(await query(broker, "T", key="k", form=pb.MESSAGE_FORM_MESSAGES)) == [again]


async def test_the_index_outlives_a_crash(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T")
        lane = await broker.lane()
        places = [await send(lane, "T", KEYS="k") for _ in range(300)]
        await indexed(broker, places[-1] + 1)
        broker.crash()
    async with running_broker(tmp_path) as broker:
        await indexed(broker, places[-1] + 1)
        answer = await query(broker, "T", key="k", max_count=64, form=pb.MESSAGE_FORM_MESSAGES)
        assert offsets(answer) == places[: -64 - 1 : -1]


async def by_time(broker: BrokerClient, time_ms: int, *queues: int, **fields: Any) -> Any:
    refs = [common.QueueRef(topic="T", queue_id=queue) for queue in queues]
    request = pb.QueryOffsetsByTimeRequest(queues=refs, time_ms=time_ms, **fields)
    return (await broker.stub.QueryOffsetsByTime(request)).queues


@pytest.mark.parametrize("boundary", [pb.TIME_BOUNDARY_LOWER, pb.TIME_BOUNDARY_UPPER])
async def test_offsets_are_found_by_time(
    tmp_path: Path, boundary: pb.TimeBoundary.ValueType
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", queues=2)
        for _ in range(10):
            await broker.send("T", 0, b"x")
        found = await broker.read_queue("T", 0)
        times = [one.store_time_ms for one in found]
        wanted = times[5]
        first, last = times.index(wanted), 9 - times[::-1].index(wanted)
        here, empty, missing = await by_time(broker, wanted, 0, 1, 2, boundary=boundary)
        lower = boundary == pb.TIME_BOUNDARY_LOWER
        assert (here.position.offset, here.store_time_ms) == (first if lower else last, wanted)
        assert here.position.generation > 0
        assert (empty.position.offset, empty.store_time_ms) == (0, 0)
        assert from_proto(missing.error).name() == "QUEUE_NOT_FOUND"
        (late,) = await by_time(broker, times[-1] + 1, 0, boundary=boundary)
        assert late.position.offset == (10 if lower else 9)
        assert late.store_time_ms == (0 if lower else times[-1])
        (early,) = await by_time(broker, times[0] - 1, 0, boundary=boundary)
        assert (early.position.offset, early.store_time_ms) == (0, times[0])


async def test_a_boundary_of_the_future_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T")
        assert isinstance(await refusal(by_time(broker, 0, 0, boundary=7)), InvalidRequest)


async def test_a_disk_that_is_really_full_stops_only_the_index(tmp_path: Path) -> None:
    sizes = {"max_hash_slot_num": 500_000, "max_index_num": 100_000}  # 4 MB a file
    with small_disk(tmp_path / "disk", 6 * 1024 * 1024) as disk:
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(3 * 1024 * 1024))
        async with running_broker(disk, **sizes) as broker:
            await broker.put_topic("T")
            lane = await broker.lane()
            place = await send(lane, "T", KEYS="k")
            await until(lambda: broker.store.index.status.stalled)
            assert (await query(broker, "T", key="k")).count == 0
            again = await send(lane, "T", KEYS="k")
            assert [r.log_offset for r in await broker.read_queue("T", 0)] == [place, again]
            ballast.unlink()
            await indexed(broker, again + 1)
            assert (await query(broker, "T", key="k")).count == 2


async def test_a_follower_answers_as_its_writer_does(tmp_path: Path) -> None:
    async with live_group(tmp_path) as group:
        writer, follower = group[0].client, group[1].client
        await writer.put_topic("T", queues=1, flush=common.FLUSH_MODE_SYNC)
        lane = await writer.lane()
        places = [await send(lane, "T", KEYS="k", UNIQ_KEY=f"ID{n}") for n in range(10)]

        async def shows_all() -> bool:
            return (await follower.status("T", 0)).max_offset == 10

        await group.in_step()
        await until_async(shows_all)
        for member in (writer, follower):
            await indexed(member, places[-1] + 1)
        form = pb.MESSAGE_FORM_MESSAGES
        answers = [await query(member, "T", key="k", form=form) for member in (writer, follower)]
        assert offsets(answers[0]) == places[::-1]
        assert list(answers[0].messages) == list(answers[1].messages)
        assert (await query(follower, "T", unique_id="ID7")).count == 1
        stored_ms = answers[0].messages[0].store_time_ms
        rows = [await by_time(member, stored_ms, 0) for member in (writer, follower)]
        assert [row.position for row in rows[0]] == [row.position for row in rows[1]]

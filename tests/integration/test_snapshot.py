"""SnapshotOffsets of a real broker: every number against what the other calls say."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cometmq.member.rpc import offset_snapshot
from cometmq.messaging.state import STATE_QUEUE_ID, STATE_TOPIC
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import SYNC, BrokerClient, LiveBroker, running_broker
from tests.support.waiting import until

Rows = dict[tuple[str, int], pb.QueueSnapshot]


async def take(broker: BrokerClient) -> tuple[pb.SnapshotHeader, Rows]:
    """A whole snapshot; queues by topic and number."""
    pieces = [piece async for piece in broker.admin.SnapshotOffsets(pb.SnapshotOffsetsRequest())]
    assert [piece.HasField("header") for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    queues = [queue for piece in pieces for queue in piece.queues]
    keys = [(queue.queue.topic, queue.queue.queue_id) for queue in queues]
    assert keys == sorted(set(keys)), "every queue once, in order"
    return pieces[0].header, dict(zip(keys, queues, strict=True))


def group(rows: Rows, key: tuple[str, int], name: str) -> pb.GroupSnapshot:
    [found] = [row for row in rows[key].groups if row.group == name]
    return found


def state_records(broker: LiveBroker) -> int:
    return broker.store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)[1]


@asynccontextmanager
async def member(broker: BrokerClient, name: str, client: str, topic: str) -> AsyncIterator[None]:
    """A live member of a group."""
    call = broker.stub.JoinGroup()
    request = pb.JoinGroupRequest(
        group=name, client_id=client, subscriptions=[pb.Subscription(topic=topic)]
    )
    await call.write(request)
    await call.read()
    try:
        yield
    finally:
        call.cancel()


async def store_time(broker: BrokerClient, topic: str, queue_id: int, offset: int) -> int:
    answer = await broker.pull(topic, queue_id, offset, max_count=1, form=pb.MESSAGE_FORM_MESSAGES)
    return answer.messages[0].store_time_ms


async def fill(broker: BrokerClient) -> None:
    """Topic T: 5 messages in queue 0, 2 in queue 1, none in queue 2."""
    await broker.put_topic("T", queues=3, flush=SYNC)
    for number in range(5):
        await broker.send("T", 0, b"%d" % number)
    await broker.send("T", 1, b"a", b"b")


async def test_an_empty_broker_has_a_header(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        header, rows = await take(broker)
        said = await broker.admin.DescribeBroker(pb.DescribeBrokerRequest())
    assert (header.cluster, header.broker_group) == (said.cluster, "g1")
    assert (header.epoch, header.taken_ms >= said.started_ms) == (said.epoch, True)
    assert header.log_end_offset == said.log_appended_offset
    assert all(not queue.groups for queue in rows.values())


async def test_it_says_what_describe_group_says(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await fill(broker)
        await broker.commit("G", ("T", 0, 0, 3), ("T", 1, 0, 2))
        await broker.commit("H", ("T", 0, 0, 0))
        async with member(broker, "G", "me", "T"):
            _, rows = await take(broker)
            for name in ("G", "H"):
                request = pb.DescribeGroupRequest(group=name)
                said = (await broker.admin.DescribeGroup(request)).progress
                for progress in said:
                    key = (progress.queue.topic, progress.queue.queue_id)
                    bounds = (rows[key].generation, rows[key].min_offset, rows[key].max_offset)
                    assert bounds == (progress.generation, progress.min_offset, progress.max_offset)
                    row = group(rows, key, name)
                    assert row.HasField("committed") == progress.HasField("committed")
                    assert row.committed == progress.committed
                of_group = [key for key in rows if name in {g.group for g in rows[key].groups}]
                assert of_group == [(p.queue.topic, p.queue.queue_id) for p in said]


async def test_store_times_are_those_of_the_messages(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await fill(broker)
        await broker.commit("G", ("T", 0, 0, 3), ("T", 1, 0, 2))
        _, rows = await take(broker)
        assert rows["T", 0].max_store_time_ms == await store_time(broker, "T", 0, 4)
        assert rows["T", 1].max_store_time_ms == await store_time(broker, "T", 1, 1)
        committed = group(rows, ("T", 0), "G").committed_store_time_ms
        assert committed == await store_time(broker, "T", 0, 3)
    assert group(rows, ("T", 1), "G").committed_store_time_ms == 0  # nothing stands there yet
    assert rows["T", 2].max_store_time_ms == 0


async def test_members_are_counted_and_the_uncommitted_is_absent(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await fill(broker)
        async with member(broker, "G", "a", "T"), member(broker, "G", "b", "T"):
            _, rows = await take(broker)
    row = group(rows, ("T", 2), "G")
    assert row.member_count == 2
    assert not row.HasField("committed")


async def test_after_a_crash_a_position_counts_as_far_as_it_holds(tmp_path: Path) -> None:
    """A position above the start of the new generation holds no more, one below does."""
    async with running_broker(tmp_path) as broker:
        await fill(broker)
        generation = (await take(broker))[1]["T", 0].generation
        before = state_records(broker)
        await broker.commit("G", ("T", 0, 0, 3), ("T", 1, 0, 1))
        await until(lambda: state_records(broker) >= before + 2)  # the group, its offsets
        broker.crash()
    async with running_broker(tmp_path) as broker:
        _, rows = await take(broker)
        assert rows["T", 0].generation > generation
        row = group(rows, ("T", 0), "G")
        assert row.committed == common.Position(generation=generation, offset=3)
        assert row.committed_store_time_ms == await store_time(broker, "T", 0, 3)


async def test_a_deleted_topic_is_not_there(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await fill(broker)
        await broker.commit("G", ("T", 0, 0, 3))
        await broker.drop_topic("T")
        _, rows = await take(broker)
    assert "T" not in {topic for topic, _ in rows}


async def test_many_queues_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offset_snapshot, "PIECE_ROWS_MAX", 10)
    monkeypatch.setattr(offset_snapshot, "TURN_READS_MAX", 3)
    monkeypatch.setattr(offset_snapshot, "TURN_ENTRIES_MAX", 3)
    async with running_broker(tmp_path) as broker:
        for topic in ("A", "B", "C"):
            await broker.put_topic(topic, queues=16, flush=SYNC)
            await broker.send(topic, 7, b"x")
        for name in ("G", "H"):
            await broker.commit(name, *[(topic, 7, 0, 0) for topic in ("A", "B", "C")])
        stream = broker.admin.SnapshotOffsets(pb.SnapshotOffsetsRequest())
        sizes = [len(piece.queues) async for piece in stream]
        _, rows = await take(broker)
        stored = await store_time(broker, "B", 7, 0)
    assert max(sizes) <= 10
    assert len([key for key in rows if key[0] in "ABC"]) == 48
    assert [g.group for g in rows["B", 7].groups] == ["G", "H"]
    assert {g.committed_store_time_ms for g in rows["B", 7].groups} == {stored}


async def test_reads_from_a_thread_give_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_broker(tmp_path) as broker:
        await fill(broker)
        await broker.commit("G", ("T", 0, 0, 3))
        _, hot = await take(broker)
        real = broker.store.read_units

        def cold(*args: object, nowait: bool = False) -> bytes:
            if nowait:
                raise BlockingIOError
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(broker.store, "read_units", cold)
        _, rows = await take(broker)
        assert rows["T", 0] == hot["T", 0]
        monkeypatch.undo()

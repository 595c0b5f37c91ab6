"""A group goes on where an operator lets it: online, offline, against commits on their way."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from cometmq.admin.cli import cli
from cometmq.client import (
    Message,
    Producer,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
)
from cometmq.errors import (
    CometError,
    GroupNotFound,
    InvalidRequest,
    LimitExceeded,
    OffsetInvalid,
    OffsetReset,
    QueueNotFound,
    TopicNotFound,
)
from cometmq.format import record
from cometmq.rpc.interceptors import error_from, from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2
from services.broker.groups.resets import OffsetResets
from tests.support.cluster.broker import (
    BrokerClient,
    LiveBroker,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.waiting import until

COUNT = 40
RESET = OffsetReset.code
FIRST, LAST = pb.RESET_BOUND_FIRST, pb.RESET_BOUND_LAST


async def reset(broker: BrokerClient, **target: object) -> list[tuple[int | None, int]]:
    """Before and after, by queue."""
    request = pb.ResetOffsetsRequest(**{"group": "G", "topic": "T", **target})  # type: ignore[arg-type]
    answer = await broker.admin.ResetOffsets(request)
    return [
        (one.before.offset if one.HasField("before") else None, one.after.offset)
        for one in answer.results
    ]


async def committed(broker: BrokerClient, group: str = "G") -> int | None:
    position = await broker.committed(group, "T", 0)
    return None if position is None else position.offset


async def commit(broker: BrokerClient, offset: int, reset_number: int) -> tuple[int, int, int]:
    """The code of the error, where to go on, and the number of the newest reset."""
    queue = common_pb2.QueueRef(topic="T", queue_id=0)
    item = pb.OffsetCommit(
        queue=queue, position=common_pb2.Position(offset=offset), reset_number=reset_number
    )
    answer = await broker.stub.CommitOffsets(pb.CommitOffsetsRequest(group="G", commits=[item]))
    one = answer.results[0]
    return one.error.code, one.error.fence.offset, one.reset_number


async def test_members_follow_and_their_old_commits_do_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[int] = []
    held = asyncio.Event()
    held.set()

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.append(int(messages[0].body))
        await held.wait()

    options = PushConsumerOptions(rebalance_delay_ms=1, concurrency=1, commit_interval_ms=10)
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        async with Producer(namesrv) as producer:
            for n in range(COUNT):
                await producer.send_and_wait(Message("T", b"%d" % n))
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: len(got) >= COUNT)
            for back_to in (10, 30, 0):  # commits go on all the time
                got.clear()
                held.clear()
                assert (await reset(broker, offset=back_to))[0][1] == back_to
                held.set()
                await until(lambda: len(got) >= COUNT - back_to)  # noqa: B023
                assert got == list(range(back_to, COUNT))
            held.clear()
            await reset(broker, bound=FIRST)
            await until(lambda: got[-1] == 0)
            caplog.clear()
            assert await reset(broker, bound=LAST) == [(0, COUNT)]
            await until(lambda: "the group was reset" in caplog.text)
            held.set()
            await broker.send("T", 0, b"%d" % COUNT)
            await until(lambda: got[-1] == COUNT)
            assert got[-2] == 0, "messages that are skipped are not consumed"
        assert await committed(broker) == COUNT + 1


async def test_a_reset_outlives_a_restart_and_stops_commits_of_before(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *[b"."] * 10)
        assert len(await broker.read_queue("T", 0)) == 10
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reset(broker, bound=FIRST)
        assert isinstance(error_from(refused.value), GroupNotFound)
        assert await commit(broker, 7, 0) == (0, 0, 0)
        assert await reset(broker, offset=3, dry_run=True) == [(7, 3)]
        assert await committed(broker) == 7
        assert await reset(broker, offset=3) == [(7, 3)]
        assert await reset(broker, offset=99) == [(3, 10)]  # its end
        assert await reset(broker, offset=4, queue_ids=[0]) == [(10, 4)]
        code, fence, newest = await commit(broker, 8, 0)
        assert (code, fence) == (RESET, 4)
        assert await commit(broker, 8, newest - 1) == (RESET, 4, newest)
        for wrong in ({}, {"bound": 0}, {"offset": -1}, {"time_ms": -1}, {"clone_of": "G"}):
            with pytest.raises(grpc.aio.AioRpcError):
                await reset(broker, **wrong)
        assert len(await reset(broker, offset=0, queue_ids=[7], dry_run=True)) == 1
    async with running_broker(tmp_path) as broker:
        assert await committed(broker) == 4
        assert await commit(broker, 8, newest - 1) == (RESET, 4, newest)
        assert await commit(broker, 8, newest) == (0, 0, 0)
        assert await reset(broker, clone_of="G", group="H") == [(None, 8)]
        assert await committed(broker, "H") == 8
        assert await committed(broker) == 8


async def test_a_client_that_knew_a_deleted_topic_cannot_undo_a_reset(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        newest = 0
        for count in (3, 1):  # more resets before the deletion than after it
            await broker.put_topic("T", 1)
            await broker.send("T", 0, *[b"."] * 10)
            assert len(await broker.read_queue("T", 0)) == 10
            assert (await commit(broker, 9, newest))[0] == 0
            for _ in range(count):
                await reset(broker, offset=2)
            stale, newest = newest, (await commit(broker, 9, 0))[2]
            assert newest > stale
            assert (await commit(broker, 9, stale))[:2] == (RESET, 2)
            await broker.admin.DeleteTopic(pb.DeleteTopicRequest(topic="T"))


async def test_a_pull_consumer_goes_on_where_the_group_was_reset_to(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *[b"%d" % n for n in range(10)])
        options = PullConsumerOptions(pull_count_max=2)
        async with PullConsumer(namesrv, "G", options=options) as consumer:
            await consumer.assign(await consumer.queues("T"))
            assert [one.queue_offset for one in await consumer.poll()] == [0, 1]
            await consumer.commit()
            assert [one.queue_offset for one in await consumer.poll()] == [2, 3]
            assert await reset(broker, offset=7) == [(2, 7)]
            await consumer.commit()
            assert [one.queue_offset for one in await consumer.poll()] == [7, 8]
            await consumer.commit()
        assert await committed(broker) == 9


async def test_a_reset_by_queue_and_time_is_an_event_and_leaves_other_queues_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 3)
        for queue_id in range(3):
            for n in range(4):
                await broker.send("T", queue_id, b"%d" % n)
            await broker.read_queue("T", queue_id)
        await broker.commit("G", *[("T", queue_id, 0, 2) for queue_id in range(2)])

        async def where() -> list[int | None]:
            found = [await broker.committed("G", "T", queue_id) for queue_id in range(3)]
            return [None if one is None else one.offset for one in found]

        def events() -> list[dict[str, object]]:
            told = [one for one in caplog.records if one.getMessage().startswith("group was reset")]
            return [vars(one)["fields"] for one in told]

        for target in ({"offset": 1}, {"time_ms": 5}, {"bound": LAST}):
            for queue_id in (7, -1):
                wanted: Any = {"group": "G", "topic": "T", "queue_ids": [queue_id], **target}
                answer = await broker.admin.ResetOffsets(pb.ResetOffsetsRequest(**wanted))
                assert isinstance(from_proto(answer.results[0].error), QueueNotFound), wanted
        wrong: list[tuple[dict[str, Any], type[CometError]]] = [
            ({"time_ms": -1}, InvalidRequest),
            ({"offset": -1}, OffsetInvalid),
            ({"bound": 9}, InvalidRequest),
            ({}, InvalidRequest),
            ({"bound": FIRST, "topic": "U"}, TopicNotFound),
            ({"bound": FIRST, "group": "H"}, GroupNotFound),
            ({"clone_of": "G"}, InvalidRequest),
            ({"clone_of": "H"}, GroupNotFound),
            ({"bound": FIRST, "queue_ids": range(4097)}, LimitExceeded),
        ]
        for fields, error in wrong:
            request = pb.ResetOffsetsRequest(**({"group": "G", "topic": "T"} | fields))
            assert isinstance(await refusal(broker.admin.ResetOffsets(request)), error), fields
        assert await where() == [2, 2, None]
        assert not events()
        assert not await counted(broker)

        assert await reset(broker, offset=3, queue_ids=[1, 1]) == [(2, 3)]
        assert await where() == [2, 3, None]
        records = record.decode_all((await broker.pull("T", 2, 0, max_count=9)).records)
        time_ms = records[2].store_time_ms
        first = next(n for n, one in enumerate(records) if one.store_time_ms == time_ms)
        assert await reset(broker, time_ms=time_ms, queue_ids=[2]) == [(None, first)]
        assert await where() == [2, 3, first]
        event, _ = events()
        assert event.pop("reset")
        assert event == {
            "group": "G",
            "topic": "T",
            "queue": 1,
            "offset": 2,
            "goes_on_at": 3,
            "asked_by": "127.0.0.1",
        }
        [line] = await counted(broker)
        assert 'topic="T"' in line
        assert 'consumer_group="G"' in line
        assert line.endswith(" 2.0")


async def counted(broker: LiveBroker) -> list[str]:
    """What the metric of resets says."""

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{broker.metrics_address}/metrics") as answer:
            text: str = answer.read().decode()
            return text

    lines = (await asyncio.to_thread(scrape)).splitlines()
    return [line for line in lines if line.startswith("cometmq_offset_resets_total{")]


Row = tuple[int, int | None, int, bool]  # queue, before, after, done


async def test_the_commands(tmp_path: Path) -> None:
    def command(namesrv: str, *words: str) -> list[Row]:
        done = CliRunner().invoke(cli, ["group", *words, "--namesrv", namesrv, "--output", "json"])
        assert done.exit_code == 0, done.output
        return [
            (one["queue_id"], one["before"], one["after"], one["done"])
            for one in json.loads(done.stdout)
        ]

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 2)
        for queue_id in (0, 1):
            await broker.send("T", queue_id, *[b"."] * 5)
            await broker.read_queue("T", queue_id)
        await broker.commit("G", ("T", 0, 0, 2), ("T", 1, 0, 3))

        async def run(*words: str) -> list[Row]:
            return await asyncio.to_thread(command, namesrv, *words)

        one = ("reset-offset", "G", "T")
        assert await run(*one, "--to-first", "--dry-run") == [(0, 2, 0, False), (1, 3, 0, False)]
        assert await run(*one, "--to-offset", "1", "--queue", "1") == [(1, 3, 1, True)]
        assert await run(*one, "--to-time", "5") == [(0, 2, 0, True), (1, 1, 0, True)]
        assert await run("skip", "G", "T") == [(0, 0, 5, True), (1, 0, 5, True)]
        assert await run(*one, "--to-offset", "4", "--queue", "0") == [(0, 5, 4, True)]
        clone = ("clone-offset", "G", "H")
        assert await run(*clone, "--dry-run") == [(0, None, 4, False), (1, None, 5, False)]
        assert await broker.committed("H", "T", 0) is None
        assert await run(*clone) == [(0, None, 4, True), (1, None, 5, True)]
        assert await run(*one, "--to-last", "--queue", "0") == [(0, 4, 5, True)]
        after = [await broker.committed("H", "T", queue_id) for queue_id in (0, 1)]
        assert [place.offset for place in after if place] == [4, 5], "a clone goes its own way"


async def test_a_group_that_is_deleted_while_its_reset_is_planned_stays_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = OffsetResets._places

    async def slow(resets: OffsetResets, *arguments: Any) -> Any:
        await broker.admin.DeleteGroup(pb.DeleteGroupRequest(group="G"))
        return await places(resets, *arguments)

    monkeypatch.setattr(OffsetResets, "_places", slow)
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"0")
        await broker.commit("G", ("T", 0, 0, 0))
        assert isinstance(await refusal(reset(broker, bound=LAST)), GroupNotFound)
        assert await committed(broker) is None

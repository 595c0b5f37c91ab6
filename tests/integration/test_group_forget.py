"""A group that has left a topic is forgotten there: in all views, at all members, for good."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

pytest.importorskip("pyarrow", reason="pyarrow is missing (extra lag: make setup)")

from pyarrow import parquet

from cometmq.admin import offsets
from cometmq.admin.cli import cli
from cometmq.admin.connection import Connection
from cometmq.client import (
    ConsumeFrom,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
)
from cometmq.clock import SystemClock
from cometmq.errors import GroupInUse, GroupNotFound, NoPermission, TopicNotFound
from cometmq.v1 import broker_pb2 as pb
from tests.support.cluster.broker import (
    BrokerClient,
    LiveBroker,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.live_group import live_group
from tests.support.cluster.pullhold import scraped
from tests.support.waiting import until, until_async

LAG = "rocketmq_consumer_lag_messages"


async def forget(broker: BrokerClient, group: str = "G", topic: str = "T") -> list[int]:
    request = pb.ForgetOffsetsRequest(group=group, topic=topic)
    return list((await broker.admin.ForgetOffsets(request)).queue_ids)


async def command(namesrv: str, *words: str) -> Any:
    """The answer of ``cometmq group``."""
    options = ["--namesrv", namesrv, "--output", "json"]
    done = await asyncio.to_thread(CliRunner().invoke, cli, ["group", *words, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


async def prepare(broker: BrokerClient) -> None:
    """Group G was in T and stays in U, and H stays in both."""
    for topic in ("T", "U"):
        await broker.put_topic(topic, 2)
        for queue_id in range(2):
            await broker.send(topic, queue_id, b"0", b"1", b"2")
            await broker.read_queue(topic, queue_id)
    for group in ("G", "H"):
        places = [(topic, queue_id, 0, 1) for topic in ("T", "U") for queue_id in range(2)]
        await broker.commit(group, *places)


@asynccontextmanager
async def member(
    broker: BrokerClient, topic: str, client: str, **fields: Any
) -> AsyncIterator[Any]:
    call: Any = broker.stub.JoinGroup()
    request = pb.JoinGroupRequest(
        group="G", client_id=client, subscriptions=[pb.Subscription(topic=topic)], **fields
    )
    await call.write(request)
    await call.read()
    yield call
    call.cancel()


async def places_of(broker: BrokerClient, group: str) -> tuple[set[str], set[str]]:
    """Topics in which the group has a place, by its progress and by a snapshot of offsets."""
    described = await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group=group))
    shown = {one.queue.topic for one in described.progress if one.HasField("committed")}
    pieces = [piece async for piece in broker.admin.SnapshotOffsets(pb.SnapshotOffsetsRequest())]
    rows = [row for piece in pieces for row in piece.queues]
    return shown, {row.queue.topic for row in rows for one in row.groups if one.group == group}


async def topics_of(broker: BrokerClient, group: str) -> set[str]:
    shown, exported = await places_of(broker, group)
    assert exported == shown
    return shown


async def lag_series(broker: LiveBroker) -> set[tuple[str, str]]:
    """Topic and group of each sample of the lag."""
    text = await scraped(broker.metrics_address)
    labels = re.findall(rf"^{LAG}{{(.*)}}", text, re.M)
    found = [dict(re.findall(r'(\w+)="([^"]*)"', one)) for one in labels]
    return {(one["topic"], one["consumer_group"]) for one in found}


async def test_all_views_forget_a_group_that_has_left_a_topic(tmp_path: Path) -> None:
    """Progress, status, lag, the metric, the export; of this group in this topic alone."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        member(broker, "U", "stays"),
    ):
        await prepare(broker)
        assert await topics_of(broker, "G") == {"T", "U"}
        [done] = await command(namesrv, "forget", "G", "T")
        assert done == {"group": "G", "topic": "T", "broker_group": "g1", "queue_count": 2}
        assert await topics_of(broker, "G") == {"U"}
        assert await topics_of(broker, "H") == {"T", "U"}
        assert await lag_series(broker) == {("U", "G"), ("T", "H"), ("U", "H")}
        report = await command(namesrv, "status", "G")
        assert [one["topic"] for one in report["topics"]] == ["U"]
        async with Connection(namesrv) as connection:
            await offsets.export(connection, tmp_path / "snapshots", SystemClock())
        [part] = (tmp_path / "snapshots").rglob("part.parquet")
        rows = parquet.read_table(part, partitioning=None).to_pylist()
        exported = {(row["topic"], row["group"]) for row in rows if row["group"] in ("G", "H")}
        assert exported == {("U", "G"), ("T", "H"), ("U", "H")}
        [again] = await command(namesrv, "forget", "G", "T")
        assert again["queue_count"] == 0, "what is done is done"
        broker.crash()
    async with running_broker(tmp_path) as broker:
        assert await topics_of(broker, "G") == {"U"}
        assert await broker.committed("G", "T", 0) is None


@pytest.mark.parametrize("session_ms", [0, 60_000])
async def test_members_of_the_topic_keep_their_group_there(tmp_path: Path, session_ms: int) -> None:
    """Also a static one that is away."""
    async with running_broker(tmp_path) as broker:
        await prepare(broker)
        async with member(broker, "T", "reads", session_ms=session_ms):
            refused = await refusal(forget(broker))
            assert isinstance(refused, GroupInUse)
            assert "reads is connected" in refused.message
        if session_ms:
            await until_async(lambda: says_away(broker))
            await broker.admin.RemoveMembers(pb.RemoveMembersRequest(group="G"))
        await until_async(lambda: is_left(broker))
        assert await forget(broker) == [0, 1]
        assert await topics_of(broker, "G") == {"U"}


async def says_away(broker: BrokerClient) -> bool:
    refused = await refusal(forget(broker))
    return "reads is away" in refused.message


async def is_left(broker: BrokerClient) -> bool:
    described = await broker.admin.DescribeGroup(pb.DescribeGroupRequest(group="G"))
    return not described.members


async def test_what_is_not_there_and_what_is_the_brokers_own_is_refused(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await prepare(broker)
        for group, topic, error in (
            ("X", "T", GroupNotFound),
            ("G", "X", TopicNotFound),
            ("G", "%RETRY%G", NoPermission),
        ):
            assert isinstance(await refusal(forget(broker, group, topic)), error)
        assert await topics_of(broker, "G") == {"T", "U"}


async def test_a_group_that_comes_back_begins_as_a_new_one(tmp_path: Path) -> None:
    """By pulls and by receives (POP); messages that were sent back before may be so again."""
    seen: list[int] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.queue_offset for message in messages)

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await prepare(broker)
        await forget(broker)
        options = PushConsumerOptions(consume_from=ConsumeFrom.FIRST)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: sorted(seen) == [0, 0, 1, 1, 2, 2])
        received = pb.ReceiveRequest(
            group="P",
            subscriptions=[pb.Subscription(topic="T")],
            max_count=2,
            invisible_ms=600_000,
        )
        first = await broker.stub.Receive(received)
        assert sum(run.count for run in first.runs) == 2
        before = broker.state.pops.lease_count
        assert await forget(broker, "P") == [0, 1]
        assert broker.state.pops.lease_count < before
        received.max_count = 32
        again = await broker.stub.Receive(received)
        assert sum(run.count for run in again.runs) == 6, "those that it had, too"


async def has_left(broker: BrokerClient) -> bool:
    return await places_of(broker, "G") == ({"U"}, {"U"})


async def test_followers_and_the_next_writer_have_forgotten_it_too(tmp_path: Path) -> None:
    async with live_group(tmp_path, 2) as group:
        writer, follower = group[0], group[1]
        await group.all_in_sync(0, 1)
        await prepare(writer.client)
        await forget(writer.client)
        await group.in_step()
        await until_async(lambda: has_left(follower.client))
        await writer.crash()
        await follower.until_role("writer")
        assert await topics_of(follower.client, "G") == {"U"}

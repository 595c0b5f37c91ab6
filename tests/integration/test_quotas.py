"""Quotas of clients over real gRPC: what is above them is refused for a time that is told."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import Message, Producer, ProducerOptions, PushConsumer, ReceivedMessage
from cometmq.client.options import PushConsumerOptions
from cometmq.errors import FlowControl, InvalidRequest, NoPermission
from cometmq.rpc.interceptors import from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import (
    BrokerClient,
    encoded,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.pullhold import rpc_count, running_pullhold, sample
from tests.support.waiting import until

NOTHING = pb.Quota()


async def limit(broker: BrokerClient, topic: str = "T", **quota: int) -> pb.PutTopicResponse:
    request = pb.PutTopicRequest(
        topic=common.TopicConfig(name=topic, read_queue_count=1, write_queue_count=1),
        send_quota=pb.Quota(**quota),
    )
    return await broker.admin.PutTopic(request)


async def limit_group(broker: BrokerClient, **quota: int) -> None:
    settings = pb.GroupSettings(group="G", read_quota=pb.Quota(**quota))
    await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))


def send(broker: BrokerClient, count: int, client_id: str = "", topic: str = "T") -> Any:
    messages = [pb.OutgoingMessage(topic=topic, body=b"x" * 100)] * count
    return broker.stub.Send(pb.SendRequest(messages=messages, client_id=client_id))


def pull(broker: BrokerClient, client_id: str, count: int, group: str = "G") -> Any:
    request = pb.PullRequest(
        group=group, queue=common.QueueRef(topic="T"), max_count=count, client_id=client_id
    )
    return broker.stub.Pull(request)


async def test_each_client_has_a_quota_of_sends(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        assert (await limit(broker, messages_per_s=10)).send_quota.messages_per_s == 10
        await broker.put_topic("free", 1)
        await send(broker, 40, "a")  # what is above the quota of a second is paid for later
        refused = await refusal(send(broker, 1, "a"))
        assert isinstance(refused, FlowControl)
        assert refused.retry_after_ms is not None
        assert 2_000 < refused.retry_after_ms <= 3_000
        await send(broker, 1, "b")
        await send(broker, 1, "a", "free")
        await send(broker, 20)  # by its address
        assert isinstance(await refusal(send(broker, 1)), FlowControl)
        mixed = [pb.OutgoingMessage(topic=topic, body=b"x") for topic in ("free", "T")]
        call = broker.stub.Send(pb.SendRequest(messages=mixed, client_id="a"))
        refused = await refusal(call)
        assert (refused.name(), refused.segment) == ("FLOW_CONTROL", 1)
        assert isinstance(await refusal(send(broker, 1, "x" * 256)), InvalidRequest)
        broker.crash()
    async with running_broker(tmp_path) as broker:  # the quota is kept, what was used is not
        described = await broker.admin.DescribeTopic(pb.DescribeTopicRequest(topic="T"))
        assert described.send_quota.messages_per_s == 10
        assert described.queues[0].max_offset == 61
        await send(broker, 20, "a")
        assert isinstance(await refusal(send(broker, 1, "a")), FlowControl)
        kept = await broker.admin.PutTopic(pb.PutTopicRequest(topic=described.topic))
        assert kept.send_quota.messages_per_s == 10  # not said: as it was
        await limit(broker)
        await send(broker, 1, "a")
        await limit(broker, messages_per_s=1)
        await broker.drop_topic("T")
        await broker.put_topic("T", 1)
        for _ in range(3):
            await send(broker, 5, "c")


@pytest.mark.parametrize(
    ("topic", "quota", "error"),
    [
        ("new", {"messages_per_s": -1}, InvalidRequest),
        ("new", {"bytes_per_s": (1 << 40) + 1}, InvalidRequest),
        ("%RETRY%G", {"messages_per_s": 1}, NoPermission),
        ("SCHEDULE_TOPIC_XXXX", {"messages_per_s": 1}, NoPermission),
    ],
)
async def test_a_wrong_quota_changes_nothing(
    tmp_path: Path, topic: str, quota: dict[str, int], error: type[Exception]
) -> None:
    async with running_broker(tmp_path) as broker:
        assert isinstance(await refusal(limit(broker, topic, **quota)), error)
        request = pb.BrokerAdminServiceListTopicsRequest()
        assert not (await broker.admin.ListTopics(request)).topics


async def test_a_stream_says_once_who_it_is_and_delayed_messages_count(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await limit(broker, bytes_per_s=500)
        stream: Any = broker.stub.SendStream()
        await stream.read()
        data = encoded("T", 0, b"x" * 2_000)
        for batch_id in (1, 2):
            await stream.write(
                pb.SendStreamRequest(
                    batch_id=batch_id,
                    records=data,
                    segments=[pb.Segment(topic="T", count=1)],
                    client_id="a" if batch_id == 1 else "",
                )
            )
        first, second = (await stream.read()).result, (await stream.read()).result
        assert not first.HasField("error")
        refused = from_proto(second.error)
        assert isinstance(refused, FlowControl)
        assert "'a'" in refused.message
        delayed = pb.OutgoingMessage(topic="T", body=b"x", delay_level=1)
        call = broker.stub.Send(pb.SendRequest(messages=[delayed], client_id="a"))
        assert isinstance(await refusal(call), FlowControl)


async def test_a_producer_waits_as_it_is_told_and_loses_nothing(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await limit(broker, messages_per_s=100)
        began_s = time.monotonic()
        options = ProducerOptions(batch_count_max=50)
        async with Producer(namesrv, options=options) as producer:
            futures = [await producer.send(Message("T", b"%d" % n)) for n in range(300)]
            await asyncio.gather(*futures)
        took_s = time.monotonic() - began_s
        assert await broker.bodies("T", 0) == [b"%d" % n for n in range(300)]
        assert took_s >= 1.4, "300 messages at 100 a second, of which 100 and the last at once"


async def test_each_client_has_a_quota_of_reads(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, *[b"x"] * 50)
        await limit_group(broker, messages_per_s=10)
        assert (await pull(broker, "a", 20)).count == 20
        refused = await refusal(pull(broker, "a", 1))
        assert isinstance(refused, FlowControl)
        assert refused.retry_after_ms is not None
        assert 500 < refused.retry_after_ms <= 1_000
        assert (await pull(broker, "b", 1)).count == 1
        assert (await pull(broker, "a", 1, "other")).count == 1
        assert isinstance(await refusal(pull(broker, "x" * 256, 1)), InvalidRequest)
        await limit_group(broker)
        assert (await pull(broker, "a", 1)).count == 1


async def test_a_consumer_keeps_to_its_quota_also_through_a_pullhold(tmp_path: Path) -> None:
    seen: list[float] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend([time.monotonic()] * len(messages))

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        running_pullhold(namesrv),
    ):
        await broker.put_topic("T", 1)
        await broker.commit("G", ("T", 0, 0, 0))
        await limit_group(broker, messages_per_s=20)
        options = PushConsumerOptions(pull_count_max=10)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: bool(consumer.assigned))
            await asyncio.sleep(0.3)  # it waits at the pull-hold
            for _ in range(60):  # one at a time: such arrivals bring their messages along
                await broker.send("T", 0, b"x")
                await asyncio.sleep(0.005)
            await until(lambda: len(seen) == 60)
        assert seen[-1] - seen[0] >= 1.0, "60 at 20 a second, of which 20 and a batch at once"


async def test_clients_ask_again_when_they_were_told_and_not_before(tmp_path: Path) -> None:
    """One refusal for the producer, one for the consumer, though both wait for seconds."""
    seen: list[ReceivedMessage] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(messages)

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await limit(broker, messages_per_s=4)
        async with Producer(namesrv) as producer:
            first = [await producer.send(Message("T", b"%d" % n)) for n in range(12)]
            await asyncio.gather(*first)
            await producer.send_and_wait(Message("T", b"12"))
        refused = "cometmq_batches_refused_total"
        assert await sample(broker.metrics_address, refused, 'error="FLOW_CONTROL"') == 1
        await limit_group(broker, messages_per_s=4)
        options = PushConsumerOptions(pull_count_max=12)
        async with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: len(seen) == 13)
            pulls = await rpc_count(broker.metrics_address, "Pull")
        assert pulls <= 4, "12 messages, a refusal, 1 message, and maybe one that finds nothing"

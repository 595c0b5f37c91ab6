"""Quotas of clients over real gRPC: what is above them is refused for a time that is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.client import Message, Producer, ProducerOptions, PushConsumer, ReceivedMessage
from cometmq.client.options import PushConsumerOptions
from cometmq.errors import CometError, FlowControl, InvalidRequest, NoPermission, TopicNotFound
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import error_from, from_proto
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from cometmq.v1 import hold_pb2, hold_pb2_grpc
from tests.support.cluster.addresses import calling_from
from tests.support.cluster.broker import (
    BrokerClient,
    LiveBroker,
    encoded,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.cluster.pullhold import rpc_count, running_pullhold, sample
from tests.support.waiting import until, until_async

SCOPES = {"address": pb.QUOTA_SCOPE_ADDRESS, "topic": pb.QUOTA_SCOPE_TOPIC}


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


# --- of addresses and topics ----------------------------------------------------------------------


async def refusal_of(call: Awaitable[object]) -> CometError | None:
    """What the call is refused with; None: it is answered."""
    try:
        await call
    except CometError as error:
        return error
    except grpc.aio.AioRpcError as error:
        return error_from(error)
    return None


async def put_quota(broker: BrokerClient, scope: str, name: str = "", **quotas: pb.Quota) -> Any:
    request = pb.PutQuotaRequest(scope=SCOPES[scope], name=name, **quotas)
    return await broker.admin.PutQuota(request)


@asynccontextmanager
async def stranger(broker: LiveBroker) -> AsyncIterator[BrokerClient]:
    """The broker, called from another address."""
    async with calling_from("127.0.0.2", broker.address) as address:
        client = BrokerClient(address, broker.internal_address)
        try:
            yield client
        finally:
            await client.close()


async def test_many_ids_at_one_address_get_no_more_and_nobody_pays_for_others(
    tmp_path: Path,
) -> None:
    async with running_broker(tmp_path) as broker, stranger(broker) as other:
        await limit(broker, messages_per_s=10)
        await put_quota(broker, "address", send=pb.Quota(messages_per_s=1))
        began_s = time.monotonic()
        answers = [await refusal_of(send(other, 1, f"id{n}")) for n in range(200)]
        refused = [answer for answer in answers if answer is not None]
        assert 0 < len(answers) - len(refused) <= 2 + time.monotonic() - began_s
        assert "address 127.0.0.2 has used up its quota of sends" in str(refused[0])
        assert refused[0].segment is None, "the whole batch, so that nobody sends it in parts"
        await send(broker, 1, "id0")  # the tenant's own quota is whole
        await put_quota(broker, "address", "127.0.0.2", send=pb.Quota())
        await send(other, 1, "tenant")
        shown = (await broker.admin.ListQuotas(pb.ListQuotasRequest())).limits
        assert [(one.name, one.send.messages_per_s) for one in shown] == [
            ("", 1),
            ("127.0.0.2", 0),
        ]
        throttled = "cometmq_calls_throttled_total"
        label = 'scope="address",way="sends"'
        assert await sample(broker.metrics_address, throttled, label) == len(refused)


def batch(topic: str) -> pb.SendStreamRequest:
    segment = pb.Segment(topic=topic, count=1)
    data = encoded(topic, 0, b"x" * 500)
    return pb.SendStreamRequest(batch_id=1, records=data, segments=[segment])


async def streamed(broker: BrokerClient, request: pb.SendStreamRequest) -> None:
    stream: Any = broker.stub.SendStream()
    await stream.read()
    await stream.write(request)
    result = (await stream.read()).result
    stream.cancel()
    if result.HasField("error"):
        raise from_proto(result.error)


async def send_back(broker: BrokerClient) -> None:
    for offset in range(2):
        item = pb.SendBackItem(
            queue=common.QueueRef(topic="free"), position=common.Position(offset=offset)
        )
        await broker.stub.SendBack(pb.SendBackRequest(group="G", items=[item]))


SENDS: dict[str, Callable[[BrokerClient], Any]] = {
    "stream": lambda broker: streamed(broker, batch("T")),
    "half": lambda broker: broker.stub.Send(
        pb.SendRequest(messages=[pb.OutgoingMessage(topic="T", body=b"x", producer_group="P")])
    ),
    "level": lambda broker: broker.stub.Send(
        pb.SendRequest(messages=[pb.OutgoingMessage(topic="T", body=b"x", delay_level=1)])
    ),
    "timer": lambda broker: broker.stub.Send(
        pb.SendRequest(messages=[pb.OutgoingMessage(topic="T", body=b"x", delay_ms=60_000)])
    ),
    "call": lambda broker: send(broker, 1),
}


@pytest.mark.parametrize("scope", ["address", "topic"])
@pytest.mark.parametrize("kind", SENDS)
async def test_all_kinds_of_sends_count(tmp_path: Path, scope: str, kind: str) -> None:
    """By address and by topic: each is refused after another kind, and others after it."""
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await put_quota(broker, scope, send=pb.Quota(messages_per_s=1))
        refused = [await refusal_of(SENDS[kind](broker)) for _ in range(4)]
        assert refused[:2] == [None, None]
        assert isinstance(refused[3], FlowControl)
        assert isinstance(await refusal(send(broker, 1, "another id")), FlowControl)
        await broker.admin.DropQuota(pb.DropQuotaRequest(scope=SCOPES[scope]))
        await send(broker, 1)


async def test_what_is_sent_back_counts_for_its_address(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker, stranger(broker) as other:
        await broker.put_topic("free", 1)
        await broker.send("free", 0, b"x" * 500, b"x" * 500)
        await broker.read_queue("free", 0)
        await put_quota(broker, "address", send=pb.Quota(bytes_per_s=400))
        refused = await refusal(send_back(other))
        assert isinstance(refused, FlowControl)
        assert refused.retry_after_ms
        assert isinstance(await refusal(send(other, 1, topic="free")), FlowControl)
        await send_back(broker)


READS: dict[str, Callable[[BrokerClient, str], Any]] = {
    "pull": lambda client, _: pull(client, "a", 20),
    "no group": lambda client, _: client.pull("T", 0, 0, max_count=20),
    "receive": lambda client, _: client.stub.Receive(
        pb.ReceiveRequest(
            group="P",
            subscriptions=[pb.Subscription(topic="T")],
            max_count=5,
            invisible_ms=60_000,
        )
    ),
    "message": lambda client, message_id: client.stub.GetMessage(
        pb.GetMessageRequest(message_id=message_id)
    ),
    "key": lambda client, _: client.stub.QueryMessages(pb.QueryMessagesRequest(topic="T", key="k")),
}


@pytest.mark.parametrize("scope", ["address", "topic"])
@pytest.mark.parametrize("kind", READS)
async def test_all_kinds_of_reads_count(tmp_path: Path, scope: str, kind: str) -> None:
    """After enough of one kind all kinds are refused."""
    async with running_broker(tmp_path) as broker, stranger(broker) as other:
        await broker.put_topic("T", 1)
        messages = [pb.OutgoingMessage(topic="T", body=b"x", keys=["k"])] * 50
        message_id = (await broker.stub.Send(pb.SendRequest(messages=messages))).sent[0].message_id
        await broker.read_queue("T", 0)
        by_key = pb.QueryMessagesRequest(topic="T", key="k")
        await until_async(lambda: has_messages(broker.stub.QueryMessages(by_key)))
        await put_quota(broker, scope, read=pb.Quota(messages_per_s=1))
        refused = [await refusal_of(READS[kind](other, message_id)) for _ in range(4)]
        assert refused[0] is None
        for name, read in READS.items():
            error = await refusal_of(read(other, message_id))
            assert isinstance(error, FlowControl), name
            assert "of reads" in error.message
        if scope == "address":
            await pull(broker, "a", 1)  # of another one


async def has_messages(answer: Awaitable[pb.QueryMessagesResponse]) -> bool:
    return bool((await answer).count)


async def test_a_quota_is_kept_and_goes_with_its_topic(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await put_quota(broker, "topic", "T", send=pb.Quota(messages_per_s=3))
        put = await put_quota(broker, "topic", "T", read=pb.Quota(bytes_per_s=7))
        assert put.limits.send.messages_per_s == 3, "what is not said stays"
        await put_quota(broker, "address", "2001:db8::7", send=pb.Quota(messages_per_s=5))
        broker.crash()
    async with running_broker(tmp_path) as broker:
        limits = (await broker.admin.ListQuotas(pb.ListQuotasRequest())).limits
        assert [one.name for one in limits] == ["2001:db8::/64", "T"]
        await send(broker, 10)
        assert isinstance(await refusal(send(broker, 1)), FlowControl)
        await broker.drop_topic("T")
        await broker.put_topic("T", 1)
        limits = (await broker.admin.ListQuotas(pb.ListQuotasRequest())).limits
        assert [one.name for one in limits] == ["2001:db8::/64"]
        for scope, name, quota, error in (
            ("topic", "nowhere", pb.Quota(), TopicNotFound),
            ("topic", "%RETRY%G", pb.Quota(), NoPermission),
            ("address", "here", pb.Quota(), InvalidRequest),
            ("address", "", pb.Quota(bytes_per_s=-1), InvalidRequest),
        ):
            assert isinstance(await refusal(put_quota(broker, scope, name, send=quota)), error)


async def test_a_consumer_at_a_pullhold_is_counted_by_its_own_address(tmp_path: Path) -> None:
    """Not by that of the pull-hold, which pulls for it."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        running_pullhold(namesrv) as pullhold,
        calling_from("127.0.0.2", pullhold.address) as address,
        open_channel(address) as channel,
    ):
        await broker.put_topic("T", 1)
        await put_quota(broker, "address", "127.0.0.2", read=pb.Quota(messages_per_s=1))
        await broker.send("T", 0, *[b"x"] * 50)
        await broker.read_queue("T", 0)
        queue = common.QueueRef(topic="T")
        request = hold_pb2.HoldRequest(
            broker_group="g1", pull=pb.PullRequest(group="G", queue=queue, max_count=20)
        )
        far = hold_pb2_grpc.HoldServiceStub(channel)
        assert (await far.Hold(request, timeout=10)).pull.count == 20
        refused = await refusal(far.Hold(request, timeout=10))
        assert isinstance(refused, FlowControl)
        assert "address 127.0.0.2" in refused.message
        assert (await pullhold.stub.Hold(request, timeout=10)).pull.count == 20

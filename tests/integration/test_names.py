"""Names at a broker: refused wherever they are made, and read where they are there already."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest

from cometmq.client import (
    Message,
    Producer,
    PullConsumer,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    SimpleConsumer,
    TransactionProducer,
)
from cometmq.errors import GroupInUse, GroupNameInvalid, GroupNotFound, TopicNameInvalid
from cometmq.messaging import state
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from tests.support.cluster.broker import (
    BrokerClient,
    LiveBroker,
    batch,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.waiting import until_async

LONG = "g" * 121
BAD_GROUPS = ["%", "|", "%RETRY%", "%RETRY%g", "CID_RMQ_SYS_TRANS", "n%", LONG]
BAD_TOPICS = ["%", "|", "n%", "%%"]
QUEUE = common.QueueRef(topic="T", queue_id=0)


async def join(broker: BrokerClient, group: str) -> None:
    call = broker.stub.JoinGroup()
    await call.write(pb.JoinGroupRequest(group=group, client_id="c"))
    await call.read()
    call.cancel()


async def commit(broker: BrokerClient, group: str) -> None:
    await broker.stub.CommitOffsets(
        pb.CommitOffsetsRequest(group=group, commits=[pb.OffsetCommit(queue=QUEUE)])
    )


async def lock(broker: BrokerClient, group: str) -> None:
    await broker.stub.LockQueues(pb.LockQueuesRequest(group=group, client_id="c", queues=[QUEUE]))


async def receive(broker: BrokerClient, group: str) -> None:
    subscription = pb.Subscription(topic="T")
    await broker.stub.Receive(
        pb.ReceiveRequest(group=group, subscriptions=[subscription], invisible_ms=10_000)
    )


async def put(broker: BrokerClient, group: str) -> None:
    await broker.admin.PutGroup(pb.PutGroupRequest(settings=pb.GroupSettings(group=group)))


async def half(broker: BrokerClient, group: str) -> None:
    message = pb.OutgoingMessage(topic="T", body=b".", producer_group=group)
    await broker.stub.Send(pb.SendRequest(messages=[message]))


@pytest.mark.parametrize("make", [join, commit, lock, receive, put, half])
async def test_a_bad_group_is_made_nowhere(
    tmp_path: Path, make: Callable[[BrokerClient, str], Awaitable[None]]
) -> None:
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        for name in BAD_GROUPS:
            if make is half and name == LONG:
                continue  # a producer group has no retry topic
            assert isinstance(
                await refusal(make(broker, name)), (GroupNameInvalid, GroupNotFound)
            ), name
        assert list(broker.state.groups) == []


async def test_a_bad_topic_is_made_nowhere(tmp_path: Path) -> None:
    async with running_broker(tmp_path, auto_create_topic_enable=True) as broker:
        before = {config.name for config in broker.state.topics}
        for name in BAD_TOPICS:
            assert isinstance(await refusal(broker.put_topic(name, 1)), TopicNameInvalid)
            assert isinstance(await refusal(broker.send(name, 0, b".")), TopicNameInvalid)
            lane = await broker.lane()
            assert isinstance(await lane.refused(*batch((name, 0, [b"."]))), TopicNameInvalid)
        assert {config.name for config in broker.state.topics} == before


async def test_a_store_with_names_of_earlier_rules_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def works(broker: LiveBroker, number: int) -> None:
        for name in BAD_TOPICS:
            await broker.put_topic(name, number + 1)  # another time: its settings
            await broker.send(name, 0, b"%d" % number)
            await until_async(lambda name=name: has(broker, name, number + 1))  # type: ignore[misc]
        for name in BAD_GROUPS:
            await put(broker, name)
            await commit(broker, name)
            await join(broker, name)

    with monkeypatch.context() as earlier:
        for check in ("check_new_topic", "check_new_group"):
            earlier.setattr(state, check, lambda name: None)
        async with running_broker(tmp_path) as broker:
            await broker.put_topic("T", 1)
            await works(broker, 0)
            broker.crash()
    async with running_broker(tmp_path) as broker:
        await works(broker, 1)
        assert {*BAD_GROUPS} <= set(broker.state.groups)
        for name in BAD_GROUPS:
            await until_async(lambda name=name: is_deleted(broker, name))  # type: ignore[misc]
        assert not {*BAD_GROUPS} & set(broker.state.groups)
        for name in BAD_TOPICS:
            await broker.drop_topic(name)
            assert isinstance(await refusal(broker.put_topic(name, 1)), TopicNameInvalid)


async def is_deleted(broker: BrokerClient, group: str) -> bool:
    """Once the member that has just left is gone."""
    try:
        await broker.admin.DeleteGroup(pb.DeleteGroupRequest(group=group))
    except grpc.aio.AioRpcError as error:
        return not isinstance(error_from(error), GroupInUse)
    return True


async def has(broker: BrokerClient, topic: str, count: int) -> bool:
    return len(await broker.read_queue(topic, 0)) == count


@pytest.mark.parametrize("name", BAD_GROUPS)
def test_clients_refuse_bad_groups_before_they_call(name: str) -> None:
    async def listener(messages: object) -> None: ...

    in_namespace = PushConsumerOptions(namespace="n" * 64)
    for make in (
        lambda: PushConsumer("127.0.0.1:1", name, listener),
        lambda: PullConsumer("127.0.0.1:1", name),
        lambda: SimpleConsumer("127.0.0.1:1", name),
        lambda: PushConsumer("127.0.0.1:1", "g" * 56, listener, options=in_namespace),
    ):
        with pytest.raises(GroupNameInvalid):
            make()
    if name != LONG:
        with pytest.raises(GroupNameInvalid):
            TransactionProducer("127.0.0.1:1", name, lambda message: None)  # type: ignore[arg-type,return-value]


async def test_a_topic_that_is_too_long_in_its_namespace_disturbs_no_other(tmp_path: Path) -> None:
    """The name server would answer nothing more to a client that asks for it."""
    seen: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        seen.extend(message.body for message in messages)

    options = PushConsumerOptions(namespace="n" * 64, rebalance_delay_ms=1, poll_backoff_ms=2)
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
        PushConsumer(namesrv, "G", listener, options=options) as consumer,
        Producer(namesrv) as producer,
    ):
        await broker.put_topic(f"{'n' * 64}%T", 1)
        with pytest.raises(TopicNameInvalid):
            await consumer.subscribe("t" * 63)
        await consumer.subscribe("T")
        await producer.send_and_wait(Message(f"{'n' * 64}%T", b"0"))

        async def has_come() -> bool:
            return seen == [b"0"]

        await until_async(has_come)

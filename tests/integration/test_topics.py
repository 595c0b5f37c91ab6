"""Typed and ordered topics, and fewer queues, over real gRPC: brokers, name servers, clients."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from cometmq.admin import topic_order, topics
from cometmq.admin.connection import Connection
from cometmq.admin.topics import Shrink, shrink_topic
from cometmq.admin.views import ShrunkTopicView
from cometmq.client import (
    Message,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.client.group.rebalance import Allocation
from cometmq.client.selectors import choose_by_hash
from cometmq.errors import (
    InvalidRequest,
    MessageTypeMismatch,
    NoPermission,
    PeerUnavailable,
    QueueNotFound,
    SendTimeout,
    TopicNameInvalid,
    TopicNotFound,
)
from cometmq.format import delayed, properties
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.messaging import order
from cometmq.messaging.order import OrderedQueues
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from cometmq.v1 import namesrv_pb2
from tests.support.cluster.broker import (
    BrokerClient,
    encoded,
    refusal,
    running_broker,
    running_namesrv,
)
from tests.support.independent.index import Shape
from tests.support.independent.reader import Store
from tests.support.waiting import until_async

FIFO, DELAY, TRANSACTION = (
    common.MESSAGE_TYPE_FIFO,
    common.MESSAGE_TYPE_DELAY,
    common.MESSAGE_TYPE_TRANSACTION,
)
INDEX_OPTIONS = {"max_hash_slot_num": 100, "max_index_num": 400}
KEYED = properties.encode({"A": "1", properties.SHARDING_KEY: "k", "UNIQ_KEY": "u"})
FIRST_KEYED = properties.encode({properties.SHARDING_KEY: "k"})
UNKEYED = properties.encode({"A": "1"})
ALIKE = properties.encode({f"x{properties.SHARDING_KEY}": "k"})  # another property


async def put(broker: BrokerClient, name: str, **settings: Any) -> common.TopicConfig:
    config = common.TopicConfig(name=name, read_queue_count=2, write_queue_count=2, **settings)
    return (await broker.admin.PutTopic(pb.PutTopicRequest(topic=config))).topic


def segment(topic: str, count: int = 1, **kind: Any) -> pb.Segment:
    return pb.Segment(topic=topic, queue_id=0, count=count, **kind)


async def test_typed_topics_refuse_other_messages_by_segment(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        for name, kind in {"F": FIFO, "D": DELAY, "X": TRANSACTION, "A": 0}.items():
            settings = await put(broker, name, message_type=kind)
            assert settings.message_type == (kind or common.MESSAGE_TYPE_ANY)
        lane = await broker.lane()
        plain = encoded("A", 0, b"plain")
        wanted = {"F": "has no sharding key", "D": "takes DELAY", "X": "takes TRANSACTION"}
        for name, why in wanted.items():
            error = await lane.refused(
                plain + encoded(name, 0, b"x", properties=UNKEYED), [segment("A"), segment(name)]
            )
            assert isinstance(error, MessageTypeMismatch)
            assert error.segment == 1
            assert why in error.message
            messages = [pb.OutgoingMessage(topic=t, queue_id=0, body=b"x") for t in ("A", name)]
            structured = await refusal(broker.stub.Send(pb.SendRequest(messages=messages)))
            assert isinstance(structured, MessageTypeMismatch)
            assert structured.segment == 1
        assert (await broker.status("A", 0)).max_offset == 0, "nothing of a refused batch is stored"
        late = encoded(
            SCHEDULE_TOPIC, 0, b"later", properties=delayed.prefix(1, "F", 0) + FIRST_KEYED
        )
        level_1 = segment("F", kind=pb.SEGMENT_KIND_DELAY_LEVEL, delay_level=1)
        error = await lane.refused(late, [level_1])
        assert isinstance(error, MessageTypeMismatch)


async def test_each_message_of_a_fifo_topic_has_a_sharding_key(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as broker:
        await put(broker, "F", message_type=FIFO)
        lane = await broker.lane()
        body = f"\x02{properties.SHARDING_KEY}\x01k".encode()  # says nothing in a body
        for bad in (UNKEYED, ALIKE, b""):
            records = [encoded("F", 0, body, properties=p) for p in (KEYED, FIRST_KEYED, bad)]
            error = await lane.refused(b"".join(records), [segment("F", 3)])
            assert isinstance(error, MessageTypeMismatch)
            assert "message 2 " in error.message
        records = [encoded("F", 0, b"%d" % n, properties=p) for n, p in enumerate((KEYED, KEYED))]
        result = await lane.exchange(b"".join(records), [segment("F", 2)])
        assert not result.HasField("error")
        outgoing = pb.OutgoingMessage(
            topic="F", queue_id=0, body=b"2", properties={properties.SHARDING_KEY: "k"}
        )
        await broker.stub.Send(pb.SendRequest(messages=[outgoing]))
        assert await broker.bodies("F", 0) == [b"0", b"1", b"2"]


async def test_a_type_outlives_restarts_and_tells_each_sender(tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as namesrv:
        async with running_broker(tmp_path, **INDEX_OPTIONS) as broker:
            await put(broker, "F", message_type=FIFO, is_ordered=True)
        async with running_broker(tmp_path, namesrv=(namesrv,), **INDEX_OPTIONS) as broker:
            settings = await put(broker, "F")  # says nothing of both
            assert (settings.message_type, settings.is_ordered) == (FIFO, True)
            await put(broker, "N", message_type=common.MESSAGE_TYPE_NORMAL)
            async with Producer(namesrv) as producer:
                kept = [
                    await producer.send(Message("F", b"1", sharding_key="k")),
                    await producer.send(Message("N", b"2")),
                ]
                refused = [
                    await producer.send(Message("F", b"3")),
                    await producer.send(Message("N", b"4", delay_level=1)),
                ]
                answers = await asyncio.gather(*kept, *refused, return_exceptions=True)
            assert [isinstance(a, MessageTypeMismatch) for a in answers] == [False] * 2 + [True] * 2
    sizes = Shape(INDEX_OPTIONS["max_hash_slot_num"], INDEX_OPTIONS["max_index_num"])
    with Store(tmp_path / "store", sizes) as read:  # by the documents alone, the exports too
        assert read.state is not None
        found = {name: (t.message_type, t.is_ordered) for name, t in read.state.topics.items()}
        assert (found["F"], found["N"]) == (("FIFO", True), ("NORMAL", False))


async def test_the_broker_itself_is_not_refused(tmp_path: Path) -> None:
    """Delayed messages of before come to a topic that takes none any more."""
    async with running_broker(tmp_path) as broker:
        await put(broker, "T")
        outgoing = pb.OutgoingMessage(topic="T", queue_id=0, body=b"late", delay_level=1)
        await broker.stub.Send(pb.SendRequest(messages=[outgoing]))
        await put(broker, "T", message_type=FIFO)

        async def arrived() -> bool:
            return (await broker.status("T", 0)).max_offset == 1

        await until_async(arrived)


@pytest.mark.parametrize("number", [7, 2**31 - 1, -1])
async def test_unknown_types_are_refused(number: Any, tmp_path: Path) -> None:
    async with running_namesrv(tmp_path) as namesrv, running_broker(tmp_path) as broker:
        config = common.TopicConfig(name="T", message_type=number)
        error = await refusal(broker.admin.PutTopic(pb.PutTopicRequest(topic=config)))
        assert isinstance(error, InvalidRequest)
        assert str(number) in error.message
        async with Connection(namesrv) as connection:
            member = namesrv_pb2.Member(
                cluster="c",
                broker_group="g",
                member_id=0,
                role=common.MEMBER_ROLE_WRITER,
                address="127.0.0.1:1",
                epoch=1,
            )
            config.flush_mode = common.FLUSH_MODE_ASYNC
            forged = namesrv_pb2.RegisterMemberRequest(member=member, topics=[config])
            with pytest.raises(InvalidRequest, match="unknown message type"):
                await connection.ask_namesrv(lambda stub: stub.RegisterMember, forged)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("", TopicNameInvalid),
        ("a b", TopicNameInvalid),
        ("a/../b", TopicNameInvalid),
        ("ä", TopicNameInvalid),
        ("a\x00", TopicNameInvalid),
        ("a" * 128, TopicNameInvalid),
        ("a" * 10_000, TopicNameInvalid),
        ("TBW102", NoPermission),
        ("SCHEDULE_TOPIC_XXXX", NoPermission),
        ("RMQ_SYS_TRANS_HALF_TOPIC", NoPermission),
        ("rmq_sys_anything", NoPermission),
        ("rmq_sys_cometmq_state", NoPermission),
        ("%RETRY%g", NoPermission),
        ("%DLQ%g", NoPermission),
    ],
)
async def test_names_that_are_none_or_reserved_are_refused(
    name: str, error: Any, tmp_path: Path
) -> None:
    async with running_broker(tmp_path, auto_create_topic_enable=True) as broker:
        config = common.TopicConfig(name=name, message_type=FIFO)
        assert isinstance(
            await refusal(broker.admin.PutTopic(pb.PutTopicRequest(topic=config))), error
        )
        deletion = broker.admin.DeleteTopic(pb.DeleteTopicRequest(topic=name))
        assert isinstance(await refusal(deletion), (error, TopicNotFound))
        listed = await broker.admin.ListTopics(pb.BrokerAdminServiceListTopicsRequest())
        assert all(topic.message_type != FIFO for topic in listed.topics)


# --- ordered topics -----------------------------------------------------------------------------


def key_for(group: str, queues: list[QueueRef]) -> str:
    """A key whose queue is of this broker group."""
    return next(k for k in map(str, range(99)) if choose_by_hash(k, queues).broker_group == group)


async def test_keys_wait_for_their_broker_group_also_when_the_route_lacks_it(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as stack:
        namesrv = await stack.enter_async_context(running_namesrv(tmp_path))
        connection = await stack.enter_async_context(Connection(namesrv))
        here = {name: tmp_path / name for name in ("a", "b")}
        for folder in here.values():
            folder.mkdir()
        a = await stack.enter_async_context(
            running_broker(here["a"], namesrv=(namesrv,), broker_group="a")
        )
        async with running_broker(here["b"], namesrv=(namesrv,), broker_group="b") as b:
            for broker in (a, b):
                await put(broker, "T")
            fixed = [OrderedQueues("b", 2), OrderedQueues("a", 1)]
            await topics.set_order(connection, "T", fixed)
            shown = await topic_order.show(connection, "T")
            assert [(v.broker_group, v.queue_count) for v in shown] == [("b", 2), ("a", 1)]
        # The order of the list counts: it is that in which RocketMQ's clients number the queues.
        queues = [QueueRef("T", 0, "b"), QueueRef("T", 1, "b"), QueueRef("T", 0, "a")]
        key_b, key_a = key_for("b", queues), key_for("a", queues)
        route = await connection.route("T")
        assert [group.broker_group for group in route.groups] == ["a"], "the group b is gone"

        patient = await stack.enter_async_context(Producer(namesrv))
        at_once = await patient.send_and_wait(Message("T", b"a", sharding_key=key_a))
        assert at_once.queue == QueueRef("T", 0, "a")
        for _ in range(8):  # whose queue does not matter: never one outside of the list
            assert (await patient.send_and_wait(Message("T", b"x"))).queue.queue_id == 0
        waiting = asyncio.create_task(patient.send_and_wait(Message("T", b"b", sharding_key=key_b)))
        impatient = ProducerOptions(
            delivery_timeout_ms=300, selector=lambda message, queues: queues[0]
        )
        async with Producer(namesrv, options=impatient) as producer:
            with pytest.raises((SendTimeout, PeerUnavailable)):
                await producer.send_and_wait(Message("T", b"never"))
        assert not waiting.done(), "it waits, and goes to no other group"
        async with running_broker(here["b"], namesrv=(namesrv,), broker_group="b") as b:
            receipt = await asyncio.wait_for(waiting, 15)
            assert receipt.queue == choose_by_hash(key_b, queues)
            assert await b.bodies("T", receipt.queue.queue_id) == [b"b"]
        await topics.set_order(connection, "T", ())
        assert not (await connection.route("T")).order
        assert not (await connection.route("T")).groups[0].topic.is_ordered


async def test_a_name_server_without_the_list_moves_no_key(tmp_path: Path) -> None:
    """It has another disk, or was away when the list was made. One that takes it back is heard."""
    fixed = [QueueRef("T", 0, "b"), QueueRef("T", 0, "a"), QueueRef("T", 1, "a")]
    of_route = fixed[1:]
    key = next(
        k
        for k in map(str, range(99))
        if (choose_by_hash(k, fixed), choose_by_hash(k, of_route)) == (fixed[2], of_route[0])
    )
    entry = {"namespace": order.NAMESPACE, "key": "T"}
    put_order = namesrv_pb2.PutValueRequest(**entry, value="b:1;a:2")
    async with AsyncExitStack() as stack:
        for name in ("n1", "n2"):
            (tmp_path / name).mkdir()
        first = await stack.enter_async_context(AsyncExitStack())
        one = await first.enter_async_context(running_namesrv(tmp_path / "n1"))
        async with running_namesrv(tmp_path / "n2") as two:
            pass  # its port; it comes later, so that the producer asks the first one
        broker = await stack.enter_async_context(
            running_broker(tmp_path, namesrv=(one, two), broker_group="a")
        )
        await put(broker, "T", is_ordered=True)
        async with Connection(one) as connection:
            await _routed(connection, "T")
            await connection.ask_namesrvs(lambda stub: stub.PutValue, put_order)
        producer = await stack.enter_async_context(Producer(f"{one};{two}"))
        message = Message("T", b"x", sharding_key=key)
        assert (await producer.send_and_wait(message)).queue == fixed[2]
        port = int(two.rpartition(":")[2])
        await stack.enter_async_context(running_namesrv(tmp_path / "n2", port))
        await put(broker, "U")
        async with Connection(two) as connection:
            await _routed(connection, "U")
        await first.aclose()
        await producer.send_and_wait(Message("U", b"x"))  # by the other one, which has no list
        assert (await producer.send_and_wait(message)).queue == fixed[2]

        async with Connection(two) as connection:
            await connection.ask_namesrvs(lambda stub: stub.PutValue, put_order)
            assert (await producer.send_and_wait(message)).queue == fixed[2]
            deletion = namesrv_pb2.DeleteValueRequest(**entry)
            await connection.ask_namesrvs(lambda stub: stub.DeleteValue, deletion)

        async def goes_by_route() -> bool:
            return (await producer.send_and_wait(message)).queue == of_route[0]

        await until_async(goes_by_route)


async def _routed(connection: Connection, topic: str) -> None:
    async def has_route() -> bool:
        try:
            await connection.route(topic)
        except TopicNotFound:
            return False
        return True

    await until_async(has_route)


async def test_an_order_names_queues_that_are_there(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        Connection(namesrv) as connection,
        running_broker(tmp_path, namesrv=(namesrv,), broker_group="a") as broker,
    ):
        await put(broker, "T")
        with pytest.raises(InvalidRequest, match="a has 2 queues for writers, not 3"):
            await topics.set_order(connection, "T", [OrderedQueues("a", 3)])
        with pytest.raises(TopicNotFound):
            await topics.update_topic(connection, common.TopicConfig(name="U"))
        wanted = common.TopicConfig(name="T", is_ordered=True)
        [view] = await topics.update_topic(connection, wanted)
        assert (view.is_ordered, view.read_queue_count, view.created) == (True, 2, False)
        more = common.TopicConfig(name="T", read_queue_count=4, write_queue_count=4)
        await topics.update_topic(connection, more)

        async def fixed() -> list[tuple[str, int]]:
            return [(o.broker_group, o.queue_count) for o in (await connection.route("T")).order]

        assert await fixed() == [("a", 2)], "no key moves unless it is asked for"
        await topics.update_topic(connection, wanted)
        assert await fixed() == [("a", 4)]
        away = [OrderedQueues("b", 2), OrderedQueues("a", 3)]
        await topics.set_order(connection, "T", away)
        fewer = common.TopicConfig(name="T", write_queue_count=1)
        await topics.update_topic(connection, fewer)
        assert await fixed() == [("b", 2), ("a", 1)], "in their order, as far as they are there"


# --- fewer queues -------------------------------------------------------------------------------


async def test_queues_are_taken_away_under_traffic(tmp_path: Path) -> None:
    consumed: Counter[bytes] = Counter()
    stop = asyncio.Event()
    sent: list[Any] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        consumed.update(message.body for message in messages)

    async with AsyncExitStack() as stack:
        namesrv = await stack.enter_async_context(running_namesrv(tmp_path))
        connection = await stack.enter_async_context(Connection(namesrv))
        broker = await stack.enter_async_context(running_broker(tmp_path, namesrv=(namesrv,)))
        await broker.put_topic("T", 8)
        producer = await stack.enter_async_context(Producer(namesrv))

        async def produce() -> None:
            while not stop.is_set():
                for _ in range(20):
                    sent.append(await producer.send(Message("T", b"%d" % len(sent))))
                await asyncio.sleep(0.002)

        for client_id in ("1", "2"):
            options = PushConsumerOptions(commit_interval_ms=100, client_id=client_id)
            consumer = await stack.enter_async_context(
                PushConsumer(namesrv, group="G", listener=listener, options=options)
            )
            await consumer.subscribe("T")
        producing = asyncio.create_task(produce())
        await until_async(lambda: _is(len(consumed) > 500))
        views = await shrink_topic(connection, Shrink("T", 3), timeout_s=20)
        assert [(v.read_queue_count, v.write_queue_count, v.waiting) for v in views] == [(3, 3, {})]
        count = len(sent)
        await until_async(lambda: _is(len(sent) > count + 500))
        stop.set()
        await producing
        receipts = await asyncio.gather(*sent)
        assert {receipt.queue.queue_id for receipt in receipts[:200]} > {0, 1, 2}
        assert {receipt.queue.queue_id for receipt in receipts[-400:]} == {0, 1, 2}
        await until_async(lambda: _is(len(consumed) == len(sent)))
        assert set(consumed.values()) == {1}, "each message once"


async def _is(condition: bool) -> bool:
    return condition


async def test_shrinking_names_who_is_behind_and_goes_on_later(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        Connection(namesrv) as connection,
        running_broker(tmp_path, namesrv=(namesrv,), broker_group="g") as broker,
    ):
        await broker.put_topic("T", 4)
        for queue_id in range(4):
            await broker.send("T", queue_id, b"x", b"y")

            async def readable(queue_id: int = queue_id) -> bool:
                return (await broker.status("T", queue_id)).max_offset == 2

            await until_async(readable)
        await broker.commit("late", ("T", 0, 0, 2), ("T", 3, 0, 1))
        await broker.commit("done", *(("T", n, 0, 2) for n in range(4)))
        await broker.commit("elsewhere", ("T", 0, 0, 1))
        await broker.put_topic("U", 1)
        await broker.commit("stranger", ("U", 0, 0, 0))
        waits: list[list[ShrunkTopicView]] = []
        shrink = Shrink("T", 2)
        [view] = await shrink_topic(connection, shrink, timeout_s=0, on_wait=waits.append)
        assert view.waiting == {"elsewhere": 4, "late": 3}
        assert (view.read_queue_count, view.write_queue_count) == (4, 2)
        assert waits == [[view]]
        refused = await refusal(broker.send("T", 2, b"no more"))
        assert isinstance(refused, QueueNotFound)
        assert await broker.bodies("T", 3) == [b"x", b"y"], "they are still read"

        async def consume(_: float) -> None:
            await broker.commit("late", ("T", 2, 0, 2), ("T", 3, 0, 2))
            await broker.admin.DeleteGroup(pb.DeleteGroupRequest(group="elsewhere"))

        [view] = await shrink_topic(connection, shrink, sleep=consume)
        assert (view.read_queue_count, view.write_queue_count, view.waiting) == (2, 2, {})
        [view] = await shrink_topic(connection, shrink)  # it is done
        assert view.read_queue_count == 2
        with pytest.raises(InvalidRequest, match="has 2 on g"):
            await shrink_topic(connection, Shrink("T", 3))


def test_every_strategy_can_be_asked_for() -> None:
    assert list(topics.ALLOCATIONS) == [one.value for one in Allocation]


async def test_who_would_read_which_queue(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        Connection(namesrv) as connection,
        running_broker(tmp_path, namesrv=(namesrv,), broker_group="g") as broker,
    ):
        await topics.update_topic(connection, (await broker.put_topic("T", 5)).topic)
        rows = await topics.allocate_queues(connection, "T", ["b", "a"], "average")
        assert [(r.client_id, r.queue_id) for r in rows] == [
            ("a", 0),
            ("a", 1),
            ("a", 2),
            ("b", 3),
            ("b", 4),
        ]

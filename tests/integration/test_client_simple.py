"""SimpleConsumer against a real broker and pull-hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq.admin import ops as admin
from cometmq.admin.connection import Connection
from cometmq.client import (
    ConsumeFrom,
    ConsumeMode,
    Message,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
    SimpleConsumer,
    SimpleConsumerOptions,
)
from cometmq.client import sync as cometmq_sync
from cometmq.client.pop.calls import PopAnswer
from cometmq.clock import SystemClock
from cometmq.errors import (
    ClientClosed,
    CometError,
    GroupInUse,
    GroupModeMismatch,
    GroupNotFound,
    HandleInvalid,
    InvalidRequest,
    InvisibleTimeInvalid,
    PeerUnavailable,
    TopicNotFound,
)
from cometmq.format.properties import SHARDING_KEY
from cometmq.rpc.streams import read, write
from cometmq.rpc.tasks import stop_all
from cometmq.v1 import broker_pb2 as pb
from cometmq.v1 import common_pb2 as common
from services.broker.pop import acks, receive
from tests.support.cluster.broker import LiveBroker, refusal
from tests.support.cluster.pop_cluster import Ahead, pop_cluster
from tests.support.cluster.pullhold import LivePullhold
from tests.support.waiting import until, until_async

FAST = {"retry_backoff_ms": 2, "retry_backoff_max_ms": 20}


def simple(namesrv: str, group: str = "G", **options: Any) -> SimpleConsumer:
    return SimpleConsumer(namesrv, group, options=SimpleConsumerOptions(**{**FAST, **options}))


async def send(namesrv: str, *bodies: bytes, tag: str = "") -> None:
    async with Producer(namesrv) as producer:
        for number, body in enumerate(bodies):
            queue = QueueRef("T", number % 2)
            await producer.send_and_wait(Message("T", body, tag, queue=queue))


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


def bodies(messages: list[ReceivedMessage]) -> list[bytes]:
    return sorted(message.body for message in messages)


async def send_keyed(broker: LiveBroker, body: bytes) -> None:
    one = pb.OutgoingMessage(topic="T", queue_id=0, body=body, properties={SHARDING_KEY: "k"})
    await broker.stub.Send(pb.SendRequest(messages=[one]))


async def receive_all(
    consumer: SimpleConsumer, count: int, invisible_ms: int | None = None
) -> list[ReceivedMessage]:
    """So many messages, with as many receives as it takes."""
    found: list[ReceivedMessage] = []
    while len(found) < count:
        found += await consumer.receive(invisible_ms=invisible_ms)
    return found


async def test_consumers_of_a_group_share_what_there_is_and_acknowledge_it(tmp_path: Path) -> None:
    clock = Ahead()
    async with pop_cluster(tmp_path, clock) as (namesrv, broker, _):
        await send(namesrv, *numbers(0, 40))
        async with simple(namesrv) as one, simple(namesrv) as other:
            found: list[ReceivedMessage] = []
            for consumer in (one, other):
                await consumer.subscribe("T")
            while len(found) < 40:
                for consumer in (one, other):
                    some = await consumer.receive(7)
                    await consumer.ack_many(some[1:])
                    await consumer.ack(some[0])
                    found += some
            assert bodies(found) == sorted(numbers(0, 40))
            clock.later_s = 31
            assert await one.receive(wait_ms=0) == []
        for queue_id in (0, 1):
            committed = await broker.committed("G", "T", queue_id)
            assert committed is not None
            assert committed.offset == 20


async def test_a_receive_waits_at_the_pullhold_until_a_message_comes(tmp_path: Path) -> None:
    async with (
        pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold),
        simple(namesrv) as one,
        simple(namesrv) as other,
    ):
        for consumer in (one, other):
            await consumer.subscribe("T")
        waiting = [asyncio.create_task(c.receive(wait_ms=20_000)) for c in (one, other)]
        await until(lambda: pullhold.waiting == 4 and pullhold.all_known)
        await broker.send("T", 1, b"one")
        done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        [first] = done
        assert bodies(first.result()) == [b"one"]
        assert len(left) == 1
        assert pullhold.waiting <= 3
        await broker.send("T", 0, b"two")
        [second] = left
        assert bodies(await second) == [b"two"]
        await until(lambda: pullhold.waiting == 0)


async def test_a_receive_ends_when_messages_come_back(tmp_path: Path) -> None:
    """The holds end at the earliest visible-at, by themselves."""
    clock = Ahead()
    async with pop_cluster(tmp_path, clock) as (namesrv, _, _hold):
        await send(namesrv, b"0")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            [message] = await consumer.receive(invisible_ms=10_000)
            assert message.attempt == 1
            clock.later_s = 9.5
            [again] = await consumer.receive(wait_ms=20_000)
            assert (again.body, again.attempt) == (b"0", 2)
            with pytest.raises(HandleInvalid):
                await consumer.change_invisible_time(_copy(again, 7), 10_000)
            for wrong in (consumer.ack, lambda one: consumer.change_invisible_time(one, 10_000)):
                with pytest.raises(InvalidRequest, match="NoneType"):
                    await wrong(None)  # type: ignore[arg-type]
            await consumer.ack(again)
            with pytest.raises(HandleInvalid):
                await consumer.ack(again)


def _copy(message: ReceivedMessage, queue_id: int) -> ReceivedMessage:
    return ReceivedMessage(message.raw, QueueRef("T", queue_id, message.queue.broker_group))


class Parked:
    """A consumer that waits for as long as a minute. ``holds``: that wait then, of two queues."""

    def __init__(self, consumer: SimpleConsumer, pullhold: LivePullhold, holds: int) -> None:
        self._consumer = consumer
        self._pullhold = pullhold
        self._holds = holds

    async def __aenter__(self) -> asyncio.Task[list[ReceivedMessage]]:
        await self._consumer.subscribe("T")
        self._task = asyncio.create_task(self._consumer.receive(wait_ms=60_000))
        await until(lambda: self._pullhold.waiting == self._holds and self._pullhold.all_known)
        return self._task

    async def __aexit__(self, *_: object) -> None:
        await stop_all([self._task])


async def put_group(broker: LiveBroker, **fields: Any) -> None:
    settings = pb.GroupSettings(group="G", mode=pb.CONSUME_MODE_POP, **fields)
    await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))


async def received(receiving: asyncio.Task[list[ReceivedMessage]]) -> ReceivedMessage:
    async with asyncio.timeout(20):
        [message] = await receiving
    return message


async def fail(broker: LiveBroker, consumer: SimpleConsumer, message: ReceivedMessage) -> None:
    lease = consumer._held.find(message)
    assert lease is not None
    item = pb.ChangeInvisibleTimeItem(messages=pb.AckItem(handle=lease.handle), failed=True)
    request = pb.ChangeInvisibleTimeRequest(group="G", items=[item])
    [result] = (await broker.stub.ChangeInvisibleTime(request)).results
    assert not result.HasField("error")


async def test_who_waits_hears_at_once_of_what_another_could_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It heard when its own wait ended, for nothing was on its way when it had asked."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold):
        policy = pb.RetryPolicy(kind=pb.RETRY_POLICY_KIND_CUSTOMIZED, steps_ms=[50])
        await put_group(broker, retry_policy=policy)
        async with (
            simple(namesrv) as one,
            Parked(one, pullhold, 2) as first,
            simple(namesrv) as other,
            Parked(other, pullhold, 4) as waiting,
        ):
            await broker.send("T", 0, b"0")
            await fail(broker, one, await received(first))
            again = await received(waiting)
            assert (again.body, again.attempt) == (b"0", 2)
            await other.ack(again)
        monkeypatch.setattr(acks, "WINDOW_HALF", 0)  # then it goes to a topic that nobody knows yet
        async with (
            simple(namesrv) as one,
            Parked(one, pullhold, 2) as first,
            simple(namesrv) as other,
            Parked(other, pullhold, 4) as waiting,
        ):
            await broker.send("T", 1, b"1")
            await fail(broker, one, await received(first))
            again = await received(waiting)
            assert (again.body, again.queue.topic) == (b"1", "%RETRY%G")


async def test_who_waits_hears_at_once_of_what_an_acknowledgement_frees(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold):
        await put_group(broker, consume_orderly=True)
        async with (
            simple(namesrv) as one,
            Parked(one, pullhold, 2) as first,
            simple(namesrv) as other,
            Parked(other, pullhold, 4) as waiting,
        ):
            await send_keyed(broker, b"0")
            message = await received(first)
            await send_keyed(broker, b"1")  # of the same message group
            await until(lambda: broker.state.pops.open_count == 2 and pullhold.waiting == 2)
            assert not waiting.done()
            await one.ack(message)
            assert (await received(waiting)).body == b"1"


async def test_a_message_that_woke_a_member_that_died_wakes_another_one(tmp_path: Path) -> None:
    """It lay there until the other member's own wait was over."""

    async def dies(*_: object) -> PopAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    async with (
        pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold),
        simple(namesrv) as one,
        Parked(one, pullhold, 2) as dying,
        simple(namesrv) as other,
        Parked(other, pullhold, 4) as waiting,
    ):
        with mock.patch.object(one._pop, "receive", dies):
            await broker.send("T", 0, b"0")
            assert (await received(waiting)).body == b"0"
            assert not dying.done()


@pytest.mark.parametrize("was_looked_at", [False, True])
async def test_who_waits_hears_of_what_is_freed_while_its_queue_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, was_looked_at: bool
) -> None:
    """It waited until messages of another message group were done, or their time was over."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await put_group(broker, consume_orderly=True)
        async with Producer(namesrv) as producer, simple(namesrv) as one, simple(namesrv) as other:

            async def send_key(key: str) -> None:
                queue = QueueRef("T", 0)
                await producer.send_and_wait(Message("T", b"0", queue=queue, sharding_key=key))

            await send_key("slow")
            await send_key("quick")
            await one.subscribe("T")
            held = {message.sharding_key: message for message in await one.receive(wait_ms=20_000)}
            while len(held) < 2:
                held |= {one.sharding_key: one for one in await one.receive(wait_ms=20_000)}
            await send_key("quick")
            await other.subscribe("T")
            if was_looked_at:
                while broker.state.pops.open_count < 3:
                    assert await other.receive(wait_ms=0) == []
                await send_key("slow")
            scan = receive.ReceiveService._scan

            async def scan_and_acknowledge(*args: Any) -> object:
                answer = await scan(*args)
                if answer is not None and "quick" in held:
                    await one.ack(held.pop("quick"))
                return answer

            monkeypatch.setattr(receive.ReceiveService, "_scan", scan_and_acknowledge)
            found = await other.receive(wait_ms=20_000)
            assert [message.sharding_key for message in found] == ["quick"]


async def test_who_waits_hears_at_once_of_a_new_retry_topic(tmp_path: Path) -> None:
    """It knew the topic from its next call on, whenever that was."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold):
        await broker.send("T", 0, b"0")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            [message] = await consumer.receive(wait_ms=20_000)
            await consumer.ack(message)
            async with Parked(consumer, pullhold, 2) as waiting:
                item = pb.SendBackItem(
                    queue=common.QueueRef(topic="T", queue_id=0),
                    position=common.Position(offset=0),
                    delay_ms=1,
                )
                await broker.stub.SendBack(pb.SendBackRequest(group="G", items=[item]))
                assert (await received(waiting)).queue.topic == "%RETRY%G"


async def test_who_waits_hears_at_once_of_a_reset(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold):
        await broker.send("T", 0, b"0")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            await consumer.ack_many(await consumer.receive())
            async with Parked(consumer, pullhold, 2) as waiting:
                reset = pb.ResetOffsetsRequest(group="G", topic="T", bound=pb.RESET_BOUND_FIRST)
                await broker.admin.ResetOffsets(reset)
                again = await received(waiting)
                assert (again.body, again.attempt) == (b"0", 1)


async def test_who_waits_for_nothing_asks_no_broker_again(tmp_path: Path) -> None:
    async with (
        pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _),
        simple(namesrv) as consumer,
    ):
        await consumer.subscribe("T")
        with mock.patch.object(consumer._pop, "receive", wraps=consumer._pop.receive) as asked:
            await until(lambda: consumer._long_poller.address is not None)
            while consumer._idle is None:
                assert await consumer.receive(wait_ms=300) == []
            before = asked.call_count
            for _ in range(3):
                assert await consumer.receive(wait_ms=20) == []
            assert asked.call_count == before
            await broker.send("T", 1, b"0")  # between two calls
            assert bodies(await consumer.receive(wait_ms=20_000)) == [b"0"]


async def test_members_are_seen_and_leave(tmp_path: Path) -> None:
    async def listener(_: list[ReceivedMessage]) -> None:
        """Does nothing."""

    async def members() -> list[tuple[str, str]]:
        async with Connection(namesrv) as connection:
            try:
                found = await admin.group_members(connection, "G")
            except GroupNotFound:
                return []
        return [(one.client_id, one.message_model) for one in found]

    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        options = PushConsumerOptions(client_id="push", consume_mode=ConsumeMode.POP)
        async with (
            simple(namesrv, client_id="simple") as consumer,
            PushConsumer(namesrv, "G", listener, options=options) as pushing,
        ):
            await consumer.subscribe("T", ["a"])
            await pushing.subscribe("T", ["a"])
            await until_async(lambda: has(members, [("push", "pop"), ("simple", "pop")]))
            deletion = broker.admin.DeleteGroup(pb.DeleteGroupRequest(group="G"))
            assert isinstance(await refusal(deletion), GroupInUse)
            with pytest.raises(GroupModeMismatch):
                await pulls(broker)
        await until_async(lambda: has(members, []))
        assert broker.state.groups["G"].policy.mode.name == "POP"
        await broker.admin.DeleteGroup(pb.DeleteGroupRequest(group="G"))


async def test_who_has_left_is_no_member_again_when_routes_change(tmp_path: Path) -> None:
    """It joined once more while the rest of its consumer was being closed."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold), simple(namesrv) as consumer:
        await consumer.subscribe("T")
        membership = consumer._member._membership
        await until(lambda: membership.members("T", ["g1"]) is not None)
        await consumer._member.leave()
        consumer._member.look_again()
        for _ in range(5):
            await asyncio.sleep(0)
        assert membership.members("T", ["g1"]) is None
        assert not membership._joined


async def has(members: Callable[[], Awaitable[list[Any]]], wanted: list[Any]) -> bool:
    return await members() == wanted


async def pulls(broker: LiveBroker) -> None:
    """A member that receives joins a group that pulls."""
    settings = pb.GroupSettings(group="P", mode=pb.CONSUME_MODE_PULL)
    await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
    stream = broker.stub.JoinGroup()
    await write(stream, pb.JoinGroupRequest(group="P", client_id="c", mode=pb.CONSUME_MODE_POP))
    await read(stream)


async def test_slow_work_keeps_its_message_as_long_as_it_asks(tmp_path: Path) -> None:
    clock = Ahead()
    async with pop_cluster(tmp_path, clock) as (namesrv, _, _hold):
        await send(namesrv, *numbers(0, 4))
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            messages = await consumer.receive(invisible_ms=10_000)
            slow = messages[0]
            for _ in range(3):
                clock.later_s += 9
                await consumer.change_invisible_time(slow, 10_000)
            again = await consumer.receive(wait_ms=0)
            assert bodies(again) == bodies(messages[1:])
            await consumer.ack_many([slow, *again])
            with pytest.raises(HandleInvalid):
                await consumer.ack(messages[1])


async def test_tags_and_start_are_those_of_the_consumer(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold):
        await send(namesrv, *numbers(0, 4), tag="a")
        await send(namesrv, *numbers(4, 8), tag="b")
        async with simple(namesrv, "tags") as consumer:
            await consumer.subscribe("T", "b")
            assert bodies(await consumer.receive(wait_ms=5_000)) == numbers(4, 8)
        async with simple(namesrv, "late", consume_from=ConsumeFrom.LAST) as consumer:
            await consumer.subscribe("T")
            assert await consumer.receive(wait_ms=0) == []
            await send(namesrv, b"new")
            assert bodies(await consumer.receive()) == [b"new"]
            await consumer.unsubscribe("T")
            with pytest.raises(InvalidRequest):
                await consumer.receive()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"count_max": 0}, InvalidRequest),
        ({"count_max": 1_025}, InvalidRequest),
        ({"count_max": True}, InvalidRequest),
        ({"wait_ms": -1}, InvalidRequest),
        ({"wait_ms": 1.5}, InvalidRequest),
        ({"invisible_ms": 9_999}, InvisibleTimeInvalid),
        ({"invisible_ms": 43_200_001}, InvisibleTimeInvalid),
        ({"invisible_ms": "10000"}, InvisibleTimeInvalid),
    ],
)
async def test_a_wrong_receive_is_refused_before_a_call(
    tmp_path: Path, fields: dict[str, Any], error: type[CometError]
) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold), simple(namesrv) as consumer:
        await consumer.subscribe("T")
        with pytest.raises(error):
            await consumer.receive(**fields)


async def test_what_a_consumer_cannot_do_is_said(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        consumer = simple(namesrv, request_timeout_ms=300)
        with pytest.raises(ClientClosed):
            await consumer.receive()
        async with consumer:
            with pytest.raises(TopicNotFound):
                await consumer.subscribe("nowhere")
            for messages in (None, 5, "text"):
                with pytest.raises(InvalidRequest):
                    await consumer.ack_many(messages)  # type: ignore[arg-type]
        await broker.commit("P", ("T", 0, 0, 0))
        async with simple(namesrv, "P") as pulling:
            await pulling.subscribe("T")
            with pytest.raises(GroupModeMismatch):
                await pulling.receive()


async def test_a_namespace_is_not_seen(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await broker.put_topic("N%T", 1)
        await broker.send("N%T", 0, b"0")
        async with simple(namesrv, namespace="N") as consumer:
            await consumer.subscribe("T")
            [message] = await consumer.receive()
            assert (message.topic, message.queue) == ("T", QueueRef("T", 0, "g1"))
            await consumer.ack(message)
        assert "N%G" in broker.state.groups


async def test_without_asyncio(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold):
        await send(namesrv, *numbers(0, 4))

        def consume() -> list[bytes]:
            with cometmq_sync.SimpleConsumer(namesrv, "G") as consumer:
                consumer.subscribe("T")
                found = consumer.receive(10)
                consumer.change_invisible_time(found[0], 20_000)
                consumer.ack(found[0])
                consumer.ack_many(found[1:])
                assert consumer.receive(wait_ms=0) == []
                consumer.unsubscribe("T")
                return bodies(found)

        assert await asyncio.to_thread(consume) == numbers(0, 4)


async def test_a_receive_of_a_thread_ends_with_its_consumer(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, pullhold):
        errors: list[BaseException] = []

        def receive() -> None:
            try:
                consumer.receive(wait_ms=60_000)
            except BaseException as error:
                errors.append(error)

        consumer = cometmq_sync.SimpleConsumer(namesrv, "G")
        await asyncio.to_thread(consumer.__enter__)
        await asyncio.to_thread(consumer.subscribe, "T")
        waiting = [asyncio.create_task(asyncio.to_thread(receive)) for _ in range(3)]
        await until(lambda: pullhold.waiting == 6)
        await asyncio.to_thread(consumer.__exit__, None, None, None)
        async with asyncio.timeout(20):
            await asyncio.gather(*waiting)
        assert [type(error) for error in errors] == [ClientClosed] * 3


async def test_messages_in_hand_wait_for_no_other_broker(tmp_path: Path) -> None:
    """Their invisible time went by while the consumer asked a broker that did not answer."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold):
        await send(namesrv, b"0")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            pop = consumer._pop
            real, consumer._rounds = pop.receive, 1

            async def one_is_silent(broker_group: str, *limits: int) -> PopAnswer:
                if broker_group == "silent":
                    await asyncio.Event().wait()
                return await real(broker_group, *limits)

            with (
                mock.patch.object(pop, "broker_groups", return_value=["g1", "silent"]),
                mock.patch.object(pop, "receive", one_is_silent),
            ):
                async with asyncio.timeout(20):
                    assert bodies(await consumer.receive(8)) == [b"0"]


async def test_a_broker_that_is_late_holds_up_nobody_and_its_messages_are_kept(
    tmp_path: Path,
) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold):
        await send(namesrv, b"0", b"1", b"2")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            pop, answers = consumer._pop, asyncio.Event()
            real, consumer._rounds = pop.receive, 0  # it is asked first

            async def one_is_late(broker_group: str, *limits: int) -> PopAnswer:
                if broker_group == "late":
                    await answers.wait()
                    return await real("g1", *limits)
                return PopAnswer([], False, None, False, ())

            with (
                mock.patch.object(pop, "broker_groups", return_value=["g1", "late"]),
                mock.patch.object(pop, "receive", one_is_late),
            ):
                assert await consumer.receive(8, wait_ms=0) == []
                waiting = asyncio.create_task(consumer.receive(1, wait_ms=60_000))
                await until(lambda: consumer._sooner._waiters)
                answers.set()
                async with asyncio.timeout(20):
                    found = await waiting
                assert len(found) == 1
                while len(found) < 3:
                    [message] = await consumer.receive(1, wait_ms=0)
                    found.append(message)
                await consumer.ack_many(found)
            assert bodies(found) == numbers(0, 3)


async def test_a_late_answer_is_kept_when_no_other_broker_is_left(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold):
        await send(namesrv, b"0")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            pop, answers = consumer._pop, asyncio.Event()
            real = pop.receive

            async def one_is_late(broker_group: str, *limits: int) -> PopAnswer:
                if broker_group == "g1":
                    await answers.wait()
                    return await real("g1", *limits)
                return PopAnswer([], False, None, False, ())

            with mock.patch.object(pop, "receive", one_is_late):
                with mock.patch.object(pop, "broker_groups", return_value=["g1", "other"]):
                    assert await consumer.receive(wait_ms=0) == []
                answers.set()
                await asyncio.wait(consumer._late["g1"])
                assert bodies(await consumer.receive(wait_ms=0)) == [b"0"]


async def test_a_cancelled_receive_leaves_its_messages_to_the_next_one(tmp_path: Path) -> None:
    """They came again when their invisible time was over, as if somebody had failed."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await send(namesrv, *numbers(0, 4))
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            given, goes_on = asyncio.Event(), asyncio.Event()
            real = receive.ReceiveService.receive

            async def is_slow(*args: Any) -> receive.Received:
                answer = await real(*args)
                given.set()
                await goes_on.wait()
                return answer

            with mock.patch.object(receive.ReceiveService, "receive", is_slow):
                receiving = asyncio.create_task(consumer.receive(4))
                await given.wait()
                await stop_all([receiving])
            assert broker.state.pops.open_count > 0
            goes_on.set()
            found: list[ReceivedMessage] = []
            while len(found) < 4:
                found += await consumer.receive(1, wait_ms=0)
            assert bodies(found) == numbers(0, 4)
            assert {message.attempt for message in found} == {1}
            await consumer.ack_many(found)


async def test_a_change_of_an_invisible_time_that_is_cancelled_keeps_the_new_handle(
    tmp_path: Path,
) -> None:
    """The old one is good for nothing then: the message came again, whatever its member did."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold):
        await send(namesrv, b"0")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            [message] = await receive_all(consumer, 1)
            lease = consumer._held.find(message)
            changed, goes_on = asyncio.Event(), asyncio.Event()
            real = acks.AckService.change

            async def is_slow(*args: Any) -> Any:
                answer = await real(*args)
                changed.set()
                await goes_on.wait()
                return answer

            with mock.patch.object(acks.AckService, "change", is_slow):
                changing = asyncio.create_task(consumer.change_invisible_time(message, 60_000))
                await changed.wait()
                await stop_all([changing])
                goes_on.set()
                await until(lambda: consumer._held.find(message) is not lease)
            await consumer.ack(message)


async def test_a_late_answer_is_kept_that_comes_as_its_receive_is_cancelled(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, _, _hold):
        await send(namesrv, b"0")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            pop, answers = consumer._pop, asyncio.Event()
            real = pop.receive
            answer = await real("g1", 8, 30_000)
            while not answer.runs:
                answer = await real("g1", 8, 30_000)

            once = [answer]

            async def is_late(broker_group: str, *limits: int) -> PopAnswer:
                await answers.wait()
                is_first = broker_group == "g1" and once
                return once.pop() if is_first else PopAnswer([], False, None, False, ())

            with (
                mock.patch.object(pop, "broker_groups", return_value=["g1", "other"]),
                mock.patch.object(pop, "receive", is_late),
            ):
                consumer._rounds = 1  # g1 is asked first
                receiving = asyncio.create_task(consumer.receive(8, wait_ms=0))
                await until(lambda: getattr(answers, "_waiters", ()))
                answers.set()
                receiving.cancel()
                await asyncio.wait([receiving])
                assert receiving.cancelled()
                consumer._rounds = 1
                assert bodies(await consumer.receive(8, wait_ms=0)) == [b"0"]


async def test_what_came_late_has_the_time_that_the_next_call_asks_for(tmp_path: Path) -> None:
    """It had that of the earlier call, and the half of it was over."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _hold):
        await send(namesrv, b"0", b"1")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            found = await receive_all(consumer, 2, invisible_ms=10_000)
            consumer._left.extend(found)
            assert await consumer.receive(1, invisible_ms=600_000, wait_ms=0) == found[:1]
            leases = [one for q in broker.state.pops.of_group("G").values() for one in q]
            longest_ms = max(one.visible_ms for one in leases) - SystemClock().wall_ms()
            assert longest_ms > 500_000
            assert await consumer.receive(2, wait_ms=0) == found[1:]
            await consumer.ack_many(found)


async def test_what_came_late_and_others_may_have_is_not_handed_out(tmp_path: Path) -> None:
    clock = Ahead()
    async with pop_cluster(tmp_path, clock) as (namesrv, _, _hold):
        await send(namesrv, b"0")
        async with simple(namesrv) as consumer, simple(namesrv) as other:
            await consumer.subscribe("T")
            await other.subscribe("T")
            consumer._left.extend(await receive_all(consumer, 1, invisible_ms=10_000))
            clock.later_s = 11
            [message] = await receive_all(other, 1, invisible_ms=10_000)
            assert await consumer.receive(1, wait_ms=0) == []
            await other.ack(message)


@pytest.mark.parametrize("shorter_first", [True, False])
async def test_a_receive_after_a_cancelled_one_has_its_own_time_and_count(
    tmp_path: Path, shorter_first: bool
) -> None:
    """It returned the messages of the earlier call, for the rest of the earlier call's time."""
    times = (10_000, 60_000) if shorter_first else (60_000, 10_000)
    async with pop_cluster(tmp_path, clock := Ahead()) as (namesrv, _broker, _):
        await send(namesrv, *numbers(0, 8))
        async with simple(namesrv) as consumer, simple(namesrv) as other:
            await consumer.subscribe("T")
            await other.subscribe("T")
            given = asyncio.Event()
            real = receive.ReceiveService.receive

            async def is_lost(*args: Any) -> receive.Received:
                await real(*args)
                given.set()
                return await asyncio.Future()

            with mock.patch.object(receive.ReceiveService, "receive", is_lost):
                receiving = asyncio.create_task(consumer.receive(8, invisible_ms=times[0]))
                await given.wait()
                await stop_all([receiving])
            clock.later_s = 4
            found: list[ReceivedMessage] = []
            while len(found) < 3:
                some = await consumer.receive(3 - len(found), invisible_ms=times[1])
                assert len(some) <= 3 - len(found)
                found += some
            clock.later_s += times[1] / 1000 - 2
            rest = await receive_all(other, 5)
            assert not {one.body for one in rest} & {one.body for one in found}
            clock.later_s += 3
            assert sorted(bodies(await receive_all(other, 3))) == sorted(bodies(found))


async def test_acknowledgements_of_a_turn_are_one_call(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await send(namesrv, *numbers(0, 8))
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            messages = await receive_all(consumer, 8)
            real = acks.AckService.acknowledge
            with mock.patch.object(
                acks.AckService, "acknowledge", autospec=True, side_effect=real
            ) as asked:
                await asyncio.gather(*map(consumer.ack, messages))
                assert asked.call_count == 1
            assert broker.state.pops.open_count == 0


async def test_an_ack_says_what_was_refused_after_others_were_tried_again(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await send(namesrv, b"0", b"1")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            messages = await receive_all(consumer, 2)
            consumer._held.of_queue(messages[0].queue)[messages[0].queue_offset].handle = "forged"
            real, calls = consumer._pop.acknowledge, 0

            async def second_is_lost(broker_group: str, items: Any) -> list[CometError | None]:
                nonlocal calls
                calls += 1
                if calls > 1:
                    return await real(broker_group, items)
                return [*await real(broker_group, items[:1]), PeerUnavailable("lost")]

            with (
                mock.patch.object(consumer._pop, "acknowledge", second_is_lost),
                pytest.raises(HandleInvalid),
            ):
                await consumer.ack_many(messages)
            assert calls == 2
            assert broker.state.pops.open_count == 1, "the other one is acknowledged"


async def test_a_receive_ends_with_its_consumer(tmp_path: Path) -> None:
    """It went on waiting, and would have taken messages that nobody consumes."""
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold):
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            receiving = asyncio.create_task(consumer.receive(wait_ms=60_000))
            await until(lambda: pullhold.waiting == 2)
        async with asyncio.timeout(20):
            with pytest.raises(ClientClosed):
                await receiving
        await send(namesrv, b"0")
        assert broker.state.pops.open_count == 0

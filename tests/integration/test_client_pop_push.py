"""The push consumer with consume_mode=POP against a real broker and pull-hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq.client import (
    ConsumeMode,
    ConsumeResult,
    Later,
    Message,
    MessageModel,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.client.pop import settler
from cometmq.errors import ConfigInvalid, PeerUnavailable
from cometmq.v1 import broker_pb2 as pb
from services.broker.pop.receive import Received, ReceiveService
from tests.support.cluster.broker import LiveBroker
from tests.support.cluster.pop_cluster import Ahead, pop_cluster
from tests.support.waiting import until, until_async

DLQ = "%DLQ%G"


def popping(namesrv: str, listener: Callable[..., Any], **options: Any) -> PushConsumer:
    usual = {"consume_mode": ConsumeMode.POP, "retry_backoff_ms": 2, "retry_backoff_max_ms": 20}
    return PushConsumer(namesrv, "G", listener, options=PushConsumerOptions(**{**usual, **options}))


async def send(namesrv: str, *bodies: bytes, key: str = "", tag: str = "") -> None:
    async with Producer(namesrv) as producer:
        for number, body in enumerate(bodies):
            queue = QueueRef("T", 0 if key else number % 2)
            message = Message("T", body, tag, queue=queue, sharding_key=key)
            await producer.send_and_wait(message)


async def committed(broker: LiveBroker) -> int:
    found = [await broker.committed("G", "T", queue_id) for queue_id in (0, 1)]
    return sum(position.offset for position in found if position is not None)


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


async def test_many_members_consume_each_message_once(tmp_path: Path) -> None:
    got: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.extend(message.body for message in messages)

    async with (
        pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold),
        popping(namesrv, listener) as one,
        popping(namesrv, listener, batch_count=8) as other,
        popping(namesrv, listener) as third,  # more than there are queues
    ):
        for consumer in (one, other, third):
            await consumer.subscribe("T")
        await until(lambda: pullhold.waiting == 6)
        await send(namesrv, *numbers(100))
        await until_async(lambda: done(broker, 100))
        assert sorted(got) == sorted(numbers(100))


async def done(broker: LiveBroker, count: int) -> bool:
    return await committed(broker) == count


async def test_slow_calls_keep_their_messages(tmp_path: Path) -> None:
    """RocketMQ #3787: the consumer asks for more time while the listener runs."""
    clock = Ahead()
    calls: list[bytes] = []
    go_on = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        calls.append(messages[0].body)
        await go_on.wait()

    async with pop_cluster(tmp_path, clock) as (namesrv, broker, _):
        await send(namesrv, b"0", b"1")
        async with popping(namesrv, listener, pop_invisible_ms=10_000) as consumer:
            await consumer.subscribe("T")
            await until(lambda: len(calls) == 2)
            held = broker.state.pops

            def ends() -> list[int]:
                queues = held.of_group("G").values()
                return [lease.visible_ms for queue in queues for lease in queue]

            before = min(ends())
            await until(lambda: min(ends()) > before + 4_000, deadline_s=30)
            clock.later_s = 9
            await asyncio.sleep(0)
            go_on.set()
            await until_async(lambda: done(broker, 2))
        assert sorted(calls) == [b"0", b"1"]


async def test_what_fails_comes_again_and_dies_as_the_group_says(tmp_path: Path) -> None:
    tries: list[tuple[bytes, int]] = []

    async def listener(messages: list[ReceivedMessage]) -> Later | ConsumeResult:
        [message] = messages
        tries.append((message.body, message.attempt))
        if message.body == b"never":
            return Later(delay_level=-1)
        if message.body == b"level" and message.reconsume_times == 0:
            return Later(delay_level=1)
        if message.body == b"soon" and message.reconsume_times == 0:
            return Later(delay_ms=50)
        if message.body == b"fails":
            raise RuntimeError("no")
        return ConsumeResult.SUCCESS

    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        policy = pb.RetryPolicy(kind=pb.RETRY_POLICY_KIND_CUSTOMIZED, steps_ms=[1, 1])
        settings = pb.GroupSettings(
            group="G", retry_times_max=2, mode=pb.CONSUME_MODE_POP, retry_policy=policy
        )
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        await send(namesrv, b"never", b"level", b"fails", b"fine", b"soon")
        async with popping(namesrv, listener) as consumer:
            await consumer.subscribe("T")
            await until_async(lambda: done(broker, 5))
            for body in (b"level", b"soon"):
                await until(lambda body=body: tries.count((body, 1)) == 2)  # type: ignore[misc]
            dead = await broker.read_queue(DLQ, 0)
        assert sorted(one.body for one in dead) == [b"fails", b"never"]
        fails = [attempt for body, attempt in tries if body == b"fails"]
        assert fails == [1, 2, 3]
        assert tries.count((b"fine", 1)) == 1


async def test_a_stop_tells_what_was_done_and_gives_back_what_was_not(tmp_path: Path) -> None:
    clock = Ahead()
    first: list[bytes] = []
    stopping = asyncio.Event()

    async def slow(messages: list[ReceivedMessage]) -> None:
        first.append(messages[0].body)
        await stopping.wait()

    again: list[bytes] = []

    async def quick(messages: list[ReceivedMessage]) -> None:
        again.append(messages[0].body)

    async with pop_cluster(tmp_path, clock) as (namesrv, broker, _):
        await send(namesrv, *numbers(10))
        async with popping(namesrv, slow, concurrency=2) as consumer:
            await consumer.subscribe("T")
            await until(lambda: len(first) == 2)
            asyncio.get_running_loop().call_later(0.1, stopping.set)
        assert len(first) == 2, "nothing begins while it stops"
        assert broker.state.pops.open_count == 8
        clock.later_s = 11
        async with popping(namesrv, quick) as consumer:
            await consumer.subscribe("T")
            await until_async(lambda: done(broker, 10))
        assert sorted(first + again) == sorted(numbers(10))


async def test_a_stop_gives_back_messages_that_were_on_their_way(tmp_path: Path) -> None:
    """Others got them after the whole invisible time, as if the process had died."""
    clock = Ahead()
    given = asyncio.Event()
    real = ReceiveService.receive

    async def is_slow(*args: Any) -> Received:
        answer = await real(*args)
        given.set()
        await asyncio.sleep(0.3)
        return answer

    got: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.append(messages[0].body)

    async with pop_cluster(tmp_path, clock) as (namesrv, broker, _):
        await send(namesrv, *numbers(10))
        with mock.patch.object(ReceiveService, "receive", is_slow):
            async with popping(namesrv, listener, pop_invisible_ms=600_000) as consumer:
                await consumer.subscribe("T")
                await given.wait()
        assert not got
        assert broker.state.pops.open_count > 0
        clock.later_s = 11
        async with popping(namesrv, listener) as consumer:
            await consumer.subscribe("T")
            await until_async(lambda: done(broker, 10))
        assert sorted(got) == sorted(numbers(10))


async def test_message_groups_keep_their_order(tmp_path: Path) -> None:
    got: dict[str, list[bytes]] = {"a": [], "b": []}
    running: set[str] = set()

    async def listener(messages: list[ReceivedMessage]) -> None:
        for message in messages:
            assert message.sharding_key not in running
            running.add(message.sharding_key)
            await asyncio.sleep(0)
            got[message.sharding_key].append(message.body)
            running.discard(message.sharding_key)

    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        settings = pb.GroupSettings(group="G", consume_orderly=True, mode=pb.CONSUME_MODE_POP)
        await broker.admin.PutGroup(pb.PutGroupRequest(settings=settings))
        await send(namesrv, *numbers(3), key="a")
        await send(namesrv, *numbers(3), key="b")
        async with popping(namesrv, listener) as one, popping(namesrv, listener) as other:
            for consumer in (one, other):
                await consumer.subscribe("T")
            await until_async(lambda: done(broker, 6))
    assert got == {"a": numbers(3), "b": numbers(3)}


async def test_what_the_filter_hook_drops_is_done(tmp_path: Path) -> None:
    got: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.extend(message.body for message in messages)

    class Odd:
        def wants(self, message: ReceivedMessage) -> bool:
            return int(message.body) % 2 == 1

    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await send(namesrv, *numbers(6))
        async with popping(namesrv, listener, filter_hooks=(Odd(),)) as consumer:
            await consumer.subscribe("T")
            await until_async(lambda: done(broker, 6))
    assert sorted(got) == [b"1", b"3", b"5"]


@pytest.mark.parametrize(
    "options",
    [
        {"orderly": True},
        {"retry_in_place": True},
        {"message_model": MessageModel.BROADCASTING},
        {"retry_times_max": 3},
        {"pop_invisible_ms": 9_999},
        {"pop_count_max": 0},
    ],
)
def test_options_that_such_a_group_cannot_have_are_refused(options: dict[str, Any]) -> None:
    async def listener(messages: list[ReceivedMessage]) -> None:
        """Never called."""

    with pytest.raises(ConfigInvalid):
        popping("127.0.0.1:1", listener, **options)


async def test_lost_leases_leave_their_room_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that the broker does not know any more filled the consumer's buffer for ever."""
    monkeypatch.setattr(settler, "LOOK_S", 0.05)
    monkeypatch.setattr(settler, "RENEW_AT", 2.0)  # at each look
    go_on = asyncio.Event()
    got: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        await go_on.wait()
        got.extend(message.body for message in messages)

    options = {"queue_count_max": 4, "pop_count_max": 4, "concurrency": 1}
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await send(namesrv, *numbers(10))
        async with popping(namesrv, listener, **options) as consumer:
            await consumer.subscribe("T")
            await until(lambda: broker.state.pops.open_count == 4)
            reset = pb.ResetOffsetsRequest(group="G", topic="T", bound=pb.RESET_BOUND_FIRST)
            await broker.admin.ResetOffsets(reset)
            await until(lambda: broker.state.pops.open_count == 4)
            go_on.set()
            await until_async(lambda: done(broker, 10))
    assert set(got) == set(numbers(10))


async def test_a_renewal_whose_answer_was_lost_loses_no_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The consumer went on with a handle that was replaced: what it had done came again."""
    monkeypatch.setattr(settler, "LOOK_S", 0.05)
    monkeypatch.setattr(settler, "RENEW_AT", 2.0)  # at each look
    go_on = asyncio.Event()
    got: list[bytes] = []
    lost = 0

    async def listener(messages: list[ReceivedMessage]) -> None:
        await go_on.wait()
        got.extend(message.body for message in messages)

    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await send(namesrv, *numbers(10))
        async with popping(namesrv, listener) as consumer:
            pop: Any = consumer._share
            real = pop._pop.change

            async def is_lost(broker_group: str, items: list[Any]) -> list[Any]:
                nonlocal lost
                answers: list[Any] = await real(broker_group, items)
                if not items or go_on.is_set():
                    return answers
                lost += 1
                go_on.set()  # the listener is done while nobody knows the new handles
                return [PeerUnavailable("the answer is lost") for _ in items]

            monkeypatch.setattr(pop._pop, "change", is_lost)
            await consumer.subscribe("T")
            await until_async(lambda: done(broker, 10))
    assert lost == 1
    assert sorted(got) == numbers(10)


async def test_new_topics_and_new_queues_are_read_at_once(tmp_path: Path) -> None:
    """A member that waited for messages found them only with its next call, a minute later."""
    got: list[bytes] = []

    async def listener(messages: list[ReceivedMessage]) -> None:
        got.extend(message.body for message in messages)

    async def send_and_see(queue: QueueRef, body: bytes) -> None:
        async with Producer(namesrv) as producer:
            await producer.send_and_wait(Message(queue.topic, body, queue=queue))
        await until(lambda: body in got)

    async with (
        pop_cluster(tmp_path, Ahead()) as (namesrv, broker, pullhold),
        popping(namesrv, listener) as consumer,
    ):
        await broker.put_topic("U", 1)
        await consumer.subscribe("T")
        await until(lambda: pullhold.waiting == 2)
        await consumer.subscribe("U")
        await until(lambda: pullhold.waiting == 3)
        await send_and_see(QueueRef("U", 0), b"topic")
        await until(lambda: pullhold.waiting == 3)
        await broker.put_topic("T", 3)
        await send_and_see(QueueRef("T", 2), b"queue")

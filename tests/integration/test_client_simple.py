"""SimpleConsumer against a real broker and pull-hold."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq.client import (
    ConsumeFrom,
    Message,
    Producer,
    QueueRef,
    ReceivedMessage,
    SimpleConsumer,
    SimpleConsumerOptions,
)
from cometmq.client import sync as cometmq_sync
from cometmq.client.pop.calls import PopAnswer
from cometmq.errors import (
    ClientClosed,
    CometError,
    GroupModeMismatch,
    HandleInvalid,
    InvalidRequest,
    InvisibleTimeInvalid,
    PeerUnavailable,
    TopicNotFound,
)
from tests.support.cluster.pop_cluster import Ahead, pop_cluster
from tests.support.waiting import until

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


async def test_an_ack_says_what_was_refused_after_others_were_tried_again(tmp_path: Path) -> None:
    async with pop_cluster(tmp_path, Ahead()) as (namesrv, broker, _):
        await send(namesrv, b"0", b"1")
        async with simple(namesrv) as consumer:
            await consumer.subscribe("T")
            messages: list[ReceivedMessage] = []
            while len(messages) < 2:
                messages += await consumer.receive()
            consumer._held[messages[0].queue, messages[0].queue_offset].handle = "forged"
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

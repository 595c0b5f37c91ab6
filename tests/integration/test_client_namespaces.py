"""Tenants of one cluster: the same names, other topics and groups."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from cometmq.client import (
    ConsumeResult,
    Later,
    Message,
    Position,
    Producer,
    ProducerOptions,
    PullConsumer,
    PullConsumerOptions,
    PushConsumer,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
)
from cometmq.client import sync as sync_client
from cometmq.errors import CometError, ConfigInvalid, QueueNotFound, TopicNotFound
from tests.support.cluster.broker import running_broker, running_namesrv
from tests.support.waiting import until

T0 = QueueRef("T", 0, "g1")


def _has_four(got: Sequence[object]) -> bool:
    return len(got) == 4


async def test_two_tenants_with_the_same_names(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        for name in ("T", "a%T", "b%T"):
            await broker.put_topic(name, 1)
        for namespace in ("a", "b", ""):
            options = ProducerOptions(namespace=namespace)
            async with Producer(namesrv, options=options) as producer:
                body = b"of " + namespace.encode()
                receipt = await producer.send_and_wait(Message("T", body))
                assert (receipt.queue, receipt.queue_offset) == (T0, 0)
                await producer.send_and_wait(Message("T", body, queue=T0))
                await producer.send_and_wait(Message("T", body, sharding_key="k"))
                late = await producer.send_and_wait(Message("T", body, delay_level=1))
                assert late.queue == T0
        for namespace in ("a", "b", ""):
            got: list[ReceivedMessage] = []
            dead = asyncio.Event()

            async def listener(
                messages: list[ReceivedMessage],
                got: list[ReceivedMessage] = got,
                dead: asyncio.Event = dead,
            ) -> Later | None:
                got.extend(messages)
                if len(got) == 1:
                    dead.set()
                    return Later(delay_level=-1)
                return None

            push = PushConsumerOptions(namespace=namespace)
            async with PushConsumer(namesrv, "G", listener, options=push) as consumer:
                await consumer.subscribe("T")
                await until(partial(_has_four, got))
                assert T0 in consumer.assigned
            assert {m.body for m in got} == {b"of " + namespace.encode()}
            assert {(m.topic, m.queue) for m in got} == {("T", T0)}
            pull = PullConsumerOptions(namespace=namespace)
            async with PullConsumer(namesrv, "G", options=pull) as puller:
                queues = await puller.queues("T")
                assert queues == [T0]
                assert list(await puller.bounds(queues)) == [T0]
                [kept] = (await puller.committed(queues)).values()
                assert kept is not None
                assert kept.offset == 4
                [letters] = await puller.queues("%DLQ%G")
                await puller.assign([letters])
                [letter] = await puller.poll()
                assert (letter.topic, letter.queue.topic) == ("T", "%DLQ%G")
        wire = {f"%DLQ%{start}G" for start in ("", "a%", "b%")}
        assert wire <= {key[0] for key in broker.store.queues()}
        assert [r.topic for r in await broker.read_queue("a%T", 0)] == ["a%T"] * 4


async def test_messages_come_again_within_their_namespace(tmp_path: Path) -> None:
    got: list[tuple[str, str, int]] = []

    async def listener(messages: list[ReceivedMessage]) -> ConsumeResult | Later:
        got.extend((m.topic, m.queue.topic, m.reconsume_times) for m in messages)
        return Later(delay_level=1) if len(got) == 1 else ConsumeResult.SUCCESS

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("a%T", 1)
        async with Producer(namesrv, options=ProducerOptions(namespace="a")) as producer:
            await producer.send_and_wait(Message("T", b"x"))
        push = PushConsumerOptions(namespace="a")
        async with PushConsumer(namesrv, "G", listener, options=push) as consumer:
            await consumer.subscribe("T")
            await until(lambda: len(got) == 2)
        assert got == [("T", "T", 0), ("T", "%RETRY%G", 1)]
        assert ("%RETRY%a%G", 0) in set(broker.store.queues())


async def test_errors_and_selectors_know_no_namespace(tmp_path: Path) -> None:
    seen: list[Sequence[QueueRef]] = []

    def selector(message: Message, queues: Sequence[QueueRef]) -> QueueRef:
        seen.append(queues)
        return QueueRef("T", int(message.body), "g1")

    options = ProducerOptions(namespace="tenant", selector=selector, route_timeout_ms=100)
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("tenant%T", 2)
        errors: list[CometError] = []
        async with Producer(namesrv, options=options) as producer:
            receipt = await producer.send_and_wait(Message("T", b"1"))
            assert receipt.queue == QueueRef("T", 1, "g1")
            for body, topic, kind in ((b"9", "T", QueueNotFound), (b"0", "U", TopicNotFound)):
                with pytest.raises(kind) as found:
                    await producer.send_and_wait(Message(topic, body))
                errors.append(found.value)
        pull = PullConsumerOptions(namespace="tenant", request_timeout_ms=500)
        async with PullConsumer(namesrv, "G", options=pull) as puller:
            await puller.queues("T")
            with pytest.raises(QueueNotFound) as found:
                await puller.pull(QueueRef("T", 9, "g1"), Position(0, 0))
            errors.append(found.value)
    assert seen[0] == (QueueRef("T", 0, "g1"), QueueRef("T", 1, "g1"))
    assert not [error for error in errors if "tenant" in str(error)]


@pytest.mark.parametrize("namespace", ["a%b", "a b", "a" * 65, None])
def test_what_is_no_namespace_is_refused(namespace: str) -> None:
    for kind in (ProducerOptions, PushConsumerOptions, PullConsumerOptions):
        with pytest.raises(ConfigInvalid):
            kind(namespace=namespace)


async def test_clients_without_asyncio_have_namespaces(tmp_path: Path) -> None:
    def send(namesrv: str) -> QueueRef:
        options = ProducerOptions(namespace="a")
        with sync_client.Producer(namesrv, options=options) as producer:
            return producer.send_and_wait(Message("T", b"x")).queue

    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("a%T", 1)
        assert await asyncio.to_thread(send, namesrv) == T0
        assert await broker.bodies("a%T", 0) == [b"x"]

"""The clients without asyncio, called from threads that run no event loop."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cometmq import client
from cometmq.client import (
    Message,
    PullConsumerOptions,
    PushConsumerOptions,
    QueueRef,
    ReceivedMessage,
    sync,
)
from cometmq.client.sync import Producer, PullConsumer, PushConsumer
from cometmq.errors import BodyTooLarge, ClientClosed, PropertyReserved
from tests.support.cluster.fake_cluster import FakeBroker, fake_cluster

QUEUE = QueueRef("T", 0, "g1")


async def against_a_cluster(work: Callable[[str, FakeBroker], None]) -> None:
    async with fake_cluster() as (namesrv, [broker]):
        await asyncio.to_thread(work, namesrv.address, broker)
        assert not [t for t in threading.enumerate() if t.name == "cometmq"], "threads are left"


async def test_sending_from_many_threads() -> None:
    def work(namesrv: str, broker: FakeBroker) -> None:
        with Producer(namesrv) as producer:

            def send_some(first: int) -> None:
                futures = [
                    producer.send(Message("T", b"%d" % n, queue=QUEUE))
                    for n in range(first, first + 50)
                ]
                assert [future.result().queue for future in futures] == [QUEUE] * 50

            threads = [threading.Thread(target=send_some, args=(n,)) for n in (0, 50, 100)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            broker.refuse = [PropertyReserved("no")]
            with pytest.raises(PropertyReserved):
                producer.send_and_wait(Message("T", b"refused"))
            with pytest.raises(BodyTooLarge):
                producer.send(Message("T", bytes(5 * 1024 * 1024)))
            producer.send(Message("T", b"buffered", queue=QUEUE))
        with pytest.raises(ClientClosed):
            producer.send_and_wait(Message("T", b"too late"))
        assert broker.bodies("T")[-1] == b"buffered"
        assert len(broker.bodies("T")) == 151

    await against_a_cluster(work)


async def test_consuming_both_ways() -> None:
    def work(namesrv: str, broker: FakeBroker) -> None:
        got: list[bytes] = []
        came = threading.Event()

        def listener(messages: list[ReceivedMessage]) -> None:
            got.extend(message.body for message in messages)
            came.set()

        with Producer(namesrv) as producer:
            producer.send_and_wait(Message("T", b"one", queue=QUEUE))
        options = PushConsumerOptions(rebalance_delay_ms=1, retry_in_place=True)
        with PushConsumer(namesrv, "G", listener, options=options) as consumer:
            consumer.subscribe("T")
            assert came.wait(20)
            assert QUEUE in consumer.assigned
        assert broker.committed["G", ("T", 0)] == (1, 1)
        with PullConsumer(namesrv, "P") as pulling:
            pulling.assign([QUEUE])
            assert [message.body for message in pulling.poll()] == got == [b"one"]
            assert pulling.commit()[QUEUE] == pulling.position(QUEUE)

    await against_a_cluster(work)


async def test_a_block_that_cannot_be_entered_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refuse(_: Any) -> None:
        raise ZeroDivisionError

    producer = Producer("127.0.0.1:1")
    monkeypatch.setattr(type(producer._client), "__aenter__", refuse)
    with pytest.raises(ZeroDivisionError):
        await asyncio.to_thread(producer.__enter__)
    assert not [thread for thread in threading.enumerate() if thread.name == "cometmq"]


async def test_what_an_interrupted_poll_has_found_is_neither_lost_nor_committed() -> None:
    def work(namesrv: str, broker: FakeBroker) -> None:
        with Producer(namesrv) as producer:
            producer.send_and_wait(Message("T", b"one", queue=QUEUE))
            producer.send_and_wait(Message("T", b"two", queue=QUEUE))
        options = PullConsumerOptions(pull_count_max=1)
        with PullConsumer(namesrv, "P", options=options) as consumer:
            consumer.assign([QUEUE])
            assert [message.body for message in consumer.poll()] == [b"one"]

            wait = consumer._wait

            def interrupted(call: Any) -> None:
                patch.undo()
                wait(call)
                raise KeyboardInterrupt

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(consumer, "_wait", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    consumer.poll()
            consumer.commit()
            assert broker.committed.get(("P", ("T", 0)), (0, 0))[1] < 2
            assert [message.body for message in consumer.poll()] == [b"two"]
            consumer.commit()
            assert broker.committed["P", ("T", 0)][1] == 2

    await against_a_cluster(work)


@pytest.mark.parametrize("name", ["Producer", "PushConsumer", "PullConsumer"])
def test_each_method_is_there_with_its_parameters(name: str) -> None:
    def public(module: Any) -> dict[str, list[str]]:
        members = inspect.getmembers(getattr(module, name))
        return {
            member: list(inspect.signature(value).parameters) if callable(value) else []
            for member, value in members
            if not member.startswith("_")
        }

    assert public(sync) == public(client)

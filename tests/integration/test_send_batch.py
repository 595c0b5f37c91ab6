"""Batches that an application makes: stored together, in one queue, or not at all."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest

from cometmq.client import Message, Producer, ProducerOptions, QueueRef, SendContext
from cometmq.errors import BatchTooLarge, BodyTooLarge, FlowControl, InvalidRequest, QueueNotFound
from tests.support.cluster.broker import running_broker, running_namesrv
from tests.support.cluster.fake_cluster import fake_cluster


def batch(count: int, **fields: Any) -> list[Message]:
    return [Message("T", b"%d" % n, **fields) for n in range(count)]


async def test_a_batch_lies_in_one_queue_without_gaps(tmp_path: Path) -> None:
    """However small the batches of the producer are, and whatever else it sends."""
    options = ProducerOptions(batch_count_max=3, batch_bytes_max=1024)
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,)) as broker,
    ):
        await broker.put_topic("T", 4)
        async with Producer(namesrv, options=options) as producer:
            others = []
            for fields in ({}, {"sharding_key": "k"}, {"queue": QueueRef("T", 2)}):
                others += [await producer.send(Message("T", b"other")) for _ in range(5)]
                receipts = await producer.send_batch(batch(200, **fields))
                assert len({receipt.queue for receipt in receipts}) == 1
                first = receipts[0].queue_offset
                offsets = [receipt.queue_offset for receipt in receipts]
                assert offsets == list(range(first, first + 200))
                queue_id = receipts[0].queue.queue_id
                bodies = await broker.bodies("T", queue_id, first)
                assert bodies[:200] == [b"%d" % n for n in range(200)]
            large = [Message("T", random.randbytes(40_000)) for _ in range(4)]
            await producer.send_batch(large)
            for other in others:
                await other
            late = await producer.send_batch(batch(3, delay_level=1))
            assert [receipt.queue_offset for receipt in late] == [-1] * 3


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], InvalidRequest),
        (Message("T", b""), InvalidRequest),
        ([Message("T", b""), b"x"], InvalidRequest),
        ([Message("T", b""), Message("U", b"")], InvalidRequest),
        ([Message("T", b""), Message("T", b"", sharding_key="k")], InvalidRequest),
        ([Message("T", b""), Message("T", b"", delay_level=1)], InvalidRequest),
        ([Message("T", b""), Message("T", b"", wait_store=False)], InvalidRequest),
        ([Message("T", b"x"), Message("T", bytes(5 << 20))], BodyTooLarge),
        ([Message("T", random.Random(1).randbytes(3 << 20))] * 2, BatchTooLarge),
        ([Message("T", b"")] * 1025, BatchTooLarge),
        (batch(2, queue=QueueRef("T", 9)), QueueNotFound),
    ],
)
async def test_what_is_no_batch_changes_nothing(messages: Any, error: type[Exception]) -> None:
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address) as producer,
    ):
        before = await producer.send(Message("T", b"before"))
        with pytest.raises(error):
            await producer.send_batch(messages)
        await before
        await producer.send_and_wait(Message("T", b"after"))
        assert producer._buffer.used == producer._buffer.count == 0
    assert broker.bodies("T") == [b"before", b"after"]


async def test_a_batch_is_sent_again_as_a_whole_and_hooks_see_each_message() -> None:
    class Hook:
        def __init__(self) -> None:
            self.decided: list[SendContext] = []

        def before_send(self, context: SendContext) -> None:
            context.message.properties["seen"] = "yes"

        def after_send(self, context: SendContext) -> None:
            self.decided.append(context)

    hook = Hook()
    options = ProducerOptions(hooks=(hook,), retry_backoff_ms=1)
    async with (
        fake_cluster() as (namesrv, [broker]),
        Producer(namesrv.address, options=options) as producer,
    ):
        broker.refuse = [FlowControl("by order"), FlowControl("by order")]
        receipts = await producer.send_batch(batch(20))
        with pytest.raises(BodyTooLarge):
            await producer.send_batch([Message("T", b""), Message("T", bytes(5 << 20))])
    assert [sum(s.count for s in sent.segments) for sent in broker.batches] == [20] * 3
    assert [record.properties["seen"] for record in broker.stored("T")] == ["yes"] * 20
    assert [context.receipt for context in hook.decided[:20]] == receipts
    assert all(isinstance(context.error, BodyTooLarge) for context in hook.decided[20:])
    assert len(hook.decided) == 22


async def test_each_error_of_a_batch_counts_as_seen(caplog: pytest.LogCaptureFixture) -> None:
    async with fake_cluster() as (namesrv, [broker]), Producer(namesrv.address) as producer:
        await producer.send_and_wait(Message("T", b"before"))
        broker.refuse = [InvalidRequest("by order")]
        with pytest.raises(InvalidRequest):
            await producer.send_batch(batch(3))
    gc.collect()
    assert "never retrieved" not in caplog.text

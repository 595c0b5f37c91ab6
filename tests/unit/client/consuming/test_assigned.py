from __future__ import annotations

import asyncio
from typing import cast

import pytest

from cometmq.client.consuming import listener as listening
from cometmq.client.consuming.assigned import AssignedQueue
from cometmq.client.consuming.listener import Workers
from cometmq.client.messages import PullBatch, PullOutcome
from cometmq.client.options import PushConsumerOptions
from cometmq.client.reading.fetcher import Fetcher
from cometmq.client.reading.memory import Memory
from cometmq.client.received import ReceivedMessage
from cometmq.format.record import encode
from cometmq.model import Position, QueueRef
from cometmq.rpc.retry import BackoffPolicy
from cometmq.rpc.tasks import Tasks

HOST = bytes(8)
CALL_NS = 20_000
PULL_COUNT = 4_096
QUEUE_COUNT_MAX = 1_000


class FakeBroker:
    """A ``Fetcher`` whose answers are full. ``in_hand`` are the messages that the client still had
    when each request reached the network: the loop has to turn before that.
    """

    def __init__(self) -> None:
        self.queue = QueueRef("T", 0, "g")
        self.memory = Memory(1 << 30).share()
        self.position: Position | None = Position(1, 0)
        self.pulled_s: float | None = None
        self.handed_out = 0
        self.answered = 0
        self.in_hand: list[int] = []

    async def locate(self) -> Position:
        assert self.position is not None
        return self.position

    async def fetch(self) -> PullBatch:
        start = await self.locate()
        await asyncio.sleep(0)
        self.in_hand.append(self.answered - self.handed_out)
        messages = [self._message(start.offset + n) for n in range(PULL_COUNT)]
        self.position = Position(1, start.offset + PULL_COUNT)
        self.answered += PULL_COUNT
        size_bytes = sum(message.size for message in messages)
        return PullBatch(PullOutcome.FOUND, messages, self.position, 0, 1 << 40, size_bytes)

    def _message(self, offset: int) -> ReceivedMessage:
        times = {"born_time_ms": 1, "born_host": HOST, "store_host": HOST}
        record = encode(b"T", 0, b"", b"", queue_offset=offset, **times)  # type: ignore[arg-type]
        return ReceivedMessage(record, self.queue)


async def test_the_next_pull_leaves_while_the_listener_has_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """... of the answer before, and not before there is room for more."""
    now_ns = 0
    monkeypatch.setattr(listening, "monotonic_ns", lambda: now_ns)
    broker, asked = FakeBroker(), asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal now_ns
        now_ns += CALL_NS
        broker.handed_out += len(messages)
        if len(broker.in_hand) > 5:
            asked.set()

    options = PushConsumerOptions(queue_count_max=QUEUE_COUNT_MAX)
    tasks = Tasks("test")
    workers = Workers(listener, options.concurrency, 1, BackoffPolicy(1.0, 1.0), 60.0)
    workers.start(tasks)
    queue = AssignedQueue(cast(Fetcher, broker), workers, options, tasks)
    await asked.wait()
    await queue.revoke()
    workers.close()
    await tasks.stop()
    first, *others = broker.in_hand
    assert first == 0
    assert all(QUEUE_COUNT_MAX / 2 < count < QUEUE_COUNT_MAX for count in others), others

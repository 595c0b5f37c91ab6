"""One order that its consumer cannot do: it is retried, becomes a dead letter, is listed, and is
sent to its group again once the cause is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cometmq.admin import dead_letters, ops
from cometmq.admin.connection import Connection, until
from cometmq.admin.views import DeadLetterView
from cometmq.client import (
    Later,
    Message,
    Producer,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
)
from cometmq.errors import TopicNotFound
from examples.roundtrip.checker import Report

TOPIC, GROUP = "orders", "order_workers"
ORDER = b"an order that cannot be done yet"
OPTIONS = PushConsumerOptions(retry_times_max=1)  # the retry comes after 10 s
WAIT_S_MAX = 60.0


class Listener:
    """Answers LATER until ``is_mended``."""

    def __init__(self) -> None:
        self.is_mended = False
        self.failed: list[int] = []  # of each call that failed: how often the order was sent back
        self.done: list[int] = []

    async def __call__(self, messages: list[ReceivedMessage]) -> Later | None:
        calls = self.done if self.is_mended else self.failed
        calls.extend(message.reconsume_times for message in messages)
        return None if self.is_mended else Later()


@asynccontextmanager
async def failing_order(connection: Connection, namesrv: str) -> AsyncIterator[Listener]:
    """Sends the order. Its consumer runs as long as the block."""
    await ops.create_topic(connection, TOPIC, read_queue_count=1, write_queue_count=1)
    listener = Listener()
    async with PushConsumer(namesrv, GROUP, listener, options=OPTIONS) as consumer:
        await consumer.subscribe(TOPIC)
        async with Producer(namesrv) as producer:
            await producer.send_and_wait(Message(TOPIC, ORDER))
        yield listener


async def resend(connection: Connection, listener: Listener, report: Report) -> None:
    """Waits for the dead letter, and sends it again twice: the order has to come once."""
    found: list[DeadLetterView] = []

    async def died() -> bool:
        found[:] = await listed(connection)
        return bool(found)

    async def came() -> bool:
        return bool(listener.done)

    await until(died, WAIT_S_MAX)
    bodies = [(one.topic, one.body) for one in found]
    report.expect(bodies == [(TOPIC, ORDER.decode())], f"the dead letters of {GROUP}: {bodies}")
    listener.is_mended = True
    first = await dead_letters.resend(connection, GROUP, found)
    second = await dead_letters.resend(connection, GROUP, found)
    counts = (first.resent_count, second.resent_count)
    report.expect(counts == (1, 0), f"{counts} dead letters were sent again, not (1, 0)")
    await until(came, WAIT_S_MAX)
    # A third time when the commit was lost with the killed writer: it stays one dead letter.
    report.expect(len(listener.failed) >= 2, f"the order failed {len(listener.failed)} times")
    report.expect(len(listener.done) == 1, f"the order was done {len(listener.done)} times")
    marks = [one.resent for one in await listed(connection)]
    report.expect(marks == [True], f"dead letters that are marked as sent again: {marks}")
    report.figures.append(
        f"an order failed {len(listener.failed)} times and became a dead letter; it was listed, "
        "sent again, and done"
    )


async def listed(connection: Connection) -> list[DeadLetterView]:
    """What ``cometmq dlq list`` shows."""
    try:
        return [view async for view, _ in dead_letters.read_dead_letters(connection, GROUP)]
    except TopicNotFound:
        return []

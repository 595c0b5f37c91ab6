"""What the cases have in common: the cluster, the kill of a writer, a listener that takes notes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from cometmq.admin.connection import Connection, until
from cometmq.client import (
    Later,
    ProducerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    SimpleConsumerOptions,
)
from cometmq.errors import PeerUnavailable
from examples.roundtrip.checker import WriterChange
from examples.roundtrip.process import now_ms
from examples.roundtrip.timeline import Outcome

PRODUCER = ProducerOptions(trace_enable=True)
CONSUMER = PushConsumerOptions(trace_enable=True, commit_interval_ms=200)
RECEIVER = SimpleConsumerOptions(trace_enable=True)
WAIT_S_MAX = 60.0


class Stage:
    """What the cases have in common: the cluster, and the kill of a writer."""

    def __init__(
        self, connection: Connection, namesrv: str, folder: Path, names: Collection[str]
    ) -> None:
        """``names`` of the cases that take part."""
        self.connection = connection
        self.namesrv = namesrv
        self.folder = folder
        self.begun = asyncio.Event()  # set just before the kill: clients are open by then
        self.killed = asyncio.Event()
        self.ready = asyncio.Event()  # all cases wait for the kill, or have ended
        self._not_ready = set(names)
        self._change: asyncio.Future[WriterChange] = asyncio.get_running_loop().create_future()

    def is_ready(self, name: str) -> None:
        """The case has done its first part, or has ended."""
        self._not_ready.discard(name)
        if not self._not_ready:
            self.ready.set()

    async def through_the_kill(self, name: str) -> WriterChange:
        """The case has done its first part. Returns when there is a new writer."""
        self.is_ready(name)
        return await self._change

    def go_on(self, change: WriterChange) -> None:
        self._change.set_result(change)

    async def until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        """A writer that does not answer is asked again. Raises TimeoutError."""

        async def holds() -> bool:
            with suppress(PeerUnavailable):
                return await condition()
            return False

        if not await until(holds, WAIT_S_MAX):
            raise TimeoutError(f"{what}: not after {WAIT_S_MAX:.0f} s")


class Calls:
    """A listener that notes what comes; it answers LATER until ``is_mended``."""

    def __init__(self, *, is_mended: bool = True) -> None:
        self.is_mended = is_mended
        self.failed: list[int] = []  # of each call, when it came
        self.done: list[int] = []
        self.messages: list[ReceivedMessage] = []  # those that are done

    async def __call__(self, messages: list[ReceivedMessage]) -> Later | None:
        if not self.is_mended:
            self.failed.append(now_ms())
            return Later()
        self.done.append(now_ms())
        self.messages += messages
        return None

    async def any_done(self) -> bool:
        return bool(self.done)

    def expect_once(self, outcome: Outcome, change: WriterChange) -> None:
        """A second call needs a reason: the commit of the first one was lost with the writer."""
        count = len(self.done)
        is_explained = count > 1 and self.done[0] <= change.to_ms
        outcome.expect(count == 1 or is_explained, f"its listener was called {count} times")


@asynccontextmanager
async def reading(
    stage: Stage, group: str, topic: str, listener: Calls
) -> AsyncIterator[PushConsumer]:
    async with PushConsumer(stage.namesrv, group, listener, options=CONSUMER) as consumer:
        await consumer.subscribe(topic)
        yield consumer

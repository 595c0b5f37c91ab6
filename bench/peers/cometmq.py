"""CometMQ: a name server, a broker and a pullhold, with the options of ``cometmq local up``."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.peers.peer import QUEUE_COUNT, Listener, Served
from bench.peers.table import BATCHES, ONE_EACH, SEND_MANY
from bench.produce import MANY, send_for, send_many_for
from bench.report import machine
from cometmq.admin import local, ops
from cometmq.admin.connection import Connection
from cometmq.client import Message, Producer, PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.model import FlushMode

ONE_A_CALL = "defaults"


class Peer:
    """See :class:`bench.peers.peer.Peer`."""

    name = "cometmq"
    batch_ways = (ONE_EACH, SEND_MANY)
    consume_ways = (ONE_A_CALL, BATCHES)
    warm_up_s = 0.0

    @contextmanager
    def serve(self, folder: Path, flush: str) -> Iterator[Served]:
        asyncio.run(local.down(folder, purge=True))  # what an interrupted run may have left
        running = asyncio.run(local.up(folder, broker_count=1, pullhold_count=1))
        try:
            pids = {process.kind: process.pid for process in running.processes}
            load = [sys.executable, "-m", "bench.peers.load", self.name, running.namesrv]
            versions = {name: str(value) for name, value in machine().items()}
            yield Served(pids, load, versions)
        finally:
            asyncio.run(local.down(folder, grace_s=1.0, purge=True))


class Client:
    """See :class:`bench.peers.peer.Client`. The address is that of the name server."""

    def __init__(self, address: str, topic: str) -> None:
        self._namesrv = address
        self._topic = topic
        self._producer = Producer(address)

    async def __aenter__(self) -> Self:
        await self._producer.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._producer.__aexit__(kind, error, _)

    async def create(self, flush: str) -> None:
        async with Connection(self._namesrv) as connection:
            await ops.create_topic(
                connection,
                self._topic,
                read_queue_count=QUEUE_COUNT,
                write_queue_count=QUEUE_COUNT,
                flush_mode=FlushMode[flush.upper()],
            )

    async def send(self, body: bytes) -> None:
        await self._producer.send_and_wait(Message(self._topic, body))

    async def send_for(self, way: str, body: bytes, seconds: float) -> int:
        if way == SEND_MANY:
            return await send_many_for(self._producer, self._topic, body, seconds, MANY)
        return await send_for(self._producer, self._topic, body, seconds)

    async def consume(
        self, way: str, listener: Listener, ready: Callable[[], None], done: asyncio.Event
    ) -> None:
        async def listen(messages: list[ReceivedMessage]) -> None:
            listener([message.body for message in messages])

        group = f"bench-{time.monotonic_ns()}"
        options = PushConsumerOptions(batch_count=256 if way == BATCHES else 1)
        async with PushConsumer(self._namesrv, group, listen, options=options) as consumer:
            await consumer.subscribe(self._topic)
            ready()
            await done.wait()

    async def drop(self) -> None:
        pass  # its log files go by age

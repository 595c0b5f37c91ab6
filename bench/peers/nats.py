"""NATS JetStream: one server with file storage, nats-py."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Self

import nats
from nats.aio.msg import Msg
from nats.js.api import PubAck, StorageType, StreamConfig

from bench.peers.peer import (
    HOST,
    Listener,
    PeerMissing,
    Served,
    daemon,
    first_line,
    free_port,
    wait_until_open,
)

PUSH = "push, an ack each"  # faster than its client's pulls
UNCONFIRMED_MAX = 4_000  # the client's own limit


class Peer:
    """See :class:`bench.peers.peer.Peer`."""

    name = "nats"
    batch_ways = ("publish_async",)
    consume_ways = (PUSH,)
    warm_up_s = 0.0

    @contextmanager
    def serve(self, folder: Path, flush: str) -> Iterator[Served]:
        if shutil.which("nats-server") is None:
            raise PeerMissing("apt-get install nats-server")
        server = first_line("nats-server", "--version")
        if flush == "sync":
            raise PeerMissing(f"{server} syncs by time only; from 2.10 on it has sync_always")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        port = free_port()
        flags = ["-a", HOST, "-p", str(port), "-js", "-sd", str(folder)]
        with daemon(["nats-server", *flags], folder / "log.txt") as process:
            wait_until_open(port)
            load = [sys.executable, "-m", "bench.peers.load", self.name, f"{HOST}:{port}"]
            yield Served(
                {"server": process.pid}, load, {self.name: server, "nats-py": version("nats-py")}
            )


class Client:
    """See :class:`bench.peers.peer.Client`. A topic is a stream of the same name."""

    def __init__(self, address: str, topic: str) -> None:
        self._address = address
        self._topic = topic

    async def __aenter__(self) -> Self:
        self._connection = await nats.connect(f"nats://{self._address}")
        self._stream = self._connection.jetstream()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._connection.close()

    async def create(self, flush: str) -> None:
        config = StreamConfig(self._topic, subjects=[self._topic], storage=StorageType.FILE)
        await self._stream.add_stream(config)

    async def send(self, body: bytes) -> None:
        await self._stream.publish(self._topic, body)

    async def send_for(self, way: str, body: bytes, seconds: float) -> int:
        acks: deque[asyncio.Future[PubAck]] = deque()
        end = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < end:
            acks.append(await self._stream.publish_async(self._topic, body))
            count += 1
            if len(acks) == UNCONFIRMED_MAX:
                await acks.popleft()
        for ack in acks:
            await ack
        return count

    async def consume(
        self, way: str, listener: Listener, ready: Callable[[], None], done: asyncio.Event
    ) -> None:
        async def listen(message: Msg) -> None:
            listener([message.data])

        await self._stream.subscribe(self._topic, durable=f"bench-{time.monotonic_ns()}", cb=listen)
        ready()
        await done.wait()

    async def drop(self) -> None:
        await self._stream.delete_stream(self._topic)

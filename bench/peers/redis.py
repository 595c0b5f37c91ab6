"""Redis Streams: one server with an append-only file, redis-py with hiredis.

Flush async is ``appendfsync everysec``, sync is ``always``. A client object opens a connection for
each caller that waits, because it does not pipeline by itself.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis.asyncio

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

PIPELINE = "pipelines of 1,024"
READ = "reads of 1,024"
MESSAGES = 1024
BLOCK_MS = 1_000
CONNECTIONS_MAX = 1024  # one for each caller; its default is 100
BODY = b"body"


class Peer:
    """See :class:`bench.peers.peer.Peer`."""

    name = "redis"
    batch_ways = (PIPELINE,)
    consume_ways = (READ,)
    warm_up_s = 0.0

    @contextmanager
    def serve(self, folder: Path, flush: str) -> Iterator[Served]:
        if shutil.which("redis-server") is None:
            raise PeerMissing("apt-get install redis-server")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        port = free_port()
        options = {
            "bind": HOST,
            "port": str(port),
            "dir": str(folder),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "always" if flush == "sync" else "everysec",
        }
        flags = [item for name, value in options.items() for item in (f"--{name}", value)]
        with daemon(["redis-server", *flags], folder / "log.txt") as process:
            wait_until_open(port)
            yield Served(
                {"server": process.pid},
                [sys.executable, "-m", "bench.peers.load", self.name, f"{HOST}:{port}"],
                {
                    self.name: first_line("redis-server", "--version"),
                    "redis-py": version("redis"),
                    "hiredis": version("hiredis"),
                },
            )


class Client:
    """See :class:`bench.peers.peer.Client`. A topic is a stream of the same name."""

    def __init__(self, address: str, topic: str) -> None:
        host, _, port = address.partition(":")
        self._topic = topic
        # Its types are unions of what the synchronous and the asynchronous client return.
        self._redis: Any = redis.asyncio.Redis(
            host=host, port=int(port), max_connections=CONNECTIONS_MAX
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        await self._redis.aclose()

    async def create(self, flush: str) -> None:
        await self._redis.ping()  # a stream begins with its first entry

    async def send(self, body: bytes) -> None:
        await self._redis.xadd(self._topic, {BODY: body})

    async def send_for(self, way: str, body: bytes, seconds: float) -> int:
        end = time.perf_counter() + seconds
        count = 0
        while time.perf_counter() < end:
            pipeline = self._redis.pipeline(transaction=False)
            for _ in range(MESSAGES):
                pipeline.xadd(self._topic, {BODY: body})
            count += len(await pipeline.execute())
        return count

    async def consume(
        self, way: str, listener: Listener, ready: Callable[[], None], done: asyncio.Event
    ) -> None:
        group = f"bench-{time.monotonic_ns()}"
        await self._redis.xgroup_create(self._topic, group, id="0", mkstream=True)
        ready()
        while not done.is_set():
            found = await self._redis.xreadgroup(
                group, "consumer", {self._topic: ">"}, count=MESSAGES, block=BLOCK_MS
            )
            for _, entries in found:
                listener([fields[BODY] for _, fields in entries])
                await self._redis.xack(self._topic, group, *(entry for entry, _ in entries))

    async def drop(self) -> None:
        await self._redis.delete(self._topic)

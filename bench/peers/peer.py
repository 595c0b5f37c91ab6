"""What every peer gives: a server, and a client of one topic."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeAlias

Listener: TypeAlias = Callable[[Sequence[bytes]], None]
QUEUE_COUNT = 8
HOST = "127.0.0.1"
START_S_MAX = 20.0


class PeerMissing(Exception):
    """What is not here, and the command that installs it."""


@dataclass(frozen=True, slots=True)
class Served:
    """A running server. ``load`` is the command of a load program that knows its address."""

    pids: Mapping[str, int]
    load: Sequence[str]
    versions: Mapping[str, str]


class Peer(Protocol):
    """A system to measure. Ways are the options that its users choose between; the first one to
    consume is its default, and that of the latency.
    """

    name: str
    batch_ways: tuple[str, ...]
    consume_ways: tuple[str, ...]
    warm_up_s: float  # of load, before its first measurement

    def serve(self, folder: Path, flush: str) -> AbstractContextManager[Served]:
        """A server with ``flush`` async or sync. Raises PeerMissing."""
        ...


class Client(Protocol):
    """A peer's Python client, for one topic. Entered, it is connected."""

    def __init__(self, address: str, topic: str) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None: ...

    async def create(self, flush: str) -> None:
        """The topic; returns when it can be used."""

    async def send(self, body: bytes) -> None:
        """Returns when the message is acknowledged."""

    async def send_for(self, way: str, body: bytes, seconds: float) -> int:
        """As many messages as it can; how many were acknowledged."""
        ...

    async def consume(
        self, way: str, listener: Listener, ready: Callable[[], None], done: asyncio.Event
    ) -> None:
        """Everything that is in the topic and comes to it, as a new group, until ``done``. Calls
        ``ready`` when no later message can be missed.
        """

    async def drop(self) -> None:
        """Frees the topic's memory or disk, where the peer keeps it until then."""


def first_line(*command: str) -> str:
    """What a program says to a question for its version."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return (done.stdout or done.stderr).splitlines()[0]


@contextmanager
def daemon(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server whose output goes to ``log``; killed afterwards, as nobody needs its data."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_until_open(port: int) -> None:
    """Until a server accepts connections. TimeoutError."""
    deadline_s = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline_s:
        with socket.socket() as tried:
            if tried.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.01)
    raise TimeoutError(f"nothing listens on port {port} after {START_S_MAX:.0f} s")


def free_port(around: Sequence[int] = (0,)) -> int:
    """A port that is free, and so are those at these distances from it."""
    while True:
        with socket.socket() as found:
            found.bind((HOST, 0))
            port: int = found.getsockname()[1]
        if all(_is_free(port + distance) for distance in around):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return True

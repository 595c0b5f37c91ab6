"""A network of nodes that tests can cut, for who may not make network namespaces.

Every process listens on a loopback address of its own and is told to others by another one, where
a proxy of ours listens on the same ports. Whose connection it is, the kernel's table of sockets
says. A cut holds back what one side sends, of open connections and of new ones, until it ends: so
connections can be made across it, and hang, where a real network would leave the first packet
unanswered. Packets cannot be lost at random.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Self

CHUNK_BYTES = 64 * 1024
HELD_S = 0.02  # between two looks whether a cut has ended
PORTS = (9876, 10911, 10912, 10921)  # that our services listen on


class ProxyNetwork:
    """Nodes by name. Use as a context manager: at its end all connections are broken."""

    def __init__(self) -> None:
        run = os.getpid() % 250
        self._real, self._shown = f"127.{run}.1", f"127.{run}.2"  # two runs must not meet
        self.addresses: dict[str, str] = {}
        self._pids: dict[int, str] = {}
        self._cuts: Counter[tuple[str, str]] = Counter()  # how many want it
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxies")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def add(self, name: str) -> str:
        """A new node; the address by which others know it."""
        number = len(self.addresses) + 1
        self.addresses[name] = f"{self._shown}.{number}"
        for port in PORTS:
            self.forward(name, port)
        return self.addresses[name]

    def add_address(self, name: str) -> str:
        """A node of the caller's own; where it is to listen, see :meth:`forward`."""
        self.addresses[name] = f"{self._shown}.{len(self.addresses) + 1}"
        return self.listen_host(name)

    def listen_host(self, name: str) -> str:
        """Where a node's process listens."""
        return self.addresses[name].replace(self._shown, self._real)

    def forward(self, name: str, port: int) -> str:
        """Connections to this port of the node's address come to its process; the address."""
        serving = self._serve(name, port)
        asyncio.run_coroutine_threadsafe(serving, self._loop).result()
        return self.addresses[name]

    def at(self, name: str) -> list[str]:
        """What to put before a command that is to run at a node: nothing."""
        assert name in self.addresses, name
        return []

    def runs(self, name: str, pid: int) -> None:
        """This process is the node's."""
        self._pids[pid] = name

    @contextmanager
    def cut(self, sources: list[str], targets: list[str]) -> Iterator[None]:
        """Nothing that a source sends reaches a target. Cuts may overlap."""
        links = [(a, b) for a in sources for b in targets if a != b]
        self._cuts.update(links)
        try:
            yield
        finally:
            self._cuts.subtract(links)

    @contextmanager
    def parted(self, some: list[str], others: list[str]) -> Iterator[None]:
        """Nothing passes between the two sides, either way."""
        with self.cut(some, others), self.cut(others, some):
            yield

    def losing(self, name: str, percent: int) -> AbstractContextManager[None]:
        raise NotImplementedError(f"{name}: there are no packets here to lose {percent} % of")

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, name: str, port: int) -> None:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._join(name, port, reader, writer)
            finally:
                writer.transport.abort()

        self._servers.append(await asyncio.start_server(connected, self.addresses[name], port))

    async def _join(
        self, name: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        source = self._pids.get(owner(writer.get_extra_info("peername")[1], list(self._pids)), "")
        try:
            there = await asyncio.open_connection(self.listen_host(name), port)
        except OSError:
            return  # nobody listens
        try:
            await asyncio.gather(
                self._pump(source, name, reader, there[1]),
                self._pump(name, source, there[0], writer),
            )
        finally:
            there[1].transport.abort()

    async def _pump(
        self, source: str, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await self._uncut(source, target)
                writer.write(data)
                await writer.drain()
        await self._uncut(source, target)  # nor does an end pass
        with suppress(OSError):
            writer.write_eof()

    async def _uncut(self, source: str, target: str) -> None:
        while self._cuts[source, target] > 0:  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(HELD_S)


def owner(port: int, pids: list[int]) -> int:
    """Which of these processes has a TCP socket on this port of loopback; 0: none of them."""
    inodes = _inodes(port)
    for pid in pids:
        with suppress(OSError):
            folder = f"/proc/{pid}/fd"
            if any(_link(f"{folder}/{name}") in inodes for name in os.listdir(folder)):
                return pid
    return 0


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""  # closed meanwhile


def _inodes(port: int) -> set[str]:
    """Of sockets whose own port it is, as links in /proc name them. Columns of the kernel's table:
    number, own address:port in hexadecimal, the other's, …, the inode is the tenth.
    """
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    wanted = f":{port:04X}"
    return {f"socket:[{row[9]}]" for row in rows if row[1].endswith(wanted)}

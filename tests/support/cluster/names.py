"""Names whose addresses change: DNS on a loopback port, which knows what a test tells it. gRPC asks
it about an address that begins with :attr:`Names.prefix`, see :func:`dialled_by`.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self, cast

import grpc

from cometmq.rpc.channels import open_channel

_HEADER = struct.Struct(">6H")
_RESPONSE, _AUTHORITATIVE, _NO_SUCH_NAME = 0x8000, 0x0400, 3
_A, _IN = 1, 1


class Names:
    """Names and their IPv4 addresses. Use it inside ``async with``."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.known: set[str] = set()  # all that there ever were
        self.answered = 0  # questions for an address that got one
        self.prefix = ""

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(
            lambda: _Protocol(self), local_addr=("127.0.0.1", 0)
        )
        self.prefix = f"dns://127.0.0.1:{self._transport.get_extra_info('sockname')[1]}/"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._transport.close()

    def move(self, name: str, address: str | None) -> None:
        """From now on the name stands for this address; None: for none."""
        self.known.add(name)
        self.addresses.pop(name, None)
        if address is not None:
            self.addresses[name] = address

    def answer(self, question: bytes) -> bytes:
        number = question[:2]
        labels, at = [], _HEADER.size
        while length := question[at]:
            labels.append(question[at + 1 : at + 1 + length].decode())
            at += 1 + length
        kind, _ = struct.unpack_from(">2H", question, at + 1)
        asked = question[_HEADER.size : at + 5]
        address = self.addresses.get(".".join(labels).lower())
        told = address is not None and kind == _A
        flags = _RESPONSE | _AUTHORITATIVE | (0 if address else _NO_SUCH_NAME)
        head = number + _HEADER.pack(0, flags, 1, int(told), 0, 0)[2:]
        if not told:
            return head + asked
        assert address is not None
        self.answered += 1
        record = struct.pack(">3HIH", 0xC000 | _HEADER.size, _A, _IN, 0, 4)
        return head + asked + record + socket.inet_aton(address)


def dialled_by(names: Names) -> Callable[..., grpc.aio.Channel]:
    """What opens channels where ``names`` are the names that there are."""

    def open_named(address: str, *arguments: Any, **options: Any) -> grpc.aio.Channel:
        known = address.rpartition(":")[0] in names.known
        return open_channel(names.prefix * known + address, *arguments, **options)

    return open_named


@contextmanager
def silent_socket(host: str, port: int) -> Iterator[None]:
    """Connections are taken there, and nothing is ever said: as where a machine has gone, but that
    no packet is lost.
    """
    with socket.create_server((host, port)):
        yield


class _Protocol(asyncio.DatagramProtocol):
    def __init__(self, names: Names) -> None:
        self._names = names

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._transport.sendto(self._names.answer(data), addr)


class Relay:
    """A way to a server that can be cut in silence: no connection breaks, nothing comes through.
    Use it inside ``async with``.
    """

    def __init__(self, address: str) -> None:
        self._to = address.rpartition(":")
        self._through = asyncio.Event()
        self._through.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        self._through.clear()

    async def _accept(self, near: asyncio.StreamReader, to_near: asyncio.StreamWriter) -> None:
        far, to_far = await asyncio.open_connection(self._to[0], int(self._to[2]))
        for source, sink in ((near, to_far), (far, to_near)):
            self._tasks.add(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            with suppress(OSError):
                while data := await source.read(1 << 16):
                    await self._through.wait()
                    sink.write(data)
        finally:
            sink.transport.abort()

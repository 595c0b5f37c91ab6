"""Clients that call from other addresses of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from cometmq.rpc.tasks import stop_all

CHUNK_BYTES = 64 * 1024


@asynccontextmanager
async def calling_from(source: str, address: str) -> AsyncIterator[str]:
    """An address whose connections reach ``address`` as if ``source`` had opened them."""
    host, _, port = address.rpartition(":")
    running: set[asyncio.Task[None]] = set()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port, local_addr=(source, 0))
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            far_writer.close()
            writer.close()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(relay(reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        here, here_port = server.sockets[0].getsockname()
        yield f"{here}:{here_port}"
        server.close()
        await stop_all(running)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()

"""A member that is none: it hears what comes to its port, and says what it likes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import grpc

from cometmq.v1 import auth_pb2

CHALLENGE = "/cometmq.v1.AuthService/Challenge"


class FakeMember(grpc.GenericRpcHandler):
    """``heard``: every byte that came; ``calls``: (method, metadata) of every call. With
    ``answers`` it makes challenges and proofs up, else it knows no method at all.
    """

    def __init__(self, answers: bool) -> None:
        self.answers = answers
        self.address = ""
        self.heard = bytearray()
        self.calls: list[tuple[str, Any]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        self.calls.append((method, handler_call_details.invocation_metadata))
        if method == CHALLENGE and self.answers:
            return grpc.unary_unary_rpc_method_handler(_made_up)
        return None

    @property
    def methods(self) -> set[str]:
        return {method for method, _ in self.calls}


async def _made_up(request: bytes, context: object) -> bytes:
    """The caller's own bytes come back as one of the proofs."""
    nonce = auth_pb2.ChallengeRequest.FromString(request).nonce
    proofs = [nonce, *(os.urandom(32) for _ in range(7))]
    answer = auth_pb2.ChallengeResponse(challenge=os.urandom(48), proofs=proofs)
    return answer.SerializeToString()


@asynccontextmanager
async def fake_member(answers: bool) -> AsyncIterator[FakeMember]:
    """One that listens, at ``address``."""
    fake = FakeMember(answers)
    server = grpc.aio.server(handlers=[fake])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with eavesdropping(port, fake.heard) as fake.address:
            yield fake
    finally:
        await server.stop(0)


@asynccontextmanager
async def eavesdropping(port: int, heard: bytearray) -> AsyncIterator[str]:
    """An address whose bytes go to ``port`` and back; all of them are kept."""
    accepted: set[asyncio.Task[None]] = set()

    async def accept(here: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        accepted.add(task)
        with suppress(OSError), closing(back):
            there, forth = await asyncio.open_connection("127.0.0.1", port)
            with closing(forth):
                await asyncio.gather(_pass_on(here, forth, heard), _pass_on(there, back, heard))

    relay = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{relay.sockets[0].getsockname()[1]}"
    finally:
        relay.close()
        for task in accepted:
            task.cancel()
        await asyncio.gather(*accepted, return_exceptions=True)


async def _pass_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, heard: bytearray
) -> None:
    while data := await source.read(65_536):
        heard += data
        target.write(data)
        await target.drain()
    target.close()

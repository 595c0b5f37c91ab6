"""A channel whose calls are made only to a server that has proven that it knows the secret, each
with our own proof.

Not by gRPC's interceptors, which put a queue and a task between a stream and its reader: the log
flows through such streams. Here a call waits for the challenge, and then nothing stays in its way.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from typing import Any, Self

import grpc

from cometmq.rpc.proof import NONCE_BYTES
from cometmq.rpc.secret import Metadata, SharedSecret
from cometmq.v1 import auth_pb2, auth_pb2_grpc

CHALLENGE_DEADLINE_S = 3.0
# What a server answers that knows nothing of challenges: it has no secret, or is of an old release.
_NOT_SERVED = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED)


class ProvenChannel(grpc.aio.Channel):
    """``channel`` to ``address``. Its calls raise PeerUnproven where the server proves nothing;
    with ``insist`` False one that wants no proof is called without.
    """

    def __init__(
        self, channel: grpc.aio.Channel, address: str, secret: SharedSecret, insist: bool
    ) -> None:
        self._channel = channel
        self._address = address
        self._secret = secret
        self._insist = insist
        self.proven = False  # the server, before the last call
        self._challenge = auth_pb2_grpc.AuthServiceStub(channel).Challenge

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        return partial(self._ask, method, self._channel.unary_unary(method, *arguments, **options))

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._stream(method, self._channel.unary_stream(method, *arguments, **options))

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError("no service that wants a proof has such a method")

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> Any:
        return self._stream(method, self._channel.stream_stream(method, *arguments, **options))

    async def _ask(self, method: str, call: Any, *arguments: Any, **options: Any) -> Any:
        # Again, once: a process that took the other's place between challenge and call has not
        # made the challenge. A refused call has done nothing.
        timeout_s = options.pop("timeout", None)
        end_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        for last in (False, True):
            metadata = await self._proof(method, _left_s(end_s))
            try:
                return await call(*arguments, metadata=metadata, timeout=_left_s(end_s), **options)
            except grpc.aio.AioRpcError as error:
                if last or error.code() is not grpc.StatusCode.UNAUTHENTICATED:
                    raise
        raise AssertionError("not reached")

    def _stream(self, method: str, call: Any) -> Any:
        async def begin(*arguments: Any, **options: Any) -> Any:
            metadata = await self._proof(method, CHALLENGE_DEADLINE_S)
            return call(*arguments, metadata=metadata, **options)

        return lambda *arguments, **options: ProvenStream(begin(*arguments, **options))

    async def _proof(self, method: str, timeout_s: float | None) -> Metadata | None:
        nonce = os.urandom(NONCE_BYTES)
        request = auth_pb2.ChallengeRequest(nonce=nonce)
        try:
            asked = await self._challenge(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _NOT_SERVED:
                raise
            refusal = self._secret.unproven(self._address, "it knows nothing of a secret")
            if self._insist:
                raise refusal from None
            self.proven = False
            return None
        proof = self._secret.prove(self._address, method, nonce, asked.challenge, asked.proofs)
        self.proven = True
        return proof


def _left_s(end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - asyncio.get_running_loop().time())


class ProvenStream:
    """A stream that begins when the server has proven itself. From then on ``read`` and ``write``
    are the call's own.
    """

    def __init__(self, beginning: Coroutine[Any, Any, Any]) -> None:
        self._beginning = asyncio.ensure_future(beginning)
        self._beginning.add_done_callback(_seen)

    async def read(self) -> Any:
        return await (await self._begun()).read()

    async def write(self, message: Any) -> None:
        await (await self._begun()).write(message)

    async def done_writing(self) -> None:
        await (await self._begun()).done_writing()

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for message in await self._begun():
            yield message

    def cancel(self) -> None:
        if self._beginning.done() and not self._beginning.cancelled():
            if self._beginning.exception() is None:
                self._beginning.result().cancel()
        else:
            self._beginning.cancel()

    async def _begun(self) -> Any:
        call = await asyncio.shield(self._beginning)
        self.read = call.read  # type: ignore[method-assign]
        if hasattr(call, "write"):
            self.write = call.write  # type: ignore[method-assign]
        return call


def _seen(beginning: asyncio.Future[Any]) -> None:
    """A caller that never reads gets no error, and asyncio need not warn of that."""
    if not beginning.cancelled():
        beginning.exception()

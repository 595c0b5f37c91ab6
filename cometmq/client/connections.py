"""Channels of one client, and the few calls that touch gRPC: everything above speaks the error
catalogue.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, cast

import grpc

from cometmq.errors import PeerUnavailable
from cometmq.rpc.channels import open_channel, parse_addresses, resolve
from cometmq.rpc.interceptors import error_from
from cometmq.v1 import broker_pb2_grpc, hold_pb2_grpc, namesrv_pb2_grpc

Request = TypeVar("Request")
Response = TypeVar("Response")

_EOF = type(grpc.aio.EOF)
Stream = grpc.aio.StreamStreamCall


async def read(stream: Stream[Any, Response]) -> Response | None:
    """The next message; None = the server ended the stream in order. Raises errors of the
    catalogue.
    """
    try:
        response = await stream.read()
    except grpc.aio.AioRpcError as error:
        raise error_from(error) from None
    return None if isinstance(response, _EOF) else cast(Response, response)


async def read_first(stream: Stream[Any, Response], timeout_s: float) -> Response | None:
    """The first message of a stream on which the server speaks first. PeerUnavailable: too late."""
    try:
        async with asyncio.timeout(timeout_s):
            return await read(stream)
    except TimeoutError:
        raise PeerUnavailable(f"The stream was not opened within {timeout_s} s.") from None


async def write(stream: Stream[Request, Any], request: Request) -> None:
    """Sends a message; waits while the peer's window is full. Raises errors of the catalogue."""
    try:
        await stream.write(request)
    except grpc.aio.AioRpcError as error:
        raise error_from(error) from None
    except asyncio.InvalidStateError:  # the call has ended meanwhile; the reader is told why
        raise PeerUnavailable("The stream has ended.") from None


async def ask(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request, timeout_s: float
) -> Response:
    """One unary call with its deadline. Raises errors of the catalogue."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_from(error) from None


class Connections:
    """One channel for each address, opened when first asked for."""

    def __init__(self, namesrv: str) -> None:
        self.namesrv = ";".join(parse_addresses(namesrv))
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def namesrv_addresses(self) -> tuple[str, ...]:
        """host:port of every name server, names resolved now; the names themselves when none
        resolves.
        """
        names = parse_addresses(self.namesrv)
        return await resolve(names) or names

    def broker(self, address: str) -> broker_pb2_grpc.BrokerServiceAsyncStub:
        return broker_pb2_grpc.BrokerServiceStub(self._channel(address))

    def pullhold(self, address: str) -> hold_pb2_grpc.HoldServiceAsyncStub:
        return hold_pb2_grpc.HoldServiceStub(self._channel(address))

    def name_server(self, address: str) -> namesrv_pb2_grpc.NameServiceAsyncStub:
        return namesrv_pb2_grpc.NameServiceStub(self._channel(address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return channel

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

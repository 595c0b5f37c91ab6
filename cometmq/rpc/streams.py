"""The client side of gRPC calls: streams are read and written, methods asked, in errors of the
catalogue.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, cast

import grpc

from cometmq.errors import PeerUnavailable
from cometmq.rpc.interceptors import error_from

Request = TypeVar("Request")
Response = TypeVar("Response")

_EOF = type(grpc.aio.EOF)
Stream = grpc.aio.StreamStreamCall


def _raise_cancellation() -> None:
    """gRPC may answer a cancellation with the failure of a call that ended at the same moment. The
    task has to end all the same: its owner waits for that.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def read(stream: Stream[Any, Response]) -> Response | None:
    """The next message; None = the server ended the stream in order. Raises errors of the
    catalogue.
    """
    try:
        response = await stream.read()
    except grpc.aio.AioRpcError as error:
        _raise_cancellation()
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
        _raise_cancellation()
        raise error_from(error) from None
    except asyncio.InvalidStateError:  # the call has ended; the reader gets the error
        _raise_cancellation()
        raise PeerUnavailable("The stream has ended.") from None


async def ask(
    method: grpc.aio.UnaryUnaryMultiCallable[Request, Response], request: Request, timeout_s: float
) -> Response:
    """One unary call with its deadline. Raises errors of the catalogue."""
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        _raise_cancellation()
        raise error_from(error) from None

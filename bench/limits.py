"""The denominators: what this machine does when there is nothing behind the same gRPC calls, and
what its disk does.

Four roles, each a process of its own (``python -m bench.limits ROLE --help``):

``server``
    answers ``SendStream`` and ``Pull`` with the serializers of ``cometmq.v1``, and looks at
    nothing: grpc.aio + uvloop.
``stream``
    a producer's client: chunks of ``chunk_bytes`` over one stream, ``window`` of them
    unanswered.
``pull``
    a consumer's client: unary calls that are answered with ``chunk_bytes``, ``window`` of them
    in flight.
``disk``
    ``pwrite`` + ``fdatasync`` of one chunk after the other on a file that was filled with zeros
    before.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from grpc import aio

from bench.processes import Line, Meter, say, watch_argument, watched
from cometmq.v1 import broker_pb2, broker_pb2_grpc

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 16 * 1024 * 1024),
    ("grpc.max_send_message_length", 16 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.so_reuseport", 0),
)
WARM_UP_S = 0.5
DISK_FILE_BYTES = 256 * 1024 * 1024
SERVICE_NAME = "cometmq.v1.BrokerService"


async def answer_stream(
    requests: AsyncIterator[broker_pb2.SendStreamRequest], context: object
) -> AsyncIterator[broker_pb2.SendStreamResponse]:
    """Acknowledges each batch unseen."""
    yield broker_pb2.SendStreamResponse(opened=broker_pb2.SendStreamOpened(broker_group="bare"))
    log_offset = 0
    async for request in requests:
        result = broker_pb2.SendBatchResult(
            batch_id=request.batch_id, log_offset=log_offset, queue_offsets=[0], store_time_ms=1
        )
        log_offset += len(request.records)
        yield broker_pb2.SendStreamResponse(result=result)


async def answer_pull(request: broker_pb2.PullRequest, context: object) -> broker_pb2.PullResponse:
    """As many bytes as were asked for, always the same ones."""
    return broker_pb2.PullResponse(
        status=broker_pb2.PULL_STATUS_FOUND,
        records=zeros(request.max_bytes),
        count=request.max_count,
    )


_zeros: dict[int, bytes] = {}


def zeros(size: int) -> bytes:
    """A buffer of that size, made once for each of the few sizes that a run asks for."""
    if size not in _zeros:
        _zeros[size] = bytes(size)
    return _zeros[size]


def new_server() -> tuple[aio.Server, int]:
    """A server that is not started yet, and its port."""
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "SendStream": grpc.stream_stream_rpc_method_handler(
            answer_stream,
            request_deserializer=broker_pb2.SendStreamRequest.FromString,
            response_serializer=broker_pb2.SendStreamResponse.SerializeToString,
        ),
        "Pull": grpc.unary_unary_rpc_method_handler(
            answer_pull,
            request_deserializer=broker_pb2.PullRequest.FromString,
            response_serializer=broker_pb2.PullResponse.SerializeToString,
        ),
    }
    server = aio.server(options=CHANNEL_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
    return server, server.add_insecure_port("127.0.0.1:0")


async def serve() -> None:
    """Runs until SIGTERM; says ``address`` first."""
    await serve_until_terminated(*new_server())


async def serve_until_terminated(server: aio.Server, port: int) -> None:
    """Says ``address``, serves until SIGTERM."""
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    say({"address": f"127.0.0.1:{port}"})
    await stopped.wait()
    await server.stop(None)


class BareStream:
    """One ``SendStream`` on which ``window`` chunks are unanswered at any time."""

    def __init__(
        self, stub: broker_pb2_grpc.BrokerServiceAsyncStub, chunk: bytes, window: int
    ) -> None:
        self._call = stub.SendStream()
        self._chunk = chunk
        self._window = window
        self._batch_id = 0
        self._segments = [broker_pb2.Segment(topic="bare", queue_id=0, count=1)]

    async def open(self) -> None:
        opened = await self._call.read()
        assert isinstance(opened, broker_pb2.SendStreamResponse)
        assert opened.HasField("opened")

    async def run(self, seconds: float) -> int:
        """Sends for so long and waits for the last answer; how many chunks it were."""
        end = time.perf_counter() + seconds
        answered = first = self._batch_id
        for _ in range(self._window):
            await self._send()
        while answered < self._batch_id:
            await self._receive()
            answered += 1
            if time.perf_counter() < end:
                await self._send()
        return answered - first

    async def _send(self) -> None:
        self._batch_id += 1
        await self._call.write(
            broker_pb2.SendStreamRequest(
                batch_id=self._batch_id,
                records=self._chunk,
                records_crc32=1,
                segments=self._segments,
            )
        )

    async def _receive(self) -> None:
        response = await self._call.read()
        assert isinstance(response, broker_pb2.SendStreamResponse)
        assert response.HasField("result")

    async def close(self) -> None:
        await self._call.done_writing()


async def measure_stream(arguments: argparse.Namespace) -> Line:
    """The ceiling of a producer: see the module's first lines."""
    async with aio.insecure_channel(arguments.address, options=CHANNEL_OPTIONS) as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        stream = BareStream(stub, zeros(arguments.chunk_bytes), arguments.window)
        await stream.open()
        await stream.run(WARM_UP_S)
        meter = Meter(watched(arguments))
        chunks = await stream.run(arguments.seconds)
        line = meter.stop(chunks * arguments.chunk_messages)
        await stream.close()
    return line


async def pull_for(
    stub: broker_pb2_grpc.BrokerServiceAsyncStub, request: broker_pb2.PullRequest, seconds: float
) -> int:
    """Calls one after the other; how many were answered."""
    end = time.perf_counter() + seconds
    calls = 0
    while time.perf_counter() < end:
        response = await stub.Pull(request)
        assert len(response.records) == request.max_bytes
        calls += 1
    return calls


async def measure_pull(arguments: argparse.Namespace) -> Line:
    """The ceiling of a consumer: see the module's first lines."""
    request = broker_pb2.PullRequest(
        group="bare", max_count=arguments.chunk_messages, max_bytes=arguments.chunk_bytes
    )
    async with aio.insecure_channel(arguments.address, options=CHANNEL_OPTIONS) as channel:
        stub = broker_pb2_grpc.BrokerServiceStub(channel)
        await pull_for(stub, request, WARM_UP_S)
        meter = Meter(watched(arguments))
        lanes = (pull_for(stub, request, arguments.seconds) for _ in range(arguments.window))
        calls = sum(await asyncio.gather(*lanes))
        return meter.stop(calls * arguments.chunk_messages)


def measure_disk(arguments: argparse.Namespace) -> Line:
    """The ceiling of a synchronous flush: one chunk, one ``fdatasync``."""
    path = Path(arguments.path)
    chunk = b"\x01" * arguments.chunk_bytes
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fill_with_zeros(descriptor)
        meter = Meter({})
        end = time.perf_counter() + arguments.seconds
        chunks = 0
        while time.perf_counter() < end:
            place = chunks * len(chunk) % (DISK_FILE_BYTES - len(chunk))
            os.pwrite(descriptor, chunk, place)
            os.fdatasync(descriptor)
            chunks += 1
        return meter.stop(chunks * arguments.chunk_messages)
    finally:
        os.close(descriptor)
        path.unlink()


def fill_with_zeros(descriptor: int) -> None:
    """Real blocks for the whole file: one that nothing was written to is slower to sync."""
    step = zeros(1024 * 1024)
    for place in range(0, DISK_FILE_BYTES, len(step)):
        os.pwrite(descriptor, step, place)
    os.fsync(descriptor)


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="python -m bench.limits", description=__doc__)
    roles = root.add_subparsers(dest="role", required=True)
    roles.add_parser("server")
    for name in ("stream", "pull", "disk"):
        role = roles.add_parser(name)
        role.add_argument("--chunk_bytes", type=int, default=256 * 1024)
        role.add_argument(
            "--chunk_messages", type=int, default=1, help="messages that a chunk stands for"
        )
        role.add_argument("--seconds", type=float, default=3.0)
        if name == "disk":
            role.add_argument("--path", required=True, help="file to write; removed afterwards")
        else:
            role.add_argument("--address", required=True, help="what the server said")
            role.add_argument("--window", type=int, default=8)
            watch_argument(role)
    return root


def main() -> None:
    arguments = parser().parse_args()
    if arguments.role == "server":
        uvloop.run(serve())
    elif arguments.role == "stream":
        say(uvloop.run(measure_stream(arguments)))
    elif arguments.role == "pull":
        say(uvloop.run(measure_pull(arguments)))
    else:
        say(measure_disk(arguments))


if __name__ == "__main__":
    main()

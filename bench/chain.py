"""What the way of a message through a pull-hold costs with nothing behind the same gRPC messages:
the denominator of ``bench latency``.

``python -m bench chain`` starts four processes, each with one uvloop. The producer writes to a
stream of the broker at a fixed rate; the broker answers, and writes the message to the stream of
the pull-hold, which writes it to the stream of the consumer. So eight operations of gRPC a message,
as many as CometMQ has where it has no more to do. ``--sync``: the broker writes the message to a
file, and syncs that in a thread, before it passes the message on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import grpc
import uvloop
from grpc import aio, method_handlers_generic_handler, stream_stream_rpc_method_handler

from bench.alarm import Alarm
from bench.limits import serve_until_terminated
from bench.processes import Line, Meter, Program, say
from bench.stats import summarise_latency
from cometmq.rpc.polling import poll_in_one_thread

SEND, WATCH = "Send", "Watch"
SERVICE = "bench.Chain"
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.so_reuseport", 0))
DUE = struct.Struct(">q")
ANSWER = bytes(24)
WARM_UP_S = 1.0
OPENED = b""  # the first answer on a stream: the server has it


class Passing:
    """A server that passes what it gets on to the streams that watch it."""

    def __init__(self, log: int = -1) -> None:
        self._watching: set[asyncio.Queue[bytes]] = set()
        self._log = log
        self._waiting: list[bytes] = []
        self._syncing: asyncio.Task[None] | None = None

    def take(self, message: bytes) -> None:
        if self._log < 0:
            self._pass([message])
            return
        os.write(self._log, message)
        self._waiting.append(message)
        if self._syncing is None or self._syncing.done():
            self._syncing = asyncio.create_task(self._sync())

    async def _sync(self) -> None:
        while self._waiting:
            messages, self._waiting = self._waiting, []
            await asyncio.get_running_loop().run_in_executor(None, os.fdatasync, self._log)
            self._pass(messages)

    def _pass(self, messages: Sequence[bytes]) -> None:
        for queue in self._watching:
            for message in messages:
                queue.put_nowait(message)

    async def send(self, _: object, context: Any) -> None:
        while (message := await context.read()) is not aio.EOF:
            self.take(message)
            await context.write(ANSWER)

    async def watch(self, _: object, context: Any) -> None:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._watching.add(queue)
        await context.write(OPENED)
        while True:
            await context.write(await queue.get())

    def server(self) -> aio.Server:
        server = aio.server(options=OPTIONS)
        methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: stream_stream_rpc_method_handler(method)
            for name, method in ((SEND, self.send), (WATCH, self.watch))
        }
        server.add_generic_rpc_handlers((method_handlers_generic_handler(SERVICE, methods),))
        return server


def _opened(channel: aio.Channel, method: str) -> Any:
    streams: aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
        f"/{SERVICE}/{method}"
    )
    return streams()


async def broker(sync: bool) -> None:
    with tempfile.TemporaryFile(dir=".") as log:
        server = Passing(log.fileno() if sync else -1).server()
        await serve_until_terminated(server, server.add_insecure_port("127.0.0.1:0"))


async def pullhold(address: str) -> None:
    passing = Passing()
    server = passing.server()

    async def read() -> None:
        async with aio.insecure_channel(address, options=OPTIONS) as channel:
            stream = _opened(channel, WATCH)
            assert await stream.read() == OPENED
            while True:
                passing.take(await stream.read())

    reading = asyncio.create_task(read())
    await serve_until_terminated(server, server.add_insecure_port("127.0.0.1:0"))
    reading.cancel()


async def consume(address: str, count: int) -> Line:
    """Says ``ready`` first."""
    latencies_ms: list[float] = []
    async with aio.insecure_channel(address, options=OPTIONS) as channel:
        stream = _opened(channel, WATCH)
        assert await stream.read() == OPENED
        say({"ready": 1})
        while len(latencies_ms) < count:
            (due_ns,) = DUE.unpack_from(await stream.read())
            latencies_ms.append((time.monotonic_ns() - due_ns) / 1e6)
    return asdict(summarise_latency(latencies_ms))


async def produce(address: str, count: int, rate: float, body_bytes: int) -> Line:
    padding = bytes(body_bytes - DUE.size)
    async with aio.insecure_channel(address, options=OPTIONS) as channel:
        stream = _opened(channel, SEND)

        async def read() -> None:
            for _ in range(count):
                await stream.read()

        reading = asyncio.create_task(read())
        start_ns = time.monotonic_ns()
        with Alarm() as alarm:
            for number in range(count):
                due_ns = start_ns + int(number / rate * 1e9)
                await alarm.until(due_ns)
                await stream.write(DUE.pack(due_ns) + padding)
        await reading
    return {"acked": count}


# --- the whole ------------------------------------------------------------------------------------


def _role(name: str, *flags: str) -> Program:
    environment: dict[str, str] = {}
    poll_in_one_thread(environment)
    return Program(name, [sys.executable, "-m", "bench.chain", name, *flags], environment)


def measure(seconds: float, rate: float, body_bytes: int, sync: bool) -> Line:
    """One run: percentiles in ms, cores by process."""
    flags = [f"--rate={rate}", f"--seconds={seconds}", f"--body_bytes={body_bytes}"]
    flags += ["--sync"] if sync else []
    with _role("broker", *flags) as broker:
        broker_at = f"--address={broker.read()['address']}"
        with _role("pullhold", broker_at) as hold:
            hold_at = f"--address={hold.read()['address']}"
            with _role("consumer", hold_at, *flags) as consumer:
                consumer.read()
                with _role("producer", broker_at, *flags) as producer:
                    roles = (broker, hold, consumer, producer)
                    names = ("broker", "pullhold", "consumer", "producer")
                    time.sleep(WARM_UP_S)
                    meter = Meter({name: one.pid for name, one in zip(names, roles, strict=True)})
                    time.sleep(seconds - WARM_UP_S - 0.5)
                    cores = meter.stop(1)
                    line = consumer.read()
    spent = {name: float(cores[f"cpu_us_{name}"]) / 1e6 / float(cores["seconds"]) for name in names}
    line |= {f"cores_{name}": share for name, share in spent.items()}
    return line | {"cores": sum(spent.values()), "other_cores": cores["other_cores"]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench chain", description=__doc__)
    roles = ["all", "broker", "pullhold", "consumer", "producer"]
    parser.add_argument("role", nargs="?", default="all", choices=roles, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--runs", type=int, default=3, help="runs in turn")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run")
    parser.add_argument("--rate", type=float, default=500.0, help="messages a second")
    parser.add_argument("--body_bytes", type=int, default=1024)
    parser.add_argument("--sync", action="store_true", help="sync each message to a file")
    arguments = parser.parse_args(argv)
    role, rate, count = arguments.role, arguments.rate, int(arguments.seconds * arguments.rate)
    if role == "all":
        for run in range(1, arguments.runs + 1):
            line = measure(arguments.seconds, rate, arguments.body_bytes, arguments.sync)
            print(f"run {run}: " + ", ".join(f"{k} {float(v):,.2f}" for k, v in line.items()))
    elif role in ("broker", "pullhold"):
        uvloop.run(broker(arguments.sync) if role == "broker" else pullhold(arguments.address))
    elif role == "consumer":
        say(uvloop.run(consume(arguments.address, count)))
    else:
        say(uvloop.run(produce(arguments.address, count, rate, arguments.body_bytes)))


if __name__ == "__main__":
    main()

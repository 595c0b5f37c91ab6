"""How long one small message takes there and back, with nothing behind the same gRPC calls: the
denominator of a sender that awaits each receipt.

``python -m bench roundtrip`` prints a table of all shapes: servers and clients with asyncio and
with threads, calls and streams, uvloop or asyncio's own loop, gRPC's event engine or its poller
from before (see cometmq/rpc/polling.py). A client with threads waits for the answer of a call in
the thread that made it, which polls the network itself.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from statistics import median
from typing import Any

import grpc
import uvloop
from grpc import aio

from bench.limits import serve_until_terminated
from bench.processes import Line, Program, cpu_seconds, say
from cometmq.rpc.polling import poll_in_one_thread

SERVICE = "bench.Echo"
UNARY, STREAM = f"/{SERVICE}/Unary", f"/{SERVICE}/Stream"
MESSAGE = bytes(200)
ANSWER = bytes(24)
WARM_UP_S = 0.3
OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.so_reuseport", 0))
KINDS = ("uvloop", "asyncio", "threads")
POLLERS = ("engine", "poller")
SHAPES = ("call", "stream")


# --- servers --------------------------------------------------------------------------------------


async def _echo(request: bytes, context: object) -> bytes:
    return ANSWER


async def _echo_stream(requests: object, context: Any) -> None:
    while await context.read() is not aio.EOF:
        await context.write(ANSWER)


def _echo_in_thread(request: bytes, context: object) -> bytes:
    return ANSWER


def _echo_stream_in_thread(requests: Iterator[bytes], context: object) -> Iterator[bytes]:
    for _ in requests:
        yield ANSWER


def _handlers(unary: Callable[..., Any], stream: Callable[..., Any]) -> grpc.GenericRpcHandler:
    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "Unary": grpc.unary_unary_rpc_method_handler(unary),
            "Stream": grpc.stream_stream_rpc_method_handler(stream),
        },
    )


async def serve() -> None:
    """With asyncio, until SIGTERM; says ``address`` first."""
    server = aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers((_handlers(_echo, _echo_stream),))
    await serve_until_terminated(server, server.add_insecure_port("127.0.0.1:0"))


def serve_in_threads() -> None:
    """The same with threads."""
    server = grpc.server(ThreadPoolExecutor(4), options=OPTIONS)
    server.add_generic_rpc_handlers((_handlers(_echo_in_thread, _echo_stream_in_thread),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    say({"address": f"127.0.0.1:{port}"})
    stopped.wait()
    server.stop(None)


# --- clients --------------------------------------------------------------------------------------


class Stopwatch:
    """Round trips of one client, and what they cost it and the server in CPU time."""

    def __init__(self, server_pid: int, seconds: float) -> None:
        self._pids = (os.getpid(), server_pid)
        self._cpu_s = list(map(cpu_seconds, self._pids))
        self._start_s = self._last_s = time.perf_counter()
        self._end_s = self._start_s + seconds
        self.trips_s: list[float] = []

    def trip(self) -> bool:
        """One more has ended; whether there is time for another one."""
        now_s = time.perf_counter()
        self.trips_s.append(now_s - self._last_s)
        self._last_s = now_s
        return now_s < self._end_s

    def line(self) -> Line:
        count = len(self.trips_s)
        after_s = map(cpu_seconds, self._pids)
        spent_s = [after - before for after, before in zip(after_s, self._cpu_s, strict=True)]
        return {
            "rate": count / (self._last_s - self._start_s),
            "p50_us": median(self.trips_s) * 1e6,
            "client_us": spent_s[0] / count * 1e6,
            "server_us": spent_s[1] / count * 1e6,
        }


async def measure(address: str, shape: str, server_pid: int, seconds: float) -> Line:
    """With asyncio."""
    async with aio.insecure_channel(address, options=OPTIONS) as channel:
        if shape == "call":
            method: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(UNARY)

            async def trip() -> None:
                await method(MESSAGE)

        else:
            streams: aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(STREAM)
            stream = streams()

            async def trip() -> None:
                await stream.write(MESSAGE)
                await stream.read()

        warm = Stopwatch(server_pid, WARM_UP_S)
        while warm.trip():
            await trip()
        watch = Stopwatch(server_pid, seconds)
        while watch.trip():
            await trip()
        return watch.line()


def measure_in_thread(address: str, shape: str, server_pid: int, seconds: float) -> Line:
    """Without asyncio."""
    requests: SimpleQueue[bytes | None] = SimpleQueue()
    with grpc.insecure_channel(address, options=OPTIONS) as channel:
        if shape == "call":
            method: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(UNARY)

            def trip() -> None:
                method(MESSAGE)

        else:
            streams: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(STREAM)
            answers = streams(iter(requests.get, None))

            def trip() -> None:
                requests.put(MESSAGE)
                next(answers)

        warm = Stopwatch(server_pid, WARM_UP_S)
        while warm.trip():
            trip()
        watch = Stopwatch(server_pid, seconds)
        while watch.trip():
            trip()
        line = watch.line()
        requests.put(None)  # the stream's end
        return line


# --- the table ------------------------------------------------------------------------------------


def role(name: str, kind: str, poller: str, *options: str) -> Program:
    """A server or a client. How gRPC polls is decided before the program imports it."""
    environment: dict[str, str] = {}
    if poller == "poller":
        poll_in_one_thread(environment)
    command = [sys.executable, "-m", "bench.roundtrip", name, f"--kind={kind}", *options]
    return Program(f"{name} with {kind}", command, environment)


def compare(rounds: int, seconds: float) -> None:
    """Every server with every client, in turn; medians of the rounds."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for _, *served in itertools.product(range(rounds), KINDS, POLLERS):
        with role("server", *served) as server:
            options = [f"--address={server.read()['address']}", f"--server_pid={server.pid}"]
            for called in itertools.product(KINDS, POLLERS):
                with role("client", *called, *options, f"--seconds={seconds}") as client:
                    for shape in SHAPES:
                        found.setdefault((*served, *called, shape), []).append(client.read())
    print("| server | client | shape | trips/s | p50 µs | CPU µs: client | server |")
    print("|---|---|---|---|---|---|---|")
    order = sorted(found, key=lambda key: -median(float(one["rate"]) for one in found[key]))
    for key in order:
        server_kind, server_poller, kind, poller, shape = key
        rate, p50, client_us, server_us = (
            f"{median(float(one[name]) for one in found[key]):,.0f}"
            for name in ("rate", "p50_us", "client_us", "server_us")
        )
        print(
            f"| {server_kind}, {server_poller} | {kind}, {poller} | {shape} "
            f"| {rate} | {p50} | {client_us} | {server_us} |"
        )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.roundtrip", description=__doc__)
    parser.add_argument("role", nargs="?", default="all", choices=["all", "server", "client"])
    parser.add_argument("--kind", choices=KINDS, default="uvloop")
    parser.add_argument("--address", default="")
    parser.add_argument("--server_pid", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args(argv)
    if arguments.role == "all":
        compare(arguments.rounds, arguments.seconds)
        return
    run: Callable[..., Any] = uvloop.run if arguments.kind == "uvloop" else asyncio.run
    if arguments.role == "server":
        serve_in_threads() if arguments.kind == "threads" else run(serve())
        return
    for shape in SHAPES:
        what = (arguments.address, shape, arguments.server_pid, arguments.seconds)
        say(measure_in_thread(*what) if arguments.kind == "threads" else run(measure(*what)))


if __name__ == "__main__":
    main()

"""A load program on a peer's Python client: commands on standard input, JSON lines on standard
output.

``python -m bench.peers.load PEER ADDRESS``, then lines of a word and ``name=value`` fields
between tabs; each names a topic. ``Load.java`` has the same commands.

``create``    makes the topic (``flush``).
``call``      ``callers`` tasks, each of which sends again when its message is acknowledged.
``batch``     as many messages as the client can send in this ``way``.
``consume``   ``count`` messages that are there, in this ``way``.
``schedule``  one message every 1/``rate`` seconds: ``warm_up``, then ``count``; the body begins
              with when it was due.
``receive``   says ``ready``, then how late ``count`` scheduled messages were.
``drop``      frees the topic.

Where something is measured, ``started`` is said when the clock starts, then what was measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from importlib import import_module

import uvloop

from bench.alarm import Alarm
from bench.latency import DUE
from bench.peers.peer import Client
from bench.processes import Line, say
from bench.stats import summarise_latency

WARM_UP_S = 0.5


async def create(client: Client, fields: dict[str, str]) -> Line:
    await client.create(fields["flush"])
    return {"created": 1}


async def call(client: Client, fields: dict[str, str]) -> Line:
    body, callers = bytes(int(fields["body_bytes"])), int(fields["callers"])
    await _call_for(client, body, callers, WARM_UP_S)
    say({"started": 1})
    took_s = await _call_for(client, body, callers, float(fields["seconds"]))
    return late([one * 1e3 for one in took_s])


async def _call_for(client: Client, body: bytes, callers: int, seconds: float) -> list[float]:
    end = time.perf_counter() + seconds
    took_s: list[float] = []

    async def caller() -> None:
        while (started := time.perf_counter()) < end:
            await client.send(body)
            took_s.append(time.perf_counter() - started)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(callers):
            tasks.create_task(caller())
    return took_s


async def batch(client: Client, fields: dict[str, str]) -> Line:
    body, way = bytes(int(fields["body_bytes"])), fields["way"]
    warm = await client.send_for(way, body, WARM_UP_S)
    say({"started": 1})
    count = await client.send_for(way, body, float(fields["seconds"]))
    return {"messages": count, "stored": warm + count}


async def consume(client: Client, fields: dict[str, str]) -> None:
    """The first listener call is not measured: nobody knows what it took."""
    count, body_bytes = int(fields["count"]), int(fields["body_bytes"])
    received = unmeasured = 0
    done = asyncio.Event()

    def listener(bodies: Sequence[bytes]) -> None:
        nonlocal received, unmeasured
        assert sum(map(len, bodies)) == len(bodies) * body_bytes
        received += len(bodies)
        if not unmeasured:
            unmeasured = received
            say({"started": 1})
        if received >= count and not done.is_set():
            done.set()
            say({"messages": received - unmeasured})

    await client.consume(fields["way"], listener, lambda: None, done)


async def schedule(client: Client, fields: dict[str, str]) -> Line:
    warm_up, count = int(fields["warm_up"]), int(fields["count"])
    padding = bytes(int(fields["body_bytes"]) - DUE.size)
    interval_ns = int(1e9 / float(fields["rate"]))
    with Alarm() as alarm:
        async with asyncio.TaskGroup() as sends:
            start_ns = time.monotonic_ns() + interval_ns
            for number in range(warm_up + count):
                due_ns = start_ns + number * interval_ns
                await alarm.until(due_ns)
                if number == warm_up:
                    say({"started": 1})
                body = DUE.pack(due_ns, number >= warm_up) + padding
                sends.create_task(client.send(body))
    return {"messages": count}


async def receive(client: Client, fields: dict[str, str]) -> Line:
    count = int(fields["count"])
    late_ms: list[float] = []
    done = asyncio.Event()

    def listener(bodies: Sequence[bytes]) -> None:
        now_ns = time.monotonic_ns()
        for body in bodies:
            due_ns, counts = DUE.unpack_from(body)
            if counts:
                late_ms.append((now_ns - due_ns) / 1e6)
        if len(late_ms) >= count:
            done.set()

    await client.consume(fields["way"], listener, lambda: say({"ready": 1}), done)
    return late(late_ms)


async def drop(client: Client, fields: dict[str, str]) -> Line:
    await client.drop()
    return {"dropped": 1}


def late(took_ms: Sequence[float]) -> Line:
    return {"messages": len(took_ms), **asdict(summarise_latency(took_ms))}


COMMANDS: dict[str, Callable[[Client, dict[str, str]], Awaitable[Line | None]]] = {
    command.__name__: command for command in (create, call, batch, consume, schedule, receive, drop)
}


async def run(make: Callable[[str, str], Client], address: str, line: str) -> None:
    word, *pairs = line.rstrip("\n").split("\t")
    fields = dict(pair.split("=", 1) for pair in pairs)
    async with make(address, fields["topic"]) as client:
        if measured := await COMMANDS[word](client, fields):
            say(measured)


def main(peer: str, address: str) -> None:
    make = import_module(f"bench.peers.{peer}").Client
    for line in sys.stdin:
        uvloop.run(run(make, address, line))


if __name__ == "__main__":
    main(*sys.argv[1:])

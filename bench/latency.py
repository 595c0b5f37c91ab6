"""End-to-end latency at a fixed rate: from when a message was due to when the listener has it.

Two roles, each a process: ``consume`` waits for ``count`` messages and says percentiles,
``produce`` sends one message every 1/rate seconds. The schedule is open-loop: a message that
goes out late because something stalled counts from when it was due; none goes out before. Both
sides read CLOCK_MONOTONIC, which all processes of a machine share; the body starts with the due
time in nanoseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict

import uvloop

from bench.alarm import Alarm
from bench.processes import Line, say
from bench.stats import summarise_latency
from cometmq.client import Message, Producer, PushConsumer, ReceivedMessage

DUE = struct.Struct(">qi")  # due time in ns; 1 = counts, 0 = warm-up
WARM_UP_MESSAGES = 500
WAIT_S_MAX = 120.0


class Stopwatch:
    """The listener: notes how late each counting message is."""

    def __init__(self, expected: int) -> None:
        self._expected = expected
        self.latencies_ms: list[float] = []
        self.complete = asyncio.Event()

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        now_ns = time.monotonic_ns()
        for message in messages:
            due_ns, counts = DUE.unpack_from(message.body)
            if counts:
                self.latencies_ms.append((now_ns - due_ns) / 1e6)
        if len(self.latencies_ms) >= self._expected:
            self.complete.set()


async def consume(arguments: argparse.Namespace) -> Line:
    """Says ``ready`` first."""
    stopwatch = Stopwatch(arguments.count)
    async with PushConsumer(arguments.namesrv, arguments.group, stopwatch) as consumer:
        await consumer.subscribe(arguments.topic)
        say({"ready": 1})
        async with asyncio.timeout(WAIT_S_MAX):
            await stopwatch.complete.wait()
    return asdict(summarise_latency(stopwatch.latencies_ms))


async def produce(arguments: argparse.Namespace) -> Line:
    """Returns when all messages are acknowledged."""
    padding = bytes(arguments.body_bytes - DUE.size)
    interval_ns = int(1e9 / arguments.rate)
    with Alarm() as alarm:
        async with Producer(arguments.namesrv) as producer:
            start_ns = time.monotonic_ns() + interval_ns
            receipts = []
            for number in range(WARM_UP_MESSAGES + arguments.count):
                due_ns = start_ns + number * interval_ns
                await alarm.until(due_ns)
                body = DUE.pack(due_ns, number >= WARM_UP_MESSAGES) + padding
                receipts.append(await producer.send(Message(arguments.topic, body)))
            await producer.flush()
    return {"acked": len([receipt.result() for receipt in receipts])}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.latency", description=__doc__)
    parser.add_argument("role", choices=["produce", "consume"])
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--group", default="bench-latency", help="consume: the consumer group")
    parser.add_argument("--count", type=int, default=2000, help="messages that count")
    parser.add_argument("--rate", type=float, default=500.0, help="produce: messages a second")
    parser.add_argument("--body_bytes", type=int, default=1024, help="produce: 12 or more")
    arguments = parser.parse_args(argv)
    role = produce if arguments.role == "produce" else consume
    say(uvloop.run(role(arguments)))


if __name__ == "__main__":
    main()

"""A producer that goes on whatever happens to its brokers, and reports what is acknowledged when.

``--rate`` messages a second, each at its time, or (0) as many as are taken, one message after the
other, for ``--seconds``. Says ``started``; then, every 20 ms in which something was acknowledged,
the acknowledgements so far and the times of the first and the last of them since the line before
(seconds since 1970, as in log lines); in the end how many were not, and with a rate how late
receipts came after their messages were due.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

import uvloop

from bench.alarm import Alarm
from bench.processes import Line, say
from bench.stats import summarise_latency
from cometmq.client import Message, Producer, SendReceipt, SendStatus
from cometmq.errors import CometError

REPORT_S = 0.02
BURST = 64  # messages between two turns of the loop
REFUSED_S = 0.02  # pause after a message that was not taken at all
WARM_UP_S = 0.5  # whose latencies do not count

Receipt = asyncio.Future[SendReceipt]


class Outcomes:
    """What became of the messages so far."""

    def __init__(self) -> None:
        self.acked = 0
        self.unsure = 0  # stored, but not everything that the topic demands was fulfilled in time
        self.failed = 0
        self.latencies_ms: list[float] = []
        self._told = 0
        self._first_s = self._last_s = 0.0  # of those that were not told

    def note(self, receipt: Receipt) -> bool:
        """A message's fate is known; whether it is acknowledged."""
        if receipt.cancelled() or receipt.exception() is not None:
            self.failed += 1
        elif receipt.result().status is not SendStatus.SEND_OK:
            self.unsure += 1
        else:
            self.acked += 1
            self._last_s = time.time()
            self._first_s = self._first_s or self._last_s
            return True
        return False

    def noting(self, due_ns: int) -> Callable[[Receipt], None]:
        """The same for a message that was due at this time of CLOCK_MONOTONIC."""

        def note(receipt: Receipt) -> None:
            if self.note(receipt):
                self.latencies_ms.append((time.monotonic_ns() - due_ns) / 1e6)

        return note

    def tell(self) -> None:
        """Says what is new."""
        if self.acked > self._told:
            say({"acked": self.acked, "first_s": self._first_s, "last_s": self._last_s})
            self._told, self._first_s = self.acked, 0.0

    def summary(self, warm_up: int) -> Line:
        line: Line = {"stored": self.acked, "unsure": self.unsure, "failed": self.failed}
        if len(self.latencies_ms) > warm_up:
            line |= asdict(summarise_latency(self.latencies_ms[warm_up:]))
        return line


async def send(producer: Producer, message: Message, note: Callable[[Receipt], object]) -> None:
    try:
        receipt = await producer.send(message)
    except CometError as error:  # nobody takes it for now
        receipt = asyncio.get_running_loop().create_future()
        receipt.set_exception(error)
        await asyncio.sleep(REFUSED_S)
    receipt.add_done_callback(note)


async def at_full_speed(
    producer: Producer, message: Message, outcomes: Outcomes, seconds: float
) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for _ in range(BURST):
            await send(producer, message, outcomes.note)
        await asyncio.sleep(0)


async def at_rate(
    producer: Producer, message: Message, outcomes: Outcomes, seconds: float, rate: float
) -> None:
    """Open loop: a message that goes out late counts from when it was due."""
    start_ns, interval_ns = time.monotonic_ns(), int(1e9 / rate)
    with Alarm() as alarm:
        for number in range(int(seconds * rate)):
            due_ns = start_ns + number * interval_ns
            await alarm.until(due_ns)
            await send(producer, message, outcomes.noting(due_ns))


async def tell(outcomes: Outcomes) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        outcomes.tell()


async def run(arguments: argparse.Namespace) -> Line:
    message = Message(arguments.topic, bytes(arguments.body_bytes))
    outcomes, seconds, rate = Outcomes(), arguments.seconds, arguments.rate
    telling = asyncio.create_task(tell(outcomes))
    async with Producer(arguments.namesrv) as producer:
        say({"started": 1})
        if rate:
            await at_rate(producer, message, outcomes, seconds, rate)
        else:
            await at_full_speed(producer, message, outcomes, seconds)
        await producer.flush()
    telling.cancel()
    with suppress(asyncio.CancelledError):
        await telling
    outcomes.tell()
    return outcomes.summary(int(rate * WARM_UP_S))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.steady", description=__doc__)
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--body_bytes", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=3600.0)
    say(uvloop.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()

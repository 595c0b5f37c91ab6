"""One producer process: sends its share of the plan, one message a line, and says how far it is.

Each line of output is a JSON object: ``acked`` messages, and in the last one also ``started_ms``
and ``ended_ms``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import uvloop

from cometmq.client import Message, Producer, ProducerOptions, SendReceipt
from examples.roundtrip.sources import SourceFile, decode_name, load_plan, split, tag_of

UNCONFIRMED_MAX = 50_000
# Two brokers with 8 batches of 256 KiB in flight each; more would only wait here and grow old.
BUFFER_BYTES_MAX = 4 * 1024 * 1024
REPORT_S = 0.2


class Pace:
    """At most ``rate`` messages a second; 0 = as fast as it goes."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._started_s = time.monotonic()
        self._count = 0

    async def next(self) -> None:
        """Waits for the next message's turn."""
        if not self._rate:
            return
        self._count += 1
        due_s = self._started_s + self._count / self._rate
        early_s = due_s - time.monotonic()
        if early_s > 0:
            await asyncio.sleep(early_s)


class Receipts:
    """Futures of sent messages, oldest first. A message that could not be delivered raises its
    error here.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[SendReceipt]] = deque()
        self.acked = 0

    async def add(self, receipt: asyncio.Future[SendReceipt]) -> None:
        """Remembers a message, and waits for the oldest one when there are too many."""
        self._waiting.append(receipt)
        if len(self._waiting) > UNCONFIRMED_MAX:
            await self._take()

    async def _take(self) -> None:
        await self._waiting.popleft()
        self.acked += 1

    async def take_finished(self) -> None:
        while self._waiting and self._waiting[0].done():
            await self._take()

    async def take_all(self) -> None:
        while self._waiting:
            await self._take()

    def give_up(self) -> None:
        """Looks at the rest, so that the loop does not report each of them: one error is enough."""
        for receipt in self._waiting:
            if receipt.done() and not receipt.cancelled():
                receipt.exception()


def messages_of(topic: str, root: Path, file: SourceFile) -> Iterator[Message]:
    """A file as messages: line numbers from 1; an empty file is one empty message with line number
    0.
    """
    lines = split((root / decode_name(file.name)).read_bytes())
    if len(lines) != file.line_count:
        raise RuntimeError(f"{file.name} has changed while the job ran")
    tag, keys = tag_of(file.name), (file.name,)
    for number, line in enumerate(lines or [b""], start=1 if lines else 0):
        properties = {"file": file.name, "line": str(number)}
        yield Message(topic, line, tag=tag, keys=keys, properties=properties)


def report(**values: int) -> None:
    print(json.dumps(values), flush=True)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def produce(arguments: argparse.Namespace) -> None:
    """Returns when every message is acknowledged."""
    started_ms = now_ms()
    receipts = Receipts()
    options = ProducerOptions(buffer_bytes_max=BUFFER_BYTES_MAX)
    try:
        async with Producer(arguments.namesrv, options=options) as producer:
            await send_share(producer, receipts, arguments)
            await producer.flush()
            await receipts.take_all()
    finally:
        receipts.give_up()
    report(acked=receipts.acked, started_ms=started_ms, ended_ms=now_ms())


async def send_share(producer: Producer, receipts: Receipts, arguments: argparse.Namespace) -> None:
    share = [file for file in load_plan(arguments.plan) if file.producer == arguments.number]
    pace = Pace(arguments.rate)
    next_report_s = time.monotonic()
    for file in share:
        for message in messages_of(arguments.topic, arguments.root, file):
            await pace.next()
            await receipts.add(await producer.send(message))
        if time.monotonic() >= next_report_s:
            await receipts.take_finished()
            report(acked=receipts.acked)
            next_report_s = time.monotonic() + REPORT_S


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.roundtrip.producing")
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument(
        "--root", type=Path, required=True, help="folder that the plan's names are relative to"
    )
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--number", type=int, required=True, help="which share of the plan")
    parser.add_argument("--rate", type=int, default=0, help="messages a second; 0 = no limit")
    uvloop.run(produce(parser.parse_args(argv)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""One consumer process of the group: spools every line it gets, until SIGTERM.

A message counts as consumed when its line is in the spool, so a process that dies in between
makes duplicates and loses nothing. Says ``{"ready": true}`` once it has subscribed, and
``{"received": n}`` at the end. SIGUSR1 holds the listener back, SIGUSR2 lets it go on: what has
been done is committed meanwhile, nothing more is done.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import BinaryIO

import uvloop

from cometmq.client import PushConsumer, PushConsumerOptions, ReceivedMessage
from examples.roundtrip.spool import Arrival, pack

LISTENER_MESSAGES_MAX = 256
COMMIT_INTERVAL_MS = 1_000
HOLD, GO_ON = signal.SIGUSR1, signal.SIGUSR2


class Spooler:
    """The listener."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.going = asyncio.Event()
        self.going.set()
        self.received = 0

    async def __call__(self, messages: list[ReceivedMessage]) -> None:
        """Returning without an exception = consumed."""
        await self.going.wait()
        now_ms = time.time_ns() // 1_000_000
        self._file.write(b"".join([pack(arrival(message, now_ms)) for message in messages]))
        self._file.flush()
        self.received += len(messages)


def arrival(message: ReceivedMessage, received_ms: int) -> Arrival:
    properties = message.properties
    return Arrival(
        properties["file"],
        int(properties["line"]),
        message.body,
        received_ms,
        message.born_time_ms,
        message.store_time_ms,
        message.queue.broker_group,
        message.queue.queue_id,
        message.queue_offset,
    )


async def consume(arguments: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    options = PushConsumerOptions(
        batch_count=LISTENER_MESSAGES_MAX, commit_interval_ms=COMMIT_INTERVAL_MS
    )
    with arguments.spool.open("wb") as file:
        spooler = Spooler(file)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stopped.set)
        loop.add_signal_handler(HOLD, spooler.going.clear)
        loop.add_signal_handler(GO_ON, spooler.going.set)
        async with PushConsumer(
            arguments.namesrv, arguments.group, spooler, options=options
        ) as consumer:
            await consumer.subscribe(arguments.topic)
            print(json.dumps({"ready": True}), flush=True)
            await stopped.wait()
    print(json.dumps({"received": spooler.received}), flush=True)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.roundtrip.consuming")
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--spool", type=Path, required=True, help="file to write")
    uvloop.run(consume(parser.parse_args(argv)))


if __name__ == "__main__":
    main(sys.argv[1:])

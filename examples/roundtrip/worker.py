"""A process of the round trip, with the SDK alone: a producer, a consumer, or one that dies.

A producer sends the lines of its files, one message a line, and prints a line of JSON now and then:
``acked`` messages, and in ``stored_ms`` for each broker group when it stored the newest of them.
After each count of ``--pause_after`` it sends no more until SIGUSR1; one may have come before.

A consumer writes every message it gets into its spool, until SIGTERM: a line of JSON for each
batch, which is an array of :class:`Arrival`. A message counts as consumed when it is in the spool.
SIGUSR1 holds the consumer back, SIGUSR2 lets it go on.

The one that dies waits for SIGUSR1, stores a message of a transaction, does its own work, which is
to make a file, and never ends the transaction: it waits to be killed. It prints a line of JSON when
it begins to wait, and when it has done its work: ``unique_id`` of the message, empty at first.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote_from_bytes

import uvloop

from cometmq.client import (
    Message,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
    SendReceipt,
    TransactionProducer,
    TransactionState,
)

SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
# Two brokers with 8 batches of 256 KiB in flight each; more would only wait here and grow old.
BUFFER_BYTES_MAX = 4 * 1024 * 1024
REPORT_S = 0.2
RATE_AT_END = 25_000  # messages a second, at most


class Arrival(NamedTuple):
    """One line as a consumer got it. Times are in milliseconds since 1970."""

    file: str
    line: int  # from 0
    body: str  # a character for each byte
    received_ms: int
    born_ms: int  # when the producer made the message
    stored_ms: int
    broker_group: str
    queue_id: int
    queue_offset: int


def text_files(root: Path) -> Iterator[tuple[str, list[bytes]]]:
    """(name, lines) of every readable text file below ``root``, in order of path.

    The name is the percent-encoded relative path, because it becomes a message key. Lines keep
    their line feeds. An empty file has one empty line, so that it travels too.
    """
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - SKIPPED_FOLDERS)
        for file in sorted(files):
            path = Path(folder, file)
            if not path.is_file() or not os.access(path, os.R_OK):
                continue
            data = path.read_bytes()
            try:
                data.decode()
            except UnicodeDecodeError:
                continue
            name = quote_from_bytes(os.fsencode(path.relative_to(root).as_posix()), safe="/")
            yield name, io.BytesIO(data).readlines() or [b""]


def messages_of(arguments: argparse.Namespace) -> Iterator[Message]:
    """The producer's share."""
    files = islice(text_files(arguments.root), arguments.number, None, arguments.of)
    for name, lines in files:
        tag = Path(name).suffix.removeprefix(".")  # for consumers that want one kind of file
        for line, body in enumerate(lines):
            place = {"file": name, "line": str(line)}
            yield Message(arguments.topic, body, tag=tag, keys=(name,), properties=place)


async def paced(arguments: argparse.Namespace) -> AsyncIterator[Message]:
    """The same at ``--rate``, with the pauses."""
    going, pauses = asyncio.Semaphore(0), arguments.pause_after
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, going.release)
    began_s, rate = time.monotonic(), arguments.rate or math.inf
    for number, message in enumerate(messages_of(arguments)):
        if (ahead_s := began_s + number / rate - time.monotonic()) > 0:
            await asyncio.sleep(ahead_s)
        if number in pauses:
            await going.acquire()
            if number == max(pauses):
                # The rest takes some seconds, in which the next writer gets its share.
                rate = min(rate, RATE_AT_END)
            began_s = time.monotonic() - number / rate
        yield message


async def produce(arguments: argparse.Namespace) -> None:
    """Returns when every message is acknowledged; one that could not be sent raises its error."""
    report: dict[str, Any] = {"acked": 0, "stored_ms": {}}
    errors: list[BaseException] = []

    def note(answer: asyncio.Future[SendReceipt]) -> None:
        if answer.cancelled():
            return
        if error := answer.exception():
            errors.append(error)
            return
        receipt = answer.result()
        report["acked"] += 1
        report["stored_ms"][receipt.queue.broker_group] = receipt.store_time_ms

    async def print_report() -> None:
        while True:
            print(json.dumps(report), flush=True)
            await asyncio.sleep(REPORT_S)

    printing = asyncio.create_task(print_report())
    sent = 0
    options = ProducerOptions(buffer_bytes_max=BUFFER_BYTES_MAX)
    async with Producer(arguments.namesrv, options=options) as producer:
        async for message in paced(arguments):
            if errors:
                raise errors[0]
            (await producer.send(message)).add_done_callback(note)
            sent += 1
        await producer.flush()
        await asyncio.sleep(0)  # for the callbacks of the last receipts
    printing.cancel()
    if report["acked"] != sent:
        raise errors[0] if errors else RuntimeError(f"{report['acked']} of {sent} acknowledged")


def read_spools(paths: Iterable[Path]) -> Iterator[Arrival]:
    """What the consumers have written."""
    for path in paths:
        with path.open() as file:
            for batch in file:
                yield from (Arrival(*fields) for fields in json.loads(batch))


async def consume(arguments: argparse.Namespace) -> None:
    going, stopped = asyncio.Event(), asyncio.Event()
    going.set()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGUSR1, going.clear)
    loop.add_signal_handler(signal.SIGUSR2, going.set)
    options = PushConsumerOptions(batch_count=256, commit_interval_ms=1_000)
    with arguments.spool.open("w") as file:

        async def spool(messages: list[ReceivedMessage]) -> None:
            await going.wait()
            now_ms = time.time_ns() // 1_000_000
            batch = [
                Arrival(
                    message.properties.get("file", ""),
                    int(message.properties.get("line", -1)),
                    message.body.decode("latin-1"),
                    now_ms,
                    message.born_time_ms,
                    message.store_time_ms,
                    message.queue.broker_group,
                    message.queue.queue_id,
                    message.queue_offset,
                )
                for message in messages
            ]
            file.write(json.dumps(batch) + "\n")
            file.flush()

        async with PushConsumer(
            arguments.namesrv, arguments.group, spool, options=options
        ) as consumer:
            await consumer.subscribe(arguments.topic)
            await stopped.wait()


async def pay(arguments: argparse.Namespace) -> None:
    """Never returns. Nobody is asked about its message before it is two seconds old."""

    def check(_: ReceivedMessage) -> TransactionState:
        return TransactionState.UNKNOWN

    def show(unique_id: str) -> None:
        print(json.dumps({"unique_id": unique_id}), flush=True)

    begun = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, begun.set)
    options = ProducerOptions(trace_enable=True)
    async with TransactionProducer(
        arguments.namesrv, arguments.group, check, options=options
    ) as producer:
        show("")
        await begun.wait()
        one = producer.transaction(check_immunity_s=2)
        receipt = await one.send(Message(arguments.topic, b"a payment", keys=("payment",)))
        arguments.done.touch()
        show(receipt.unique_id)
        await asyncio.Event().wait()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.roundtrip.worker")
    roles = parser.add_subparsers(required=True)
    producer, consumer = roles.add_parser("produce"), roles.add_parser("consume")
    payer = roles.add_parser("pay")
    for role, work in ((producer, produce), (consumer, consume), (payer, pay)):
        role.add_argument("--namesrv", required=True)
        role.add_argument("--topic", required=True)
        role.set_defaults(work=work)
    producer.add_argument("--root", type=Path, required=True, help="folder of text files")
    producer.add_argument("--number", type=int, required=True, help="which producer, from 0")
    producer.add_argument("--of", type=int, required=True, help="of how many producers")
    producer.add_argument("--rate", type=int, default=0, help="messages a second; 0 = no limit")
    producer.add_argument(
        "--pause_after", type=int, nargs="*", default=[], help="messages to send before SIGUSR1"
    )
    consumer.add_argument("--group", required=True)
    consumer.add_argument("--spool", type=Path, required=True, help="file to write")
    payer.add_argument("--group", required=True)
    payer.add_argument("--done", type=Path, required=True, help="file to make")
    arguments = parser.parse_args(argv)
    uvloop.run(arguments.work(arguments))


if __name__ == "__main__":
    main(sys.argv[1:])

"""``python -m bench filters``: a backlog of which a consumer wants one message in a hundred.

A cluster of one broker, one topic with 8 queues, 1 M messages. A pull consumer pulls all queues
side by side from their first message to their end: by tag, which the broker compares in the units
of the queues, and by two SQL92 expressions, for which it reads the records. Counted are the
messages that the broker has looked at. ``COMETMQ_NATIVE=0`` in the environment shows plain Python.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from bench import stage
from bench.processes import cpu_seconds
from bench.report import machine, markdown
from cometmq import native
from cometmq.client import Message, Position, Producer, PullConsumer, PullOutcome, QueueRef
from cometmq.model import FlushMode

PROJECT = Path(__file__).resolve().parent.parent
BODY_BYTES = 128
ONE_IN = 100
REGIONS = ("eu", "us", "cn", "in")
WANTED: dict[str, dict[str, Any]] = {
    "tag": {"tags": ["rare"]},
    "SQL, one comparison": {"sql": "price < 10"},
    "SQL, four": {"sql": "price BETWEEN 0 AND 9 AND region IN ('eu', 'us') OR price = 5"},
}


def messages(topic: str, count: int) -> Iterator[Message]:
    body = bytes(BODY_BYTES)
    for number in range(count):
        tag = "rare" if number % ONE_IN == 0 else "usual"
        price = number * 7919 % 1_000  # one in a hundred is below 10
        properties = {"price": str(price), "region": REGIONS[number // 1_000 % len(REGIONS)]}
        yield Message(topic, body, tag, properties=properties)


async def fill(namesrv: str, topic: str, count: int) -> None:
    async with Producer(namesrv) as producer:
        last = None
        for message in messages(topic, count):
            last = await producer.send(message)
        await producer.flush()
        assert last is not None
        await last


async def scan(consumer: PullConsumer, queue: QueueRef, wanted: dict[str, Any]) -> tuple[int, int]:
    """How many messages the queue has, and how many of them came."""
    position, found = Position(0, 0), 0
    while True:
        batch = await consumer.pull(queue, position, count_max=256, **wanted)
        if batch.outcome is PullOutcome.NOT_FOUND:
            return position.offset, found
        position, found = batch.next_position, found + len(batch.messages)


async def measure(namesrv: str, topic: str, wanted: dict[str, Any], broker_pid: int) -> list[float]:
    """Messages looked at a second, the broker's CPU µs for each, and the share that came."""
    async with PullConsumer(namesrv, "bench-filters") as consumer:
        queues = await consumer.queues(topic)
        started_s, cpu_s = time.perf_counter(), cpu_seconds(broker_pid)
        scanned = await asyncio.gather(*(scan(consumer, queue, wanted) for queue in queues))
        seconds, spent_s = time.perf_counter() - started_s, cpu_seconds(broker_pid) - cpu_s
    looked_at, found = (sum(column) for column in zip(*scanned, strict=True))
    return [looked_at / seconds, spent_s / looked_at * 1e6, found / looked_at]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench filters", description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="messages of the backlog")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    said = parser.parse_args(argv)
    topic = stage.topic_name(BODY_BYTES, FlushMode.ASYNC)
    results: dict[str, list[list[float]]] = {name: [] for name in WANTED}
    folder = said.folder.resolve() / "filters"
    folder.mkdir(parents=True, exist_ok=True)
    with stage.cluster(folder, [(BODY_BYTES, FlushMode.ASYNC)]) as bench:
        uvloop.run(fill(bench.namesrv, topic, said.count))
        for _ in range(said.runs):
            for name, wanted in WANTED.items():
                one = uvloop.run(measure(bench.namesrv, topic, wanted, bench.broker_pid))
                results[name].append(one)
    rows = [
        [name, *(median(column) for column in zip(*runs, strict=True))]
        for name, runs in results.items()
    ]
    print(json.dumps({"implementation": native.description(), "runs": results}))
    table = [
        [name, f"{rate:,.0f}", f"{cpu_us:.2f}", f"{share:.1%}"]
        for name, rate, cpu_us, share in rows
    ]
    print(markdown(["filter", "looked at/s", "broker CPU µs each", "came"], table))
    print(f"\n{native.description()}; machine: {machine()}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])

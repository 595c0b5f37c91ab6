"""``python -m bench tracing``: what trace records cost producers and consumers.

A cluster of one broker, a topic with 8 queues, bodies of 128 B. Runs without trace, with one of 100
messages traced and with each one traced take turns, so that a busy minute of the machine meets all
of them: sends by ``send_many`` and by ``send``, then a push consumer, 32 messages a listener call.
Compared are the CPU time of the client's process, with that of its trace records, and the rate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from bench import stage
from bench.processes import Line, Meter
from bench.produce import MANY
from bench.report import machine, markdown
from bench.stage import Bench
from cometmq import native
from cometmq.client import (
    Message,
    Producer,
    ProducerOptions,
    PushConsumer,
    PushConsumerOptions,
    ReceivedMessage,
)
from cometmq.format.trace import TRACE_ON
from cometmq.model import FlushMode

PROJECT = Path(__file__).resolve().parent.parent
BODY = bytes(128)
PERIODS = (0, 100, 1)  # one message of so many is traced; 0: nothing is
NAMES = {0: "not traced", 100: "one of 100", 1: "each"}
LIMITS = {100: "2 %", 1: "15 %"}
WAYS = ("send_many", "send", "consume")
BUFFER_MAX = 1_000_000
WARM_UP_S = 0.5
WARM_UP_PART = 4  # of what a consumer gets, one of so many


def _options(period: int) -> dict[str, Any]:
    if not period:
        return {}
    topic = stage.topic_name(1024, FlushMode.ASYNC)
    return {
        "trace_enable": True,
        "trace_sampling": period,
        "trace_topic": topic,
        "trace_buffer_max": BUFFER_MAX,
    }


async def send(bench: Bench, topic: str, count: int, period: int, way: str) -> Line:
    """All messages acknowledged, and their trace records."""
    producer = Producer(bench.namesrv, options=ProducerOptions(**_options(period)))
    async with producer:
        first = Message(topic, BODY, properties={TRACE_ON: "true"} if period else None)
        await producer.send_and_wait(first)
        await asyncio.sleep(WARM_UP_S)  # its trace record goes, by a producer of its own
        meter = Meter({"broker": bench.broker_pid})
        if way == "send":
            for _ in range(count):
                await producer.send(Message(topic, BODY))
        else:
            for _ in range(count // MANY):
                await producer.send_many([Message(topic, BODY) for _ in range(MANY)])
        await producer.flush()
    found = meter.stop(count)
    assert not producer.traces_lost, producer.traces_lost
    return found


async def consume(bench: Bench, topic: str, count: int, period: int, group: str) -> Line:
    """Messages through a listener that does nothing, from the topic's begin on; the first ones do
    not count.
    """
    seen = unmeasured = 0
    meter: Meter | None = None
    all_seen = asyncio.Event()

    async def listener(messages: list[ReceivedMessage]) -> None:
        nonlocal seen, unmeasured, meter
        seen += len(messages)
        if meter is None and seen >= count // WARM_UP_PART:
            meter, unmeasured = Meter({"broker": bench.broker_pid}), seen
        if seen >= count:
            all_seen.set()

    options = PushConsumerOptions(batch_count=32, **_options(period))
    async with PushConsumer(bench.namesrv, group, listener, options=options) as consumer:
        await consumer.subscribe(topic)
        await all_seen.wait()
    assert meter is not None
    assert not consumer.traces_lost, consumer.traces_lost
    return meter.stop(count - unmeasured)


def run(bench: Bench, topic: str, count: int, number: int) -> dict[str, float]:
    """Each way with each period; another one begins each time."""
    found: dict[str, float] = {}
    turn = PERIODS[number % 3 :] + PERIODS[: number % 3]
    for way in WAYS:
        for period in turn:
            if way == "consume":
                group = f"bench-trace-{number}-{period}"
                one = uvloop.run(consume(bench, topic, count, period, group))
            else:
                one = uvloop.run(send(bench, topic, count, period, way))
            found |= {f"{way}_{period}_{name}": float(value) for name, value in one.items()}
    return found


def _row(runs: Sequence[dict[str, float]], way: str, period: int) -> list[str]:
    def middle(name: str, *, relative: bool = False) -> float:
        values = [
            one[f"{way}_{period}_{name}"] / (one[f"{way}_0_{name}"] if relative else 1)
            for one in runs
        ]
        return median(values)

    return [
        f"{way}, {NAMES[period]}",
        f"{middle('cpu_us_client'):.2f}",
        f"{middle('cpu_us_client', relative=True) - 1:+.1%}",
        f"{middle('cpu_us_broker'):.2f}",
        f"{middle('rate'):,.0f}",
        f"{middle('rate', relative=True) - 1:+.1%}",
        LIMITS.get(period, ""),
    ]


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench tracing", description=__doc__)
    parser.add_argument("--count", type=int, default=400_000, help="messages of each run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    said = parser.parse_args(argv)
    size, flush = len(BODY), FlushMode.ASYNC
    topic = stage.topic_name(size, flush)
    folder = said.folder.resolve() / "tracing"
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, float]] = []
    with stage.cluster(folder, [(size, flush), (1024, flush)]) as bench:
        for number in range(said.runs):
            runs.append(run(bench, topic, said.count, number))
            print(json.dumps(runs[-1]), flush=True)
    table = [_row(runs, way, period) for way in WAYS for period in PERIODS]
    heads = ["what", "client, CPU µs", "more", "broker, CPU µs", "messages/s", "more", "limit"]
    print(markdown(heads, table))
    print(f"\n{native.description()}; machine: {machine()}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])

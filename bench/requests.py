"""``python -m bench requests``: requests and their replies.

A cluster of one broker and one pull-hold, a topic with 8 queues, bodies of 128 B. A process of its
own replies at once to what its listener gets. First one request waits for another: how long does
each take? Then 256 are always on their way: how many a second, how long does each take, and what
does one cost each process?
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import uvloop

from bench import stage
from bench.processes import Child, Line, Meter, say
from bench.report import machine, markdown
from bench.stage import Bench
from bench.stats import percentile
from cometmq import native
from cometmq.client import Message, Producer, PushConsumer, PushConsumerOptions, ReceivedMessage
from cometmq.model import FlushMode

PROJECT = Path(__file__).resolve().parent.parent
BODY = bytes(128)
REPLIER = "replier"
IN_FLIGHT = 256
WARM_UP_S = 0.5
TIMEOUT_S = 20.0
PROCESSES = ("client", REPLIER, "broker", "pullhold")


async def reply(namesrv: str, topic: str) -> None:
    """Replies until the process ends."""

    async def listener(messages: list[ReceivedMessage]) -> None:
        await asyncio.gather(*(consumer.reply(message, message.body) for message in messages))

    options = PushConsumerOptions(batch_count=32)
    consumer = PushConsumer(namesrv, "bench-requests", listener, options=options)
    async with consumer:
        await consumer.subscribe(topic)
        say({"ready": 1})
        await asyncio.Event().wait()


async def ask_for(producer: Producer, topic: str, seconds: float, tasks: int) -> list[float]:
    """Seconds that each request took, by so many tasks that each wait for their replies."""
    took: list[float] = []
    end = time.perf_counter() + seconds

    async def ask() -> None:
        while (started := time.perf_counter()) < end:
            await producer.request(Message(topic, BODY), TIMEOUT_S)
            took.append(time.perf_counter() - started)

    await asyncio.gather(*(ask() for _ in range(tasks)))
    return took


async def measure(namesrv: str, topic: str, seconds: float, watch: dict[str, int]) -> Line:
    """Milliseconds of lone requests and of many; requests a second; CPU time of one in µs."""
    async with Producer(namesrv) as producer:
        await ask_for(producer, topic, WARM_UP_S, 1)
        lone = await ask_for(producer, topic, seconds, 1)
        await ask_for(producer, topic, WARM_UP_S, IN_FLIGHT)
        meter = Meter(watch)
        many = await ask_for(producer, topic, seconds, IN_FLIGHT)
        line = meter.stop(len(many))
    for name, took in (("lone", lone), ("many", many)):
        line[f"{name}_p50_ms"] = 1_000 * percentile(took, 0.5)
        line[f"{name}_p99_ms"] = 1_000 * percentile(took, 0.99)
    return line


def run(bench: Bench, topic: str, seconds: float) -> Line:
    """One run against a cluster."""
    with Child("bench.requests", REPLIER, namesrv=bench.namesrv, topic=topic) as replier:
        replier.read()
        watch = {
            REPLIER: replier.pid,
            "broker": bench.broker_pid,
            "pullhold": bench.cluster.pullholds[0].pid,
        }
        return uvloop.run(measure(bench.namesrv, topic, seconds, watch))


def _reply_main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.requests replier")
    parser.add_argument("--namesrv", required=True)
    parser.add_argument("--topic", required=True)
    said = parser.parse_args(argv)
    uvloop.run(reply(said.namesrv, said.topic))


def main(argv: Sequence[str]) -> None:
    if argv and argv[0] == REPLIER:
        _reply_main(argv[1:])
        return
    parser = argparse.ArgumentParser(prog="python -m bench requests", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each of the two parts")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    said = parser.parse_args(argv)
    size, flush = len(BODY), FlushMode.ASYNC
    folder = said.folder.resolve() / "requests"
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[Line] = []
    for _ in range(said.runs):
        with stage.cluster(folder, [(size, flush)], pullholds=1) as bench:
            runs.append(run(bench, stage.topic_name(size, flush), said.seconds))
        print(json.dumps(runs[-1]), flush=True)
    rows = [
        ("a lone request, p50 ms", "lone_p50_ms", 2, "3"),
        ("its p99, ms", "lone_p99_ms", 2, ""),
        (f"requests/s, {IN_FLIGHT} in flight", "rate", 0, "5,000"),
        ("a request then, p50 ms", "many_p50_ms", 1, ""),
        ("its p99, ms", "many_p99_ms", 1, ""),
        *((f"CPU of a request, {name}, µs", f"cpu_us_{name}", 0, "") for name in PROCESSES),
    ]
    table = [
        [what, f"{median(float(run[key]) for run in runs):,.{digits}f}", limit]
        for what, key, digits, limit in rows
    ]
    print(markdown(["what", "median", "limit"], table))
    print(f"\n{native.description()}; machine: {machine()}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])

"""``python -m bench transactions``: what transactions cost beside plain messages.

A cluster of one broker, one topic with 8 queues, bodies of 128 B. Plain messages and transactions
take turns: messages sent one by one beside transactions of one message, with 1,024 and with 64
tasks; ``send_many`` beside transactions of 1,000 messages, 4 at a time. Ends one by one: 64 tasks
end halves that were stored before. Of each the CPU time of both processes a message.

Then, in this process: how much memory 100,000 open halves take, and how long one pass of checks
over them occupies the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from bench import stage
from bench.processes import Meter
from bench.report import machine, markdown
from cometmq import native
from cometmq.client import (
    Message,
    Producer,
    ReceivedMessage,
    Transaction,
    TransactionProducer,
    TransactionState,
)
from cometmq.messaging.transaction_checks import CheckBoard
from cometmq.messaging.transactions import CheckRules, HalfTable
from cometmq.model import FlushMode

PROJECT = Path(__file__).resolve().parent.parent
BODY = bytes(128)
BLOCK, BLOCKS_AT_ONCE = 1_000, 4
OPEN_COUNT = 100_000
IMMUNITY_S = 3_600  # nothing is checked within a run


def _unknown(_: ReceivedMessage) -> TransactionState:
    return TransactionState.UNKNOWN


async def plain_many(namesrv: str, topic: str, count: int) -> float:
    """Messages a second by ``send_many``, all acknowledged."""
    async with Producer(namesrv) as producer:
        await producer.send_and_wait(Message(topic, BODY))
        messages = [Message(topic, BODY) for _ in range(BLOCK)]
        started_s = time.perf_counter()
        for _ in range(0, count, BLOCK):
            await producer.send_many(messages)
        await producer.flush()
        return count / (time.perf_counter() - started_s)


async def blocks(namesrv: str, topic: str, count: int) -> float:
    """Messages a second in transactions of many, from the first half to the last commit."""
    async with TransactionProducer(namesrv, "bench", _unknown) as producer:
        messages = [Message(topic, BODY) for _ in range(BLOCK)]
        left = count

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= BLOCK
                async with producer.transaction(check_immunity_s=IMMUNITY_S) as one:
                    await one.send_many(messages)

        await producer.send_and_wait(Message(topic, BODY))
        started_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(BLOCKS_AT_ONCE)))
        return count / (time.perf_counter() - started_s)


async def plain(namesrv: str, topic: str, count: int) -> float:
    """Messages a second, all acknowledged."""
    async with Producer(namesrv) as producer:
        await producer.send_and_wait(Message(topic, BODY))
        started_s = time.perf_counter()
        for _ in range(count):
            await producer.send(Message(topic, BODY))
        await producer.flush()
        return count / (time.perf_counter() - started_s)


async def whole(namesrv: str, topic: str, count: int, tasks: int) -> float:
    """Transactions a second, from the half to the answer to its commit."""
    async with TransactionProducer(namesrv, "bench", _unknown) as producer:
        left = count

        async def work() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                async with producer.transaction(check_immunity_s=IMMUNITY_S) as one:
                    await one.send(Message(topic, BODY))

        await producer.send_and_wait(Message(topic, BODY))
        started_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(tasks)))
        return count / (time.perf_counter() - started_s)


async def ends(namesrv: str, topic: str, count: int, tasks: int) -> float:
    """Commits a second of halves that were stored before, each awaited by its task."""
    async with TransactionProducer(namesrv, "bench", _unknown) as producer:
        ready: list[Transaction] = []

        async def prepare() -> None:
            while len(ready) < count:
                one = producer.transaction(check_immunity_s=IMMUNITY_S)
                ready.append(one)
                await one.send(Message(topic, BODY))

        await asyncio.gather(*(prepare() for _ in range(512)))

        async def work() -> None:
            while ready:
                await ready.pop().commit()

        number = len(ready)
        started_s = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(tasks)))
        return number / (time.perf_counter() - started_s)


def table_costs() -> dict[str, float]:
    """MiB of 100,000 open halves, and ms of the longest turn and of a whole pass over them."""
    gc.collect()
    gc.freeze()  # as services do at their start: a collection is no part of the pass
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    table = HalfTable()
    board = CheckBoard(table, CheckRules())
    for offset in range(OPEN_COUNT):
        table.add(offset, (offset * 400 + 1_000_000, 400 + offset % 7, "bench"), 6.0)
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    board.join("bench", 1)
    looks: list[float] = []
    asked = 0
    while asked < OPEN_COUNT:
        started_s = time.perf_counter()
        board.look(10.0)
        for ask in board.asks(10.0):
            asked += len(ask.offsets)
        looks.append(time.perf_counter() - started_s)
        for offset in range(OPEN_COUNT):  # the producer answers, which is not the pass
            if board.is_asked(offset, 1):
                board.unknown(offset)
    started_s = time.perf_counter()
    assert table.has_unwritten
    return {
        "open_mib": (size - before) / 2**20,
        "pass_ms": 1000 * sum(looks),
        "turn_ms": 1000 * max(looks),
        "progress_ms": 1000 * (time.perf_counter() - started_s),
    }


WORK: dict[str, Callable[[str, str, int], Coroutine[Any, Any, float]]] = {
    "plain_many": plain_many,
    "blocks": blocks,
    "plain": plain,
    "whole": partial(whole, tasks=1_024),
    "whole64": partial(whole, tasks=64),
    "ends": partial(ends, tasks=64),
}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench transactions", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="transactions a run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=PROJECT / "data" / "bench")
    said = parser.parse_args(argv)
    size, flush = len(BODY), FlushMode.ASYNC
    topic = stage.topic_name(size, flush)
    folder = said.folder.resolve() / "transactions"
    folder.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, float]] = []
    for _ in range(said.runs):
        with stage.cluster(folder, [(size, flush)]) as bench:
            one: dict[str, float] = {}
            for name, work in WORK.items():
                meter = Meter({"broker": bench.broker_pid})
                one[name] = uvloop.run(work(bench.namesrv, topic, said.count))
                line = meter.stop(said.count)
                for whose in ("client", "broker"):
                    one[f"{name}_{whose}_us"] = float(line[f"cpu_us_{whose}"])
        runs.append(one | table_costs())
        print(json.dumps({key: round(value, 2) for key, value in runs[-1].items()}), flush=True)

    def middle(key: str, digits: int) -> str:
        return f"{median(run[key] for run in runs):,.{digits}f}"

    rates = [
        [name, middle(key, 0), middle(f"{key}_client_us", 1), middle(f"{key}_broker_us", 1), limit]
        for name, key, limit in (
            ("send_many", "plain_many", ""),
            (f"transactions of {BLOCK:,} messages", "blocks", "30 % of send_many"),
            ("sends one by one", "plain", ""),
            ("transactions of one message, 1,024 tasks", "whole", "30 % of sends"),
            ("... 64 tasks", "whole64", ""),
            ("ends one by one, 64 tasks (CPU: with the half)", "ends", "20,000"),
        )
    ]
    print(markdown(["what", "messages/s", "client CPU, µs", "broker CPU, µs", "limit"], rates))
    costs = [
        [name, middle(key, digits), limit]
        for name, key, digits, limit in (
            (f"{OPEN_COUNT:,} open halves, MiB", "open_mib", 1, "32"),
            ("a pass of checks over them, ms of the loop", "pass_ms", 0, "100"),
            ("its longest turn, ms", "turn_ms", 1, "5"),
            ("progress of them for the state, ms", "progress_ms", 1, ""),
        )
    ]
    print(markdown(["what", "median", "limit"], costs))
    print(f"\n{native.description()}; machine: {machine()}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])

"""``python -m bench transactions``: what transactions cost beside plain messages.

A cluster of one broker, one topic with 8 queues, bodies of 128 B. Plain sends and transactions of
one message take turns, with 1,024 and with 64 tasks. Ends one by one: 64 tasks end halves that were
stored before. Then, in this process: how much memory 100,000 open halves take, and how long one
pass of checks over them occupies the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import uvloop

from bench import stage
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
OPEN_COUNT = 100_000
IMMUNITY_S = 3_600  # nothing is checked within a run


def _unknown(_: ReceivedMessage) -> TransactionState:
    return TransactionState.UNKNOWN


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
            one = {
                "plain": uvloop.run(plain(bench.namesrv, topic, said.count)),
                "whole": uvloop.run(whole(bench.namesrv, topic, said.count, 1_024)),
                "whole64": uvloop.run(whole(bench.namesrv, topic, said.count, 64)),
                "ends": uvloop.run(ends(bench.namesrv, topic, said.count, 64)),
            }
        runs.append(one | table_costs())
        print(json.dumps(runs[-1]), flush=True)
    table = [
        [name, f"{median(run[key] for run in runs):,.{digits}f}", limit]
        for name, key, digits, limit in (
            ("plain sends/s", "plain", 0, ""),
            ("transactions/s, 1,024 tasks", "whole", 0, "30 % of plain"),
            ("transactions/s, 64 tasks", "whole64", 0, ""),
            ("ends one by one/s, 64 tasks", "ends", 0, "20,000"),
            (f"{OPEN_COUNT:,} open halves, MiB", "open_mib", 1, "32"),
            ("a pass of checks over them, ms of the loop", "pass_ms", 0, "100"),
            ("its longest turn, ms", "turn_ms", 1, "5"),
            ("progress of them for the state, ms", "progress_ms", 1, ""),
        )
    ]
    print(markdown(["what", "median", "limit"], table))
    print(f"\n{native.description()}; machine: {machine()}")


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])

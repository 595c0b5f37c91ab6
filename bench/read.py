"""``python -m bench.read``: a cold backlog, read by the engine beside ``cat`` of the same files.
And what such a reader does to producers.

Cold means that the files' pages were dropped from the cache before (``posix_fadvise``). The second
part runs a broker: a producer at a fifth of its full rate, once alone and once while a consumer
works through a cold backlog.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import uvloop

from bench import stage
from bench.filling import MIB, Content, fill, options, sync
from bench.processes import Child, Line
from bench.produce import send_for
from bench.stats import percentile
from cometmq.client import Message, Producer, SendReceipt
from cometmq.clock import SystemClock
from cometmq.messaging.pull import choose
from cometmq.model import FlushMode
from cometmq.store.writer import MessageStore

PULL_COUNT = 256
PULL_BYTES = 1024 * 1024
TICK_S = 0.01
NEVER_READ_COUNT = 10**9  # the reader is ended when the producer is done


def drop_cache(folder: Path) -> None:
    """Let the kernel forget the files' pages; what is dirty is written first."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


# --- the engine beside cat ---


def read_all(store: MessageStore) -> int:
    """Every message of every queue, all queues in step, as their consumers would; bytes of it."""
    done = 0
    positions = {queue: 0 for queue in store.queues()}
    while positions:
        for queue, offset in list(positions.items()):
            units = store.read_units(*queue, offset, PULL_COUNT)
            if not units:
                del positions[queue]
                continue
            chosen = choose(units, offset, PULL_COUNT, PULL_BYTES)
            done += len(store.read_records(chosen.spans))
            positions[queue] = chosen.next_offset
    return done


def engine(folder: Path, said: argparse.Namespace) -> Iterator[Line]:
    """Each run: ``cat``, then the engine, both cold; MB/s and the ratio."""
    store = MessageStore.open(folder, options(said.file_mib), clock=SystemClock())
    fill(store, Content(said.mib * MIB, said.queues))
    sync(store)
    files = [str(path) for path in sorted((folder / "commitlog").iterdir())]
    for _ in range(said.runs):
        drop_cache(folder)
        started_s = time.perf_counter()
        subprocess.run(["cat", *files], stdout=subprocess.DEVNULL, check=True)
        cat_s = time.perf_counter() - started_s
        drop_cache(folder)
        started_s = time.perf_counter()
        size = read_all(store)
        read_s = time.perf_counter() - started_s
        # The last file is not full: both sides count the bytes that they read.
        cat_bytes = sum(os.path.getsize(name) for name in files)
        rates = size / read_s / 1e6, cat_bytes / cat_s / 1e6
        yield {"read_mb_s": rates[0], "cat_mb_s": rates[1], "ratio": rates[0] / rates[1]}
    store.abandon()


# --- producers beside a cold reader ---


async def full_rate(namesrv: str, topic: str, seconds: float) -> float:
    """Messages a second of a producer that does nothing else."""
    async with Producer(namesrv) as producer:
        started_s = time.perf_counter()
        count = await send_for(producer, topic, bytes(1024), seconds)
        return count / (time.perf_counter() - started_s)


async def steady(namesrv: str, topic: str, rate: float, seconds: float) -> list[float]:
    """Milliseconds from when each message was due to its receipt, at a fixed rate."""
    late_ms: list[float] = []
    pending: deque[asyncio.Task[None]] = deque()
    per_tick = max(1, round(rate * TICK_S))
    async with Producer(namesrv) as producer:
        start_s = time.perf_counter()
        for tick in range(int(seconds / TICK_S)):
            due_s = start_s + tick * TICK_S
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            futures = [await producer.send(Message(topic, bytes(1024))) for _ in range(per_tick)]
            pending.append(asyncio.create_task(_note(futures, due_s, late_ms)))
            while pending and pending[0].done():
                pending.popleft().result()
        await asyncio.gather(*pending)
    return late_ms


async def _note(
    futures: list[asyncio.Future[SendReceipt]], due_s: float, late_ms: list[float]
) -> None:
    await asyncio.gather(*futures)
    late_ms.append((time.perf_counter() - due_s) * 1e3)


def beside(folder: Path, said: argparse.Namespace) -> Iterator[Line]:
    """Each run: a producer's p99 alone, and while a cold backlog is read."""
    topics = [(1024, FlushMode.ASYNC), (128, FlushMode.ASYNC)]
    backlog, live = (stage.topic_name(size, mode) for size, mode in topics)
    with stage.cluster(folder / "cluster", topics) as bench:
        full = uvloop.run(full_rate(bench.namesrv, backlog, said.backlog_s))
        for run in range(said.runs):
            drop_cache(folder / "cluster")
            alone = uvloop.run(steady(bench.namesrv, live, full / 5, said.seconds))
            drop_cache(folder / "cluster")
            reader = Child(
                "bench.consume",
                namesrv=bench.namesrv,
                topic=backlog,
                group=f"cold-{run}",
                count=NEVER_READ_COUNT,
            )
            with reader:
                reader.read()  # it has begun
                read = uvloop.run(steady(bench.namesrv, live, full / 5, said.seconds))
            p99 = percentile(alone, 0.99), percentile(read, 0.99)
            yield {"alone_p99_ms": p99[0], "beside_p99_ms": p99[1], "ratio": p99[1] / p99[0]}


def report(title: str, lines: list[Line]) -> None:
    keys = lines[0].keys()
    middle: Line = {key: median([float(line[key]) for line in lines]) for key in keys}
    figures = ", ".join(f"{key} {value:,.3g}" for key, value in middle.items())
    print(f"{title}, median of {len(lines)}: {figures}")
    print(json.dumps({"name": title, "runs": lines}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.read", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("data/bench"))
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--queues", type=int, default=4)
    parser.add_argument("--file_mib", type=int, default=1024)
    parser.add_argument("--backlog_s", type=float, default=20.0, help="how long it is produced")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=3)
    said = parser.parse_args()
    said.folder.mkdir(parents=True, exist_ok=True)
    for title, part in (("cold read by the engine", engine), ("producers beside it", beside)):
        with tempfile.TemporaryDirectory(dir=said.folder, prefix="read-") as place:
            report(title, list(part(Path(place), said)))


if __name__ == "__main__":
    main()

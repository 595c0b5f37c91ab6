"""``python -m bench.flush``: group commit, beside a bare loop that writes and syncs.

So many callers each wait for the acknowledgement of a batch of one message, send the next, and so
on. All who come during one sync share the next, so what counts is syncs a second with the same
bytes in each: the engine's, divided by those of ``pwrite`` + ``fdatasync`` in turn on a file that
was written ahead. ``--delay_ms`` lets each sync on both sides take so much longer, for a disk
slower than this machine's: in a process of its own, into which ``slow_disk.c`` is preloaded (``cc``
builds it).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import uvloop

from bench.filling import HOST, MIB, options
from bench.limits import fill_with_zeros
from cometmq.clock import SystemClock
from cometmq.format import record
from cometmq.member.storage.authority import SoleWriter
from cometmq.member.storage.flusher import FlushPolicy
from cometmq.member.storage.member_storage import MemberStorage, Segment
from cometmq.replication.watermarks import DurabilityClass
from cometmq.store.writer import MessageStore

FILE_MIB = 256
TOPIC = "bench-flush"


@dataclass(frozen=True, slots=True)
class Rate:
    """``ratio``: the engine's syncs a second by those of the bare loop."""

    callers: int
    delay_ms: float
    messages_per_s: float
    syncs_per_s: float
    bytes_per_sync: float
    bare_syncs_per_s: float
    ratio: float


async def group_commit(folder: Path, callers: int, seconds: float) -> Rate:
    """Callers against an engine for so long; the bare loop right after it."""
    syncs = 0

    def synced(_seconds: float) -> None:
        nonlocal syncs
        syncs += 1

    clock = SystemClock()
    store = MessageStore.open(folder / "store", options(FILE_MIB), clock=clock)
    storage = MemberStorage(store, FlushPolicy(), clock, SoleWriter(), synced)
    running = asyncio.create_task(storage.run(flush_queues_s=1.0))
    await caller(storage, 0.2)
    start, start_syncs, started_s = store.appended_offset, syncs, time.perf_counter()
    counts = await asyncio.gather(*(caller(storage, seconds) for _ in range(callers)))
    spent_s = time.perf_counter() - started_s
    done, written = syncs - start_syncs, store.appended_offset - start
    running.cancel()
    await asyncio.wait([running])
    storage.close()
    per_sync = written / done
    bare = bare_rate(folder / "bare", int(per_sync), seconds)
    rate = done / spent_s
    return Rate(callers, slowed_ms(), sum(counts) / spent_s, rate, per_sync, bare, rate / bare)


async def caller(storage: MemberStorage, seconds: float) -> int:
    """One batch after the other, each when the one before is on the disk; how many."""
    segment = Segment(TOPIC, 0, 1, DurabilityClass.FLUSHED)
    one = record.encode(
        TOPIC.encode(), 0, bytes(1024), b"", born_time_ms=1, born_host=HOST, store_host=HOST
    )
    end_s = time.perf_counter() + seconds
    count = 0
    while time.perf_counter() < end_s:
        ticket = storage.append(one, [segment], born_host=HOST, store_host=HOST)
        assert ticket.acked is not None
        await ticket.acked
        count += 1
    return count


def bare_rate(path: Path, size: int, seconds: float) -> float:
    """Syncs a second of the bare loop."""
    chunk = bytes(size)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fill_with_zeros(descriptor)
        count, started_s = 0, time.perf_counter()
        while time.perf_counter() - started_s < seconds:
            os.pwrite(descriptor, chunk, count * size % (FILE_MIB * MIB - size))
            os.fdatasync(descriptor)
            count += 1
        return count / (time.perf_counter() - started_s)
    finally:
        os.close(descriptor)
        path.unlink()


def measure(folder: Path, callers: int, runs: int, seconds: float) -> Rate:
    """The run whose ratio is the median of all."""
    rates = []
    for run in range(runs):
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"flush-{run}-") as place:
            rates.append(uvloop.run(group_commit(Path(place), callers, seconds)))
    middle = median([rate.ratio for rate in rates])
    return min(rates, key=lambda rate: abs(rate.ratio - middle))


def slowed_ms() -> float:
    """How much longer each sync of this process takes."""
    return float(os.environ.get("SLOW_DISK_MS", 0))


def run_slowed(delay_ms: float, arguments: Sequence[str]) -> None:
    """This program again, with ``arguments``, over a slower disk."""
    with tempfile.TemporaryDirectory() as place:
        library = f"{place}/slow_disk.so"
        source = Path(__file__).with_name("slow_disk.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        environment = {**os.environ, "LD_PRELOAD": library, "SLOW_DISK_MS": str(delay_ms)}
        command = [sys.executable, "-m", "bench.flush", *arguments, "--delay_ms", str(delay_ms)]
        subprocess.run(command, check=True, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.flush", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("data/bench"))
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--delay_ms", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    said = parser.parse_args()
    said.folder.mkdir(parents=True, exist_ok=True)
    for delay_ms in said.delay_ms:
        if delay_ms == slowed_ms():
            show(measure(said.folder, said.callers, said.runs, said.seconds))
        else:
            run_slowed(delay_ms, sys.argv[1:])


def show(rate: Rate) -> None:
    print(
        f"{rate.callers} callers, syncs {rate.delay_ms:g} ms slower: "
        f"{rate.messages_per_s:,.0f} messages/s in {rate.syncs_per_s:,.0f} syncs/s "
        f"of {rate.bytes_per_sync:,.0f} bytes; bare {rate.bare_syncs_per_s:,.0f} syncs/s; "
        f"ratio {rate.ratio:.2f}"
    )
    print(json.dumps(asdict(rate)), flush=True)


if __name__ == "__main__":
    main()

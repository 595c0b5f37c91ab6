"""``python -m bench messaging --only store``: stores full of messages that wait, without gRPC.

A store is filled and ends as a crash would. Opening it and recovering it from its log alone are
compared with a store of as many plain messages. Then the index of the messages with a time of their
own is built from their queue. Each step is a process of its own (``--role``), so that its memory is
its own too. The page cache is warm.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.filling import HOST, options, sync
from bench.holds import rss_mib
from bench.processes import Line, say
from bench.recover import run
from cometmq.clock import SystemClock
from cometmq.format import delayed, properties, queueunit, record, timers
from cometmq.format.timers import TIMER_QUEUE, TimerForm
from cometmq.store.timers.catalog import Coverage
from cometmq.store.timers.entries import in_order, of_units
from cometmq.store.timers.index import TimerIndex
from cometmq.store.writer import MessageStore, RecordRun

PLAIN, LEVEL, TIMER = "plain", "level", "timer"
KINDS = (PLAIN, LEVEL, TIMER)
TOPIC, BODY = "bench-waiting", bytes(128)
DELAY_LEVEL = 18
BATCH_COUNT = 1_000
DELAY_MS_MIN, DELAY_MS_MAX = 3_600_000, 3 * 86_400_000
SYNC_EVERY_COUNT = 200_000
FILE_MIB = 1024
UNITS_AT_ONCE = 8_192  # as the broker reads them
UNIQUE = properties.encode({properties.UNIQ_KEY: "0" * 32})


# --- the roles, each a process ---


def fill(folder: Path, kind: str, count: int) -> None:
    """Store so many messages, synced to the last tenth, and end as a crash would."""
    store = MessageStore.open(folder, options(FILE_MIB), clock=SystemClock())
    records, segment = batch_of(kind)
    for done in range(0, count, BATCH_COUNT):
        store.append(records, [segment], born_host=HOST, store_host=HOST)
        if done % SYNC_EVERY_COUNT == 0 and done <= count * 9 // 10:
            sync(store)
    os.kill(os.getpid(), signal.SIGKILL)


def batch_of(kind: str) -> tuple[bytes, RecordRun]:
    """A batch that may be sent again and again: the times are delays, in no order."""
    chance = random.Random(BATCH_COUNT)
    topic, queue_id, prefix, segment = TOPIC, 0, b"", RecordRun(TOPIC, 0, BATCH_COUNT)
    if kind == LEVEL:
        topic, queue_id = delayed.SCHEDULE_TOPIC, delayed.queue_id_of(DELAY_LEVEL)
        prefix, delay_ms = delayed.prefix(DELAY_LEVEL, TOPIC, 0), delayed.delay_ms(DELAY_LEVEL)
        segment = RecordRun(topic, queue_id, BATCH_COUNT, prefix, delay_ms)
    if kind == TIMER:
        topic, queue_id = TIMER_QUEUE
        prefix = timers.prefix(TOPIC, 0)
        segment = RecordRun(topic, queue_id, BATCH_COUNT, prefix, timer=TimerForm.AFTER)

    def properties_of_one() -> bytes:
        if kind != TIMER:
            return prefix + UNIQUE
        return timers.with_time(prefix, chance.randrange(DELAY_MS_MIN, DELAY_MS_MAX)) + UNIQUE

    def one() -> bytes:
        fields = topic.encode(), queue_id, BODY, properties_of_one()
        return record.encode(*fields, born_time_ms=1, born_host=HOST, store_host=HOST)

    return b"".join(one() for _ in range(BATCH_COUNT)), segment


def open_store(folder: Path) -> None:
    """Open, as after a crash; then the index of what waits for a time of its own, if there is any,
    from the queue and then from its files.
    """
    started_s = time.perf_counter()
    store = MessageStore.open(folder, options(FILE_MIB), clock=SystemClock())
    line: Line = {"open_s": time.perf_counter() - started_s}
    try:
        if TIMER_QUEUE in store.queues():
            line |= {f"queue_{key}": value for key, value in load(store).items()}
            line |= {f"files_{key}": value for key, value in load(store).items()}
        say(line)
    finally:
        store.abandon()


def load(store: MessageStore) -> Line:
    """As the broker loads the index when it starts."""
    give_back()
    low, end = store.queue_bounds(*TIMER_QUEUE)
    before_mib = rss_mib(os.getpid())
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    index = store.new_timer_index()
    at = index.load((0, 0), low, end, lambda _: True)
    while at < end:
        units = store.read_units(*TIMER_QUEUE, at, min(UNITS_AT_ONCE, end - at))
        index.add(in_order(of_units(units, at)))
        at += len(units) // queueunit.UNIT_BYTES
        spill(store, index, low, at)
    took_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    give_back()
    more_mib = rss_mib(os.getpid()) - before_mib
    assert len(index) == end - low, (len(index), end - low)
    index.clear()
    return {"s": took_s, "cpu_s": cpu_s, "mib": more_mib, "entries": end - low}


def give_back() -> None:
    """To the machine: memory that is free in this process."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def spill(store: MessageStore, index: TimerIndex, low: int, read: int) -> None:
    """Write to the disk what the index wants there."""
    covered = Coverage(store.store_id, store.epoch, 0, low, read, index.after)
    while job := index.next_job(lambda: covered):
        index.finish(job, job.run())


# --- what is measured ---


def measure(folder: Path, count: int, *, recovers: bool) -> dict[str, float]:
    """What ``python -m bench messaging`` shows of stores with so many messages."""
    found: dict[str, float] = {}
    for kind, name, line in opened(folder, count, KINDS if recovers else (TIMER,)):
        found[f"{kind}_{name}_s"] = float(line["open_s"])
        if kind == TIMER and name == "open":
            found["index_rate"] = float(line["queue_entries"]) / float(line["queue_s"])
            found["index_cpu_rate"] = float(line["queue_entries"]) / float(line["queue_cpu_s"])
            found["index_mib"] = float(line["queue_mib"])
            found["index_files_s"] = float(line["files_s"])
    if recovers:
        plain_s = found[f"{PLAIN}_log_s"]
        longer_s = found[f"{TIMER}_open_s"] - found[f"{PLAIN}_open_s"] + found["index_files_s"]
        found["open_longer_s"] = longer_s
        found["level_recovery"] = 100 * plain_s / found[f"{LEVEL}_log_s"]
        found["timer_recovery"] = 100 * plain_s / found[f"{TIMER}_log_s"]
    return found


def opened(folder: Path, count: int, kinds: Sequence[str]) -> Iterator[tuple[str, str, Line]]:
    """After kill -9; then, of several kinds, from the log alone."""
    for kind in kinds:
        with tempfile.TemporaryDirectory(dir=folder, prefix=f"waiting-{kind}-") as place:
            work = ("--folder", place, "--kind", kind, "--count", count)
            run("bench.waiting", "--role", "fill", *work, "--die")
            yield kind, "open", run("bench.waiting", "--role", "open", *work)
            if len(kinds) > 1:
                for derived in ("consumequeue", "index", "cometmq.timers"):
                    shutil.rmtree(Path(place) / derived, ignore_errors=True)
                yield kind, "log", run("bench.waiting", "--role", "open", *work)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.waiting", description=__doc__)
    parser.add_argument("--role", choices=["fill", "open"], required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=KINDS, default=TIMER)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--die", action="store_true", help="said by the caller of a role that does")
    said = parser.parse_args()
    if said.role == "fill":
        return fill(said.folder, said.kind, said.count)
    return open_store(said.folder)


if __name__ == "__main__":
    main()

"""``python -m bench.recover``: how long a store takes to open after a crash, from the log alone,
and with very many queues.

Each opening is a process of its own (``--role open``), so that its memory is its own too. The page
cache is warm: what is measured is the program, not the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench.filling import HOST, MIB, Content, options, sync
from bench.processes import REPOSITORY, Line, say
from cometmq.clock import SystemClock
from cometmq.format import record
from cometmq.store.writer import MessageStore

CALL_S_MAX = 900.0
SEGMENTS_PER_BATCH = 1000
NATIVE_SWITCH = "COMETMQ_NATIVE"


# --- the roles, each a process ---


def open_store(folder: Path, file_mib: int) -> None:
    """Open, index what is not indexed yet, close as a crash would; says how long each took."""
    started_s = time.perf_counter()
    store = MessageStore.open(folder, options(file_mib), clock=SystemClock())
    opened_s = time.perf_counter()
    while store.index_some():
        pass
    indexed_s = time.perf_counter()
    line: Line = {
        "open_s": opened_s - started_s,
        "index_s": indexed_s - opened_s,
        "log_mib": (store.appended_offset - store.min_offset) // MIB,
        "queues": sum(1 for _ in store.queues()),
    }
    say(line | footprint(folder))
    store.abandon()


def append_to_all(folder: Path, file_mib: int, queue_count: int) -> None:
    """Open, one message to each of very many queues, close in order."""
    started_s = time.perf_counter()
    store = MessageStore.open(folder, options(file_mib), clock=SystemClock())
    opened_s = time.perf_counter()
    for run in chunks(Content(0, queue_count).queues()):
        records = b"".join(message(topic, queue_id) for topic, queue_id in run)
        segments = [(topic, queue_id, 1) for topic, queue_id in run]
        store.append(records, segments, born_host=HOST, store_host=HOST)
    appended_s = time.perf_counter()
    sync(store)
    synced_s = time.perf_counter()
    line = footprint(folder)
    closing_s = time.perf_counter()
    store.close()
    times: Line = {
        "open_s": opened_s - started_s,
        "append_s": appended_s - opened_s,
        "sync_s": synced_s - appended_s,
        "close_s": time.perf_counter() - closing_s,
    }
    say(times | line)


def chunks(queues: list[tuple[str, int]]) -> Iterator[list[tuple[str, int]]]:
    for first in range(0, len(queues), SEGMENTS_PER_BATCH):
        yield queues[first : first + SEGMENTS_PER_BATCH]


def message(topic: str, queue_id: int) -> bytes:
    return record.encode(
        topic.encode(), queue_id, b"x", b"", born_time_ms=1, born_host=HOST, store_host=HOST
    )


def footprint(folder: Path) -> Line:
    """What this process and the folder take."""
    used = sum(entry.stat().st_blocks * 512 for entry in (folder / "consumequeue").rglob("*"))
    return {
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "open_files": len(os.listdir("/proc/self/fd")),
        "queues_disk_mib": round(used / MIB, 1),
    }


# --- what is measured ---


def run(module: str, *arguments: object, native: bool = True) -> Line:
    """What a role says; nothing when it ended as a crash would."""
    environment = dict(os.environ) | ({} if native else {NATIVE_SWITCH: "0"})
    process = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=CALL_S_MAX,
        check=False,
    )
    if "--die" in arguments:
        return {}
    if process.returncode:
        raise RuntimeError(process.stderr)
    found: Line = json.loads(process.stdout.splitlines()[-1])
    return found


def crashed(folder: Path, said: argparse.Namespace) -> Iterator[tuple[str, Line]]:
    """After kill -9; then from the log alone, natively and in plain Python."""
    size = ("--file_mib", said.file_mib)
    content = ("--mib", said.mib, "--queues", said.queues, "--unflushed_mib", said.unflushed_mib)
    run("bench.filling", folder, *content, *size, "--die")
    opening = ("--role", "open", "--folder", folder, *size)
    yield "after kill -9", run("bench.recover", *opening)
    for native, name in ((True, "natively"), (False, "in plain Python")):
        for derived in ("consumequeue", "index"):
            shutil.rmtree(folder / derived, ignore_errors=True)
        yield f"from the log alone, {name}", run("bench.recover", *opening, native=native)


def many_queues(folder: Path, said: argparse.Namespace) -> Iterator[tuple[str, Line]]:
    work = ("--role", "many", "--folder", folder, "--queues", said.many, "--file_mib", 64)
    yield f"{said.many:,} queues, first message", run("bench.recover", *work)
    yield f"{said.many:,} queues, opened again", run("bench.recover", *work)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.recover", description=__doc__)
    parser.add_argument("--role", choices=["all", "open", "many"], default="all")
    parser.add_argument("--folder", type=Path, default=Path("data/bench"))
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--queues", type=int, default=1000)
    parser.add_argument("--many", type=int, default=40_000)
    parser.add_argument("--unflushed_mib", type=int, default=64)
    parser.add_argument("--file_mib", type=int, default=1024)
    said = parser.parse_args()
    if said.role == "open":
        return open_store(said.folder, said.file_mib)
    if said.role == "many":
        return append_to_all(said.folder, said.file_mib, said.queues)
    said.folder.mkdir(parents=True, exist_ok=True)
    for part in (crashed, many_queues):
        with tempfile.TemporaryDirectory(dir=said.folder, prefix="recover-") as place:
            for name, line in part(Path(place), said):
                print(f"{name}: " + ", ".join(f"{k} {v:,.3g}" for k, v in line.items()))
                print(json.dumps({"name": name} | line), flush=True)


if __name__ == "__main__":
    main()

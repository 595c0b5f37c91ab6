"""``python -m bench.append``: how fast the engine appends, as a share of what the bytes alone cost.

The denominator is a bare loop in the same process: one ``zlib.crc32`` of each body and one
``pwrite`` of the same batch, to a file whose room was taken, as that of a log file is. Each
measurement is a process of its own (``--role measure``), with the C extension and without it in
turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from bench.filling import HOST, MIB, Content, batches
from bench.processes import Line, say
from bench.recover import run
from bench.report import machine, markdown
from bench.stats import Spread, spread
from cometmq import native
from cometmq.clock import SystemClock
from cometmq.format import record
from cometmq.store.writer import MessageStore, StoreOptions

BODY_SIZES = (128, 1024)
FILE_MIB = 512
BATCH_BYTES_MIN = 4 * MIB  # of different batches, so that the processor's caches do not help


@dataclass(frozen=True, slots=True)
class Row:
    """One size of bodies in one implementation; messages a second."""

    body_bytes: int
    implementation: str
    appended: Spread
    bare: Spread
    ratio: Spread  # of the two, run by run


# --- one measurement ---


def measure(folder: Path, body_bytes: int) -> Line:
    """Fill a log file through the engine, then one like it with the bare loop."""
    content = list(some_batches(body_bytes))
    options = StoreOptions(commit_log_file_bytes=FILE_MIB * MIB)
    store = MessageStore.open(folder, options, clock=SystemClock())
    append(store, content[:1])  # makes the file
    rounds = rounds_that_fit(content)
    started_s = time.perf_counter()
    for _ in range(rounds):
        append(store, content)
    appended_s = time.perf_counter() - started_s
    store.abandon()
    bare_s = bare(folder / "bare", content, rounds)
    count = rounds * sum(segment[2] for _, segment in content)
    return {
        "implementation": native.description(),
        "appended": count / appended_s,
        "bare": count / bare_s,
    }


Batch = tuple[bytes, tuple[str, int, int]]


def some_batches(body_bytes: int) -> Iterator[Batch]:
    """A few megabytes of batches for one queue."""
    size = len(next(batches(Content(1, 1, body_bytes)))[0])
    yield from islice(batches(Content(2 * BATCH_BYTES_MIN, 1, body_bytes)), BATCH_BYTES_MIN // size)


def rounds_that_fit(content: Sequence[Batch]) -> int:
    """How often the batches fit into one log file, behind the first of them."""
    size = sum(len(records) for records, _ in content)
    rounds = (FILE_MIB * MIB - len(content[0][0]) - record.BLANK_BYTES) // size
    assert rounds > 0, size
    return rounds


def append(store: MessageStore, content: Sequence[Batch]) -> None:
    for records, segment in content:
        store.append(records, [segment], born_host=HOST, store_host=HOST)


def bare(path: Path, content: Sequence[Batch], rounds: int) -> float:
    """Seconds for one CRC of each body and one write of each batch."""
    parts = [(records, [one.body for one in record.decode_all(records)]) for records, _ in content]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, FILE_MIB * MIB)
        started_s = time.perf_counter()
        place = 0
        for _ in range(rounds):
            for records, bodies in parts:
                for body in bodies:
                    zlib.crc32(body)
                place += os.pwrite(descriptor, records, place)
        return time.perf_counter() - started_s
    finally:
        os.close(descriptor)


# --- several of them ---


def rows(folder: Path, runs: int) -> Iterator[Row]:
    lines: dict[tuple[int, str], list[Line]] = {}
    for _ in range(runs):
        for body_bytes in BODY_SIZES:
            for is_native in (True, False):
                line = one(folder, body_bytes, is_native)
                lines.setdefault((body_bytes, str(line["implementation"])), []).append(line)
    for (body_bytes, implementation), found in lines.items():
        yield row(body_bytes, implementation, found)


def one(folder: Path, body_bytes: int, is_native: bool) -> Line:
    place = Path(tempfile.mkdtemp(dir=folder, prefix="append-"))
    try:
        where = ("--folder", place, "--body_bytes", body_bytes)
        return run("bench.append", "--role", "measure", *where, native=is_native)
    finally:
        shutil.rmtree(place)


def row(body_bytes: int, implementation: str, lines: Sequence[Line]) -> Row:
    appended = [float(line["appended"]) for line in lines]
    denominators = [float(line["bare"]) for line in lines]
    ratios = [above / below for above, below in zip(appended, denominators, strict=True)]
    return Row(body_bytes, implementation, spread(appended), spread(denominators), spread(ratios))


def table(found: Sequence[Row]) -> str:
    header = ("body", "implementation", "appended/s", "bare/s", "ratio", "lowest–highest")
    return markdown(header, [cells(one) for one in found])


def cells(one: Row) -> Sequence[str]:
    return (
        f"{one.body_bytes} B",
        one.implementation,
        f"{one.appended.median:,.0f}",
        f"{one.bare.median:,.0f}",
        f"{one.ratio.median:.1%}",
        f"{one.ratio.lowest:.1%}–{one.ratio.highest:.1%}",
    )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.append", description=__doc__)
    parser.add_argument("--role", choices=["all", "measure"], default="all")
    parser.add_argument("--folder", type=Path, default=Path("data/bench"))
    parser.add_argument("--body_bytes", type=int, default=1024, help="for --role measure")
    parser.add_argument("--runs", type=int, default=5)
    said = parser.parse_args(argv)
    if said.role == "measure":
        say(measure(said.folder, said.body_bytes))
        return
    said.folder.mkdir(parents=True, exist_ok=True)
    found = list(rows(said.folder, said.runs))
    print(table(found))
    print(json.dumps({"machine": machine(), "append": [asdict(one) for one in found]}))


if __name__ == "__main__":
    main(sys.argv[1:])

"""``python -m bench idle``: what processes cost that have nothing to do.

A name server, a writer and its follower, a broker without followers, and a pull-hold, without any
client. Over the same stretch of time: the share of a core of each process, and how often its
threads fell asleep, which is how often they woke.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.processes import REPOSITORY
from cometmq.admin import local

SETTLE_S = 12.0  # the first registrations, snapshots and looks of a start are over
THREADS_NAMED = 4


class Spent(NamedTuple):
    """By the names of a process's threads: how long they ran, and how often they fell asleep."""

    ns: Counter[str]
    sleeps: Counter[str]


@dataclass(frozen=True, slots=True)
class AtRest:
    """``cores``: shares of one core; ``wakes``: a second; both by the names of threads."""

    name: str
    cores: Mapping[str, float]
    wakes: Mapping[str, float]

    def text(self) -> str:
        cores, wakes = sum(self.cores.values()), sum(self.wakes.values())
        busiest = sorted(self.cores, key=lambda thread: -self.cores[thread])[:THREADS_NAMED]
        named = [f"{one} {self.cores[one]:.2%} {self.wakes.get(one, 0):.1f}/s" for one in busiest]
        head = f"{self.name:<20} {cores:6.2%} of a core, {wakes:5.1f} wake-ups/s"
        return f"{head}: {', '.join(named)}"


def spent(pid: int) -> Spent:
    """By the threads that a process has now."""
    ns: Counter[str] = Counter()
    sleeps: Counter[str] = Counter()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            name = _text(thread / "comm").strip()
            count = re.search(r"^voluntary_ctxt_switches:\s+(\d+)", _text(thread / "status"), re.M)
            assert count is not None
            ns[name] += int(_text(thread / "schedstat").split()[0])
            sleeps[name] += int(count[1])
    return Spent(ns, sleeps)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def measure(pids: Mapping[str, int], seconds: float) -> list[AtRest]:
    """By names of processes. Threads that begin and end meanwhile do not count."""
    before = {name: spent(pid) for name, pid in pids.items()}
    started_s = time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - started_s
    found = []
    for name, pid in pids.items():
        ns, sleeps = spent(pid)
        cores = {one: n / took_s / 1e9 for one, n in (ns - before[name].ns).items()}
        wakes = {one: n / took_s for one, n in (sleeps - before[name].sleeps).items()}
        found.append(AtRest(name, cores, wakes))
    return found


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, int]]:
    """The processes by what they are."""
    places = folder / "group", folder / "alone"
    for place in places:
        asyncio.run(local.down(place, purge=True))  # what an interrupted run may have left
    try:
        group = asyncio.run(local.up(places[0], broker_count=1, slave_count=1, pullhold_count=1))
        alone = asyncio.run(local.up(places[1], broker_count=1))
        pids = {f"{one.kind} {one.name}": one.pid for one in group.processes}
        yield pids | {"broker alone": alone.brokers[0].pid}
    finally:
        for place in places:
            asyncio.run(local.down(place, purge=True))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench idle", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="that are measured")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "data" / "bench-idle")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with cluster(folder) as pids:
        time.sleep(SETTLE_S)
        for one in measure(pids, arguments.seconds):
            print(one.text())


if __name__ == "__main__":
    main()

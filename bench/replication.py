"""``python -m bench replication``: what copies cost, how soon a new slave has everything, what a
lost or slow one does to those who send.

Four parts, each as often as ``--runs`` says, on clusters of their own: ``throughput`` and
``latency`` compare a broker without followers with a writer that has one slave, for topics that do
not wait for it and for topics that do (replication ``appended``); ``catch-up`` gives a writer with
a full log a slave with an empty disk, first with nobody sending, then beside a producer at full
speed; ``trouble`` kills, stops and slows down one slave of two while a producer sends to a topic
that waits for both.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from bench.figures import Figure, Row, number, rows, table
from bench.group import Groups, create_topic, groups
from bench.newslave import BODY_BYTES, catch_up, rate_for
from bench.processes import REPOSITORY, Child, Line
from bench.report import machine
from bench.watching import producing
from cometmq.model import ReplicationMode

ALONE, ASYNC, SYNC = "alone", "async", "sync"
MODES = {ASYNC: ReplicationMode.ASYNC, SYNC: ReplicationMode.APPENDED}
LATENCY_RATE = 500.0
# A slow slave runs for the first part of each period only.
SLOW_RUNS_S, SLOW_PERIOD_S = 0.005, 1.0


# --- throughput and latency ---------------------------------------------------------------------


class Stages:
    """A broker alone and a writer with a slave, both up all the time."""

    def __init__(self, alone: Groups, group: Groups) -> None:
        self._of = {ALONE: alone, ASYNC: group, SYNC: group}
        for name in (ASYNC, SYNC):
            create_topic(group.namesrv, name, MODES[name])
        create_topic(alone.namesrv, ALONE, ReplicationMode.ASYNC)

    def child(self, module: str, name: str, seconds: float, **options: str | float) -> Child:
        stage = self._of[name]
        common = {"body_bytes": BODY_BYTES, "seconds": seconds, "topic": name, **options}
        return Child(module, namesrv=stage.namesrv, **common)

    def produce(self, name: str, seconds: float) -> Line:
        watch = f"writer={self._of[name].member(0).pid}"
        with self.child("bench.produce", name, seconds, watch=watch) as child:
            child.read()
            return child.read()

    def latency(self, name: str, seconds: float) -> Line:
        with self.child("bench.steady", name, seconds, rate=LATENCY_RATE) as child:
            while "p50_ms" not in (line := child.read()):
                pass
            return line


@contextmanager
def stages(folder: Path) -> Iterator[Stages]:
    with groups(folder / "alone", 0) as alone, groups(folder / "group", 1) as group:
        yield Stages(alone, group)


def throughput(folder: Path, runs: int, seconds: float) -> Iterator[list[Figure]]:
    with stages(folder) as both:
        for _ in range(runs):
            lines = {name: both.produce(name, seconds) for name in (ALONE, ASYNC, SYNC)}
            yield list(throughput_figures(lines))


def throughput_figures(lines: dict[str, Line]) -> Iterator[Figure]:
    """Of one run."""
    alone = lines[ALONE]
    for name, line in lines.items():
        yield Figure(f"produce, {name}", float(line["rate"]), "messages/s")
    for name, least in ((ASYNC, 0.60), (SYNC, 0.55)):
        share = float(lines[name]["rate"]) / float(alone["rate"])
        yield Figure(f"produce, {name} / alone", share, "", least)
    for name, line in lines.items():
        yield Figure(f"CPU of the writer, {name}", float(line["cpu_us_writer"]), "µs/message")
    for name in (ASYNC, SYNC):
        times = float(lines[name]["cpu_us_writer"]) / float(alone["cpu_us_writer"])
        yield Figure(f"CPU of the writer, {name} / alone", times, "", 1.3, at_most=True)


def latency(folder: Path, runs: int, seconds: float) -> Iterator[list[Figure]]:
    with stages(folder) as both:
        for _ in range(runs):
            lines = {name: both.latency(name, seconds) for name in (ALONE, ASYNC, SYNC)}
            found = [
                Figure(f"receipt, {name}, {which}", float(line[f"{which}_ms"]), "ms")
                for name, line in lines.items()
                for which in ("p50", "p99")
            ]
            added = float(lines[SYNC]["p50_ms"]) - float(lines[ALONE]["p50_ms"])
            yield [*found, Figure("receipt, sync − alone, p50", added, "ms", 1.5, at_most=True)]


# --- one slave of two ---------------------------------------------------------------------------


def trouble(folder: Path, runs: int, seconds: float) -> Iterator[list[Figure]]:
    with groups(folder / "group", 2) as group:
        create_topic(group.namesrv, SYNC, MODES[SYNC])
        for _ in range(runs):
            yield [
                figure
                for name, ill in (("dead", dead), ("paused", paused), ("slow", slow))
                for figure in ill_slave(group, name, ill, seconds)
            ]


Heal = Callable[[], None]


def ill_slave(
    group: Groups, name: str, ill: Callable[[Groups], Heal], seconds: float
) -> Iterator[Figure]:
    """What member 2 does to the others: until the set has shrunk, and then."""
    with producing(group.namesrv, SYNC, body_bytes=BODY_BYTES) as watch:
        before = rate_for(watch, seconds)
        began_s = time.time()
        heal = ill(group)
        try:
            shrunk_s = group.wait_in_sync(0, 1)
            after = rate_for(watch, seconds)
            gap = watch.silence(began_s) or (began_s, time.time())
        finally:
            heal()
    yield Figure(f"one slave {name}: until the set has shrunk", shrunk_s, "s")
    yield Figure(f"one slave {name}: nothing acknowledged for", gap[1] - gap[0], "s")
    yield Figure(f"one slave {name}: then, of the rate before", after / before, "", 0.70)
    group.wait_in_sync(0, 1, 2)


def dead(group: Groups) -> Heal:
    group.kill(2)
    return group.start


def paused(group: Groups) -> Heal:
    group.signal(2, signal.SIGSTOP)
    return lambda: group.signal(2, signal.SIGCONT)


def slow(group: Groups) -> Heal:
    """It runs for a two-hundredth of the time."""
    process, healed = group.member(2).id, threading.Event()

    def hold_back() -> None:
        while not healed.is_set():
            process.signal(signal.SIGSTOP)
            healed.wait(SLOW_PERIOD_S - SLOW_RUNS_S)
            process.signal(signal.SIGCONT)
            time.sleep(SLOW_RUNS_S)

    holding = threading.Thread(target=hold_back)
    holding.start()

    def heal() -> None:
        healed.set()
        holding.join()

    return heal


# --- all of it ----------------------------------------------------------------------------------

PARTS: dict[str, Callable[[Path, int, float], Iterator[list[Figure]]]] = {
    "throughput": throughput,
    "latency": latency,
    "catch-up": catch_up,
    "trouble": trouble,
}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench replication", description=__doc__)
    parser.add_argument("--part", choices=[*PARTS], action="append", help="only this; repeatable")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "data" / "bench")
    arguments = parser.parse_args(argv)
    folder: Path = arguments.folder.resolve()
    found: list[Row] = []
    for name in arguments.part or PARTS:
        runs = []
        for run in PARTS[name](folder / "replication", arguments.runs, arguments.seconds):
            runs.append(run)
            for one in run:
                print(f"run {len(runs)}: {one.name}: {number(one.value)} {one.unit}", flush=True)
        found += rows(runs)
    print(f"{table(found)}\n\nmachine: {machine()}")
    result = {"machine": machine(), "rows": [asdict(row) for row in found]}
    (folder / "replication.json").write_text(json.dumps(result, indent=2) + "\n")
    if missed := [row.figure.name for row in found if not row.reached]:
        sys.exit(f"not reached: {', '.join(missed)}")


if __name__ == "__main__":
    main(sys.argv[1:])

"""``python -m bench replication``: what copies cost, how soon a new slave has everything, what a
lost or slow one does to those who send.

Four parts, each as often as ``--runs`` says, on clusters of their own: ``throughput`` and
``latency`` compare a broker that stands alone with a writer that has one slave, for topics that do
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
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.group import Groups, create_topic, groups, wait_for
from bench.processes import REPOSITORY, Child, Line
from bench.report import machine, markdown
from bench.stats import Spread, spread
from bench.watching import Watch, producing
from cometmq.model import ReplicationMode

BODY_BYTES = 1024
ALONE, ASYNC, SYNC = "alone", "async", "sync"
MODES = {ASYNC: ReplicationMode.ASYNC, SYNC: ReplicationMode.APPENDED}
LATENCY_RATE = 500.0
CATCH_UP_BYTES = 1_200_000_000
SETTLE_S = 1.0  # after something has changed, before it is measured
MB = 1_000_000
# A slow slave runs for the first part of each period only.
SLOW_RUNS_S, SLOW_PERIOD_S = 0.005, 1.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one run. ``limit`` is the issue's: a least or, with ``at_most``, a most; None:
    there is none.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_most: bool = False


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


# --- a new slave --------------------------------------------------------------------------------


def catch_up(folder: Path, runs: int, seconds: float) -> Iterator[list[Figure]]:
    with groups(folder / "group", 1) as group:
        create_topic(group.namesrv, ASYNC, MODES[ASYNC])
        lose_disk(group)
        fill(group, CATCH_UP_BYTES)
        for _ in range(runs):
            size = group.log_end(0)
            copied_s = copy_anew(group)
            idle = Figure("catch-up, nobody sends", size / copied_s / MB, "MB/s", 300)
            yield [idle, *beside_producers(group, seconds)]
            lose_disk(group)


def beside_producers(group: Groups, seconds: float) -> Iterator[Figure]:
    """A producer at full speed: with its slave in step, then beside a new one that catches up."""
    with producing(group.namesrv, ASYNC, body_bytes=BODY_BYTES) as watch:
        in_step = rate_for(watch, seconds)
        lose_disk(group)
        gone = rate_for(watch, seconds)
        group.start()
        wait_for(lambda: group.log_end(1) > 0, "the copy")
        copied, started_s = group.log_end(1), time.time()
        time.sleep(seconds)
        ended_s = time.time()
        copied = group.log_end(1) - copied
        beside = watch.rate(started_s, ended_s)
    yield Figure("produce, no slave", gone, "messages/s")
    yield Figure("produce, slave in step", in_step, "messages/s")
    yield Figure("produce, new slave catches up", beside, "messages/s")
    yield Figure("catching up / in step", beside / in_step, "", 0.80)
    yield Figure("catch-up, beside the producer", copied / (ended_s - started_s) / MB, "MB/s")


def lose_disk(group: Groups) -> None:
    """The slave dies, and its store with it."""
    group.kill(1)
    group.wipe(1)


def copy_anew(group: Groups) -> float:
    """Start the slave; seconds from its first bytes until it has everything on its disk."""
    starting = threading.Thread(target=group.start)
    starting.start()
    wait_for(lambda: group.log_end(1) > 0, "the copy")
    started_s = time.monotonic()
    wait_for(lambda: group.log_end(1) == group.log_end(0), "a whole copy")
    copied_s = time.monotonic() - started_s
    starting.join()
    return copied_s


def fill(group: Groups, size: int) -> None:
    with producing(group.namesrv, ASYNC, body_bytes=BODY_BYTES):
        wait_for(lambda: group.log_end(0) >= size, "a full log")


def rate_for(watch: Watch, seconds: float) -> float:
    """Messages a second from a moment after now on."""
    time.sleep(SETTLE_S)
    started_s = time.time()
    time.sleep(seconds)
    return watch.rate(started_s, started_s + seconds)


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


@dataclass(frozen=True, slots=True)
class Row:
    """One figure over all runs."""

    figure: Figure  # of the first run
    values: Spread

    @property
    def reached(self) -> bool:
        limit, value = self.figure.limit, self.values.median
        if limit is None:
            return True
        return value <= limit if self.figure.at_most else value >= limit


def rows(runs: Sequence[Sequence[Figure]]) -> list[Row]:
    """The figures of several runs, as they come in each of them."""
    return [
        Row(figures[0], spread([figure.value for figure in figures]))
        for figures in zip(*runs, strict=True)
    ]


def table(found: Sequence[Row]) -> str:
    header = ("what", "median", "lowest–highest", "unit", "limit", "reached")
    return markdown(header, [cells(row) for row in found])


def cells(row: Row) -> tuple[str, ...]:
    figure, values = row.figure, row.values
    limit = ""
    if figure.limit is not None:
        limit = f"{'≤' if figure.at_most else '≥'} {figure.limit:g}"
    extent = f"{number(values.lowest)}–{number(values.highest)}"
    reached = ("yes" if row.reached else "NO") if limit else ""
    return figure.name, number(values.median), extent, figure.unit, limit, reached


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


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

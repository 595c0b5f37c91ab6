"""Chaos on real processes. ``make test-chaos`` plays the acts, ``make chaos`` at random.

``python -m tests.chaos [--run NAME]… [--share K/N] [--minutes N] [--seed N] [--keep FOLDER]``. A
name is that of an act, or ``random-<number>`` of a run at random; with the seed that was printed it
is played again. ``--share`` plays the Kth of N parts of the acts. Two are played at a time, for a
cluster mostly waits. As root every node gets a network namespace of its own and every member a disk
of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.acts import ACTS
from tests.chaos.listing import FAULTS
from tests.chaos.play import command
from tests.support.cluster import network
from tests.support.faults.checkers import Verdict

AT_ONCE = 2
SHOWN_MAX = 20  # broken promises
RUN_S_MAX = 900


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos", description="Chaos on real processes.")
    parser.add_argument("--run", action="append", help=f"of {', '.join(ACTS)}, random-<number>")
    parser.add_argument("--share", default="1/1", help="K/N: the Kth of N parts of the acts")
    parser.add_argument("--minutes", type=float, help="at random, for so long")
    parser.add_argument("--seed", type=int, help="replays a run")
    parser.add_argument("--keep", type=Path, help="where logs and stores stay")
    options = parser.parse_args()
    if reason := network.why_not():
        print(f"behind proxies, without network namespaces: {reason}")
    for fault in FAULTS.values():
        if reason := fault.left_out():
            print(f"left out: {fault.name}: {reason}")
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    print(f"SEED={seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        total = _play(_names(options), seed, options.keep or Path(scratch))
    return 1 if total.broken else 0


def _names(options: argparse.Namespace) -> Iterator[str]:
    """The runs, one after the other."""
    if options.run or options.minutes is None:
        part, parts = map(int, options.share.split("/"))
        yield from options.run or [*ACTS][part - 1 :: parts]
        return
    end_s = time.monotonic() + options.minutes * 60
    for number in itertools.takewhile(lambda _: time.monotonic() < end_s, itertools.count()):
        yield f"random-{number}"


def _play(names: Iterator[str], seed: int, folder: Path) -> Verdict:
    total = Verdict()
    began_s = time.monotonic()
    taking = threading.Lock()

    def take_turns() -> None:
        while (name := _next(names, taking)) is not None:
            verdict = _run(name, seed, folder / name)
            with taking:
                print(f"\n{name}:")
                _show(verdict)
                total.broken += verdict.broken
                total.counts.update(verdict.counts)

    with ThreadPoolExecutor(AT_ONCE) as lanes:
        for lane in [lanes.submit(take_turns) for _ in range(AT_ONCE)]:
            lane.result()
    print(f"\nall of it, in {time.monotonic() - began_s:.0f} s:")
    _show(total)
    return total


def _next(names: Iterator[str], taking: threading.Lock) -> str | None:
    with taking:
        return next(names, None)


def _run(name: str, seed: int, folder: Path) -> Verdict:
    folder.mkdir(parents=True)
    subprocess.run(command(name, seed, folder), check=False, timeout=RUN_S_MAX)
    told = folder / "verdict.json"
    if not told.exists():
        return Verdict(broken=[f"{name} ended without a verdict"])
    return Verdict(**json.loads(told.read_text()))


def _show(verdict: Verdict) -> None:
    width = max((len(f"{number:,}") for number in verdict.counts.values()), default=1)
    for what, number in verdict.counts.items():
        print(f"  {number:>{width},} {what}")
    for finding in verdict.broken[:SHOWN_MAX]:
        print(f"  BROKEN: {finding}")
    print(f"  {len(verdict.broken) or 'no'} promises broken", flush=True)


if __name__ == "__main__":
    sys.exit(main())

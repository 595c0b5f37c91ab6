"""The cluster simulation: ``python -m tests.sim [--seeds N] [--first N] [--seed N]``.

With ``--seed`` one run is told line by line. Ends with 1 when something did not hold, or when the
run did too little of what it is for.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from tests.sim.coverage import FULL_RUN_SEEDS, missing, report
from tests.sim.many import outcomes
from tests.sim.run import play


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.sim", description="Fail-over, simulated.")
    parser.add_argument("--seeds", type=int, default=FULL_RUN_SEEDS, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="one alone, told line by line")
    options = parser.parse_args()
    if options.seed is not None:
        play(options.seed, print)
        return 0
    return _play_many(range(options.first, options.first + options.seeds))


def _play_many(seeds: range) -> int:
    counts: Counter[str] = Counter()
    broken = 0
    started_s = time.monotonic()
    for outcome in outcomes(seeds):
        counts += outcome.counts
        if outcome.broken:
            broken += 1
            print(f"SEED={outcome.seed}: {outcome.broken}", flush=True)
    print(report(counts))
    seldom = missing(counts, len(seeds))
    for line in seldom:
        print(f"too seldom: {line}")
    print(f"{len(seeds)} seeds, {broken} broken, {time.monotonic() - started_s:.0f} s")
    return 1 if broken or seldom else 0


if __name__ == "__main__":
    sys.exit(main())

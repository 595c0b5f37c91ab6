"""One run, in namespaces of its own: ``python -m tests.chaos.play NAME SEED FOLDER``.

NAME is an act, or ``random-<number>``. The folder gets what all processes said and did, and
``verdict.json``. The kernel takes everything else away when the process ends, however it ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import traceback
from pathlib import Path

from tests.chaos.acts import ACTS, RANDOM_SIZES, at_random, steps_of
from tests.chaos.cluster import Cluster
from tests.chaos.listing import FAULTS
from tests.chaos.performance import Step, perform
from tests.support.cluster import network
from tests.support.faults.checkers import Verdict
from tests.support.stores import loop_disk

# Of the runs at random disks may be full. Then old messages go, and nobody can tell whether those
# came that come later: their clients are left out.
FILLS_SHARE = 0.4
NAMESPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def command(name: str, seed: int, folder: Path) -> list[str]:
    """What plays a run."""
    into = [] if network.why_not() else ["unshare", *NAMESPACES, "--propagation", "private"]
    return [*into, sys.executable, "-m", "tests.chaos.play", name, str(seed), str(folder)]


def steps(name: str, rng: random.Random) -> list[Step]:
    """The steps of a run, as far as they can be done here."""
    possible = [fault for fault in FAULTS.values() if not fault.left_out()]
    if name not in ACTS:
        if rng.random() < FILLS_SHARE:
            return at_random(rng, [fault for fault in possible if not fault.later])
        return at_random(rng, [fault for fault in possible if not fault.fills])
    return [step for step in steps_of(name) if step.fault in possible]


def _fills(steps: list[Step]) -> bool:
    return any(fault.fills for step in steps for fault in step.every())


def play(name: str, seed: int, folder: Path) -> Verdict:
    def tell(line: str) -> None:
        print(f"  {name}: {line}", flush=True)

    rng = random.Random(f"{seed}/{name}")
    chosen = steps(name, rng)
    size = ACTS[name].size if name in ACTS else rng.choice(RANDOM_SIZES)
    faults = ", ".join(map(str, chosen))
    tell(f"{size.members} members, at least {size.in_sync_min} in sync; {faults}")
    namespaces = not network.why_not()
    own_disks = namespaces and not loop_disk.missing("ext4")
    groups = name not in ACTS or ACTS[name].groups
    later = ACTS[name].later if name in ACTS else not _fills(chosen)
    cluster = Cluster(
        folder,
        size,
        namespaces=namespaces,
        own_disks=own_disks,
        has_groups=groups,
        has_later=later,
        own_clocks=any(fault.clock for step in chosen for fault in step.every()),
    )
    try:
        verdict = asyncio.run(perform(cluster, chosen, rng, tell))
    except Exception as error:
        traceback.print_exc()
        verdict = Verdict(broken=[f"{name} did not come to its end: {error}"])
    played = [fault.name for step in chosen for fault in step.every()]
    verdict.counts.update(f"times: {name}" for name in played)
    verdict.counts["faults"] += len(played)
    if name in ACTS and chosen == steps_of(name):
        missing = [what for what in ACTS[name].shows if not verdict.counts[what]]
        verdict.add("acts that did not show", missing)
    return verdict


def main() -> None:
    name, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if not network.why_not():
        # What is unmounted here shall be gone from the mount namespaces of members too.
        subprocess.run(["mount", "--make-rshared", "/"], check=True)
    verdict = play(name, seed, folder)
    verdict.broken = [f"{name}: {finding}" for finding in verdict.broken]
    told = {"broken": verdict.broken, "counts": verdict.counts}
    (folder / "verdict.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()

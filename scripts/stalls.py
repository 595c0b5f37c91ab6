"""``python -m scripts.stalls SEED COMMAND…``: runs COMMAND, and now and then stops one of its
processes for a moment, as happens on a machine that is busy, swaps or is moved.

What fails then counted on luck: a test's deadline, or a race of the product.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

BETWEEN_S = (0.5, 4.0)
STANDSTILLS_S = (0.1, 0.3, 0.6, 1.0)


def descendants(pid: int) -> list[int]:
    """Processes below ``pid`` at this moment (Linux)."""
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children + [pid for child in children for pid in descendants(child)]


def hold_up(pid: int, seconds: float) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def main(seed: str, *command: str) -> int:
    rng = random.Random(seed)
    count = 0
    with subprocess.Popen(command) as process:
        while process.poll() is None:
            time.sleep(rng.uniform(*BETWEEN_S))
            running = [process.pid, *descendants(process.pid)]
            hold_up(rng.choice(running), rng.choice(STANDSTILLS_S))
            count += 1
    print(f"{count} standstills, seed {seed}")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

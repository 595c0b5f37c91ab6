"""A bit that has flipped on a disk at rest, and what an operator does about it."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

BODY = re.compile(rb"(?:orderly|eager)/[0-9]+ [.]{8,}")  # as the clients of a run write them
WRONG = 3  # the status of `cometmq store verify`


class Flip(NamedTuple):
    """Where a bit was flipped, and what the byte is now."""

    file: Path
    offset: int
    value: int

    @property
    def stands(self) -> bool:
        """Nobody has written or removed the place since."""
        return self.file.exists() and self.file.read_bytes()[self.offset] == self.value


def flip_a_bit(store: Path, rng: random.Random) -> Flip | None:
    """In the body of a message in the older half of the log, if there are messages."""
    files = sorted((store / "commitlog").glob("*"))
    bodies = [(file, *match.span()) for file in files for match in BODY.finditer(file.read_bytes())]
    if len(bodies) < 2:
        return None
    file, start, end = rng.choice(bodies[: len(bodies) // 2])
    offset = rng.randrange(start, end)
    value = file.read_bytes()[offset] ^ 1 << rng.randrange(8)
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(bytes([value]))
    return Flip(file, offset, value)


def find_and_replace(
    store: Path, flip: Flip | None, hash_slots: object, index_entries: object
) -> None:
    """Damage that is still there is found by the command for it; then the member begins with an
    empty folder. It must not run.
    """
    command = [sys.executable, "-m", "cometmq.admin", "store", "verify", str(store)]
    sizes = ["--hash-slots", str(hash_slots), "--index-entries", str(index_entries)]
    if flip is not None and flip.stands:
        done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False)
        assert done.returncode == WRONG, (flip, done.stdout, done.stderr)
    shutil.rmtree(store, ignore_errors=True)

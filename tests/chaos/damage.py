"""A bit that has flipped on a disk at rest, and what an operator does about it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.faults.bad_pages import PAGE_BYTES

BODY = re.compile(rb"(?:orderly|eager)/[0-9]+ [.]{8,}")  # as the clients of a run write them
WRONG = 3  # the status of `cometmq store verify`


class Spoilt(NamedTuple):
    """A page that the disk cannot read."""

    file: Path
    inode: int

    @property
    def stands(self) -> bool:
        return self.file.exists() and self.file.stat().st_ino == self.inode


class Flip(NamedTuple):
    """Where a bit was flipped, and what the byte is now."""

    file: Path
    offset: int
    value: int

    @property
    def stands(self) -> bool:
        """Nobody has written or removed the place since."""
        return self.file.exists() and self.file.read_bytes()[self.offset] == self.value


def spoil_a_page(store: Path, bad_pages: Path, rng: random.Random) -> Spoilt | None:
    """In the older half of the log, if there are messages; as ``bad_pages.c`` reads it."""
    bodies = _bodies(store)
    if len(bodies) < 2:
        return None
    file, start, _ = rng.choice(bodies[: len(bodies) // 2])
    spoilt = Spoilt(file, file.stat().st_ino)
    bad_pages.write_text(f"{spoilt.inode} {start // PAGE_BYTES}\n")
    return spoilt


def _bodies(store: Path) -> list[tuple[Path, int, int]]:
    files = sorted((store / "commitlog").glob("*"))
    return [(file, *match.span()) for file in files for match in BODY.finditer(file.read_bytes())]


def flip_a_bit(store: Path, rng: random.Random) -> Flip | None:
    """In the body of a message in the older half of the log, if there are messages."""
    bodies = _bodies(store)
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
    store: Path,
    damage: Flip | Spoilt | None,
    hash_slots: object,
    index_entries: object,
    **environment: str,
) -> bool:
    """Damage that is still there is found by the command for it (True); then the member begins with
    an empty folder. It must not run. ``environment``: of the command.
    """
    command = [sys.executable, "-m", "cometmq.admin", "store", "verify", str(store)]
    sizes = ["--hash-slots", str(hash_slots), "--index-entries", str(index_entries)]
    stands = damage is not None and damage.stands
    if stands:
        environment = {**os.environ, **environment}
        done = subprocess.run(
            [*command, *sizes], capture_output=True, text=True, check=False, env=environment
        )
        assert done.returncode == WRONG, (damage, done.stdout, done.stderr)
    shutil.rmtree(store, ignore_errors=True)
    return stands

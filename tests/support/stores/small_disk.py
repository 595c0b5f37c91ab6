"""A file system that is full when a test wants it to be."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of that size; skips the test where nobody may mount one."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(directory)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("a full disk needs a tmpfs: run as root, with the right to mount")
    try:
        yield directory
    finally:
        # Lazily: a descriptor may still be open for a moment.
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Take all room that is left; the file to remove when there shall be room again."""
    path = directory / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue
    assert os.statvfs(directory).f_bavail == 0
    return path

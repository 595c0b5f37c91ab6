"""The file ``abort``: the store is open, or was when its process ended; and whether a disk refused.
``docs/format/store-layout.md`` §4.

When a sync fails, Linux takes the pages for clean that it could not write: they can still be read,
no later sync writes them, and the next one succeeds. So the process that opens the store next,
while the machine still runs, must not take for durable what it reads. This file says so, in the
page cache as well: a restart of the machine makes both forget.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cometmq.errors import DiskFull, Shortage, StoreError
from cometmq.store.disk.files import Files, replace

FAILED = b"failed "  # before the number of the process


def write(files: Files, path: Path, *, failed: bool) -> None:
    """The store is in use. ``failed``: what an earlier process could not sync is not safe yet.

    On a full disk the file that is there stays, or an empty one is made: that takes no block.
    """
    number = str(files.process_id()).encode("ascii")
    try:
        replace(files, path, FAILED + number if failed else number)
    except DiskFull:
        if not files.exists(path):
            files.create(path, 0).close()


def note_failure(files: Files, path: Path) -> None:
    """The disk has refused to write or to sync. As far as it lets us, and without a sync."""
    with suppress(StoreError, Shortage):
        file = files.open(path)
        try:
            file.pwrite(FAILED + str(files.process_id()).encode("ascii"), 0)
        finally:
            file.close()


def records_failure(files: Files, path: Path) -> bool:
    """Whether :func:`note_failure` was called since the store was last recovered."""
    return (files.read(path) or b"").startswith(FAILED)

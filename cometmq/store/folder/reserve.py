"""Room that the next opening will need: ``docs/format/store-layout.md`` §4.

An opening writes small files before anything is served: whose store it is, its epoch, ``abort``. On
a volume that is full to the last byte it could not; and what makes room, retention, runs only in a
store that is open. So while there is plenty, a file of zeros keeps some.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cometmq.errors import Shortage
from cometmq.store.disk.files import ZEROS, Files

# small files, each twice, and the units of a crash's last messages: a block for each queue
RESERVE_BYTES = 256 * 1024
PLENTY_BYTES = 4 * RESERVE_BYTES  # nobody shall lack what we keep


def keep(files: Files, path: Path) -> None:
    """Keep the room, if there is plenty and it is not kept already."""
    kept = [e.size for e in files.entries(path.parent) if e.name == path.name]
    if kept == [RESERVE_BYTES] or files.usage(path.parent).free_bytes < PLENTY_BYTES:
        return
    with suppress(Shortage):  # somebody else took it this moment: the next opening tries again
        files.unlink(path)  # which a crash cut short
        file = files.create(path, 0)
        try:
            file.pwrite(ZEROS[:RESERVE_BYTES], 0)
        finally:
            file.close()


def use(files: Files, path: Path) -> None:
    """Give the room back if it is needed now."""
    if files.usage(path.parent).free_bytes < RESERVE_BYTES:
        files.unlink(path)

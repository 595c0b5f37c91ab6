"""Room that the next opening will need: ``docs/format/store-layout.md`` §4.

An opening writes before anything is served: whose store it is, its epoch, ``abort``, and a state
snapshot of the state, which the log may need a file for. On a volume that is full to the last byte
it could not; and what makes room, retention, runs only in a store that is open. So while there is
plenty, a file of zeros keeps some.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from cometmq.errors import Shortage
from cometmq.store.disk.files import ZEROS, Files
from cometmq.store.layout import SPARE

# small files, each twice, and the units of a crash's last messages: a block for each queue
RESERVE_BYTES = 256 * 1024
SPARE_BYTES = 4096  # no small file that a start replaces is longer
OTHERS_BYTES = 3 * RESERVE_BYTES  # that stay free besides, for other programs
# Of the state: the opening's, and two behind which retention may remove the oldest log file.
COPIES = 3


def keep(files: Files, path: Path, state_bytes: int = 0) -> None:
    """Keep the room for copies of a state of that size, if there is plenty and it is not kept
    already. It grows, and never gets smaller while it exists.
    """
    _keep_spare(files, path.with_name(SPARE))
    wanted = RESERVE_BYTES + COPIES * state_bytes
    kept = _kept(files, path)
    if kept >= wanted or files.usage(path.parent).free_bytes < wanted - kept + OTHERS_BYTES:
        return
    with suppress(Shortage):  # another program took the space: a later call tries again
        file = files.open(path) if kept or files.exists(path) else files.create(path, 0)
        try:
            for at in range(kept, wanted, len(ZEROS)):
                file.pwrite(ZEROS[: min(len(ZEROS), wanted - at)], at)
        finally:
            file.close()


def _keep_spare(files: Files, path: Path) -> None:
    """Keep a block for the small files that a start replaces. What :func:`use` gives back may go to
    others: a file system keeps its last blocks for root.
    """
    if not files.exists(path):
        with suppress(Shortage):
            file = files.create(path, 0)
            try:
                file.pwrite(ZEROS[:SPARE_BYTES], 0)
            finally:
                file.close()


def use(files: Files, path: Path) -> None:
    """Give the room back if it may be needed now."""
    kept = _kept(files, path)
    if kept and files.usage(path.parent).free_bytes < kept + OTHERS_BYTES:
        files.unlink(path)


def _kept(files: Files, path: Path) -> int:
    return sum(entry.size for entry in files.entries(path.parent) if entry.name == path.name)

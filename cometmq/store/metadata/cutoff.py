"""Parts of a member's log that its group does not have: kept as files, for people.

A member that wrote, or copied, more than the writer after it had, cuts that off when it comes back.
Of asynchronous topics that may be messages which were acknowledged. ``cometmq store dump`` does not
read these files: they hold records as the log does, from the log offset in their name on
(``docs/format/store-layout.md``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from cometmq.store.disk.files import Files

# epoch, first log offset, and the one behind the last
NAME = re.compile(r"([0-9]+)-([0-9]+)-([0-9]+)\.log")
BYTES_MAX = 256 * 1024 * 1024  # of one cut; what comes behind is reported, not kept
FILES_MAX = 16  # the oldest go
PIECE_BYTES = 1024 * 1024

Read = Callable[[int, int], bytes]  # log offset, most bytes → at least one, at most those


def keep(files: Files, folder: Path, read: Read, start: int, end: int, epoch: int) -> int:
    """Keep the log from ``start`` to ``end``, which ``epoch`` wrote the last of; how many bytes of
    it are kept. On the disk at return.
    """
    assert 0 <= start < end, (start, end)
    files.make_directories(folder)
    known = kept(files, folder)
    for number, first, stop in known[: max(0, len(known) - FILES_MAX + 1)]:
        files.unlink(folder / f"{number}-{first}-{stop}.log")
    kept_end = min(end, start + BYTES_MAX)
    path = folder / f"{epoch}-{start}-{kept_end}.log"
    file = files.create(path, kept_end - start)
    try:
        at = start
        while at < kept_end:
            piece = read(at, min(PIECE_BYTES, kept_end - at))
            assert piece, (at, kept_end)
            file.pwrite(piece, at - start)
            at += len(piece)
        file.sync()
    finally:
        file.close()
    files.sync_directory(folder)
    return kept_end - start


def kept(files: Files, folder: Path) -> list[tuple[int, int, int]]:
    """Epoch, first offset and end of every file, oldest first; of other files none."""
    if not files.exists(folder):
        return []
    names = (NAME.fullmatch(entry.name) for entry in files.entries(folder))
    return sorted((int(n[1]), int(n[2]), int(n[3])) for n in names if n is not None)

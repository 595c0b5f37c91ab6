"""The list of the index's files, and what they were made from. docs/format/timers.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

from cometmq.errors import StoreFailed
from cometmq.store.disk.files import Files
from cometmq.store.timers.entries import ENTRY
from cometmq.store.timers.runs import RunFile

CATALOG = "runs.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Coverage:
    """The files have all timers behind ``after`` of the messages from ``first`` up to ``end`` of
    the timer queue of a store. ``epoch`` wrote the last of these messages, at ``log_offset``: a log
    that has this epoch there has the same messages before.
    """

    store_id: str
    epoch: int
    log_offset: int
    first: int
    end: int
    after: bytes  # an entry


@dataclass(frozen=True, slots=True)
class Catalog:
    coverage: Coverage
    files: tuple[RunFile, ...]


def write_catalog(folder: Path, files: Files, catalog: Catalog) -> None:
    """Replaces the list in one step. Blocking. DiskFull, StoreFailed."""
    covered = catalog.coverage
    text = json.dumps(
        {
            "v": VERSION,
            "store": covered.store_id,
            "epoch": covered.epoch,
            "log": covered.log_offset,
            "first": covered.first,
            "end": covered.end,
            "after": list(ENTRY.unpack(covered.after)),
            "runs": [list(file) for file in catalog.files],
        },
        separators=(",", ":"),
    )
    data = f"{text}\n{crc32(text.encode()):08x}\n".encode()
    new = folder / f"{CATALOG}.new"
    files.unlink(new)
    file = files.create(new, len(data))
    try:
        file.pwrite(data, 0)
    finally:
        file.close()
    files.rename(new, folder / CATALOG)


def read_catalog(folder: Path, files: Files) -> Catalog | None:
    """None: there is none that is whole and can be read, of this version."""
    try:
        data = files.read(folder / CATALOG)
    except StoreFailed:
        return None
    if data is None:
        return None
    text, _, rest = data.partition(b"\n")
    if rest != f"{crc32(text):08x}\n".encode():
        return None
    try:
        return _catalog(json.loads(text))
    except (ValueError, TypeError, KeyError):
        return None


def _catalog(fields: dict[str, Any]) -> Catalog | None:
    if fields["v"] != VERSION:
        return None
    epoch, log_offset, first, end = (int(fields[name]) for name in ("epoch", "log", "first", "end"))
    due_ms, offset = fields["after"]
    runs = tuple(RunFile(str(name), int(count)) for name, count in fields["runs"])
    if any("/" in run.name or not run.name or run.entry_count < 1 for run in runs):
        return None
    after = ENTRY.pack(int(due_ms), int(offset))
    return Catalog(Coverage(str(fields["store"]), epoch, log_offset, first, end, after), runs)

"""Files in rows, and the small files, as ``docs/format/store-layout.md``, ``checkpoint.md`` and
``epochs.md`` have them.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.independent.record import expect

CHECKPOINT = struct.Struct(">6q")
CHECKPOINT_MARK_AT = 256
CHECKPOINT_MARK = struct.Struct(">8sqqiIiqI")
CHECKPOINT_REACH = struct.Struct(">qI")
CHECKPOINT_START_AT = 384
CHECKPOINT_BYTES = 4096
FILE_NAME = re.compile(r"[0-9]{20}")
TRASH = re.compile(r"cometmq\.trash\.[0-9]+")
ZEROS = bytes(1 << 20)

FOLDERS = frozenset({"commitlog", "consumequeue", "index", "config"})
MAY_HOLD_ZEROS = ("cometmq.next", "cometmq.reserve")
REPLACED = frozenset({"cometmq.json", "cometmq.epochs", "cometmq.heads", "checkpoint", "abort"})
OURS = frozenset({*REPLACED, "lock", "cometmq.spare", *MAY_HOLD_ZEROS})
RESERVE_BYTES_MAX = 262_144 + 3 * (1 << 20)  # a MiB of state is more than any test has
ROCKETMQS = frozenset({"timerwheel", "timerlog"})

View = mmap.mmap | bytes


def entries(folder: Path) -> list[Path]:
    """What counts in a folder, by name."""
    found = sorted(folder.iterdir()) if folder.exists() else []
    return [path for path in found if path.name[0] != "." and path.name != "lost+found"]


def expect_tree(root: Path, log_file_bytes: int) -> None:
    """In a store's folder there is nothing that the document does not name."""
    drafts = {f"{name}.new" for name in REPLACED}
    for path in entries(root):
        folder = path.name in FOLDERS or TRASH.fullmatch(path.name) is not None
        file = path.name in OURS | drafts or path.suffix == ".bak"
        named = folder or file or path.name in ROCKETMQS
        expect(named, path, "a name that does not belong here")
        expect(path.is_dir() if folder else path.is_file() or not file, path, "of another kind")
    for name, most in zip(MAY_HOLD_ZEROS, (log_file_bytes, RESERVE_BYTES_MAX), strict=True):
        zeros = root / name
        if zeros.exists():
            made = zeros.read_bytes()
            expect(len(made) <= most and not any(made), zeros, "not made of so many zeros")


# --- rows of files --------------------------------------------------------------------------------


class Row:
    """The files of a folder as one row of bytes, [start, end); names are first offsets."""

    def __init__(self, folder: Path) -> None:
        self._views: list[View] = []
        self.folder = folder
        self.mended = False  # a crash, or a copy that broke off, has left the last file too short
        paths = entries(folder)
        for path in paths:
            legal = path.is_file() and FILE_NAME.fullmatch(path.name) is not None
            expect(legal, path, "a name that does not belong here")
        if paths and not paths[-1].stat().st_size:
            paths.pop()
            self.mended = True
        self.file_bytes = paths[0].stat().st_size if paths else 0
        self.start = int(paths[0].name) if paths else 0
        self.end = self.start
        for path in paths:
            self._add(path, path is paths[-1])

    def _add(self, path: Path, last: bool) -> None:
        length = path.stat().st_size
        missing = self.file_bytes - length
        expect(not missing or (last and missing > 0), path, "its length differs from the others'")
        expect(int(path.name) == self.end, path, f"offset {self.end} should follow")
        expect(self.end % self.file_bytes == 0, path, "not a multiple of the files' size")
        if missing:
            self._views.append(path.read_bytes() + bytes(missing))
            self.mended = True
        else:
            with path.open("rb") as file:
                self._views.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        self.end += self.file_bytes

    def close(self) -> None:
        for view in self._views:
            if isinstance(view, mmap.mmap):
                view.close()

    def files(self) -> Iterator[tuple[int, View]]:
        """(offset of the first byte, bytes) of each file."""
        return zip(range(self.start, self.end, self.file_bytes or 1), self._views, strict=True)

    def at(self, offset: int) -> tuple[View, int]:
        """A file, and where in it that offset is."""
        number, within = divmod(offset - self.start, self.file_bytes)
        return self._views[number], within

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end), less where the row ends."""
        parts = []
        at, end = max(start, self.start), min(end, self.end)
        while at < end:
            view, within = self.at(at)
            parts.append(view[within : within + end - at])
            at += len(parts[-1])
        return b"".join(parts)

    def expect_zeros(self, start: int) -> None:
        """Nothing was written from ``start`` on."""
        for at in range(start, self.end, len(ZEROS)):
            chunk = self.read(at, at + len(ZEROS))
            expect(chunk == ZEROS[: len(chunk)], f"{self.folder} behind {at}", "not zeros")


# --- small files ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mark:
    """Up to ``end`` log and queues are on the disk."""

    end: int
    last_offset: int
    last_bytes: int
    last_crc32: int
    queue_count: int
    unit_count: int

    @property
    def counts(self) -> tuple[int, int]:
        return self.queue_count, self.unit_count


@dataclass(frozen=True)
class Identity:
    """``cometmq.json``; ``clean`` is None after a crash, ``foreign`` once an adoption is done."""

    store_id: str
    clean: Mark | None
    foreign: int | None


def read_identity(path: Path) -> Identity:
    fields = json.loads(path.read_text(encoding="utf-8"))
    crc32 = fields.pop("crc32", None)
    sealed = json.dumps(fields, separators=(",", ":"), sort_keys=True).encode("ascii")
    expect(crc32 in (None, zlib.crc32(sealed)), path, f"crc32 {crc32}")
    sizes = ["log_file_bytes", "queue_file_bytes", "hash_slots", "index_entries"]
    optional: dict[str, Callable[[Any], bool]] = {
        "recovered": lambda value: type(value) is bool,
        "has_state": lambda value: type(value) is bool,
        "foreign": lambda value: value is None or type(value) is int,
        "former_store_id": lambda value: re.fullmatch("(?:[0-9a-f]{32})?", value) is not None,
        "state_lost": lambda value: (
            value is None or all(type(count) is int and count > 0 for count in value.values())
        ),
        "options": lambda value: (
            value is None
            or (
                list(value) == [*sizes, "transient_bytes_max"]
                and all(type(size) is int for size in value.values())
            )
        ),
    }
    required: dict[str, Callable[[Any], bool]] = {
        "version": lambda value: value == 1,
        "store_id": lambda value: re.fullmatch("[0-9a-fA-F]{32}", value) is not None,
        "boot_id": lambda value: True,
        "clean": lambda value: value is None or set(value) == set(Mark.__annotations__),
    }
    expect(required.keys() <= fields.keys(), path, f"has only {sorted(fields)}")
    for name, value in fields.items():
        legal = (required | optional).get(name)
        expect(legal is not None and legal(value), path, f"{name} is {value!r}")
    clean = fields["clean"]
    mark = None if clean is None else Mark(**clean)
    return Identity(fields["store_id"], mark, fields.get("foreign"))


class Epoch(NamedTuple):
    number: int
    start: int


def read_epochs(path: Path) -> list[Epoch]:
    """Oldest first; numbers and starts increase strictly. A follower that has copied nothing yet
    has none.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    expect(lines[:1] == [b"cometmq-epochs 1\n"], path, f"begins {lines[:1]}")
    sealed = b"crc32 %08x\n" % zlib.crc32(b"".join(lines[:-1]))
    expect(lines[-1] == sealed, path, f"last line {lines[-1]!r}, not {sealed!r}")
    epochs = []
    for line in lines[1:-1]:
        expect(re.fullmatch(rb"[1-9][0-9]* (0|[1-9][0-9]*)\n", line) is not None, path, repr(line))
        epochs.append(Epoch(*map(int, line.split())))
    for older, newer in pairwise(epochs):
        rises = older.number < newer.number and older.start < newer.start
        expect(rises, path, f"{newer} behind {older}")
    return epochs


class Head(NamedTuple):
    """What a log file begins with; times in ms."""

    start: int
    epoch: int
    size: int
    body_crc: int
    born_time_ms: int
    store_time_ms: int


def read_heads(path: Path) -> list[Head]:
    """In the order of the log files; none without the list."""
    heads = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        text, _, sealed = line.rpartition(b" ")
        expect(sealed == b"%08x" % zlib.crc32(text), path, f"{line!r} does not fit its checksum")
        heads.append(Head(*map(int, text.split(b" "))))
    expect(heads == sorted(heads), path, "not in the order of the log files")
    return heads


class Checkpoint(NamedTuple):
    """Store times in ms; 0 = none."""

    log_time_ms: int
    queue_time_ms: int
    index_time_ms: int
    master_flushed_offset: int
    confirm_offset: int
    durable_offset: int
    mark: Mark | None
    reach: int | None


def read_checkpoint(path: Path) -> Checkpoint:
    if not path.exists():
        return Checkpoint(0, 0, 0, 0, 0, 0, None, None)
    data = path.read_bytes()
    expect(len(data) == CHECKPOINT_BYTES, path, f"{len(data)} bytes")
    mark_end = CHECKPOINT_MARK_AT + CHECKPOINT_MARK.size
    reach_end = mark_end + CHECKPOINT_REACH.size
    start_end = CHECKPOINT_START_AT + CHECKPOINT_REACH.size
    rest = data[CHECKPOINT.size : CHECKPOINT_MARK_AT] + data[reach_end:CHECKPOINT_START_AT]
    rest += data[start_end:]
    expect(not any(rest), path, "not zeros behind the fields")
    fields = CHECKPOINT.unpack_from(data)
    expect(min(fields) >= 0, path, f"negative: {fields}")
    # Without its magic or its seal a mark is none, and without its seal the reach is not known.
    magic, *numbers, seal = CHECKPOINT_MARK.unpack_from(data, CHECKPOINT_MARK_AT)
    sealed = zlib.crc32(data[CHECKPOINT_MARK_AT : mark_end - 4])
    mark = Mark(*numbers) if (magic, seal) == (b"cometmq1", sealed) else None
    reach, seal = CHECKPOINT_REACH.unpack_from(data, mark_end)
    known = seal == zlib.crc32(data[mark_end : reach_end - 4])
    return Checkpoint._make((*fields, mark, reach if known else None))

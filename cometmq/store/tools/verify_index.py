"""The key index against the log, both ways: its entries are the keys of the log's records, in the
same order.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from cometmq.format import indexfile, record
from cometmq.format.indexfile import ENTRY_BYTES, HEADER_BYTES, KEY, SLOT_BYTES, Header, Sizes
from cometmq.format.indexkeys import keys_of_chunk
from cometmq.store import layout
from cometmq.store.disk.files import File, Files
from cometmq.store.log.scanning import Stretch

PLACE = struct.Struct(">iq8x")  # of an entry: the key's hash, and where the record starts
assert PLACE.size == ENTRY_BYTES
ENTRIES_AT_ONCE = 50_000
TAG_KEY = "T#"  # stands before a tag that is a key
FAULTS_MAX = 20

Finding = tuple[Path, int | None, str]  # file or folder, log offset, what


class IndexCheck:
    """Entries are read as the log comes to what they point to."""

    def __init__(self, files: Files, directory: Path, sizes: Sizes, log_start: int) -> None:
        self.faults: list[Finding] = []
        self.notes: list[str] = []
        self.entry_count = 0
        self._files = files
        self._directory = directory
        self._sizes = sizes
        self._log_start = log_start
        self._ahead: deque[tuple[int, int]] = deque()  # (log offset, hash) of entries
        self._headers: list[tuple[str, Header]] = []
        self._from = self._to = -1  # log offsets that the index speaks of
        self._blocks = self._entries()
        self._open()

    def _open(self) -> None:
        for entry in self._files.entries(self._directory):
            if layout.is_ignored(entry.name) or not entry.size:
                continue
            path = self._directory / entry.name
            if layout.INDEX_NAME.fullmatch(entry.name) is None or entry.is_directory:
                self.faults.append((path, None, "is not a file of a key index"))
            elif entry.size != self._sizes.file_bytes:
                self.notes.append(
                    f"{path} has {entry.size} bytes: made with other sizes; not looked at: "
                    "--hash-slots and --index-entries tell its sizes"
                )
            else:
                self._add(path)
        if self._headers:
            self._from = self._headers[0][1].begin_offset
            self._to = self._headers[-1][1].end_offset

    def _add(self, path: Path) -> None:
        file = self._files.open(path)
        try:
            header = indexfile.decode_header(file.pread(HEADER_BYTES, 0))
            if header.next_entry > self._sizes.entries:
                self.faults.append((path, None, f"counts {header.next_entry} entries"))
            elif not header.is_empty:
                self._check_slots(path, file, header)
                self._headers.append((path.name, header))
        finally:
            file.close()

    def _check_slots(self, path: Path, file: File, header: Header) -> None:
        slots = array("i", file.pread(self._sizes.hash_slots * SLOT_BYTES, HEADER_BYTES))
        slots.byteswap()
        if max(slots) >= header.next_entry:
            self.faults.append((path, None, f"a slot names entry {max(slots)}, there is none"))
        used = len(slots) - slots.count(0)
        if used != header.used_slots:
            what = f"{used} slots are used, the header counts {header.used_slots}"
            self.faults.append((path, None, what))

    def _entries(self) -> Iterator[list[tuple[int, int]]]:
        """(log offset, hash) of all entries, in pieces. A file stays as long as one of its keys has
        a message, so the first may begin before the log.
        """
        for name, header in self._headers:
            file = self._files.open(self._directory / name)
            self.entry_count += header.next_entry - 1
            try:
                for first in range(1, header.next_entry, ENTRIES_AT_ONCE):
                    count = min(ENTRIES_AT_ONCE, header.next_entry - first)
                    at = self._sizes.entries_at + first * ENTRY_BYTES
                    entries = file.pread(count * ENTRY_BYTES, at)
                    pairs = [(place, code) for code, place in PLACE.iter_unpack(entries)]
                    yield [pair for pair in pairs if pair[0] >= self._log_start]
            finally:
                file.close()

    def take(self, stretch: Stretch, data: bytes) -> None:
        """The next records of the log, and their bytes."""
        if not self._headers or stretch.start > self._to or stretch.end <= self._from:
            return
        expected = [
            (place, code)
            for code, place, _ in KEY.iter_unpack(keys_of_chunk(data).packed)
            if self._from <= place <= self._to
        ]
        found = self._entries_before(stretch.end)
        if found != expected:
            found = _without_tags(found, data)
        if found == expected or (stretch.end > self._to and found == expected[: len(found)]):
            return
        if len(self.faults) < FAULTS_MAX:
            differing = set(found) ^ set(expected)
            place = min(differing)[0] if differing else stretch.start
            what = f"{len(found)} keys of records up to {stretch.end}, the log has {len(expected)}"
            self.faults.append((self._directory, place, what))

    def _entries_before(self, log_offset: int) -> list[tuple[int, int]]:
        found = []
        while self._fill() and self._ahead[0][0] < log_offset:
            found.append(self._ahead.popleft())
        return found

    def _fill(self) -> bool:
        while not self._ahead:
            block = next(self._blocks, None)
            if block is None:
                return False
            self._ahead.extend(block)
        return True

    def finish(self) -> None:
        """The log has been read."""
        if self._fill():
            place, _ = self._ahead[0]
            self.faults.append((self._directory, place, "keys from here on are not in the log"))


def _without_tags(entries: list[tuple[int, int]], data: bytes) -> list[tuple[int, int]]:
    """The entries of these records but for their tags, by which RocketMQ 5.5 finds them too."""
    tags = {
        (found.log_offset, indexfile.key_hash(found.topic, f"{TAG_KEY}{found.tag}"))
        for found in record.decode_all(data)
        if found.tag
    }
    return [entry for entry in entries if entry not in tags]

"""The key index against the log, both ways: its entries are the keys of the log's records, in the
same order.
"""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cometmq.errors import StoreFailed
from cometmq.format import indexfile, record
from cometmq.format.indexfile import ENTRY_BYTES, HEADER_BYTES, KEY, SLOT_BYTES, Header, Sizes
from cometmq.format.indexkeys import keys_of_chunk
from cometmq.store import layout
from cometmq.store.disk.files import File, Files, Kind
from cometmq.store.log.scan import Stretch

PLACE = struct.Struct(">iq8x")  # of an entry: the key's hash, and where the record starts
assert PLACE.size == ENTRY_BYTES
ENTRIES_AT_ONCE = 50_000
TAG_KEY = "T#"  # in front of a tag that is a key
FAULTS_MAX = 20

Finding = tuple[Path, int | None, str]  # file or folder, log offset, what


class IndexCheck:
    """Entries are read as the log comes to what they point to."""

    """``sizes`` None: the store does not have them. ``known_time_ms``: the keys of all records up
    to this store time should be there, 0 = of none. ``live``: a broker may be adding some.
    """

    def __init__(
        self,
        files: Files,
        directory: Path,
        sizes: Sizes | None,
        log_start: int,
        known_time_ms: int,
        *,
        live: bool,
    ) -> None:
        self.faults: list[Finding] = []
        self.entry_count = 0
        self._files = files
        self._directory = directory
        self._sizes = sizes or self._guessed_sizes()
        self._log_start = log_start
        self._live = live
        self._ahead: deque[tuple[int, int]] = deque()  # (log offset, hash) of entries
        self._headers: list[tuple[str, Header]] = []
        self._from = self._to = -1  # log offsets that the index speaks of
        self._blocks = self._entries()
        self._open(known_time_ms)

    def _guessed_sizes(self) -> Sizes:
        """RocketMQ's, or those of a full file: all files but the last are full."""
        entries = [entry for entry in self._files.entries(self._directory) if entry.size]
        if len(entries) > 1 and entries[0].size != Sizes().file_bytes:
            with self._minding_removal(self._directory / entries[0].name) as file:
                count = indexfile.decode_header(file.pread(HEADER_BYTES, 0)).next_entry
                slots, rest = divmod(
                    entries[0].size - HEADER_BYTES - count * ENTRY_BYTES, SLOT_BYTES
                )
                if count > 1 and slots > 0 and not rest:
                    return Sizes(slots, count)
        return Sizes()

    def _open(self, known_time_ms: int) -> None:
        for entry in self._files.entries(self._directory):
            if layout.is_ignored(entry.name) or (not entry.size and not entry.is_directory):
                continue
            path = self._directory / entry.name
            if layout.INDEX_NAME.fullmatch(entry.name) is None or entry.kind is not Kind.FILE:
                self.faults.append((path, None, "is not a file of a key index"))
            elif entry.size != self._sizes.file_bytes:
                self.faults.append(
                    (
                        path,
                        None,
                        f"has {entry.size} bytes, not the {self._sizes.file_bytes} of "
                        f"{self._sizes.hash_slots} slots and {self._sizes.entries} entries: not "
                        "looked at. Give other sizes with --hash-slots and --index-entries",
                    )
                )
            else:
                self._add(path)
        if self._headers:
            self._from = self._headers[0][1].begin_offset
            self._to = self._headers[-1][1].end_offset
        newest_ms = self._headers[-1][1].end_time_ms if self._headers else 0
        if newest_ms < known_time_ms:
            what = f"ends at store time {newest_ms}, {known_time_ms} was on the disk"
            self.faults.append((self._directory, None, what))
        if known_time_ms and self._headers:
            self._from = min(self._from, self._log_start)

    def _add(self, path: Path) -> None:
        with self._minding_removal(path) as file:
            header = indexfile.decode_header(file.pread(HEADER_BYTES, 0))
            if header.next_entry > self._sizes.entries:
                self.faults.append((path, None, f"counts {header.next_entry} entries"))
            elif header.is_empty:
                # RocketMQ makes files ahead of their use, and names in them the end of the one
                # before.
                if not self._live and self._headers and header == Header():
                    self.faults.append((path, None, "has no keys"))
            else:
                # Slots of a file that keys are being put into are ahead of its header.
                if not (self._live and self._sizes.room(header)):
                    self._check_slots(path, file, header)
                self._headers.append((path.name, header))

    @contextmanager
    def _minding_removal(self, path: Path) -> Iterator[File]:
        """A file, which retention may remove before it is opened."""
        file = self._files.open(path)
        try:
            yield file
        except StoreFailed:
            if self._files.exists(path):
                raise
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
            read_bytes = 0
            with self._minding_removal(self._directory / name) as file:
                for first in range(1, header.next_entry, ENTRIES_AT_ONCE):
                    count = min(ENTRIES_AT_ONCE, header.next_entry - first)
                    at = self._sizes.entries_at + first * ENTRY_BYTES
                    entries = file.pread(count * ENTRY_BYTES, at)
                    self.entry_count += count
                    read_bytes += len(entries)
                    pairs = [(place, code) for code, place in PLACE.iter_unpack(entries)]
                    yield [pair for pair in pairs if pair[0] >= self._log_start]
            if read_bytes < (header.next_entry - 1) * ENTRY_BYTES:
                # It has gone, with all messages that it speaks of.
                self.skip_to(header.end_offset + 1)

    def skip_to(self, log_offset: int) -> None:
        """Look at nothing before this place."""
        self._from = max(self._from, log_offset)

    def take(self, stretch: Stretch, data: bytes) -> None:
        """The next records of the log, and their bytes."""
        if not self._headers or stretch.start > self._to or stretch.end <= self._from:
            return
        found = []
        while self._fill() and self._ahead[0][0] < stretch.end:
            found.append(self._ahead.popleft())
        found = [entry for entry in found if entry[0] >= self._from]
        expected = [
            (place, code)
            for code, place, _ in KEY.iter_unpack(keys_of_chunk(data).packed)
            if self._from <= place <= self._to
        ]
        if found != expected:
            found = _without_tags(found, data)
        if found == expected or (stretch.end > self._to and found == expected[: len(found)]):
            return
        if len(self.faults) < FAULTS_MAX:
            differing = set(found) ^ set(expected)
            place = min(differing)[0] if differing else stretch.start
            what = f"{len(found)} keys of records up to {stretch.end}, the log has {len(expected)}"
            self.faults.append((self._directory, place, what))

    def _fill(self) -> bool:
        while not self._ahead:
            block = next(self._blocks, None)
            if block is None:
                return False
            self._ahead.extend(block)
        return True

    def finish(self) -> None:
        """The log has been read."""
        while self._fill() and self._ahead[0][0] < self._from:
            self._ahead.popleft()
        if self._ahead:
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

"""Sorted runs of entries, in memory and in files. docs/format/timers.md.

A file is a row of blocks, each with its CRC-32. A block that does not fit is damage: the index is
made again from the queue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol
from zlib import crc32

from cometmq.errors import StoreDamaged, StoreFailed
from cometmq.store.disk.files import Files
from cometmq.store.timers.entries import ENTRY_BYTES, count_up_to

BLOCK_ENTRIES = 4096
BLOCK_BYTES = BLOCK_ENTRIES * ENTRY_BYTES
CRC_BYTES = 4


class Run(Protocol):
    """Entries in order, read forward."""

    @property
    def left(self) -> int:
        """How many were not taken."""

    def peek(self, count: int) -> bytes:
        """The next entries; of a file not more than its block has."""

    def take(self, count: int) -> None:
        """Go on behind the next ``count`` entries, which were seen."""

    def rank(self, key: bytes) -> int:
        """How many entries of all, taken or not, are not above ``key``, an entry."""

    def slice(self, first: int, count: int) -> bytes:
        """At most ``count`` entries from entry ``first`` on; of a file from one block."""

    def close(self) -> None:
        """End the reading."""


class MemoryRun:
    """``entries`` are sorted."""

    def __init__(self, entries: bytes) -> None:
        self._entries = entries
        self._next = 0

    @property
    def left(self) -> int:
        return len(self._entries) // ENTRY_BYTES - self._next

    @property
    def rest(self) -> bytes:
        """All that is left."""
        return self._entries[self._next * ENTRY_BYTES :] if self._next else self._entries

    def peek(self, count: int) -> bytes:
        return self.slice(self._next, count)

    def take(self, count: int) -> None:
        assert count <= self.left
        self._next += count

    def rank(self, key: bytes) -> int:
        return count_up_to(self._entries, key)

    def slice(self, first: int, count: int) -> bytes:
        return self._entries[first * ENTRY_BYTES : (first + count) * ENTRY_BYTES]

    def close(self) -> None:
        self._entries = b""
        self._next = 0


class RunFile(NamedTuple):
    """A file of the index, as the list of runs names it."""

    name: str
    entry_count: int


class FileRun:
    """The entries of a file behind ``after``, an entry. Blocking. Any method may raise
    StoreDamaged.
    """

    def __init__(self, folder: Path, file: RunFile, files: Files, after: bytes) -> None:
        self.file = file
        self._path = folder / file.name
        self._block_number = -1
        self._block = b""
        try:
            self._data = files.open(self._path)
        except StoreFailed as error:
            raise StoreDamaged(error.message) from error
        try:
            self._next = self.rank(after)
        except BaseException:
            self.close()
            raise

    @property
    def left(self) -> int:
        return self.file.entry_count - self._next

    def peek(self, count: int) -> bytes:
        return self.slice(self._next, count)

    def take(self, count: int) -> None:
        assert count <= self.left
        self._next += count

    def rank(self, key: bytes) -> int:
        # The block by its first entry, then within it.
        low, high = 0, -(-self.file.entry_count // BLOCK_ENTRIES)
        while low < high:
            middle = (low + high) // 2
            if self._block_at(middle)[:ENTRY_BYTES] <= key:
                low = middle + 1
            else:
                high = middle
        if not low:
            return 0
        return (low - 1) * BLOCK_ENTRIES + count_up_to(self._block_at(low - 1), key)

    def slice(self, first: int, count: int) -> bytes:
        if first >= self.file.entry_count:
            return b""
        number, at = divmod(first, BLOCK_ENTRIES)
        return self._block_at(number)[at * ENTRY_BYTES : (at + count) * ENTRY_BYTES]

    def _block_at(self, number: int) -> bytes:
        if number != self._block_number:
            count = min(BLOCK_ENTRIES, self.file.entry_count - number * BLOCK_ENTRIES)
            size = count * ENTRY_BYTES + CRC_BYTES
            try:
                data = self._data.pread(size, number * (BLOCK_BYTES + CRC_BYTES))
            except StoreFailed as error:  # what cannot be read is made again
                raise StoreDamaged(error.message) from error
            block, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
            if len(data) != size or crc32(block).to_bytes(CRC_BYTES, "big") != crc:
                raise StoreDamaged(f"block {number} of {self._path} does not fit its checksum")
            self._block, self._block_number = block, number
        return self._block

    def close(self) -> None:
        self._data.close()


def size_of(count: int) -> int:
    """Bytes of a file with so many entries."""
    return count * ENTRY_BYTES + -(-count // BLOCK_ENTRIES) * CRC_BYTES


def write_run(
    folder: Path, name: str, files: Files, count: int, pieces: Iterable[bytes]
) -> RunFile:
    """Writes ``count`` sorted entries, piece by piece, as a file. Blocking. DiskFull, StoreFailed;
    then a part of the file may be there.
    """
    file = files.create(folder / name, size_of(count))
    try:
        at = 0
        for block in _blocks(pieces):
            data = block + crc32(block).to_bytes(CRC_BYTES, "big")
            file.pwrite(data, at)
            at += len(data)
        assert at == size_of(count), (at, count)
    finally:
        file.close()
    return RunFile(name, count)


def _blocks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        rest = rest + piece if rest else piece
        whole = len(rest) // BLOCK_BYTES * BLOCK_BYTES
        for at in range(0, whole, BLOCK_BYTES):
            yield rest[at : at + BLOCK_BYTES]
        rest = rest[whole:]
    if rest:
        yield rest

"""A contiguous run of files of one size, found by offset: what a log and a queue have in common."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cometmq.errors import StoreForeignFile
from cometmq.store import layout
from cometmq.store.files import Entry, Files
from cometmq.store.segment import Segment


class Segments:
    """The files of one folder, oldest first. Readers may look things up while the writer adds at
    the end.
    """

    __slots__ = ("_list", "base", "directory", "file_bytes")

    def __init__(self, directory: Path, file_bytes: int) -> None:
        assert file_bytes > 0, file_bytes
        self.directory = directory
        self.file_bytes = file_bytes
        self.base = 0  # where the first file will start, while there is none
        self._list: list[Segment] = []

    def load(self, files: Files) -> None:
        """Take up the files of the folder; anything but whole files in a row is
        :class:`StoreForeignFile`.

        A last file without a byte is what a crash left of the making of a file: it is removed, as
        RocketMQ 5 does.
        """
        assert not self._list, self.directory
        entries = files.entries(self.directory)
        if entries and _is_unfinished(entries[-1]):
            files.unlink(self.directory / entries.pop().name)
        for entry in entries:
            self.add(files, self._checked_start(entry))

    def add(self, files: Files, start: int) -> Segment:
        """Take up the file that starts at ``start``, which exists and follows the last one."""
        assert not self._list or start == self.end, (self.directory, start, self.end)
        segment = Segment(files.open(self.path(start)), start, self.file_bytes)
        self._list.append(segment)
        return segment

    def path(self, start: int) -> Path:
        return self.directory / layout.offset_name(start)

    def find(self, offset: int) -> Segment | None:
        """The file that holds ``offset``."""
        if not self._list:
            return None
        index = (offset - self._list[0].start) // self.file_bytes
        return self._list[index] if 0 <= index < len(self._list) else None

    def pread(self, offset: int, size: int) -> bytes:
        """``size`` bytes at ``offset``; none at all when they do not lie in one of the files."""
        segment = self.find(offset)
        if segment is None or offset + size > segment.end:
            return b""
        return segment.pread(offset, size)

    def remove_after(self, files: Files, offset: int) -> bool:
        """Remove the files that start at ``offset`` or later, newest first; True when there were
        any.
        """
        removed = False
        while self._list and self._list[-1].start >= offset:
            segment = self._list.pop()
            segment.file.close()
            files.unlink(segment.file.path)
            removed = True
        return removed

    def remove_last(self, files: Files) -> None:
        """Remove the newest file, off the disk at return."""
        segment = self._list.pop()
        segment.file.close()
        files.unlink(segment.file.path)
        files.sync_directory(self.directory)

    def close(self) -> None:
        for segment in self._list:
            segment.file.close()

    @property
    def start(self) -> int:
        """The first offset that a file holds; without files ``base``."""
        return self._list[0].start if self._list else self.base

    @property
    def end(self) -> int:
        """The offset behind the last file; without files ``base``."""
        return self._list[-1].end if self._list else self.base

    def __len__(self) -> int:
        return len(self._list)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._list)

    def __reversed__(self) -> Iterator[Segment]:
        return reversed(self._list)

    def _checked_start(self, entry: Entry) -> int:
        path = self.directory / entry.name
        start = layout.parse_offset_name(entry.name, self.directory)
        if entry.is_directory:
            raise StoreForeignFile(f"{path} is a folder where a file of the store is expected")
        if entry.size != self.file_bytes:
            raise StoreForeignFile(
                f"{path} has {entry.size} bytes, files of this store have {self.file_bytes}"
            )
        if start % self.file_bytes or (self._list and start != self.end):
            raise StoreForeignFile(
                f"{path} does not follow the file before it: expected offset {self.end}"
            )
        return start


def _is_unfinished(entry: Entry) -> bool:
    is_ours = layout.OFFSET_NAME.fullmatch(entry.name) is not None
    return is_ours and not entry.is_directory and entry.size == 0

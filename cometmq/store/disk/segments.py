"""A contiguous run of files of one size, found by offset: what a log and a queue have in common."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from cometmq.errors import StoreForeignFile
from cometmq.native.interface import SharedOffsets
from cometmq.store import layout
from cometmq.store.disk.files import Buffer, Entry, File, Files, Kind

logger = logging.getLogger(__name__)

# Files come and go rarely and fast: one lock is enough for all folders.
_CHANGING = threading.Lock()


class Segment:
    """One file of fixed size: the bytes from ``start`` to ``end`` of the row. All offsets here are
    offsets in the row, not in the file.
    """

    __slots__ = ("end", "file", "start")

    def __init__(self, file: File, start: int, size: int) -> None:
        assert size > 0, (file.path, size)
        assert start >= 0, (file.path, start)
        assert start % size == 0, (file.path, start, size)
        self.file = file
        self.start = start
        self.end = start + size

    def pread(self, offset: int, size: int, *, nowait: bool = False) -> bytes:
        """``size`` bytes at ``offset``, which must not cross the end; fewer when the file was
        closed meanwhile.
        """
        assert self.start <= offset <= offset + size <= self.end, (self.file.path, offset, size)
        return self.file.pread(size, offset - self.start, nowait=nowait)

    def is_unreadable(self, start: int, end: int) -> bool:
        """Whether reads found that the disk cannot read all from ``start`` to ``end``."""
        return self.file.is_unreadable(start - self.start, end - self.start)

    def pwrite(self, offset: int, data: Buffer) -> None:
        assert self.start <= offset <= offset + len(data) <= self.end, (self.file.path, offset)
        self.file.pwrite(data, offset - self.start)


class _Short:
    """A file that lacks its end, read as if that were zeros; only :meth:`Segments.mend` writes."""

    def __init__(self, file: File, there: int) -> None:
        self.path = file.path
        self.whole = file  # once it is mended
        self._there = there

    def pread(self, size: int, offset: int, *, nowait: bool = False) -> bytes:
        return self.whole.pread(size, offset, nowait=nowait).ljust(size, b"\0")

    def is_unreadable(self, start: int, end: int) -> bool:
        return self.whole.is_unreadable(start, end)

    def pwrite(self, data: Buffer, offset: int) -> None:
        raise AssertionError(f"{self.path} is written to before it is mended")

    def sync(self) -> None:
        """There is nothing of ours in it."""

    def sync_while_wanted(self, offsets: SharedOffsets, stop: int, write_fd: int) -> bool:
        return False

    def data_extents(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        yield from self.whole.data_extents(min(start, self._there), min(end, self._there))

    def close(self) -> None:
        self.whole.close()


class Segments:
    """The files of one folder, oldest first. Readers may look things up while one thread adds at
    the end and another removes from the front: the list only grows, or is replaced whole.
    """

    __slots__ = ("_list", "_unfinished", "base", "directory", "file_bytes")

    def __init__(self, directory: Path, file_bytes: int) -> None:
        assert file_bytes > 0, file_bytes
        self.directory = directory
        self.file_bytes = file_bytes
        self.base = 0  # where the first file will start, while there is none
        self._list: list[Segment] = []
        self._unfinished: tuple[Entry, ...] = ()  # what :meth:`mend` has to mend

    def load(self, files: Files, *, gaps_allowed: bool = False) -> bool:
        """Take up the files of the folder; anything but whole files in a row is
        :class:`StoreForeignFile`. With ``gaps_allowed`` False is returned when one is missing
        between two others, and none is taken up.

        Changes nothing on the disk: what a crash or a copy that broke off left of the last file
        reads as if :meth:`mend` had been there, which has to come before anything is written.
        """
        assert not self._list, self.directory
        entries = [e for e in files.entries(self.directory) if not layout.is_ignored(e.name)]
        if entries and _is_unfinished(entries[-1]):
            self._unfinished = (entries.pop(),)
        if gaps_allowed and any(_is_unfinished(e) for e in entries):
            return False  # a power cut took the length of one, and left that of a later one
        starts = [
            self._checked_start(e, is_last=e is entries[-1] is not entries[0]) for e in entries
        ]
        for before, start in pairwise(starts):
            if start != before + self.file_bytes:
                if gaps_allowed:
                    return False
                raise StoreForeignFile(
                    f"{self.path(start)} does not follow the file before it: "
                    f"{self.path(before + self.file_bytes)} is missing; put it back, from a copy "
                    f"or another member, or give it up: {self.repair_command()}"
                )
        for start in starts:
            self.add(files, start)
        if entries and entries[-1].size < self.file_bytes:
            self._unfinished += (entries[-1],)
            self._list[-1].file = _Short(self._list[-1].file, entries[-1].size)
        assert self.end - self.start == len(starts) * self.file_bytes, self.directory
        return True

    @property
    def is_unfinished(self) -> bool:
        """There is something to :meth:`mend`."""
        return bool(self._unfinished)

    def mend(self, files: Files) -> None:
        """What is behind the last whole file: without a byte it is removed, as RocketMQ 5
        does; a shorter one is filled up with zeros, for what was not written reads as zeros.
        """
        for entry in self._unfinished:
            path = self.directory / entry.name
            if not entry.size:
                files.unlink(path)
                continue
            short = self._list[-1].file
            assert isinstance(short, _Short), path
            short.whole.pwrite(b"\0", self.file_bytes - 1)
            short.whole.sync()
            self._list[-1].file = short.whole
            logger.warning("%s had %d bytes: filled up with zeros", path, entry.size)
        self._unfinished = ()

    def add(self, files: Files, start: int) -> Segment:
        """Take up the file that starts at ``start``, which exists and follows the last one."""
        return self.take(files.open(self.path(start)), start)

    def take(self, file: File, start: int) -> Segment:
        """Take up ``file`` as the one that starts at ``start`` and follows the last one."""
        assert not self._list or start == self.end, (self.directory, start, self.end)
        segment = Segment(file, start, self.file_bytes)
        with _CHANGING:
            self._list.append(segment)
        return segment

    def repair_command(self, options: str = "") -> str:
        """What errors of these files advise to call."""
        return layout.repair_command(layout.root_of(self.directory), options)

    def path(self, start: int) -> Path:
        return self.directory / layout.offset_name(start)

    def find(self, offset: int) -> Segment | None:
        """The file that holds ``offset``."""
        files = self._list
        if not files:
            return None
        index = (offset - files[0].start) // self.file_bytes
        return files[index] if 0 <= index < len(files) else None

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
        assert not self._list or self.end < offset + self.file_bytes, (self.directory, offset)
        return removed

    def remove_first(self, files: Files) -> Segment:
        """Remove the oldest file, off the disk at return: were the next one gone before it after a
        crash, there would be a gap. It must not be the last. Reads that have begun come to their
        end.
        """
        with _CHANGING:
            segment, *rest = self._list
            assert rest, f"the last file of {self.directory} stays"
            self._list = rest
        segment.file.close()
        files.unlink(segment.file.path)
        files.sync_directory(self.directory)
        return segment

    def remove_last(self, files: Files) -> None:
        """Remove the newest file, off the disk at return."""
        assert self._list, self.directory
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

    def _checked_start(self, entry: Entry, *, is_last: bool) -> int:
        path = self.directory / entry.name
        start = layout.parse_offset_name(entry.name, self.directory)
        if entry.is_directory or entry.is_special:
            raise StoreForeignFile(
                f"{path} is a {entry.kind.value} where a file of the store is expected: "
                "move it out of the store"
            )
        if entry.is_link:
            raise StoreForeignFile(
                f"{path} is a symbolic link: move it out of the store and put the file itself "
                "there, or keep the whole data folder where the link points to"
            )
        if not entry.size:
            raise StoreForeignFile(
                f"{path} is empty and files follow it: put back a whole one, from a copy or "
                f"another member, or give up what is missing: {self.repair_command()}"
            )
        if entry.size != self.file_bytes and not (is_last and entry.size < self.file_bytes):
            raise StoreForeignFile(
                f"{path} has {entry.size} bytes, files of this store have {self.file_bytes}: if it "
                f"was made with files of {entry.size} bytes, set {self._option}={entry.size}; if "
                "the file was cut short, put back a whole one, from a copy or another member, or "
                f"give up what is missing: {self.repair_command()}"
            )
        if start > layout.OFFSET_MAX - self.file_bytes:
            raise StoreForeignFile(
                f"{path} begins behind the last offset that there can be: move it out of the store"
            )
        if start % self.file_bytes:
            raise StoreForeignFile(
                f"{path} does not follow the file before it: no file of {self.file_bytes} bytes "
                "starts there: move it out of the store"
            )
        return start

    @property
    def _option(self) -> str:
        """The option that says how long the files are."""
        is_log = self.directory.name == layout.COMMIT_LOG
        return "mapped_file_size_commit_log" if is_log else "mapped_file_size_consume_queue"


def _is_unfinished(entry: Entry) -> bool:
    is_ours = layout.OFFSET_NAME.fullmatch(entry.name) is not None
    return is_ours and entry.kind is Kind.FILE and entry.size == 0

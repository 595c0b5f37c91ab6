"""A log of which files are missing or too short, read as if it were whole, with zeros for what is
not there. So what was lost there is found, reported and written off like any other damage.

Writing off puts records of the lost over damaged bytes, so that readers of the log come past them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cometmq.errors import StoreForeignFile
from cometmq.format import record
from cometmq.native.interface import SharedOffsets
from cometmq.store import layout
from cometmq.store.disk.files import Buffer, File, Files, Kind
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.log.units import LOST_RECORD_BYTES_MIN, lost_record
from cometmq.store.metadata.identity import LastOptions
from cometmq.store.recovery.recovery import Damage

COPY_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 16 * 1024 * 1024  # that are written off with one record: none is much longer


class Incomplete:
    """A file of which only the first ``there`` bytes are there, perhaps none: it reads as ``size``
    bytes. What is written goes to a whole one beside it, at ``new_path``, which takes its place
    with :meth:`sync`: never is a file seen that is half made.
    """

    def __init__(self, files: Files, path: Path, new_path: Path, *, size: int, there: int) -> None:
        assert 0 <= there < size, (path, there, size)
        self.path = str(path)
        self.there = there
        self._files = files
        self._new_path = new_path
        self._size = size
        self._old = files.open(path) if there else None
        self._new: File | None = None

    def pread(self, size: int, offset: int, *, nowait: bool = False) -> bytes:
        assert offset + size <= self._size, (self.path, offset, size)
        source = self._new or self._old
        found = b"" if source is None else source.pread(size, offset, nowait=nowait)
        return found.ljust(size, b"\0")

    def is_unreadable(self, start: int, end: int) -> bool:
        source = self._new or self._old
        return source is not None and source.is_unreadable(start, end)

    def pwrite(self, data: Buffer, offset: int) -> None:
        self._whole().pwrite(data, offset)

    def sync(self) -> None:
        """Let the whole file be in its place, on the disk at return."""
        whole = self._whole()
        whole.sync()
        self.close()
        self._files.make_directories(Path(self.path).parent)  # which may be gone, too
        self._files.rename(self._new_path, self.path)
        self._files.sync_directory(Path(self.path).parent)
        self._old, self._new, self.there = self._files.open(self.path), None, self._size

    def sync_while_wanted(self, offsets: SharedOffsets, stop: int, write_fd: int) -> bool:
        return False  # no caller waits for a log that is being mended

    def data_extents(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        yield start, end

    def close(self) -> None:
        for file in (self._old, self._new):
            if file is not None:
                file.close()

    def _whole(self) -> File:
        if self._new is None:
            self._files.unlink(self._new_path)  # what a crash left there
            self._new = self._made()
        return self._new

    def _made(self) -> File:
        new = self._files.create(self._new_path, self._size, takes_room=True)
        try:
            for at in range(0, self.there, COPY_BYTES):
                new.pwrite(self.pread(min(COPY_BYTES, self.there - at), at), at)
        except BaseException:
            new.close()
            self._files.unlink(self._new_path)
            raise
        return new


def open_log(
    files: Files, paths: layout.StorePaths, last: LastOptions | None, log_start: int
) -> tuple[Segments, list[Incomplete]]:
    """The log of a store that was opened with ``last``, each file from the first to the last, and
    those of them that are not whole. A last file without a byte is none. ``log_start``: where the
    log began, if that is known; one without any file has one there that is not whole.

    Raises StoreForeignFile for what does not belong there, and when the size of files is not known.
    """
    sizes = _sizes(files, paths.commit_log)
    file_bytes = _file_bytes(sizes) if last is None else last.log_file_bytes
    if not sizes and last is None:
        raise StoreForeignFile(
            f"{paths.commit_log} holds no file of a store, and nothing shows how long its files "
            "were: put them back, from a copy or another member; a member that has nothing left "
            "starts on an empty folder"
        )
    _refuse_what_is_no_row(sizes, paths.commit_log, file_bytes)
    row = Segments(paths.commit_log, file_bytes)
    incomplete = []
    known = max(log_start, 0) // file_bytes * file_bytes
    first = min(sizes, default=known) if log_start < 0 else min([known, *sizes])
    for start in range(first, max(sizes, default=first) + 1, row.file_bytes):
        there = sizes.get(start, 0)
        if there == row.file_bytes:
            row.add(files, start)
        else:
            hole = Incomplete(
                files, row.path(start), paths.next_log_file, size=row.file_bytes, there=there
            )
            row.take(hole, start)
            incomplete.append(hole)
    return row, incomplete


def _sizes(files: Files, directory: Path) -> dict[int, int]:
    """Bytes of each file, by where it starts."""
    entries = [e for e in files.entries(directory) if not layout.is_ignored(e.name)]
    foreign = [
        f"{directory / entry.name} does not belong there: move it out of the store"
        for entry in entries
        if entry.kind is not Kind.FILE or layout.OFFSET_NAME.fullmatch(entry.name) is None
    ]
    if foreign:
        raise StoreForeignFile(f"{'; '.join(foreign)}; then repair again")
    while entries and not entries[-1].size:
        entries.pop()
    return {int(entry.name): entry.size for entry in entries}


def _file_bytes(sizes: Mapping[int, int]) -> int:
    """How long the files are when they are whole: as most of those are in whose row all start; 0:
    as none is.
    """
    counts = Counter(sizes.values())
    fitting = [size for size in counts if size and not any(start % size for start in sizes)]
    return max(fitting, key=lambda size: (counts[size], size), default=0)


def _refuse_what_is_no_row(sizes: Mapping[int, int], directory: Path, file_bytes: int) -> None:
    wrong = [
        f"{directory / layout.offset_name(start)} has {size} bytes"
        for start, size in sizes.items()
        if size > file_bytes or start % file_bytes
    ]
    if wrong:
        how_long = f"the log has files of {file_bytes}" if file_bytes else "their names are no row"
        raise StoreForeignFile(
            f"{'; '.join(wrong)}, {how_long}. A file that only got longer is cut with truncate "
            "--size; for another put back a whole one, from a copy or another member, or move it "
            "out of the store. Then repair again"
        )


def written_to(log: Segments) -> int:
    """Where the last file starts that anything was written to: before it, all was."""
    for segment in reversed(log):
        if any(segment.pread(segment.start, record.BLANK_BYTES)):
            return segment.start
    return log.start


# --- writing off ----------------------------------------------------------------------------------


def write_off(log: Segments, damages: Sequence[Damage]) -> Iterator[str]:
    """Write off ``damages``, on the disk when the iteration has ended, and make the files whole
    that are not; yields what was done, step by step.
    """
    # These come last: until all are whole no broker opens the store, and cuts it where others are
    # still damaged.
    for segment in sorted(log, key=lambda one: isinstance(one.file, Incomplete)):
        pieces = [
            (max(damage.start, segment.start), min(damage.end, segment.end), damage.time_ms)
            for damage in damages
            if damage.start < segment.end and damage.end > segment.start
        ]
        for start, end, time_ms in pieces:
            _write_off(segment, start, end, time_ms)
            yield f"wrote off {end - start} bytes of the log at {start}"
        if isinstance(segment.file, Incomplete):
            there = segment.file.there
            segment.file.sync()
            yield (
                f"filled up {segment.file.path}, which had {there} bytes, with zeros"
                if there
                else f"made {segment.file.path}, which was missing, of zeros"
            )
        elif pieces:
            segment.file.sync()


def _write_off(segment: Segment, start: int, end: int, time_ms: int) -> None:
    """The bytes from ``start`` to ``end``. At a file's end an end mark follows; where only that was
    damaged, it is all that is written.
    """
    is_rest = end == segment.end
    stop = end - record.BLANK_BYTES if is_rest else end
    at = start
    if is_rest and stop - at < LOST_RECORD_BYTES_MIN:
        stop = at
    while at < stop:
        # The last piece must not be too small for a record.
        size = stop - at if stop - at <= 2 * PIECE_BYTES else PIECE_BYTES
        segment.pwrite(at, lost_record(at, segment.pread(at, size), time_ms))
        at += size
    if is_rest:
        segment.pwrite(stop, record.blank(end - stop))

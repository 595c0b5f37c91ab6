"""The log: all records of all queues, end to end, in files of one size.
``docs/format/store-layout.md`` §2.

Threads: the writer's appends, one flushes, one prepares files, any number read below the appended
position.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cometmq.errors import DiskFull, MessageNotFound, Shortage, StoreDamaged, StoreFailed
from cometmq.format import record
from cometmq.format.record import BLANK_BYTES
from cometmq.store import layout
from cometmq.store.disk.files import ZEROS, Buffer, Files, clear
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.log.levels import new_shared_offsets
from cometmq.store.log.scan import first_damage
from cometmq.store.log.transient import TransientBuffer

GAP_BYTES_MAX = 16 * 1024  # reading this much in vain is cheaper than a second call
READ_BYTES_MAX = 8 * 1024 * 1024
READ_AHEAD_BYTES_MAX = 16 * 1024 * 1024  # more than any kernel reads ahead
BATCH_ENDS_MAX = 8192
# A sync of bytes in room that nothing was written to before has to note that, too, in the file
# system's journal: it takes half as long again. Where syncs are so small, zeros are written behind
# the log's end, once for several of them.
SMALL_SYNC_BYTES = 64 * 1024
AHEAD_SYNCS, AHEAD_BYTES_MIN = 4, 64 * 1024

SIZE = struct.Struct(">i")  # TOTALSIZE, the first field of a record
SIZE_AND_MAGIC = struct.Struct(">ii")

Span = tuple[int, int]  # log offset and size of one record


class Chunk(NamedTuple):
    """A piece of the log as it is copied: whole records of one file, or a file's end mark."""

    data: bytes
    next_offset: int  # where the next one begins


class CommitLog:
    """``end`` is the appended position together with the store time of the last record before it:
    one tuple, replaced whole, so that the flush thread never pairs a time with the position of an
    older record.

    ``transient_bytes_max`` above 0: appends wait in private memory, at most so many bytes, until
    :meth:`commit` or :meth:`flush`. What waits cannot be read here.
    """

    def __init__(
        self, paths: layout.StorePaths, files: Files, file_bytes: int, transient_bytes_max: int = 0
    ) -> None:
        self.segments = Segments(paths.commit_log, file_bytes)
        self.offsets = new_shared_offsets()
        self._end: tuple[int, int] = (0, 0)
        # What was appended from here on was checked then and has been in memory since: it needs no
        # check when it is read. Moves on when the disk is read, which reads more than it is asked.
        self.trusted_from = 0
        self.files_max = 0  # that may be made; 0: any number
        # From here on nothing but zeros was ever written to the files, as the disk knows too:
        # `extend(offset)` raises it above `offset`. With this value it is not kept.
        self.reach = layout.OFFSET_MAX
        self.extend: Callable[[int], None] | None = None
        self._forgotten = 0  # what is before it is being removed
        self._ahead_to = 0  # so far zeros were written, or shall not be
        self._files = files
        self._new_path: Path = paths.next_log_file
        self._growing = threading.Lock()  # held while a file is made
        # Where the newest batches end, in order: a reader of chunks need not look for the end of a
        # record. Others read it, so it is shortened by taking another list.
        self._batch_ends: list[int] = []
        # (offset, size) behind the end that a failed append may have written to
        self._dirty_tail: list[Span] = []
        self._transient = TransientBuffer(transient_bytes_max) if transient_bytes_max else None
        self._closed = False

    @property
    def end(self) -> tuple[int, int]:
        return self._end

    @end.setter
    def end(self, end: tuple[int, int]) -> None:
        self._end = end
        self.offsets.append_to(*end)

    @property
    def flushed(self) -> tuple[int, int]:
        """Like ``end``, for what is on the disk; the time may be an older record's."""
        return self.offsets.flushed()

    @flushed.setter
    def flushed(self, flushed: tuple[int, int]) -> None:
        assert flushed[0] <= self._end[0], (flushed, self._end)
        self.offsets.flush_to(*flushed)

    # --- appending: the writer --------------------------------------------------------------------

    def place(self, size: int) -> int:
        """Where a batch of ``size`` bytes goes: at the end, or at the start of the next file."""
        assert 0 < size <= self.segments.file_bytes - BLANK_BYTES, size
        end = self.end[0]
        file_end = end - end % self.segments.file_bytes + self.segments.file_bytes
        return end if end + size + BLANK_BYTES <= file_end else file_end

    def room_behind(self, size: int) -> int | None:
        """Bytes that the quota's files have left when ``size`` more are appended; None: there is
        no quota. Below 0: they do not fit.
        """
        if not self.files_max:
            return None
        segments = self.segments
        stop = max(segments.end, segments.start + self.files_max * segments.file_bytes)
        return stop - BLANK_BYTES - self.place(size) - size

    def append(self, offset: int, batch: Buffer, store_time_ms: int) -> None:
        """Write ``batch`` at ``offset``, which :meth:`place` gave. After :class:`Shortage` nothing
        has changed.
        """
        end, last_time_ms = self.end
        assert offset == self.place(len(batch)), (offset, end, len(batch))
        assert store_time_ms >= last_time_ms, (store_time_ms, last_time_ms)
        if self._dirty_tail:
            self.zero_dirty_tail()
        if self._transient is not None and not self._transient.has_room(len(batch)):
            self.commit()
        segment = self.segments.find(offset) or self._grown_to(offset)
        if offset + len(batch) > self.reach:
            assert self.extend is not None, (offset, self.reach)
            self.extend(offset + len(batch))
            assert offset + len(batch) <= self.reach, (offset, self.reach)
        try:
            if offset != end:
                self._write_blank(end, offset)
            self._write(segment, offset, batch)
        except Shortage:
            self._dirty_tail.append((offset, len(batch)))
            # At once: recovery must not find what was refused. As a rule that takes no room.
            with suppress(Shortage):
                self.zero_dirty_tail()
            raise
        self._dirty_tail.clear()
        self._write_ahead(segment, offset + len(batch))
        self._batch_ends.append(offset + len(batch))
        if len(self._batch_ends) > BATCH_ENDS_MAX:
            self._batch_ends = self._batch_ends[BATCH_ENDS_MAX // 2 :]
        self.end = (offset + len(batch), store_time_ms)

    def _write_ahead(self, segment: Segment, end: int) -> None:
        """Write zeros behind ``end``, where the log is about to end, if its syncs are small."""
        if end <= self._ahead_to or self._transient is not None:
            return
        unsynced = end - self.flushed[0]
        if unsynced <= SMALL_SYNC_BYTES:
            size = min(max(AHEAD_SYNCS * unsynced, AHEAD_BYTES_MIN), segment.end - end)
            self._ahead_to = end + size
            with suppress(Shortage):  # the batch has its room
                segment.pwrite(end, memoryview(ZEROS)[:size])

    def zero_dirty_tail(self) -> None:
        """Put zeros over what failed appends left, else a shorter batch could end where an old
        record starts.
        """
        while self._dirty_tail:
            offset, size = self._dirty_tail[-1]
            segment = self.segments.find(offset)
            assert segment is not None, offset
            start = offset - segment.start
            clear(segment.file, start, start + size)  # a hole stays one: filling it takes room
            self._dirty_tail.pop()

    def _write_blank(self, end: int, file_end: int) -> None:
        segment = self.segments.find(end)
        assert segment is not None, end
        assert segment.end == file_end, (end, file_end)
        # Until the batch behind it is written, it is not part of the log.
        self._dirty_tail.append((end, BLANK_BYTES))
        self._write(segment, end, record.blank(file_end - end))

    def _write(self, segment: Segment, offset: int, data: Buffer) -> None:
        if self._transient is None:
            segment.pwrite(offset, data)
        else:
            self._transient.put(offset, data, segment)

    def end_file(self) -> None:
        """Close the file at the end with its mark; the end is then the start of the next file."""
        end, last_time_ms = self.end
        file_end = end - end % self.segments.file_bytes + self.segments.file_bytes
        if self._dirty_tail:
            self.zero_dirty_tail()
        self._write_blank(end, file_end)
        self._dirty_tail.clear()
        self.end = (file_end, last_time_ms)

    # --- cutting: no other thread uses the log ---

    def truncate(self, offset: int, last_time_ms: int) -> None:
        """End at ``offset``, behind a record of ``last_time_ms``. At return nothing that ever lay
        behind it is on the disk.
        """
        segments = self.segments
        assert segments.start <= offset <= self.end[0], (offset, self.end)
        start = segments.start
        # The newest first, one by one: a file behind a gap would look like the end of a whole log.
        while len(segments) and segments.end - segments.file_bytes >= offset:
            segments.remove_last(self._files)
        segments.base = start
        self.clear_behind(offset)
        self._dirty_tail.clear()
        self._batch_ends = self._batch_ends[: bisect_right(self._batch_ends, offset)]
        self.end = (offset, last_time_ms)
        self.flushed = min(self.flushed, self.end)

    def clear_behind(self, offset: int) -> None:
        """Leave nothing behind ``offset`` in its file, on the disk at return. What was never
        written is not looked at: the file may be much longer than what was.
        """
        segment = self.segments.find(offset)
        stop = self.reach if segment is None else min(segment.end, self.reach)
        if segment is None or stop <= offset:
            return
        if clear(segment.file, offset - segment.start, stop - segment.start):
            segment.file.sync()

    def reset_to(self, offset: int) -> None:
        """Remove all files; the log begins again at ``offset``, the start of a file."""
        assert offset % self.segments.file_bytes == 0, offset
        self.truncate(self.segments.start, 0)
        self._forgotten = 0
        self.segments.base = offset
        self.end = self.flushed = (offset, 0)
        if offset:
            self._grow()  # an empty folder would mean 0

    # --- removing from the front: a thread of its own ---------------------------------------------

    @property
    def start(self) -> int:
        """Log offset of the oldest byte."""
        return max(self._forgotten, self.segments.start)

    def forget_before(self, offset: int) -> None:
        """Begin at ``offset``, where a file starts and everything before is on the disk. The files
        before it go with :meth:`remove_first`; reads that have begun come to their end.
        """
        assert offset % self.segments.file_bytes == 0, offset
        assert self.start <= offset < self.flushed[0], (self.start, offset, self.flushed)
        self._forgotten = offset

    def remove_first(self) -> Segment:
        """Remove the oldest file, of which nothing is left to read."""
        oldest = self.segments.start + self.segments.file_bytes
        assert oldest <= self._forgotten, (oldest, self._forgotten)
        return self.segments.remove_first(self._files)

    # --- growing: the writer, or a thread of its own ahead of it ----------------------------------

    @property
    def next_file_wanted(self) -> bool:
        """Less than half a file is left to write to."""
        return self.segments.end - self.end[0] <= self.segments.file_bytes // 2

    def prepare_next_file(self) -> None:
        """Make the next file, if it is wanted."""
        with self._growing:
            if self._closed:
                raise StoreFailed("the store is closed")
            if self.next_file_wanted:
                self._grow()

    def _grown_to(self, offset: int) -> Segment:
        with self._growing:  # waits for a file that is being made
            while self.segments.end <= offset:
                self._grow(is_due=True)
        segment = self.segments.find(offset)
        assert segment is not None, offset
        return segment

    def _grow(self, *, is_due: bool = False) -> None:
        # Made outside the log's folder and moved in at full length: RocketMQ refuses to open a
        # folder with a shorter file.
        start = self.segments.end
        if 0 < self.files_max <= len(self.segments):
            raise DiskFull(f"the log has the {self.files_max} files that the store's quota allows")
        # Its room is taken now, so that a full disk is met here and not by appends. Nothing is
        # written: the log's bytes would go to the disk twice. On a full volume a file that is due
        # is one hole: else not even a copy of the state could be written, without which retention
        # must not make room.
        size = self.segments.file_bytes
        volume = self._files.usage(self._new_path.parent)
        is_hole = is_due and volume.free_bytes < size
        try:
            new = self._files.create(self._new_path, size, takes_room=not is_hole)
            try:
                new.sync()
            finally:
                new.close()
            self._files.rename(self._new_path, self.segments.path(start))
        except BaseException:
            self._files.unlink(self._new_path)
            raise
        self._files.sync_directory(self.segments.directory)
        self.segments.add(self._files, start)
        if is_hole:
            self._ahead_to = start + size  # what room is left is for batches

    # --- flushing: the flush thread ---------------------------------------------------------------

    def commit(self) -> None:
        """Let everything that was appended be written, so that it outlives the process."""
        if self._transient is not None:
            self._transient.write_out()

    def flush(self) -> int:
        """Bring everything up to the end, as it is now, to the disk; returns that position."""
        end, flushed = self.end, self.flushed[0]
        assert flushed <= end[0], (flushed, end)
        self.commit()
        for segment in list(self.segments):
            if segment.end > flushed and segment.start < end[0]:
                segment.file.sync()
        self.flushed = end
        return end[0]

    def flush_while_wanted(self, write_fd: int) -> bool:
        """Bring to the disk what callers wait for, again and again, as long as all that is not
        there yet lies in one file; False when nothing was done.
        :meth:`cometmq.native.interface.SharedOffsets.sync` explains ``write_fd``.
        """
        segment = self.segments.find(self.flushed[0])
        if segment is None or self._transient is not None:
            return False
        return segment.file.sync_while_wanted(self.offsets, segment.end, write_fd)

    def write_again(self, start: int) -> None:
        """Write the files from ``start`` on over themselves, so that the next :meth:`flush` brings
        them to the disk though the kernel may take them for clean. No other thread uses the log.
        """
        for segment in self.segments:
            stop = min(segment.end, self.reach)
            for at in range(max(start, segment.start), stop, len(ZEROS)):
                size = min(len(ZEROS), stop - at)
                segment.pwrite(at, segment.pread(at, size))

    # --- reading: any thread ----------------------------------------------------------------------

    @property
    def written(self) -> int:
        """Log offset below which everything can be read."""
        end = self.end[0]
        return end if self._transient is None else self._transient.written(end)

    def read(self, offset: int, size: int, *, nowait: bool) -> bytes:
        """``size`` bytes at ``offset``, inside one file and below ``written``; else
        :class:`MessageNotFound`.
        """
        segment = self.segments.find(offset) if size > 0 and offset + size <= self.written else None
        if segment is None or offset + size > segment.end:
            raise MessageNotFound(f"the log has no {size} bytes at {offset}")
        found = segment.pread(offset, size, nowait=nowait)
        if len(found) != size:
            raise MessageNotFound(f"the log's file at {segment.start} is gone")
        return found

    def read_records(self, spans: Sequence[Span], *, nowait: bool) -> bytes:
        """The records at ``spans``, joined; a span holds one record, or several end to end.

        Neighbours are read with one call. What was not in memory since it was checked and appended
        is checked again: damage is StoreDamaged, and never served.
        """
        pieces: list[bytes] = []
        if not nowait and spans:
            self.trusted_from = max(self.trusted_from, spans[-1][0] + READ_AHEAD_BYTES_MAX)
        first = 0
        while first < len(spans):
            stop, end, dense = _neighbours(spans, first, self.segments.file_bytes)
            start = spans[first][0]
            chunk = self.read(start, end - start, nowait=nowait)
            for offset, size in spans[first:stop]:
                if size < SIZE.size or not 0 < SIZE.unpack_from(chunk, offset - start)[0] <= size:
                    raise StoreDamaged(f"there is no record of {size} bytes at {offset} of the log")
                if not dense:
                    pieces.append(chunk[offset - start : offset - start + size])
            if dense:
                pieces.append(chunk)
            if start < self.trusted_from:
                self._check(spans[first:stop], chunk, start)
            first = stop
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _check(self, spans: Sequence[Span], chunk: bytes, start: int) -> None:
        file_end = start - start % self.segments.file_bytes + self.segments.file_bytes
        for offset, end in _end_to_end(spans):
            records = chunk[offset - start : end - start]
            damaged = first_damage(records, offset, file_end - offset)
            if damaged is not None:
                raise StoreDamaged(f"the record at {damaged} of the log is damaged")

    def read_chunk(self, offset: int, bytes_max: int, *, nowait: bool) -> Chunk | None:
        """See :meth:`cometmq.store.base.BaseStore.read_chunk`."""
        end = self.written
        if offset >= end:
            return None
        segment = self.segments.find(offset)
        if segment is None:
            raise MessageNotFound(f"the log begins at {self.start}, not at {offset}")
        left = min(segment.end, end) - offset
        wanted = min(left, max(bytes_max, BLANK_BYTES))
        if nowait and self.trusted_from <= offset:
            whole = self._batches(offset, wanted)
            if whole:
                return Chunk(self.read(offset, whole, nowait=True), offset + whole)
        data = self.read(offset, wanted, nowait=nowait)
        size, magic = SIZE_AND_MAGIC.unpack_from(data)
        if magic == record.MAGIC_BLANK:
            return Chunk(data[:BLANK_BYTES], segment.end)
        if size > len(data):
            if size > left:
                raise StoreDamaged(f"no record of {size} bytes can lie at {offset} of the log")
            data = self.read(offset, size, nowait=nowait)
        whole = _whole_records(data)
        if not whole:
            raise StoreDamaged(f"there is no record at {offset} of the log")
        return Chunk(data[:whole], offset + whole)

    def _batches(self, offset: int, bytes_max: int) -> int:
        """Bytes from ``offset`` on to the last end of a batch within ``bytes_max``; 0: none is
        known.
        """
        ends = self._batch_ends
        index = bisect_right(ends, offset + bytes_max)
        return max(0, ends[index - 1] - offset) if index else 0

    # --- ending -----------------------------------------------------------------------------------

    def validate(self) -> None:
        """The positions are in order; for tests, while no thread writes."""
        (flushed, flushed_ms), (end, end_ms) = self.flushed, self.end
        assert 0 <= self.segments.start <= self.start <= flushed <= self.written <= end
        assert flushed_ms <= end_ms, (flushed_ms, end_ms)
        assert end <= self.segments.end, (end, self.segments.end)
        assert end <= self.reach, (end, self.reach)
        assert self.trusted_from >= 0, self.trusted_from
        assert self._batch_ends == sorted(set(self._batch_ends))
        assert not self._batch_ends or self._batch_ends[-1] <= end, (self._batch_ends[-1], end)
        assert all(offset >= end for offset, _ in self._dirty_tail), (self._dirty_tail, end)

    def close(self) -> None:
        with self._growing:
            self._closed = True
            self.segments.close()


def _neighbours(spans: Sequence[Span], first: int, file_bytes: int) -> tuple[int, int, bool]:
    """The spans from ``first`` that one read gets: index behind the last, its end, and whether no
    gap is between.
    """
    start, size = spans[first]
    end, dense = start + size, True
    stop_max = min(start + READ_BYTES_MAX, start - start % file_bytes + file_bytes)
    for index in range(first + 1, len(spans)):
        offset, size = spans[index]
        if not end <= offset <= end + GAP_BYTES_MAX or offset + size > stop_max or size <= 0:
            return index, end, dense
        dense = dense and offset == end
        end = offset + size
    return len(spans), end, dense


def _end_to_end(spans: Sequence[Span]) -> Iterator[Span]:
    """Where records without a gap between them begin and end."""
    start, size = spans[0]
    end = start + size
    for offset, size in spans[1:]:
        if offset != end:
            yield start, end
            start = offset
        end = offset + size
    yield start, end


def _whole_records(data: bytes) -> int:
    """Bytes of the records that lie whole at the start of ``data``."""
    at, length = 0, len(data)
    while at + BLANK_BYTES <= length:
        size, magic = SIZE_AND_MAGIC.unpack_from(data, at)
        if magic != record.MAGIC_V1 or size < BLANK_BYTES or at + size > length:
            break
        at += size
    return at

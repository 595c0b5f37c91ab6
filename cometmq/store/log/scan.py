"""Reads a log in big pieces, from a place where a record or a file starts, and finds a good record
again behind a damaged place.

What it hands out are runs of records in packed form (:mod:`cometmq.format.scan`); a record of a
topic that its reader wants to see, and what is rare, comes by itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import record
from cometmq.format.scan import Run, scan_run, topic_list
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.log import units
from cometmq.store.log.units import LOST_RECORD_BYTES_MIN, LOST_TOPIC

CHUNK_BYTES = 4 * 1024 * 1024
# a size above it is taken for garbage rather than read into memory
RECORD_BYTES_MAX = 64 * 1024 * 1024

FIRST_READ_BYTES = 4096  # most records are shorter

SIZE = struct.Struct(">i")  # TOTALSIZE, the first field of a record
MAGIC = record.MAGIC_V1.to_bytes(4, "big", signed=True)
MAGIC_V2 = bytes.fromhex("daa320ab")
MAGIC_AT = 4


class Stretch(NamedTuple):
    """Good records, end to end: ``start`` and ``end`` are log offsets."""

    start: int
    end: int
    run: Run
    topic: str = ""  # of a record that comes by itself
    apart: bytes = b""  # that record

    @property
    def last_offset(self) -> int:
        """Where the last record starts."""
        return self.end - self.run.last_bytes


def apart_of(topics: Iterable[str]) -> bytes:
    """For :func:`next_stretch`: ``topics``, and that of what was lost."""
    return topic_list({*topics, LOST_TOPIC})


def next_stretch(
    chunk: bytes, at: int, *, log_offset: int, file_left: int, apart: bytes
) -> Stretch | record.Found:
    """The good records at ``at`` of a piece of a log file; arguments as of
    :func:`cometmq.format.scan.scan_run`, ``apart`` from :func:`apart_of`. Without any: what was
    found instead.

    Raises StoreForeignFile for what only Apache RocketMQ writes and nothing here reads.
    """
    run = scan_run(chunk, at, log_offset=log_offset, file_left=file_left, apart=apart)
    if run.record_count:
        return Stretch(log_offset, log_offset + run.end - at, run)
    found = record.check(chunk, at, log_offset=log_offset, bytes_left=file_left)
    if found.record is None:
        _refuse_version_2(found, chunk[at : at + record.BLANK_BYTES], log_offset)
        return found
    end = at + found.size
    run = units.run_of(found.record, end)
    return Stretch(log_offset, log_offset + found.size, run, found.record.topic, chunk[at:end])


def _refuse_version_2(found: record.Found, head: bytes, log_offset: int) -> None:
    if found.kind is record.Kind.BAD and head[MAGIC_AT:] == MAGIC_V2:
        raise StoreForeignFile(
            f"the log has a record of version 2 at {log_offset}: Apache RocketMQ writes them for "
            "topics of more than 127 characters, and they cannot be read here. Nothing was "
            "changed: the folder is Apache RocketMQ's as before, which alone can read it; begin "
            "here with an empty folder"
        )


def first_damage(data: bytes, log_offset: int, file_left: int) -> int | None:
    """Log offset of the first place in ``data``, which should be records end to end, that is no
    good one; None: all are good. ``file_left`` counts from ``log_offset``.
    """
    at = 0
    while at < len(data):
        place = log_offset + at
        found = next_stretch(data, at, log_offset=place, file_left=file_left - at, apart=b"")
        if isinstance(found, record.Found):
            return place
        at = found.end - log_offset
    return None


class LogScan:
    """Iterates over the good records of a log, from ``start`` on. Afterwards ``end`` is the place
    of the next record, and ``reason`` says why there is none.

    A caller that knows where the log continues may move ``end``, and begin the iteration again.
    """

    def __init__(self, segments: Segments, start: int, apart: Iterable[str] = ()) -> None:
        self.end = start
        self.reason = ""
        self.kind = record.Kind.END
        self.is_unreadable = False  # what is there: the disk has no torn write, it has lost a page
        self._segments = segments
        self._apart = apart_of(apart)
        self._chunk = b""
        self._chunk_start = start

    def __iter__(self) -> Iterator[Stretch]:
        while (segment := self._segments.find(self.end)) is not None:
            found = self._next(segment)
            if isinstance(found, Stretch):
                yield found
                self.end = found.end
            elif found.kind is record.Kind.MORE:
                if not self._read(segment, found.size):
                    return
            elif found.kind is record.Kind.BLANK:
                self.end = segment.end
            else:
                self._stop(segment, found)
                return
        self.kind = record.Kind.END
        self.reason = "the log has no file for what comes next"

    def _stop(self, segment: Segment, found: record.Found) -> None:
        self.kind = found.kind
        self.reason = found.reason or "nothing is written there"
        size = SIZE.unpack(self._chunk[self.end - self._chunk_start :][:4].ljust(4, b"\0"))[0]
        size = min(max(size, 1), RECORD_BYTES_MAX, segment.end - self.end)
        self.is_unreadable = segment.is_unreadable(self.end, self.end + size)
        if self.is_unreadable:  # it reads as zeros, and whether a record was there nobody can tell
            self.kind = record.Kind.BAD
            self.reason = f"the disk cannot read all of it, in {segment.file.path}"

    def forget(self) -> None:
        """Read again what was read ahead: it may have been written since."""
        self._chunk, self._chunk_start = b"", self.end

    def raw(self, start: int, end: int) -> bytes:
        """The bytes from ``start`` to ``end``, which lie in the stretch that came last."""
        return self._chunk[start - self._chunk_start : end - self._chunk_start]

    def _next(self, segment: Segment) -> Stretch | record.Found:
        at = self.end - self._chunk_start
        if not 0 <= at <= len(self._chunk):
            at, self._chunk, self._chunk_start = 0, b"", self.end
        left = segment.end - self.end
        return next_stretch(self._chunk, at, log_offset=self.end, file_left=left, apart=self._apart)

    def _read(self, segment: Segment, size: int) -> bool:
        if size > RECORD_BYTES_MAX:
            self.kind = record.Kind.BAD
            self.reason = f"TOTALSIZE {size} is more than any record has"
            return False
        room = min(max(size, CHUNK_BYTES), segment.end - self.end)
        self._chunk = segment.pread(self.end, room)
        self._chunk_start = self.end
        if len(self._chunk) < size:
            raise StoreDamaged(f"{segment.file.path} is shorter than it should be")
        return True


# --- behind a damaged place -----------------------------------------------------------------------


def good_stretches(segments: Segments, start: int, stop: int) -> Iterator[tuple[LogScan, Stretch]]:
    """The good records from ``start`` on, where one begins, with the scan that has their bytes, to
    the first run of them that reaches ``stop``. Damaged places are passed over.
    """
    scan = LogScan(segments, start)
    while scan.end < stop:
        with suppress(StoreDamaged):  # a file is too short
            for stretch in scan:
                yield scan, stretch
                if stretch.end >= stop:
                    return
        if scan.end < stop:
            found = find_good(segments, scan.end, stop)
            if found is None:
                return
            scan.end = found


def find_good(segments: Segments, damaged: int, stop: int) -> int | None:
    """Log offset of the next good record behind the damaged place at ``damaged``; None: there is
    none before ``stop``.

    A good record holds its own log offset, so no other bytes are taken for one. An end mark holds
    none: it may be that of another file that was put here, so what is between it and the end of
    the file is as damaged as what is before it.
    """
    for segment in segments:
        if segment.end <= damaged or segment.start >= stop:
            continue
        start = max(segment.start, damaged + 1)
        found = _find_in_file(segment, start, min(stop, segment.end))
        if found is not None:
            return found
    return None


def _find_in_file(segment: Segment, start: int, stop: int) -> int | None:
    if start == segment.start and found_at(segment, start).record is not None:
        return start
    overlap = MAGIC_AT + len(MAGIC) - 1
    for at in range(start, stop, CHUNK_BYTES):
        chunk = segment.pread(at, min(CHUNK_BYTES + overlap, segment.end - at))
        for place in _places(chunk):
            if at + place < stop and found_at(segment, at + place).record is not None:
                return at + place
    return None


def _places(chunk: bytes) -> Iterator[int]:
    """Where records may begin in ``chunk``."""
    at = chunk.find(MAGIC, MAGIC_AT)
    while at >= 0:
        yield at - MAGIC_AT
        at = chunk.find(MAGIC, at + 1)


def found_at(segment: Segment, log_offset: int) -> record.Found:
    """What is at a place of a log file."""
    left = segment.end - log_offset
    chunk = segment.pread(log_offset, min(left, FIRST_READ_BYTES))
    found = record.check(chunk, 0, log_offset=log_offset, bytes_left=left)
    if found.kind is record.Kind.MORE and found.size <= RECORD_BYTES_MAX:
        chunk = segment.pread(log_offset, found.size)
        found = record.check(chunk, 0, log_offset=log_offset, bytes_left=left)
    return found


def end_with_room(segments: Segments, start: int, end: int) -> int:
    """The end of as many good records behind ``end`` as make room for the record that writes all
    from ``start`` on off: a record may be shorter than that.
    """
    segment = segments.find(start)
    while segment is not None and end < min(segment.end, start + LOST_RECORD_BYTES_MIN):
        behind = found_at(segment, end).record
        end = segment.end if behind is None else end + behind.size
    return end

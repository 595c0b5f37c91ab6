"""Puts records of the lost over damaged bytes of a log, so that its readers come past them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cometmq.format import record
from cometmq.store.disk.segment import Segment
from cometmq.store.disk.segments import Segments
from cometmq.store.log.lost import LOST_RECORD_BYTES_MIN, lost_record
from cometmq.store.recovery.recovery import Damage
from cometmq.store.repair.holes import Incomplete

PIECE_BYTES = 16 * 1024 * 1024  # no record is much longer


def write_off(log: Segments, damages: Sequence[Damage]) -> Iterator[str]:
    """Write off ``damages``, on the disk when the iteration has ended, and make the files whole
    that are not; tells step by step what was done.
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

"""``cometmq.heads``: the first record of each log file, by which a file of another store under the
right name is known. ``docs/format/store-layout.md`` §4.

A record names its place in the log, not its store: what tells the records of two stores apart is
what they hold, and when they were sent and stored.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cometmq.format.record import Record, body_crc
from cometmq.store.disk.files import Files, replace
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.log.scan import found_at
from cometmq.store.log.units import LOST_TOPIC
from cometmq.store.metadata.epochs import Epoch


class Head(NamedTuple):
    """The first record of the log file at ``start``, which ``epoch`` wrote. What another epoch
    wrote at the same place is another record.
    """

    start: int
    epoch: int
    size: int  # TOTALSIZE
    body_crc: int
    born_time_ms: int
    store_time_ms: int


def load(files: Files, path: Path) -> dict[int, Head]:
    """By the start of the file. A line that does not fit its checksum says nothing."""
    lines = (files.read(path) or b"").splitlines()
    heads = (_decoded(line) for line in lines)
    return {head.start: head for head in heads if head is not None}


def encode(heads: Iterable[Head]) -> bytes:
    texts = [b" ".join(b"%d" % number for number in head) for head in heads]
    return b"".join(b"%s %08x\n" % (text, zlib.crc32(text)) for text in texts)


def _decoded(line: bytes) -> Head | None:
    text, _, checksum = line.rpartition(b" ")
    return Head(*map(int, text.split())) if checksum == b"%08x" % zlib.crc32(text) else None


def is_own(segment: Segment, head: Head | None, epochs: Sequence[Epoch]) -> bool:
    """Whether a log file begins with the very record that was noted."""
    if head is None or head.epoch != epoch_of(epochs, segment.start):
        return False
    found = found_at(segment, segment.start).record
    return found is not None and _head_of(found, head.epoch) == head


def is_strange(segment: Segment, head: Head | None, epochs: Sequence[Epoch]) -> bool:
    """Whether a log file begins with a good record of another store. One damaged field shows
    nothing; nor does what a repair put there.
    """
    if head is None or head.epoch != epoch_of(epochs, segment.start):
        return False
    found = found_at(segment, segment.start).record
    if found is None or found.topic == LOST_TOPIC:
        return False
    now = _head_of(found, head.epoch)
    # Damage would show in a size or a body: the record would not be good.
    if (now.size, now.body_crc) != (head.size, head.body_crc):
        return True
    return now.born_time_ms != head.born_time_ms and now.store_time_ms != head.store_time_ms


def epoch_of(epochs: Sequence[Epoch], offset: int) -> int:
    """The number of the epoch that wrote this byte of the log; 0: it is not known."""
    return next((one.number for one in reversed(epochs) if one.start <= offset), 0)


class HeadsFile:
    """Grows with the log. For the flush thread."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._heads = load(files, path)

    def note(self, log: Segments, flushed: int, epochs: Sequence[Epoch]) -> None:
        """Note the first record of each file that has one on the disk."""
        now = {head.start: head for head in self._noted(log, flushed, epochs)}
        if now != self._heads:
            replace(self._files, self._path, encode(now.values()))
            self._heads = now

    def _noted(self, log: Segments, flushed: int, epochs: Sequence[Epoch]) -> Iterator[Head]:
        for segment in list(log):
            if segment.start >= flushed:
                return
            known, epoch = self._heads.get(segment.start), epoch_of(epochs, segment.start)
            if known is not None and known.epoch == epoch:
                yield known
            elif (found := found_at(segment, segment.start).record) and _is_whole(found, flushed):
                yield _head_of(found, epoch)


def _head_of(found: Record, epoch: int) -> Head:
    crc = body_crc(found.body)
    times = found.born_time_ms, found.store_time_ms
    return Head(found.log_offset, epoch, found.size, crc, *times)


def _is_whole(found: Record, flushed: int) -> bool:
    return found.log_offset + found.size <= flushed and found.topic != LOST_TOPIC

"""Do the units of a queue name its messages? The log's records say whose messages they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, islice
from typing import NamedTuple

from cometmq.format import queueunit
from cometmq.format.belonging import first_strange, is_message_at
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.log.scan import LogScan, found_at
from cometmq.store.queues.consumequeue import UNIT_BYTES, ConsumeQueue

FIRST_READ_BYTES_MIN, FIRST_READ_BYTES_MAX = queueunit.LOST_SIZE + 1, 64 * 1024
UNITS_TOGETHER_MAX = 512  # reading so many costs less than a second call
GAP_BYTES_MAX = 4096  # the same of the log, between two records
ENDS_AT_ONCE = 8192


class Verdict(Enum):
    """What the log has where a unit of a file points to."""

    MESSAGE = "the message"
    ANOTHER = "another record"
    NOTHING = "no record"


def compare(queue: ConsumeQueue, log: Segments, offset: int) -> Verdict:
    """The unit at ``offset``, which is in a file, with the log."""
    unit, key = queue.stored_unit(offset), (queue.topic, queue.queue_id)
    log_offset, size, _ = queueunit.unit_at(unit, 0)
    segment = log.find(log_offset) if queueunit.is_message(log_offset, size) else None
    if segment is None:
        return Verdict.NOTHING
    # As nearly always: what the record says is enough, whatever has become of its body.
    if FIRST_READ_BYTES_MIN <= size <= min(FIRST_READ_BYTES_MAX, segment.end - log_offset):
        seen = segment.pread(log_offset, size)
        if len(seen) == size and first_strange(seen, unit, offset, key) is None:
            return Verdict.MESSAGE
    found = found_at(segment, log_offset).record
    if found is None:
        return Verdict.NOTHING
    is_its = is_message_at(found, (key, offset)) and found.size == size
    return Verdict.MESSAGE if is_its else Verdict.ANOTHER


class _End(NamedTuple):
    """The first or the last unit of a file of a queue."""

    queue: ConsumeQueue
    segment: Segment
    offset: int
    unit: bytes


def _ends(queue: ConsumeQueue) -> Iterator[_End]:
    for segment in queue.segments:
        first = max(segment.start // UNIT_BYTES, queue.min_offset)
        last = min(segment.end // UNIT_BYTES, queue.next_offset) - 1
        if first > last:
            continue
        if last - first < UNITS_TOGETHER_MAX:
            size = (last + 1 - first) * UNIT_BYTES
            units = segment.pread(first * UNIT_BYTES, size).ljust(size, b"\0")
            yield _End(queue, segment, first, units[:UNIT_BYTES])
            if first < last:
                yield _End(queue, segment, last, units[-UNIT_BYTES:])
        else:
            for offset in (first, last):
                yield _End(queue, segment, offset, queue.stored_unit(offset))


def _end_of_run(by_place: Sequence[tuple[int, int, int]], number: int) -> int:
    """Up to where records are read with this one."""
    start, size, _ = by_place[number]
    end = start + size
    for index in range(number + 1, len(by_place)):
        place, size, _ = by_place[index]
        if place > end + GAP_BYTES_MAX or place + size > start + FIRST_READ_BYTES_MAX:
            break
        if size > 0:
            end = max(end, place + size)
    return end


class Comparison:
    """Compares the first and the last unit of each file of queues with the log. Units whose records
    damage took out of the log show nothing.
    """

    def __init__(self, log: Segments) -> None:
        self._log = log
        self._whole_to: dict[int, int] = {}  # by a log file's start: where its good records end

    def complaint(self, queues: Iterable[ConsumeQueue]) -> str:
        """What shows that a file of a queue is not the queue's; empty: nothing does."""
        ends = chain.from_iterable(map(_ends, queues))
        while some := list(islice(ends, ENDS_AT_ONCE)):
            for end in self._unproven(some):
                if self._is_strange(end.queue, end.offset):
                    return (
                        f"{end.segment.file.path} is not of queue {end.queue.queue_id} of "
                        f"{end.queue.topic}: its unit of message {end.offset} names another record"
                    )
        return ""

    def _unproven(self, ends: Sequence[_End]) -> Iterator[_End]:
        """Those whose records do not say at once that they are the messages. Records that are near
        each other are read together.
        """
        by_place = sorted((*queueunit.unit_at(end.unit, 0)[:2], n) for n, end in enumerate(ends))
        chunk, chunk_start, read_to = b"", 0, -1
        for number, (place, size, index) in enumerate(by_place):
            end = ends[index]
            if not FIRST_READ_BYTES_MIN <= size <= FIRST_READ_BYTES_MAX:
                yield end
                continue
            if place + size > read_to:
                chunk_start, read_to = place, _end_of_run(by_place, number)
                segment = self._log.find(place)
                read_to = read_to if segment is None else min(read_to, segment.end)
                whole = segment is not None and place + size <= read_to
                chunk = segment.pread(place, read_to - place) if segment and whole else b""
            at = place - chunk_start
            seen, key = chunk[at : at + size], (end.queue.topic, end.queue.queue_id)
            if len(seen) < size or first_strange(seen, end.unit, end.offset, key) is not None:
                yield end

    def _is_strange(self, queue: ConsumeQueue, offset: int) -> bool:
        verdict = compare(queue, self._log, offset)
        if verdict is not Verdict.NOTHING:
            return verdict is Verdict.ANOTHER
        log_offset, size, _ = queueunit.unit_at(queue.stored_unit(offset), 0)
        if size == queueunit.LOST_SIZE or not queueunit.is_message(log_offset, size):
            return False
        # Is the record damaged, or do good records run across the place?
        segment = self._log.find(log_offset)
        return segment is not None and log_offset < self._end_of_good(segment)

    def _end_of_good(self, segment: Segment) -> int:
        if segment.start not in self._whole_to:
            end = segment.start
            for stretch in LogScan(self._log, segment.start):
                if stretch.start >= segment.end:
                    break
                end = stretch.end
            self._whole_to[segment.start] = end
        return self._whole_to[segment.start]

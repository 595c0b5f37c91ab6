"""Do the units of a queue name its messages? The log's records say whose messages they are."""

from __future__ import annotations

from enum import Enum

from cometmq.format import queueunit
from cometmq.format.belonging import first_strange, is_message_at
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.log.scan import LogScan, found_at
from cometmq.store.queues.consumequeue import UNIT_BYTES, ConsumeQueue

FIRST_READ_BYTES_MIN, FIRST_READ_BYTES_MAX = queueunit.LOST_SIZE + 1, 64 * 1024


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


class Comparison:
    """Compares the first and the last unit of each file of queues with the log. Units whose records
    damage took out of the log show nothing.
    """

    def __init__(self, log: Segments) -> None:
        self._log = log
        self._whole_to: dict[int, int] = {}  # by a log file's start: where its good records end

    def complaint(self, queue: ConsumeQueue) -> str:
        """What shows that a file of a queue is not the queue's; empty: nothing does."""
        for segment in queue.segments:
            first = max(segment.start // UNIT_BYTES, queue.min_offset)
            last = min(segment.end // UNIT_BYTES, queue.next_offset) - 1
            for offset in {first, last} if first <= last else ():
                if self._is_strange(queue, offset):
                    return (
                        f"{segment.file.path} is not of queue {queue.queue_id} of {queue.topic}: "
                        f"its unit of message {offset} names another record"
                    )
        return ""

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

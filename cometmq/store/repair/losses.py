"""Which messages were at a place of the log, by the queues as they are before they are rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from cometmq.errors import StoreDamaged, StoreFailed, StoreForeignFile
from cometmq.format import queueunit
from cometmq.format.record import LAYOUTS
from cometmq.model import TOPIC_NAME, QueueKey
from cometmq.store import layout
from cometmq.store.disk.files import Files
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.log.scan import RECORD_BYTES_MAX, found_at
from cometmq.store.metadata import abortfile
from cometmq.store.queues.consumequeue import UNIT_BYTES, ConsumeQueue, Tail
from cometmq.store.recovery import witness
from cometmq.store.recovery.replay import Loss
from cometmq.store.repair.survey import Known, open_queue_row

RECORD_BYTES_MIN = LAYOUTS[0].record_bytes_min
UNITS_READ = 50_000  # at a time

Bounds = tuple[int, int]  # queue offsets of the first message and behind the last


def between(files: Files, paths: layout.StorePaths, start: int, end: int) -> Iterator[Loss]:
    """The messages of all queues that lie from ``start`` to ``end`` of the log."""
    for queue, first, stop in _with_messages(files, paths, start, end):
        yield Loss(queue.topic, queue.queue_id, first, stop - first, start)


def tails(files: Files, paths: layout.StorePaths, known: Known) -> dict[QueueKey, Tail]:
    """What queues have units for behind the mark, where these vouch for the log: see
    :mod:`cometmq.store.recovery.witness`. Of a store that is in use, too, when it is asked for
    before its log is read.
    """
    one = known.identity
    failed = abortfile.records_failure(files, paths.abort)
    if one is None or one.clean is not None or one.foreign is not None:
        return {}
    if not witness.kept_all(files, one, disk_failed=failed):
        return {}
    found: dict[QueueKey, Tail] = {}
    for queue in _queues(files, paths):
        with suppress(StoreDamaged, StoreFailed):  # not this log's, or it has gone this moment
            queue.measure(0, 0 if known.mark is None else known.mark.end)
            tail = queue.tail()
            if tail is not None:
                found[queue.topic, queue.queue_id] = tail
    return found


def by_log(
    files: Files, paths: layout.StorePaths, log: Segments, end: int
) -> Iterator[tuple[Loss, bool]]:
    """The messages of each queue before ``end`` of the log, and whether the log has the records
    that the queue's first and last unit name.
    """
    for queue, first, stop in _with_messages(files, paths, log.start, end):
        units = [next(_units(queue, at)) for at in (first, stop - 1)]
        found = Loss(queue.topic, queue.queue_id, first, stop - first, units[0][0])
        yield found, all(_log_has(log, queue.topic, position, size) for position, size, _ in units)


def _log_has(log: Segments, topic: str, position: int, size: int) -> bool:
    segment = log.find(position)
    return size == queueunit.LOST_SIZE or (
        segment is not None and _fits(segment, topic, position, size)
    )


def _fits(segment: Segment, topic: str, position: int, size: int) -> bool:
    """Whether the record of a unit is where the unit says."""
    one = found_at(segment, position).record
    return one is not None and (one.size, one.topic) == (size, topic)


def merged(some: Iterable[Loss]) -> list[Loss]:
    """The same messages, sorted, each of them once."""
    found: list[Loss] = []
    for loss in sorted(some):
        stop = loss.first_queue_offset + loss.message_count
        last = found[-1] if found and found[-1][:2] == loss[:2] else None
        if last is None or last.first_queue_offset + last.message_count < loss.first_queue_offset:
            found.append(loss)
        else:
            count = max(last.message_count, stop - last.first_queue_offset)
            found[-1] = last._replace(message_count=count)
    return found


def topics_found(files: Files, paths: layout.StorePaths) -> dict[str, int]:
    """The topics that have folders, and how many queues: one more than the highest number."""
    counts: dict[str, int] = {}
    for topic in files.entries(paths.consume_queue):
        if not topic.is_directory or not TOPIC_NAME.fullmatch(topic.name):
            continue
        for entry in files.entries(paths.consume_queue / topic.name):
            if layout.QUEUE_ID_NAME.fullmatch(entry.name):
                counts[topic.name] = max(counts.get(topic.name, 0), int(entry.name) + 1)
    return counts


def misfits(files: Files, paths: layout.StorePaths, segment: Segment) -> tuple[int, int]:
    """How many units point into a log file and name another record than the file has there, and how
    many point into it at all.
    """
    wrong = count = 0
    for queue in _queues(files, paths):
        with suppress(StoreDamaged):  # its units are not this log's
            for position, size, _ in _units(queue, queue.first_at(segment.start)):
                if position >= segment.end:
                    break
                if size > 1 and position >= segment.start:
                    wrong += not _fits(segment, queue.topic, position, size)
                    count += 1
    return wrong, count


def known_end(files: Files, paths: layout.StorePaths) -> int:
    """Log offset behind the last message of all queues."""
    found = 0
    for queue, _, stop in _with_messages(files, paths, 0, layout.OFFSET_MAX):
        position, size, _ = next(_units(queue, stop - 1))
        found = max(found, position + size)
    return found


def _with_messages(
    files: Files, paths: layout.StorePaths, start: int, end: int
) -> Iterator[tuple[ConsumeQueue, int, int]]:
    """The queues with messages from ``start`` to ``end`` of the log, and the bounds of these."""
    for queue in _queues(files, paths):
        try:
            first, stop = _bounds(queue, start, end)
        except StoreDamaged:  # its units are not this log's
            continue
        if first < stop:
            yield queue, first, stop


def _queues(files: Files, paths: layout.StorePaths) -> Iterator[ConsumeQueue]:
    """The queues as they were found, as far as they can be read."""
    for topic in files.entries(paths.consume_queue):
        for entry in files.entries(paths.consume_queue / topic.name) if topic.is_directory else ():
            folder = paths.consume_queue / topic.name / entry.name
            try:
                number = layout.parse_queue_id(entry.name, folder.parent)
                row, _ = open_queue_row(files, folder)
            except StoreForeignFile:
                continue
            queue = ConsumeQueue(topic.name, number, folder, row.file_bytes)
            queue.segments = row
            yield queue
            queue.close()


def _bounds(queue: ConsumeQueue, start: int, end: int) -> Bounds:
    """The units that a writer can have made: each points to a record behind the one before. Other
    bytes of a queue's file, too long or half written, are of no message.
    """
    first = stop = queue.first_at(start)
    behind = start
    for position, size, _ in _units(queue, first):
        is_record = RECORD_BYTES_MIN <= size <= RECORD_BYTES_MAX and behind <= position
        if is_record and position + size <= end:
            behind = position + size
        elif not _is_of_none(position, size):
            break
        elif first == stop:
            first += 1
        stop += 1
    return first, stop


def _is_of_none(position: int, size: int) -> bool:
    """Filler, or a message that was lost before."""
    return size == queueunit.LOST_SIZE or (position, size) == (0, queueunit.PREFILL_SIZE)


def _units(queue: ConsumeQueue, first: int) -> Iterator[tuple[int, int, int]]:
    at = first * UNIT_BYTES
    while (segment := queue.segments.find(at)) is not None:
        units = segment.pread(at, min(UNITS_READ * UNIT_BYTES, segment.end - at))
        if not units:  # the file has become shorter meanwhile
            return
        yield from queueunit.iterate(units)
        at += len(units)


def in_words(losses: Iterator[Loss]) -> str:
    """Which messages they are."""
    found = []
    for topic, queue_id, first, count, _ in losses:
        which = f"message {first}" if count == 1 else f"messages {first} to {first + count - 1}"
        found.append(f"{which} of queue {queue_id} of {topic}")
    return ", ".join(found) or "no message that a queue has"


def all_of(
    missed: Sequence[Loss], given_up: Sequence[Loss], after: Mapping[tuple[str, int], Bounds]
) -> list[Loss]:
    """``missed`` is what the log itself shows, by the gaps that are left in its queues.
    ``given_up`` is what was at the places that were given up. Of that the log cannot show what came
    before a queue's first message or behind its last: ``after`` has where these are now.
    """
    inside = [loss for loss in missed if loss.first_queue_offset < _bounds_of(loss, after)[1]]
    whole = {(loss.topic, loss.queue_id) for loss in inside if loss.first_queue_offset == 0}
    bounds = {key: (0 if key in whole else low, high) for key, (low, high) in after.items()}
    return [*inside, *sorted(chain.from_iterable(_outside(loss, bounds) for loss in given_up))]


def _bounds_of(loss: Loss, after: Mapping[tuple[str, int], Bounds]) -> Bounds:
    return after.get((loss.topic, loss.queue_id), (0, 0))


def _outside(loss: Loss, after: Mapping[tuple[str, int], Bounds]) -> Iterator[Loss]:
    low, high = _bounds_of(loss, after)
    first, stop = loss.first_queue_offset, loss.first_queue_offset + loss.message_count
    for start, end in ((first, min(stop, low)), (max(first, high), stop)):
        if start < end:
            yield loss._replace(first_queue_offset=start, message_count=end - start)

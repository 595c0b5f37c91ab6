"""Which units a queue had where its files were damaged, found again in the log while both are open.

Around the damage two units are looked for that are right: the log has their records. The log from
the one to the other names all units between them. Units of another queue are damage, too: its files
were put in the place of these.
"""

from __future__ import annotations

from typing import NamedTuple

from cometmq.format import queueunit
from cometmq.format.queueunit import UNIT_BYTES
from cometmq.store.disk.segments import Segments
from cometmq.store.log.scan import good_stretches
from cometmq.store.log.units import lost_unit
from cometmq.store.queues.agreement import Verdict, compare
from cometmq.store.queues.consumequeue import ConsumeQueue

NO_SIZE = 0  # of a unit of zeros


class Mended(NamedTuple):
    """What belongs into a queue's files from the unit at ``first`` on. ``is_closed`` False: the
    damage goes to the end of the files, so records of it may lie behind those that were read.
    """

    first: int  # queue offset
    units: bytes
    lost_count: int  # of them: units of zeros of which the log has no record
    is_closed: bool


def mended(queue: ConsumeQueue, log: Segments, log_end: int, offset: int) -> Mended:
    """The units around the damaged one at ``offset``, which is in a file. The log is read up to
    ``log_end``. What the log has no record of is marked as lost if it is all zeros or names another
    message, and stays as it is otherwise. Blocking: may read all of the log between two messages
    of the queue.
    """
    low = max(queue.min_offset, queue.segments.start // UNIT_BYTES)
    first, end = offset - 1, offset + 1

    def is_right(place: int) -> bool:
        return compare(queue, log, place) is Verdict.MESSAGE

    while first >= low and not is_right(first):
        first -= 1
    while end < queue.file_end and not is_right(end):
        end += 1
    is_closed = end < queue.file_end
    # The two may lack their last bytes: their places are right, and they are found again as well.
    start = _place(queue, first)[0] if first >= low else log.start
    stop = sum(_place(queue, end)) if is_closed else log_end
    first, end = max(first, low), min(end + 1, queue.file_end)
    return _in_log(queue, log, (start, stop), (first, end), is_closed)


def _in_log(
    queue: ConsumeQueue,
    log: Segments,
    places: tuple[int, int],
    offsets: tuple[int, int],
    is_closed: bool,
) -> Mended:
    first, end = offsets
    found: dict[int, bytes] = {}
    for _, stretch in good_stretches(log, *places):
        for run in stretch.run.queues:
            if (run.topic, run.queue_id) == (queue.topic, queue.queue_id):
                for number in range(run.unit_count):
                    unit = run.units[number * UNIT_BYTES : (number + 1) * UNIT_BYTES]
                    found[run.first_queue_offset + number] = unit
    units: list[bytes] = []
    place, lost_count = places[0], 0
    for offset in range(first, end):
        unit = found.get(offset) or queue.stored_unit(offset)
        log_offset, size, _ = queueunit.unit_at(unit, 0)
        is_lost = offset not in found and compare(queue, log, offset) is Verdict.ANOTHER
        if size == NO_SIZE or is_lost:
            unit = lost_unit(place)
            lost_count += 1
        else:
            place = log_offset + size
        units.append(unit)
    return Mended(first, b"".join(units), lost_count, is_closed)


def _place(queue: ConsumeQueue, offset: int) -> tuple[int, int]:
    """Log offset and size of the record that a unit names."""
    log_offset, size, _ = queueunit.unit_at(queue.stored_unit(offset), 0)
    return log_offset, size

"""Are records the messages of a queue that somebody asked for? Each record names its topic, its
queue and its offset there. The files of a queue may name other records: those of another queue
that were put in their place.
"""

from __future__ import annotations

from array import array
from typing import Final, TypeAlias

from cometmq.format import queueunit, record
from cometmq.format.record import LAYOUTS, SYS_FLAG_HOSTS, Record
from cometmq.model import QueueKey
from cometmq.native import accelerator

_FIELDS: Final = (
    *("size", "magic", "queue_id", "queue_offset", "log_offset", "sys_flag", "body_bytes"),
)
_READERS: Final = {
    flags: (layout.reader(*_FIELDS).unpack_from, layout.head_bytes)
    for flags, layout in LAYOUTS.items()
}
_READ_V4: Final = _READERS[0][0]


Place: TypeAlias = tuple[QueueKey, int]  # a queue and an offset


def is_message_at(found: Record, place: Place) -> bool:
    """Whether a record says that it is the message at ``place``."""
    (topic, queue_id), offset = place
    return found.queue_offset == offset and found.queue_id == queue_id and found.topic == topic


def first_strange(records: bytes, units: bytes, offset: int, queue: QueueKey) -> int | None:
    """Where in ``records``, which lie end to end, the first one begins that is not the message of
    the queue that a unit says it is; None: all are.

    ``units`` are the queue's from ``offset`` on. ``records`` are those of some of them, in their
    order.
    """
    topic, at, index = queue[0].encode(), 0, 0
    if accelerator is not None:
        stopped = accelerator.of_queue(records, units, offset, topic, queue[1])
        if stopped == len(records):
            return None
    places = queueunit.log_offsets(units)
    while at < len(records):
        found = _named(records, at)
        if found is None:
            return at
        size, log_offset, *_ = found
        while index < len(places) and places[index] != log_offset:
            index += 1
        if index == len(places) or found[2:] != (topic, queue[1], offset + index):
            return at
        index += 1
        at += size
    return None


def first_misplaced(records: bytes, topic: str, places: array[int]) -> int | None:
    """As :func:`first_strange`, of records of one topic in any order. ``places``, an
    ``array("q")``, has a queue id and a queue offset for each.
    """
    wanted, at = topic.encode(), 0
    if accelerator is not None and records:
        placed = accelerator.at_places(records, wanted, places)
        if placed == len(records):
            return None
    for index in range(0, len(places), 2):
        found = _named(records, at)
        if found is None or found[2:] != (wanted, places[index], places[index + 1]):
            return at
        at += found[0]
    return None if at == len(records) else at


def _named(records: bytes, at: int) -> tuple[int, int, bytes, int, int] | None:
    """Size, log offset, topic, queue id and queue offset, as the record at ``at`` says; None: it is
    not a whole record.
    """
    left = len(records) - at
    if left < LAYOUTS[0].record_bytes_min:
        return None
    flags = _READ_V4(records, at)[5] & SYS_FLAG_HOSTS
    if left < LAYOUTS[flags].record_bytes_min:
        return None
    read, head_bytes = _READERS[flags]
    size, magic, queue_id, queue_offset, log_offset, _, body_bytes = read(records, at)
    topic_at = at + head_bytes + body_bytes + 1
    is_framed = body_bytes >= 0 and 0 < size <= left and topic_at <= at + size
    if magic != record.MAGIC_V1 or not is_framed:
        return None
    topic = records[topic_at : topic_at + records[topic_at - 1]]
    return size, log_offset, topic, queue_id, queue_offset

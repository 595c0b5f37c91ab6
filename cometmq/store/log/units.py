"""Which unit a record gets in its queue: RocketMQ's rules of dispatch, for a record that is looked
at by itself. Plain ones are done in bulk: :mod:`cometmq.format.scan`.

And the marks of messages that damage took out of a log. In the log ``cometmq store repair
--write-off`` puts one record over the damaged bytes, so that readers come past it: a record of
:data:`LOST_TOPIC` that says it was rolled back, which gets no unit in any queue, at RocketMQ's too.
In a queue a unit of one byte marks each message that is gone: no record has one byte, so
reading it is :class:`StoreDamaged`.
"""

from __future__ import annotations

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import delayed, queueunit, record, taghash, timers
from cometmq.format.delayed import SCHEDULE_TOPIC
from cometmq.format.properties import tag_of
from cometmq.format.record import Record
from cometmq.format.scan import QueueRun, Run
from cometmq.format.timers import TIMER_QUEUE

TRANSACTION_MASK = 0b11 << 2
PREPARED, ROLLED_BACK = 0b01 << 2, 0b11 << 2
BATCH_FLAGS = 0b11 << 6  # a record that holds many messages: RocketMQ 5's BatchCQ
BATCH_COUNT = "INNER_NUM"  # how many; no client of ours may set it, and RocketMQ always does

LOST_TOPIC = "rmq_sys_lost"
LOST_RECORD_BYTES_MIN = record.record_size(0, len(LOST_TOPIC), 0)
NO_HOST = bytes(record.HOST_V4_BYTES)


def run_of(found: Record, end: int) -> Run:
    """The record as a run of one. Raises StoreForeignFile for a record that holds a batch.

    One with a batch's bits and no count holds one message: SYSFLAG has no checksum, and a bit of
    it has flipped.
    """
    if found.sys_flag & BATCH_FLAGS and BATCH_COUNT in found.properties:
        raise StoreForeignFile(
            f"the record at {found.log_offset} of the log holds a batch of messages: Apache "
            f"RocketMQ's topic {found.topic} has queue.type BatchCQ, which cannot be read here. "
            "Nothing was changed: the folder is Apache RocketMQ's as before, which alone can read "
            "it; begin here with an empty folder"
        )
    queues = []
    if found.sys_flag & TRANSACTION_MASK not in (PREPARED, ROLLED_BACK):
        unit = queueunit.pack(found.log_offset, found.size, tags_code(found))
        queues.append(QueueRun(found.topic, found.queue_id, found.queue_offset, unit))
    time_ms = found.store_time_ms
    return Run(end, 1, found.size, time_ms, time_ms, False, queues)


def tags_code(found: Record) -> int:
    """The value of the unit's field for the tag's hash; for a delayed message its due time."""
    if found.topic == SCHEDULE_TOPIC:
        level = delayed.level_named(found.properties)
        if level:
            return found.store_time_ms + delayed.delay_ms(level)
    if (found.topic, found.queue_id) == TIMER_QUEUE:
        due_ms = timers.due_ms(found.raw_properties)
        if due_ms is not None:
            return due_ms
    return taghash.tags_code(tag_of(found.raw_properties))


def lost_unit(log_offset: int) -> bytes:
    """Marks in a queue a message that was lost at ``log_offset`` or somewhat behind."""
    return queueunit.pack(log_offset, queueunit.LOST_SIZE, 0)


def lost_record(log_offset: int, damaged: bytes, store_time_ms: int) -> bytes:
    """As long as ``damaged``, which it replaces; its body is as much of it as there is room for.

    StoreDamaged when not even an empty one has room.
    """
    room = len(damaged) - LOST_RECORD_BYTES_MIN
    if room < 0:
        raise StoreDamaged(
            f"the {len(damaged)} damaged bytes at {log_offset} are too few to be written off: cut "
            "the log there instead"
        )
    written = record.encode(
        LOST_TOPIC.encode(),
        0,
        damaged[:room],
        b"",
        born_time_ms=store_time_ms,
        born_host=NO_HOST,
        store_host=NO_HOST,
        sys_flag=ROLLED_BACK,
        log_offset=log_offset,
        store_time_ms=store_time_ms,
    )
    assert len(written) == len(damaged), (len(written), len(damaged))
    return written

"""What damage took out of a log: how its place is marked, in the log and in queues.

In the log ``cometmq store repair --write-off`` puts one record over the damaged bytes, so that
whoever reads the log comes past it: a record of :data:`LOST_TOPIC` that says it was rolled back,
which gets no unit in any queue, at RocketMQ's too. In a queue a unit of one byte stands for each
message that is gone: no record has one byte, so reading it is :class:`StoreDamaged`.
"""

from __future__ import annotations

from cometmq.errors import StoreDamaged
from cometmq.format import queueunit, record
from cometmq.store.log.units import ROLLED_BACK

LOST_TOPIC = "rmq_sys_lost"
LOST_RECORD_BYTES_MIN = record.record_size(0, len(LOST_TOPIC), 0)
NO_HOST = bytes(record.HOST_V4_BYTES)


def lost_unit(log_offset: int) -> bytes:
    """Stands in a queue for a message that was lost at ``log_offset`` or somewhat behind."""
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

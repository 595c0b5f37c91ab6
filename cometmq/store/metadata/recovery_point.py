"""A mark: up to some position of the log everything is on the disk, in the log and in the queues.

A clean close leaves one in ``cometmq.json``; while a store is open, ``checkpoint`` has one of a
moment ago. Either is believed after a look at the log: ``docs/format/store-layout.md`` §4.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import NamedTuple

from cometmq.format import record
from cometmq.store.disk.segments import Segments

UNKNOWN = -1


class QueueTotals(NamedTuple):
    """What the queues hold together. Says that all of them are still there."""

    queue_count: int = UNKNOWN  # queues that ever got a message
    unit_count: int = UNKNOWN  # sum of their next offsets

    @property
    def is_known(self) -> bool:
        return self.queue_count >= 0


@dataclass(frozen=True, slots=True)
class RecoveryPoint:
    """``end`` is behind a record, or where the next file begins behind the record's end mark. An
    empty log has ``end`` == ``last_offset`` and ``last_bytes`` 0.
    """

    end: int
    last_offset: int  # where the last record before ``end`` starts
    last_bytes: int  # that record's size
    last_crc32: int  # CRC-32 of that record's bytes
    queue_count: int = UNKNOWN
    unit_count: int = UNKNOWN

    @classmethod
    def of(
        cls, end: int, last_offset: int, last_record: bytes, tally: QueueTotals
    ) -> RecoveryPoint:
        assert last_offset + len(last_record) <= end, (end, last_offset, len(last_record))
        crc = zlib.crc32(last_record)
        return cls(end, last_offset, len(last_record), crc, *tally)

    @property
    def tally(self) -> QueueTotals:
        """What the queues held of the log before ``end``."""
        return QueueTotals(self.queue_count, self.unit_count)

    def last_record(self, log: Segments) -> bytes | None:
        """The bytes of the record that the mark names; None when the log has others there."""
        found = log.pread(self.last_offset, self.last_bytes) if self.last_bytes else b""
        return found if zlib.crc32(found) == self.last_crc32 else None

    def holds(self, log: Segments) -> bool:
        """Whether the log is the mark's up to ``end``, as far as one record shows."""
        if self.last_record(log) is None:
            return False
        behind = self.last_offset + self.last_bytes
        rest = self.end - behind
        if rest < record.BLANK_BYTES:
            return rest == 0
        return log.pread(behind, record.BLANK_BYTES) == record.blank(rest)

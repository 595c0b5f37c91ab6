"""The 20-byte unit of a consume queue. Spec: docs/format/queueunit.md."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator
from typing import Final

UNIT: Final = struct.Struct(
    ">"
    "q"  # log offset of the record
    "i"  # size: TOTALSIZE of the record; 0 in a unit that was never written
    "q"  # tags code: the hash of the record's tag, sign-extended; 0 = no tag
)
UNIT_BYTES: Final = UNIT.size
assert UNIT_BYTES == 20

PREFILL_SIZE: Final = 0x7FFFFFFF
PREFILL: Final = UNIT.pack(0, PREFILL_SIZE, 0)
"""Fills the front of a queue whose first messages are gone, when its file is rebuilt."""

LOST_SIZE: Final = 1
"""The size in a unit whose message was lost to damage of the log: no record has one byte."""

_HOLE: Final = bytes(UNIT_BYTES)
_SIZE: Final = slice(8, 12)
_NO_SIZE: Final = bytes(4)


def pack(log_offset: int, size: int, tags_code: int) -> bytes:
    """One unit. ``tags_code`` is signed, as :func:`cometmq.format.taghash.tags_code` gives it."""
    assert log_offset >= 0
    assert size > 0
    return UNIT.pack(log_offset, size, tags_code)


def iterate(units: bytes) -> Iterator[tuple[int, int, int]]:
    """(log offset, size, tags code) of each unit; ``units`` holds whole units only."""
    assert len(units) % UNIT_BYTES == 0
    return UNIT.iter_unpack(units)


def log_offsets(units: bytes) -> array[int]:
    """The log offset of each unit (int64), without a number made for each."""
    return _column(units, 0)


def tags_codes(units: bytes) -> array[int]:
    """The tags code of each unit (int64), in the same way."""
    return _column(units, _SIZE.stop)


def _column(units: bytes, first: int) -> array[int]:
    assert len(units) % UNIT_BYTES == 0
    numbers = bytearray(len(units) // UNIT_BYTES * 8)
    for byte in range(8):
        numbers[byte::8] = units[first + byte :: UNIT_BYTES]
    found = array("q", numbers)
    if sys.byteorder == "little":
        found.byteswap()
    return found


def unit_at(units: bytes, index: int) -> tuple[int, int, int]:
    """(log offset, size, tags code) of the unit with that index, from 0."""
    log_offset, size, tags_code = UNIT.unpack_from(units, index * UNIT_BYTES)
    return log_offset, size, tags_code


def before_hole(units: bytes) -> bytes:
    """The first of ``units``, up to a hole: zeros where a page of the disk was lost. The unit
    before a hole may have lost its end with it, and is left out, too.
    """
    # No units in a row have as many zeros: 8 of a tag, 8 of an offset, and less than a size.
    if _HOLE not in units:
        return units if units[_SIZE] != _NO_SIZE else b""
    return units[: units.index(_HOLE) // UNIT_BYTES * UNIT_BYTES]


def is_message(log_offset: int, size: int) -> bool:
    """Whether a unit is of a message: it is neither unwritten (zeros) nor pre-fill."""
    return log_offset >= 0 and size > 0 and (log_offset, size) != (0, PREFILL_SIZE)

"""Entries of the timer index: when a message is due and its offset in the timer queue, 16 bytes
whose order is that of delivery. docs/format/timers.md.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from cometmq.format import queueunit
from cometmq.native import accelerator

ENTRY: Final = struct.Struct(">qq")  # due_ms, queue offset
ENTRY_BYTES: Final = ENTRY.size
assert ENTRY_BYTES == 16

HASH_MAX = 2**31 - 1  # Apache RocketMQ's units have the tag's hash, which lies between


def iterate(entries: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """(due_ms, queue offset) of each entry."""
    return ENTRY.iter_unpack(entries)


def first_of(entries: bytes | bytearray, at: int = 0) -> tuple[int, int]:
    """(due_ms, queue offset) of the entry at byte ``at``."""
    due_ms, offset = ENTRY.unpack_from(entries, at)
    return due_ms, offset


def of_units(units: bytes, first_offset: int) -> bytes:
    """The entries of units of the timer queue, of which the first has this offset, in their order.
    Units of no message, and of messages without a due time, are left out.
    """
    if accelerator is not None:
        return accelerator.timer_entries(units, first_offset)
    pack = ENTRY.pack
    return b"".join(
        [
            pack(code, offset)
            for offset, (_, size, code) in enumerate(queueunit.iterate(units), first_offset)
            if code > HASH_MAX and queueunit.LOST_SIZE < size < queueunit.PREFILL_SIZE
        ]
    )


def in_order(entries: bytes | bytearray) -> bytes:
    """The same entries, sorted."""
    if accelerator is not None:
        return accelerator.sort_timers(entries)
    pieces = [bytes(entries[at : at + 16]) for at in range(0, len(entries), 16)]
    pieces.sort()
    return b"".join(pieces)


def count_up_to(entries: bytes, key: bytes, first: int = 0) -> int:
    """How many of sorted entries, without the ``first`` ones, are not above ``key``, an entry."""
    low, high = first, len(entries) // ENTRY_BYTES
    while low < high:
        middle = (low + high) // 2
        at = middle * ENTRY_BYTES
        if entries[at : at + ENTRY_BYTES] <= key:
            low = middle + 1
        else:
            high = middle
    return low - first

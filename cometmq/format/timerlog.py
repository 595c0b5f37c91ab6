"""The files in which RocketMQ 5 keeps its timers: ``timerlog``, which lists the messages that wait,
and ``config/timercheck``, which says how far it is. docs/format/timers.md. Pure.

RocketMQ delivers by second. The messages of a second are a chain in the list: each unit says where
the one before it lies. A table, which RocketMQ makes again from the list, has the last one of each
second.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

# Size of the unit, place of the unit before it, magic; when RocketMQ wrote the unit, in how many ms
# it delivers the message; the record's log offset and size; a hash of the topic, and nothing.
_UNIT = struct.Struct(">iqiqiqiiq")
UNIT_BYTES = _UNIT.size
assert UNIT_BYTES == 52
_BLANK_BYTES = 16  # RocketMQ wants so much room behind the last unit
DELIVER, STORE_AGAIN, RECALL = 1, 2, 4

SECOND_MS = 1_000
# What is due later RocketMQ stores once more by then: its timerRollWindowSlot.
WINDOW_MS = 172_800 * SECOND_MS
# It delivers nothing that is a week late.
LATE_MS_MAX = 86_400 * SECOND_MS

# Up to when RocketMQ has delivered, bytes of the timer log, and the offset in the timer queue up to
# which it has looked at messages, twice: its own, and its master's. Then a version: number of the
# state, time, counter.
_CHECK = struct.Struct(">qqqqqqq")
_CHECK_HEAD = struct.Struct(">qqq")
_MARK = struct.Struct(">8sI")  # ours, behind what RocketMQ reads and writes
_MARK_NAME = b"cometmq\0"
CHECK_BYTES = 4_096  # RocketMQ maps so much


class WaitingRecord(NamedTuple):
    """A record of the timer queue that is to be delivered."""

    due_ms: int
    log_offset: int
    size: int


class TimerLog(NamedTuple):
    """The list, and the first second for which it has messages, in ms."""

    content: bytearray
    first_ms: int


def units_max(file_bytes: int) -> int:
    """How many units a file of the list has room for."""
    return (file_bytes - _BLANK_BYTES) // UNIT_BYTES


def encode_log(waiting: Iterable[WaitingRecord], last: tuple[int, int], now_ms: int) -> TimerLog:
    """The list of what waits; empty: nothing does. ``last``: log offset and size of the timer
    queue's last record, whether it waits or not: RocketMQ continues in the queue behind the record
    that the list ends with.
    """
    base_ms = _second_of(now_ms)
    last_of: dict[int, int] = {}  # second → where its last unit lies
    units = bytearray()  # of a million messages 52 MB, which a list would treble
    pack = _UNIT.pack
    end = -1
    for due_ms, log_offset, size in waiting:
        magic, second_ms = DELIVER, max(_second_of(due_ms), base_ms - LATE_MS_MAX)
        if second_ms - base_ms >= WINDOW_MS:
            magic, second_ms = DELIVER | STORE_AGAIN, _second_to_store_again(second_ms, base_ms)
        before = last_of.get(second_ms, -1)
        after_ms = second_ms - base_ms
        last_of[second_ms] = len(units)
        units += pack(UNIT_BYTES, before, magic, base_ms, after_ms, log_offset, size, 0, 0)
        end = log_offset
    if units and end != last[0]:
        # A unit that recalls a message which names none: RocketMQ passes over it.
        before = last_of.get(base_ms, -1)
        units += pack(UNIT_BYTES, before, RECALL, base_ms, 0, *last, 0, 0)
    return TimerLog(units, min(last_of, default=base_ms))


def _second_of(time_ms: int) -> int:
    return time_ms // SECOND_MS * SECOND_MS


def _second_to_store_again(second_ms: int, base_ms: int) -> int:
    """RocketMQ's rule: not so late that little would be left to wait."""
    left_ms = second_ms - base_ms - WINDOW_MS
    return base_ms + (WINDOW_MS // 2 if left_ms < WINDOW_MS // 3 else WINDOW_MS)


class TimerCheck(NamedTuple):
    """RocketMQ has looked at all before ``offset`` in the timer queue, and delivered of it what is
    due in a second before ``time_ms``. ``is_ours``: it has not been here since we wrote this.
    """

    time_ms: int
    offset: int
    is_ours: bool = False


def encode_check(time_ms: int, offset: int, log_bytes: int, now_ms: int) -> bytes:
    """``config/timercheck``. RocketMQ continues at ``offset`` of the timer queue, with a list of so
    many bytes.
    """
    said = _CHECK.pack(_second_of(time_ms), log_bytes, offset, offset, 0, now_ms, 0)
    mark = _MARK.pack(_MARK_NAME, zlib.crc32(said))
    return (said + mark).ljust(CHECK_BYTES, b"\0")


def decode_check(content: bytes | None) -> TimerCheck | None:
    """The content of the file; None: it says nothing."""
    if content is None or len(content) < _CHECK_HEAD.size:
        return None
    time_ms, _, offset = _CHECK_HEAD.unpack_from(content)
    if time_ms <= 0 or offset < 0:
        return None
    return TimerCheck(time_ms, offset, _is_ours(content))


def _is_ours(content: bytes) -> bool:
    if len(content) < _CHECK.size + _MARK.size:
        return False
    name, crc = _MARK.unpack_from(content, _CHECK.size)
    return bool(name == _MARK_NAME and crc == zlib.crc32(content[: _CHECK.size]))

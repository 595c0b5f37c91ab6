"""The adoption of timers that Apache RocketMQ left in a store: docs/compatibility.md.
Blocking; reads the timer queue once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import delayed, queueunit, record, timers
from cometmq.format.record import Record
from cometmq.format.timers import TIMER_OUT_MS, TIMER_QUEUE
from cometmq.messaging.timers import TIME_MS_MAX, Timer, TimerMark, TimerTable
from cometmq.store.base import BaseStore

TIMERCHECK = "timercheck"
# Time up to which RocketMQ has delivered, position in its timer log, offset in the timer queue up
# to which it has looked at messages. More follows.
_CHECK = struct.Struct(">qqq")
UNITS_AT_ONCE = 1_024


class Checkpoint(NamedTuple):
    """RocketMQ has delivered what it had looked at, before ``offset``, up to this time."""

    time_ms: int
    offset: int


def read_check(content: bytes | None) -> Checkpoint | None:
    """RocketMQ's ``config/timercheck``; None: it says nothing."""
    if content is None or len(content) < _CHECK.size:
        return None
    time_ms, _, offset = _CHECK.unpack_from(content)
    return Checkpoint(time_ms, offset) if time_ms > 0 and offset >= 0 else None


def adopt_timers(store: BaseStore, table: TimerTable, check: Checkpoint | None, now_ms: int) -> int:
    """Let ``table`` have what still waits, and nothing else; how many messages that are.

    Of several records of one message, which RocketMQ stores again every two days, the newest
    counts; a tombstone cancels. Without a checkpoint all that is not yet due waits.
    """
    low, end = store.queue_bounds(*TIMER_QUEUE)
    if low == end:
        return 0
    check = check or Checkpoint(now_ms, end)
    offset = min(max(check.offset, low), end)
    time_ms = max(check.time_ms, table.watermark.due_ms)
    table.restore(TimerMark(Timer(time_ms, TIME_MS_MAX), offset, low), ())
    newest: dict[str, Timer] = {}
    gone: list[Timer] = []
    for found in _records(store, low, end):
        due_ms = timers.due_ms(found.raw_properties)
        if due_ms is None:
            continue
        timer = Timer(due_ms, found.queue_offset)
        name = timers.recalls(found.raw_properties)
        if name:
            gone += [timer, *filter(None, [newest.pop(name, None)])]
            continue
        name = _name_of(found)
        if name in newest:
            gone.append(newest[name])
        newest[name] = timer
        out_ms = found.properties.get(TIMER_OUT_MS, "")
        # It rounds down, and so delivers up to a second before our time.
        if timer.offset < offset and out_ms.isdigit() and int(out_ms) <= time_ms:
            gone.append(newest.pop(name))
    for timer in gone:
        table.skip(timer)
    return sum(map(table.is_pending, newest.values()))


def _name_of(found: Record) -> str:
    """As a tombstone names it; one without an id has a name of its own."""
    target = delayed.target_of(found.raw_properties)
    topic = target[0] if target else ""
    return f"{topic}+{found.unique_id}" if found.unique_id else str(found.queue_offset)


def _records(store: BaseStore, first: int, end: int) -> Iterator[Record]:
    """Those that are there, in order."""
    while first < end:
        units = store.read_units(*TIMER_QUEUE, first, min(UNITS_AT_ONCE, end - first))
        for place, size, _ in queueunit.iterate(units):
            if queueunit.is_message(place, size) and size > queueunit.LOST_SIZE:
                try:
                    yield record.decode(store.read_records([(place, size)]))
                except (MessageNotFound, StoreDamaged):
                    continue
        first += max(1, len(units) // queueunit.UNIT_BYTES)

"""The adoption of timers that Apache RocketMQ left in a store: docs/compatibility.md.
Blocking; reads the timer queue once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import delayed, queueunit, record, timers
from cometmq.format.belonging import is_message_at
from cometmq.format.record import Record
from cometmq.format.timerlog import SECOND_MS, TimerCheck
from cometmq.format.timers import TIMER_OUT_MS, TIMER_QUEUE
from cometmq.messaging.timers import TIME_MS_MAX, Timer, TimerMark, TimerTable
from cometmq.model import QueueKey
from cometmq.store.base import BaseStore

UNITS_AT_ONCE = 1_024


def adopt_timers(
    store: BaseStore,
    table: TimerTable,
    check: TimerCheck | None,
    now_ms: int,
    takes: Callable[[Record], bool] = lambda _: False,
) -> int:
    """Let ``table`` have what still waits, and nothing else; how many messages that are.

    Of several records of one message, which RocketMQ stores again every two days, the newest
    counts; a tombstone cancels. Without a checkpoint all that is not yet due waits. If RocketMQ has
    left our checkpoint as it was, ``table`` knows what waits. ``takes``: hears of each that waits;
    one for which it says True is not delivered.
    """
    low, end = store.queue_bounds(*TIMER_QUEUE)
    if low == end or (check is not None and check.is_ours and table.mark != TimerMark()):
        return 0
    check = check or TimerCheck(now_ms, end)
    offset = min(max(check.offset, low), end)
    newest: dict[str, Timer] = {}
    names: dict[str, str] = {}  # of the messages by their unique ids alone
    gone: list[Timer] = []
    for found in records_of(store, TIMER_QUEUE, low, end):
        due_ms = timers.due_ms(found.raw_properties)
        if due_ms is None:
            continue
        timer = Timer(due_ms, found.queue_offset)
        recalled = timers.recalls(found.raw_properties)
        if recalled:
            # Some versions name the topic too.
            name = recalled if recalled in newest else names.get(recalled, "")
            gone += [timer, *filter(None, [newest.pop(name, None)])]
            continue
        name = names[found.unique_id] = _name_of(found)
        if name in newest:
            gone.append(newest[name])
        newest[name] = timer
        is_delivered = timer.offset < offset and _second_of(found, due_ms) < check.time_ms
        if is_delivered or not table.is_pending(timer) or takes(found):
            gone.append(newest.pop(name))
    table.restore(TimerMark(Timer(check.time_ms - 1, TIME_MS_MAX), offset, low), ())
    for timer in gone:
        table.skip(timer)
    return sum(map(table.is_pending, newest.values()))


def _second_of(found: Record, due_ms: int) -> int:
    """The second in which RocketMQ delivers the message."""
    out_ms = found.properties.get(TIMER_OUT_MS, "")
    return (int(out_ms) if out_ms.isdigit() else due_ms) // SECOND_MS * SECOND_MS


def _name_of(found: Record) -> str:
    """As a tombstone names it; one without an id has a name of its own."""
    target = delayed.target_of(found.raw_properties)
    topic = target[0] if target else ""
    return f"{topic}+{found.unique_id}" if found.unique_id else str(found.queue_offset)


def records_of(store: BaseStore, key: QueueKey, first: int, end: int) -> Iterator[Record]:
    """The readable records of a queue from ``first`` to ``end``, in order."""
    while first < end:
        units = store.read_units(*key, first, min(UNITS_AT_ONCE, end - first))
        for offset, (place, size, _) in enumerate(queueunit.iterate(units), first):
            if queueunit.is_message(place, size) and size > queueunit.LOST_SIZE:
                try:
                    found = record.decode(store.read_records([(place, size)]))
                except (MessageNotFound, StoreDamaged):
                    continue
                if is_message_at(found, (key, offset)):
                    yield found
        first += max(1, len(units) // queueunit.UNIT_BYTES)

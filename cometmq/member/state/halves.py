"""The open half messages of a log that is opened for writing, read from its half and op queues:
:mod:`cometmq.messaging.transactions`. Blocking.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from cometmq.clock import Clock
from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import halves, queueunit, record
from cometmq.format.belonging import is_message_at
from cometmq.format.halves import HALF_QUEUE, HALF_TOPIC, OP_TOPIC, QUEUE_ID
from cometmq.format.record import Record
from cometmq.messaging.delay import Now
from cometmq.messaging.half_runs import EndedHalf, OpenHalf
from cometmq.messaging.transactions import CheckRules, HalfProgress, HalfTable
from cometmq.store.base import BaseStore
from cometmq.store.log.commitlog import Span
from cometmq.store.writer import MessageStore
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

_UNITS_AT_ONCE = 4_096
_READ_BYTES_MAX = 1 << 20


def open_halves(
    store: MessageStore,
    table: HalfTable,
    ended: Mapping[int, EndedHalf],
    rules: CheckRules,
    now: Now,
) -> list[int]:
    """Fill ``table``, which knows its progress. ``ended``: the halves whose ends are records of the
    end of the log, by log offset. Answers the offsets of those that the op queue does not list: an
    op record has to.
    """
    low, end = store.queue_bounds(*HALF_QUEUE)
    op_low, op_end = store.queue_bounds(OP_TOPIC, QUEUE_ID)
    floor, op_floor, checks = known = table.progress
    if low > floor and floor < end:
        log.error("half messages are gone", extra=fields(first=floor, end=min(low, end)))
    floor, op_floor = min(max(floor, low), end), min(max(op_floor, op_low), op_end)
    table.restore(HalfProgress(floor, op_floor, checks))
    listed = _listed(store, table, op_floor, op_end)
    missing: list[int] = []
    spans: dict[int, Span] = {}
    for offset, span in _spans(store, floor, end):
        if offset in listed:
            continue
        if span[0] in ended:
            missing.append(offset)
        else:
            spans[offset] = span
    newest: dict[str, int] = {}
    halves_found: dict[int, tuple[OpenHalf, float, int]] = {}
    for offset, found in _read(store, spans):
        its = halves.read(found.raw_properties)
        if its is None:
            log.error("a half message names no topic", extra=fields(at=found.log_offset))
            missing.append(offset)
            continue
        if store.adoption is not None and its.unique_id in newest:
            # RocketMQ appends a half again when it asks about it; a crash may leave both open.
            before = newest[its.unique_id]
            del halves_found[before]
            missing.append(before)
        if its.unique_id:
            newest[its.unique_id] = offset
        count = known.checks_of(offset) or min(its.check_count, rules.checks_max - 1)
        wait_s = rules.interval_s if count else its.immunity_s or rules.immunity_s
        # The clock of another machine may have stored it.
        age_s = max(0.0, (now.wall_ms - found.store_time_ms) / 1000)
        due_s = now.monotonic_s + (wait_s if count else max(0.0, wait_s - age_s))
        halves_found[offset] = ((found.log_offset, found.size, its.group), due_s, count)
    for offset, (half, due_s, count) in halves_found.items():
        table.add(offset, half, due_s, count)
    table.passed(end)
    _remember(store, table, ended)
    return missing


def _listed(store: BaseStore, table: HalfTable, first: int, end: int) -> set[int]:
    """The halves that the op queue lists from ``first`` on."""
    listed: set[int] = set()
    for offset, found in _read(store, dict(_spans(store, first, end, OP_TOPIC)), OP_TOPIC):
        offsets = halves.ended_halves(found.body) if found.tag == halves.OP_TAG else []
        if offsets:
            listed.update(offsets)
            table.told(offset + 1, offsets)
    return listed


def _spans(
    store: BaseStore, first: int, end: int, topic: str = HALF_TOPIC
) -> Iterator[tuple[int, Span]]:
    while first < end:
        units = store.read_units(topic, QUEUE_ID, first, min(_UNITS_AT_ONCE, end - first))
        assert units, "the queue ends before its own bound"
        for log_offset, size, _ in queueunit.iterate(units):
            if size > queueunit.LOST_SIZE:
                yield first, (log_offset, size)
            first += 1


def _read(
    store: BaseStore, spans: Mapping[int, Span], topic: str = HALF_TOPIC
) -> Iterator[tuple[int, Record]]:
    """The records, but for damaged ones."""
    some: list[tuple[int, Span]] = []
    size = 0
    for offset, span in spans.items():
        some.append((offset, span))
        size += span[1]
        if size >= _READ_BYTES_MAX:
            yield from _read_some(store, some, topic)
            some, size = [], 0
    if some:
        yield from _read_some(store, some, topic)


def _read_some(
    store: BaseStore, some: Sequence[tuple[int, Span]], topic: str
) -> Iterator[tuple[int, Record]]:
    try:
        found = record.decode_all(store.read_records([span for _, span in some]))
        for (offset, _), half in zip(some, found, strict=True):
            if not is_message_at(half, ((topic, QUEUE_ID), offset)):
                raise StoreDamaged(f"the unit of message {offset} of {topic} names another message")
    except (MessageNotFound, StoreDamaged) as error:
        if len(some) == 1:
            log.error("a half message is lost", extra=fields(at=some[0][1][0], reason=str(error)))
            return
        for one in some:
            yield from _read_some(store, [one], topic)
        return
    yield from zip([offset for offset, _ in some], found, strict=True)


def _remember(store: BaseStore, table: HalfTable, ended: Mapping[int, EndedHalf]) -> None:
    """Keep the results of halves whose ends lie at the end of the log: producers may ask again."""
    found: dict[int, EndedHalf] = {}
    for log_offset, became in ended.items():
        with suppress(MessageNotFound, StoreDamaged):
            half = record.decode(store.read_record(log_offset))
            if half.topic == HALF_TOPIC:
                found[half.queue_offset] = became
    table.remember_all(found)


def now_of(clock: Clock) -> Now:
    """One look at both clocks."""
    return Now(clock.wall_ms(), clock.monotonic_s())

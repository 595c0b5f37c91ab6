"""The state in the log: state records as batches, and the way back from the log to the tables.
Blocking, no asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from cometmq.errors import CometError, MessageNotFound, StateTooNew, StoreDamaged
from cometmq.format import properties, queueunit, record, taghash
from cometmq.messaging.changes import OffsetsCommitted, QueuesCounted, TopicDropped, decode
from cometmq.messaging.rebuilding import Commits
from cometmq.messaging.state import (
    STATE_QUEUE_ID,
    STATE_TAGS,
    STATE_TOPIC,
    BrokerState,
    StateLoader,
    StateRecord,
    find_copy_start,
)
from cometmq.store.base import BaseStore
from cometmq.store.writer import MessageStore

REBUILD = (
    "Take the log from a copy or another member; or let topics, groups and offsets be made anew "
    "from what is left of them, config/*.json and the queues: cometmq store repair DIRECTORY "
    "--rebuild-tables"
)
Counted = dict[str, tuple[int, ...]]  # by topic, the next offset of each queue

_TAG_OF_CODE = {taghash.tags_code(tag.encode()): tag for tag in STATE_TAGS}
_UNITS_AT_ONCE = 1_000
_RECORD_BYTES_AT_ONCE = 4 * 1024 * 1024


def encode_record(state_record: StateRecord, host: bytes, now_ms: int) -> bytes:
    """One state record as it goes into the log. ``host`` is the broker's own address and port:
    it is the producer.
    """
    return record.encode(
        STATE_TOPIC.encode(),
        STATE_QUEUE_ID,
        state_record.body,
        properties.encode({properties.TAGS: state_record.tag}),
        born_time_ms=now_ms,
        born_host=host,
        store_host=host,
    )


def append_now(
    store: MessageStore, records: Sequence[StateRecord], host: bytes, now_ms: int
) -> None:
    """Append state records before anybody else uses the store, and sync."""
    for state_record in records:
        data = encode_record(state_record, host, now_ms)
        segment = (STATE_TOPIC, STATE_QUEUE_ID, 1)
        store.append(data, [segment], born_host=host, store_host=host)
    store.flush_log()


class Source(Protocol):
    """Where state records are read: a store, or the preview of one."""

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]: ...

    def read_units(
        self, topic: str, queue_id: int, offset: int, count: int, *, nowait: bool = False
    ) -> bytes: ...

    def read_records(self, spans: Sequence[tuple[int, int]], *, nowait: bool = False) -> bytes: ...


def load(
    store: Source, new_state: Callable[[], BrokerState], counted: Counted | None = None
) -> BrokerState:
    """The state as the log tells it: the newest complete copy and the changes after it. Into
    ``counted`` comes how far queues had counted then. Raises StoreDamaged, StateTooNew.
    """
    try:
        return _load(store, new_state, {} if counted is None else counted)
    except MessageNotFound as error:
        raise _damaged_queue(error.message) from error


def _load(store: Source, new_state: Callable[[], BrokerState], counted: Counted) -> BrokerState:
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    if high == low:
        return new_state()
    back = find_copy_start(_tags_newest_first(store, low, high))
    first = low if back is None else high - 1 - back
    # Read from its very beginning, the state topic needs no copy to start from.
    loader = StateLoader(new_state() if first == 0 else None, new_state)
    for found in _records(store, first, high):
        try:
            for change in loader.feed(found.tag, found.body):
                match change:
                    case QueuesCounted(topic, next_offsets):
                        counted[topic] = next_offsets
                    case TopicDropped(topic):
                        counted.pop(topic, None)
        except (StateTooNew, StoreDamaged) as error:
            raise type(error)(f"{error.message}{_way_on(found)}") from error
    if not loader.complete:
        raise StoreDamaged(f"the log holds no complete copy of the state. {REBUILD}")
    return loader.state


def refuse_short_queues(store: Source, counted: Counted) -> None:
    """Raise StoreDamaged when a queue ends before what it had counted when the state was copied:
    all that it had then stands before that copy in the log.
    """
    for topic, next_offsets in counted.items():
        for queue_id, next_offset in enumerate(next_offsets):
            _, high = store.queue_bounds(topic, queue_id)
            if high < next_offset:
                raise StoreDamaged(
                    f"queue {queue_id} of {topic} ends at {high}, but had counted to {next_offset}"
                    ". Make the queues anew from the log: cometmq store repair DIRECTORY"
                )


def lost_changes(store: Source) -> str:
    """What tells that damage took changes behind the newest complete copy; empty: nothing does."""
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    if low == high:
        return ""
    back = find_copy_start(_tags_newest_first(store, low, high))
    for log_offset, size, _ in _units(store, low if back is None else high - 1 - back, high):
        if size == queueunit.LOST_SIZE:
            return f"changes of the state that stood at {log_offset} of the log are lost. {REBUILD}"
    return ""


def load_what_is_left(
    store: Source, new_state: Callable[[], BrokerState]
) -> tuple[BrokerState, Commits]:
    """The state of a log that has lost a part of it, and what groups had committed, in topics that
    it does not tell of too: all that can still be read.
    """
    commits: dict[tuple[str, str, int], int] = {}
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    loader = StateLoader(new_state(), new_state)
    for unit in _units(store, low, high):
        if unit[1] > queueunit.LOST_SIZE:
            with suppress(StoreDamaged, MessageNotFound):  # or it speaks of what is lost
                found = record.decode(store.read_records([unit[:2]]))
                for change in decode(found.body):
                    if isinstance(change, OffsetsCommitted):
                        for c in change.commits:
                            commits[c.group, c.topic, c.queue_id] = c.position.offset
                loader.feed(found.tag, found.body)
    return loader.state, commits


def keep_from(store: BaseStore) -> int:
    """Log offset from which on everything must be kept, so that whatever a crash or a cut takes
    away the rest still tells the state: where the last but one complete copy begins. The log's
    start while it has no two. What is not on the disk does not count.
    """
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    flushed = store.flushed_offset
    while high > low and _end_of(_units(store, high - 1, high)[0]) > flushed:
        high -= 1
    tags = _tags_newest_first(store, low, high)
    last = find_copy_start(tags)
    before = None if last is None else find_copy_start(tags)  # goes on where the first stopped
    if last is None or before is None:
        return store.min_offset
    first = high - 1 - last - 1 - before
    return _units(store, first, first + 1)[0][0]


def _end_of(unit: tuple[int, int, int]) -> int:
    log_offset, size, _ = unit
    return log_offset + size


def _tags_newest_first(store: Source, low: int, high: int) -> Iterator[str]:
    while high > low:
        first = max(low, high - _UNITS_AT_ONCE)
        units = _units(store, first, high)
        for log_offset, size, code in reversed(units):
            tag = "" if size == queueunit.LOST_SIZE else _TAG_OF_CODE.get(code)
            if tag is None:
                raise _unknown_tag(store, log_offset, size, code)
            yield tag
        high = first


def _unknown_tag(store: Source, log_offset: int, size: int, code: int) -> CometError:
    """Is it the record's, or has only its unit been damaged?"""
    try:
        found = record.decode(store.read_records([(log_offset, size)]))
    except MessageNotFound as error:
        return _damaged_queue(str(error))
    if found.topic == STATE_TOPIC and taghash.tags_code(found.tag.encode()) == code:
        told = f"a record of the state topic has the tag {found.tag!r}, which is no tag of ours"
        return StateTooNew(told + _way_on(found))
    return _damaged_queue(f"the unit of the record at {log_offset} has tag hash {code}")


def _way_on(found: record.Record) -> str:
    """Neither tags nor the rest of the properties have a checksum."""
    start = found.log_offset
    return (
        f", at {start} of the log. Where no other release wrote it, it is damaged: take the log "
        "from another member, or give that record up: cometmq store repair DIRECTORY --write-off "
        f"{start}-{start + found.size}"
    )


def _damaged_queue(complaint: str) -> StoreDamaged:
    """What the log has is not lost by it."""
    return StoreDamaged(
        f"queue {STATE_QUEUE_ID} of {STATE_TOPIC} does not fit the log: {complaint}. Make the "
        "queues anew from the log: cometmq store repair DIRECTORY"
    )


def _units(store: Source, first: int, end: int) -> list[tuple[int, int, int]]:
    data = store.read_units(STATE_TOPIC, STATE_QUEUE_ID, first, end - first, nowait=False)
    units = list(queueunit.iterate(data))
    # Fewer than asked for is no damage: the read stops at the end of a queue file.
    return units if len(units) == end - first else units + _units(store, first + len(units), end)


def _records(store: Source, first: int, end: int) -> Iterator[record.Record]:
    while first < end:
        units = _units(store, first, min(end, first + _UNITS_AT_ONCE))
        spans: list[tuple[int, int]] = []
        size = 0
        for log_offset, record_size, _ in units:
            if spans and size + record_size > _RECORD_BYTES_AT_ONCE:
                break
            spans.append((log_offset, record_size))
            size += record_size
        yield from record.decode_all(store.read_records(spans, nowait=False))
        first += len(spans)


def topic_deletions(store: Source, log_offset: int) -> dict[str, int]:
    """The topics that were deleted from ``log_offset`` on, each with where the last record of its
    deletion stands in the log.
    """
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    first = high
    while first > low and _units(store, first - 1, first)[0][0] >= log_offset:
        first -= 1
    return {
        change.topic: found.log_offset
        for found in _records(store, first, high)
        for change in decode(found.body)
        if isinstance(change, TopicDropped)
    }

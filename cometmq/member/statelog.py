"""The state in the log: state records as batches, and the way back from the log to the tables.
Blocking, no asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from cometmq.errors import StateTooNew
from cometmq.format import properties, queueunit, record, taghash
from cometmq.messaging.changes import TopicDropped, decode
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
from cometmq.store.engine import MessageStore

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


def load(store: BaseStore, new_state: Callable[[], BrokerState]) -> BrokerState:
    """The state as the log tells it: the newest complete copy and the changes after it. Raises
    StoreDamaged.
    """
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    if high == low:
        return new_state()
    back = find_copy_start(_tags_newest_first(store, low, high))
    first = low if back is None else high - 1 - back
    # Read from its very beginning, the state topic needs no copy to start from.
    loader = StateLoader(new_state() if first == 0 else None, new_state)
    for found in _records(store, first, high):
        loader.feed(found.tag, found.body)
    return loader.state


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


def _tags_newest_first(store: BaseStore, low: int, high: int) -> Iterator[str]:
    while high > low:
        first = max(low, high - _UNITS_AT_ONCE)
        units = _units(store, first, high)
        for _, _, code in reversed(units):
            tag = _TAG_OF_CODE.get(code)
            if tag is None:
                raise StateTooNew(
                    f"a record of the state topic has tag hash {code}, which is no tag of ours"
                )
            yield tag
        high = first


def _units(store: BaseStore, first: int, end: int) -> list[tuple[int, int, int]]:
    data = store.read_units(STATE_TOPIC, STATE_QUEUE_ID, first, end - first, nowait=False)
    units = list(queueunit.iterate(data))
    # Fewer than asked for is no damage: the read stops at the end of a queue file.
    return units if len(units) == end - first else units + _units(store, first + len(units), end)


def _records(store: BaseStore, first: int, end: int) -> Iterator[record.Record]:
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


def deletes_a_topic(store: BaseStore, log_offset: int) -> bool:
    """Whether the log, from ``log_offset`` on, has the deletion of a topic."""
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    first = high
    while first > low and _units(store, first - 1, first)[0][0] >= log_offset:
        first -= 1
    return any(
        isinstance(change, TopicDropped)
        for found in _records(store, first, high)
        for change in decode(found.body)
    )

"""The state in the log: state records as batches, and the way back from the log to the tables.
Blocking, no asyncio.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import NamedTuple, Protocol

from cometmq.errors import MessageNotFound, StateTooNew, StoreDamaged
from cometmq.format import properties, queueunit, record, taghash
from cometmq.format.delayed import SCHEDULE_TOPIC, queue_id_of
from cometmq.format.halves import HALF_QUEUE
from cometmq.format.timers import TIMER_QUEUE
from cometmq.messaging.changes import (
    DelaysReached,
    OffsetsCommitted,
    QueuesCounted,
    TopicDropped,
    decode,
)
from cometmq.messaging.rebuilding import Commits
from cometmq.messaging.state import (
    CHANGE,
    STATE_QUEUE_ID,
    STATE_TAGS,
    STATE_TOPIC,
    BrokerState,
    StateLoader,
    StateRecord,
    find_copy_start,
)
from cometmq.model import DELAY_LEVEL_MAX, QueueKey
from cometmq.store.base import BaseStore
from cometmq.store.writer import MessageStore

Counted = dict[str, tuple[int, ...]]  # by topic, the next offset of each queue

_TAG_OF_CODE = {taghash.tags_code(tag.encode()): tag for tag in STATE_TAGS}
_UNITS_AT_ONCE = 1_000
_RECORD_BYTES_AT_ONCE = 4 * 1024 * 1024


def encode_record(state_record: StateRecord, host: bytes, now_ms: int) -> bytes:
    """One state record as it goes into the log. ``host``: the broker's own address and port, as of
    a producer.
    """
    assert state_record.tag in STATE_TAGS, state_record.tag
    return record.encode(
        STATE_TOPIC.encode(),
        STATE_QUEUE_ID,
        state_record.body,
        properties.encode({properties.TAGS: state_record.tag}),
        born_time_ms=now_ms,
        born_host=host,
        store_host=host,
    )


class OwnStateRecord(NamedTuple):
    """A state record that is appended with messages, in one batch."""

    body: bytes
    tag: str
    host: bytes  # the broker's own, as of a producer

    @property
    def topic(self) -> str:
        return STATE_TOPIC

    @property
    def queue_id(self) -> int:
        return STATE_QUEUE_ID

    @property
    def size_bytes(self) -> int:
        head = record.layout_of_hosts(self.host, self.host).record_bytes_min
        return head + len(self.body) + len(STATE_TOPIC) + len(self._properties)

    @property
    def _properties(self) -> bytes:
        return properties.encode({properties.TAGS: self.tag})

    def tags_code(self, store_time_ms: int) -> int:
        """What the record's unit holds."""
        return taghash.tags_code(self.tag.encode())

    def encode(
        self, queue_offset: int, log_offset: int, store_time_ms: int, store_host: bytes
    ) -> bytes:
        """The record as it is written at ``log_offset``."""
        assert len(store_host) == len(self.host)
        return record.encode(
            STATE_TOPIC.encode(),
            STATE_QUEUE_ID,
            self.body,
            self._properties,
            born_time_ms=store_time_ms,
            born_host=self.host,
            store_host=store_host,
            queue_offset=queue_offset,
            log_offset=log_offset,
            store_time_ms=store_time_ms,
        )


def append_now(
    store: MessageStore, records: Sequence[StateRecord], host: bytes, now_ms: int
) -> None:
    """Append state records to a store that nothing else uses yet, and sync."""
    for state_record in records:
        data = encode_record(state_record, host, now_ms)
        segment = (STATE_TOPIC, STATE_QUEUE_ID, 1)
        store.append(data, [segment], born_host=host, store_host=host)
    store.flush_log()
    assert store.flushed_offset == store.appended_offset


class Source(Protocol):
    """Where state records are read: a store, or the preview of one."""

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]: ...

    def read_units(
        self, topic: str, queue_id: int, offset: int, count: int, *, nowait: bool = False
    ) -> bytes: ...

    def read_records(self, spans: Sequence[tuple[int, int]], *, nowait: bool = False) -> bytes: ...

    def repair_command(self, options: str = "") -> str: ...


def rebuild_advice(store: Source) -> str:
    """What an error says that reports a loss of the state."""
    return (
        "Take the log from a copy or another member. Or let the next writer rebuild topics, groups "
        "and offsets from what is left of them, config/*.json and the queues: "
        + store.repair_command("--rebuild-tables")
    )


def load(
    store: Source, new_state: Callable[[], BrokerState], counted: Counted | None = None
) -> BrokerState:
    """The state in the log: the newest complete snapshot and the changes after it. Puts
    into ``counted`` how far queues had counted then. Raises StoreDamaged, StateTooNew.
    """
    counted = {} if counted is None else counted
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    if high == low:
        return new_state()
    try:
        first = _start_of_state(store, low, high)
        # Read from its very beginning, the state topic needs no snapshot to start from.
        loader = StateLoader(new_state() if first == 0 else None, new_state)
        for found in _records(store, first, high):
            try:
                changes = loader.feed(found.tag, found.body)
            except (StateTooNew, StoreDamaged) as error:
                raise type(error)(f"{error.message}{_way_on(store, found)}") from error
            for change in changes:
                match change:
                    case QueuesCounted(topic, next_offsets):
                        counted[topic] = next_offsets
                    case TopicDropped(topic):
                        counted.pop(topic, None)
    except MessageNotFound as error:
        raise _damaged_queue(store, error.message) from error
    if not loader.complete:
        raise StoreDamaged(
            f"the log holds no complete snapshot of the state. {rebuild_advice(store)}"
        )
    return loader.state


def _start_of_state(store: Source, low: int, high: int) -> int:
    """Queue offset of the newest complete snapshot; without one, of the oldest record."""
    assert low < high
    back = find_copy_start(_tags_newest_first(store, low, high))
    first = low if back is None else high - 1 - back
    assert low <= first < high
    return first


def refuse_short_queues(store: Source, counted: Counted) -> None:
    """Raise StoreDamaged when a queue ends before what the state snapshot says it had counted: all
    that it had then comes before that snapshot in the log.
    """
    for topic, next_offsets in counted.items():
        for queue_id, next_offset in enumerate(next_offsets):
            _, high = store.queue_bounds(topic, queue_id)
            if high < next_offset:
                raise StoreDamaged(
                    f"queue {queue_id} of {topic} ends at {high}, but had counted to {next_offset}"
                    f". Rebuild the queues from the log: {store.repair_command()}"
                )


def refuse_lost_changes(store: Source, *, has_other_tables: bool) -> None:
    """Raise StoreDamaged when damage took changes behind the newest complete snapshot, unless
    another program's tables have them.
    """
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    if low == high:
        return
    for log_offset, size, _ in _units(store, _start_of_state(store, low, high), high):
        if size == queueunit.LOST_SIZE and not has_other_tables:
            raise StoreDamaged(
                f"changes of the state that were at {log_offset} of the log are lost. "
                + rebuild_advice(store)
            )


def load_what_is_left(
    store: Source, new_state: Callable[[], BrokerState]
) -> tuple[BrokerState, Commits]:
    """What can still be read of the state of a log that has lost a part of it, and what groups had
    committed, also in topics that this state lacks.
    """
    commits: dict[tuple[str, str, int], int] = {}
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    loader = StateLoader(new_state(), new_state)
    for unit in _units(store, low, high):
        if unit[1] > queueunit.LOST_SIZE:
            with suppress(StoreDamaged, MessageNotFound):  # or it speaks of what is lost
                found = record.decode(store.read_records([unit[:2]]))
                changes = [one for one in decode(found.body) if isinstance(one, OffsetsCommitted)]
                for c in chain.from_iterable(one.commits for one in changes):
                    commits[c.group, c.topic, c.queue_id] = c.position.offset
                loader.feed(found.tag, found.body)
    return loader.state, commits


def keep_from(store: BaseStore) -> int:
    """Log offset from which on retention keeps everything, so that the log still has the state
    after a crash or a cut took its end: where the last but one complete snapshot on the disk
    begins. The log's start while there are no two.
    """
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    flushed = store.flushed_offset
    while high > low:
        [(log_offset, size, _)] = _units(store, high - 1, high)
        if log_offset + size <= flushed:
            break
        high -= 1
    tags = _tags_newest_first(store, low, high)
    last = find_copy_start(tags)
    before = None if last is None else find_copy_start(tags)  # continues behind it
    if last is None or before is None:
        return store.min_offset
    first = high - 1 - last - 1 - before
    assert low <= first < high
    return _units(store, first, first + 1)[0][0]


class Waiting(NamedTuple):
    """From which queue offset on messages may wait: for their end, for a time of their own, for
    each delay level.
    """

    half: int
    timer: int
    delayed: Mapping[int, int]

    def oldest(self, store: BaseStore) -> int:
        """Log offset of the oldest of these messages; the log's end if there is none."""
        levels = range(1, DELAY_LEVEL_MAX + 1)
        firsts = {(SCHEDULE_TOPIC, queue_id_of(n)): self.delayed.get(n, 0) for n in levels}
        firsts |= {HALF_QUEUE: self.half, TIMER_QUEUE: self.timer}
        return min(_place_from(store, queue, first) for queue, first in firsts.items())


def _place_from(store: BaseStore, queue: QueueKey, first: int) -> int:
    """Log offset of the first message of a queue from queue offset ``first`` on; the log's end if
    there is none.
    """
    low, end = store.queue_bounds(*queue)
    first = max(low, first)
    unit = store.read_units(*queue, first, 1) if first < end else b""
    return queueunit.unit_at(unit, 0)[0] if unit else store.appended_offset


def newest_progress(store: Source) -> int:
    """Log offset of the newest record with how far the log was looked through, and how far delayed
    messages were delivered: a change, or the begin of the newest complete snapshot. All later
    progress is in records behind it.
    """
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    if low == high:
        return 0
    first = _start_of_state(store, low, high)
    for offset in reversed(range(first + 1, high)):
        for found in _records(store, offset, offset + 1, skip_lost=True):
            is_change = found.tag == CHANGE
            if is_change and any(isinstance(c, DelaysReached) for c in decode(found.body)):
                return found.log_offset
    return _units(store, first, first + 1)[0][0]


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


def _unknown_tag(
    store: Source, log_offset: int, size: int, code: int
) -> StateTooNew | StoreDamaged:
    """Is it the record's, or has only its unit been damaged?"""
    try:
        found = record.decode(store.read_records([(log_offset, size)]))
    except MessageNotFound as error:
        return _damaged_queue(store, str(error))
    if found.topic == STATE_TOPIC and taghash.tags_code(found.tag.encode()) == code:
        complaint = (
            f"a record of the state topic has the tag {found.tag!r}, which is no tag of ours"
        )
        return StateTooNew(complaint + _way_on(store, found))
    return _damaged_queue(store, f"the unit of the record at {log_offset} has tag hash {code}")


def _way_on(store: Source, found: record.Record) -> str:
    """Neither tags nor the rest of the properties have a checksum."""
    start = found.log_offset
    return (
        f", at {start} of the log. Unless another release wrote it, it is damaged: take the log "
        "from another member, or give that record up: "
        + store.repair_command(f"--write-off {start}-{start + found.size}")
    )


def _damaged_queue(store: Source, complaint: str) -> StoreDamaged:
    """The queue is damaged; the log still has its records."""
    return StoreDamaged(
        f"queue {STATE_QUEUE_ID} of {STATE_TOPIC} does not fit the log: {complaint}. Rebuild the "
        f"queues from the log: {store.repair_command()}"
    )


def _units(store: Source, first: int, end: int) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    while (start := first + len(found)) < end:  # each read stops at the end of a queue file
        data = store.read_units(STATE_TOPIC, STATE_QUEUE_ID, start, end - start, nowait=False)
        assert data, "the queue ends before its own bound"
        found += queueunit.iterate(data)
    return found


def _records(
    store: Source, first: int, end: int, *, skip_lost: bool = False
) -> Iterator[record.Record]:
    """Raises StoreDamaged at a record that is lost, unless these are skipped."""
    while first < end:
        units = _units(store, first, min(end, first + _UNITS_AT_ONCE))
        spans: list[tuple[int, int]] = []
        size = 0
        for log_offset, record_size, _ in units:
            if spans and size + record_size > _RECORD_BYTES_AT_ONCE:
                break
            first += 1
            if record_size > queueunit.LOST_SIZE or not skip_lost:
                spans.append((log_offset, record_size))
                size += record_size
        if spans:
            for found in record.decode_all(store.read_records(spans, nowait=False)):
                if found.topic != STATE_TOPIC:
                    raise _damaged_queue(store, f"the record at {found.log_offset} is another's")
                yield found


def topic_deletions(store: Source, log_offset: int) -> dict[str, int]:
    """The topics that were deleted from ``log_offset`` on, each with the log offset of the last
    record of its deletion.
    """
    low, high = store.queue_bounds(STATE_TOPIC, STATE_QUEUE_ID)
    first = high
    while first > low and _units(store, first - 1, first)[0][0] >= log_offset:
        first -= 1
    return {
        change.topic: found.log_offset
        for found in _records(store, first, high, skip_lost=True)
        for change in decode(found.body)
        if isinstance(change, TopicDropped)
    }

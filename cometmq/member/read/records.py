"""Reads single messages: each has an answer of its own, so damage takes no neighbour along."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate

from cometmq.errors import CometError, MessageNotFound, OffsetInvalid, StoreDamaged
from cometmq.format import queueunit, record
from cometmq.format.belonging import Place, first_misplaced, is_message_at
from cometmq.format.record import Record
from cometmq.member.storage.member_storage import BaseStorage
from cometmq.model import QueueKey
from cometmq.store.base import BaseStore
from cometmq.store.log.commitlog import Span


async def find_spans(
    storage: BaseStorage, places: Sequence[Place | CometError]
) -> list[Span | CometError]:
    """Where the log has these messages, each a queue and an offset, or why nobody can tell: from
    memory at once, else in a thread. Errors stay: OffsetInvalid (consumers cannot have read it),
    MessageNotFound (retention has removed it), StoreDamaged.
    """
    checked = [
        place if isinstance(place, CometError) else _readable(storage, *place) for place in places
    ]
    store = storage.store
    try:
        return [_span(store, place, nowait=True) for place in checked]
    except BlockingIOError:
        return await asyncio.to_thread(
            lambda: [_span(store, place, nowait=False) for place in checked]
        )


def _readable(storage: BaseStorage, queue: QueueKey, offset: int) -> Place | CometError:
    low, readable, _ = storage.bounds(queue)
    topic, queue_id = queue
    if not 0 <= offset < readable:
        return OffsetInvalid(
            f"queue {queue_id} of {topic} ends at {readable}: no consumer can have read {offset}"
        )
    if offset < low:
        return MessageNotFound(
            f"queue {queue_id} of {topic} begins at {low}: message {offset} is gone"
        )
    return queue, offset


def _span(store: BaseStore, place: Place | CometError, *, nowait: bool) -> Span | CometError:
    if isinstance(place, CometError):
        return place
    (topic, queue_id), offset = place
    try:
        unit = store.read_units(topic, queue_id, offset, 1, nowait=nowait)
    except StoreDamaged as error:
        return error
    if not unit:  # retention came between
        return MessageNotFound(f"message {offset} of queue {queue_id} of {topic} is gone")
    log_offset, size, _ = queueunit.unit_at(unit, 0)
    return log_offset, size


def is_in_queue(store: BaseStore, found: Record) -> bool:
    """Whether a record of the log is still a message of its queue: a topic that was deleted and
    created again has other messages at the same offsets. Blocking, unless it is new.
    """
    queue = (found.topic, found.queue_id)
    low, high = store.queue_bounds(*queue)
    if not low <= found.queue_offset < high:
        return False
    unit = store.read_units(*queue, found.queue_offset, 1)
    return bool(unit) and queueunit.unit_at(unit, 0)[0] == found.log_offset


def slices(spans: Sequence[Span | None], count_max: int, bytes_max: int) -> Iterator[slice]:
    """Slices of ``spans`` in their order, each with so many at most, of which the records have so
    many bytes at most, or are one. None has no bytes.
    """
    if len(spans) <= count_max and sum([span[1] for span in spans if span]) <= bytes_max:
        if spans:
            yield slice(0, len(spans))
        return
    first, size = 0, 0
    for number, span in enumerate(spans):
        more = span[1] if span is not None else 0
        if number > first and (number - first == count_max or size + more > bytes_max):
            yield slice(first, number)
            first, size = number, 0
        size += more
    if first < len(spans):
        yield slice(first, len(spans))


def log_offsets_of(store: BaseStore, queue: QueueKey, first: int, count: int) -> array[int]:
    """The log offsets (int64) of messages of a queue that were appended just now, from offset
    ``first`` on.
    """
    found = array("q")
    while len(found) < count:  # each read stops at the end of a queue file
        offset = first + len(found)
        units = store.read_units(*queue, offset, count - len(found))
        assert units, "messages that were appended just now have their units"
        found += queueunit.log_offsets(units)
    return found


async def read_units(store: BaseStore, queue: QueueKey, offset: int, count: int) -> bytes:
    """Units of a queue, at most so many: from memory at once, else in a thread. Damaged ones are
    written again from the log first.
    """
    try:
        return store.read_units(*queue, offset, count, nowait=True)
    except (BlockingIOError, StoreDamaged):
        return await asyncio.to_thread(_read_mended, store, queue, offset, count)


def _read_mended(store: BaseStore, queue: QueueKey, offset: int, count: int) -> bytes:
    try:
        return store.read_units(*queue, offset, count)
    except StoreDamaged:
        store.mend_units(*queue, offset)
        return store.read_units(*queue, offset, count)


async def read_each(
    store: BaseStore, spans: Sequence[Span], places: Sequence[Place]
) -> list[Record | StoreDamaged | MessageNotFound]:
    """The record at each span, which should be the message at its place, or why it cannot be read:
    from memory at once, else in a thread. Units that name another message are written again from
    the log first. Raises StoreFailed, Shortage.
    """
    try:
        found = record.decode_all(store.read_records(spans, nowait=True))
        if all(map(is_message_at, found, places)):
            return list(found)
    except (BlockingIOError, StoreDamaged, MessageNotFound):
        pass
    return await asyncio.to_thread(_read_one_by_one, store, spans, places)


async def read_joined(
    store: BaseStore, spans: Sequence[Span], places: Sequence[Place]
) -> tuple[bytes, array[int]] | None:
    """The records at different ``spans`` in the order of the log, and where in them each one begins
    (uint32), in the order of ``spans``. Records near each other are read with one call: from
    memory at once, else in a thread. None: one of them is damaged or gone, or is not the message at
    its place, which are all of one topic. Raises StoreFailed, Shortage.
    """
    order = sorted(range(len(spans)), key=spans.__getitem__)
    in_log = [spans[index] for index in order]
    joined = await read_run(store, in_log, [places[index] for index in order])
    if joined is None:
        return None
    starts = dict(zip(in_log, accumulate((size for _, size in in_log), initial=0), strict=False))
    return joined, array("I", map(starts.__getitem__, spans))


async def read_run(
    store: BaseStore, spans: Sequence[Span], places: Sequence[Place]
) -> bytes | None:
    """The records at ``spans``, joined, as :func:`read_joined`; a span may hold several, each of
    which has a place.
    """
    try:
        try:
            joined = store.read_records(spans, nowait=True)
        except BlockingIOError:
            joined = await asyncio.to_thread(store.read_records, spans)
    except (StoreDamaged, MessageNotFound):
        return None
    if not places:
        return joined
    (topic, _), _ = places[0]
    wanted = array("q", [number for (_, *key), offset in places for number in (*key, offset)])
    return joined if first_misplaced(joined, topic, wanted) is None else None


def _read_one_by_one(
    store: BaseStore, spans: Sequence[Span], places: Sequence[Place]
) -> list[Record | StoreDamaged | MessageNotFound]:
    return [_read_one(store, span, *place) for span, place in zip(spans, places, strict=True)]


def _read_one(
    store: BaseStore, span: Span, queue: QueueKey, offset: int
) -> Record | StoreDamaged | MessageNotFound:
    try:
        return _checked(store, span, queue, offset)
    except (StoreDamaged, MessageNotFound) as error:
        try:
            right = _mended_span(store, queue, offset)
            return error if right in (None, span) else _checked(store, right, queue, offset)
        except (StoreDamaged, MessageNotFound):
            return error


def _checked(store: BaseStore, span: Span, queue: QueueKey, offset: int) -> Record:
    found = record.decode(store.read_records([span]))
    if not is_message_at(found, (queue, offset)):
        raise StoreDamaged(
            f"the unit of message {offset} of queue {queue[1]} of {queue[0]} names another "
            f"message, at {span[0]} of the log"
        )
    return found


def _mended_span(store: BaseStore, queue: QueueKey, offset: int) -> Span | None:
    """Where the message is by its unit, after that was compared with the log; None: it has none."""
    store.mend_units(*queue, offset)
    unit = store.read_units(*queue, offset, 1)
    return queueunit.unit_at(unit, 0)[:2] if unit else None


def read_mended_message(store: BaseStore, queue: QueueKey, offset: int) -> bytes:
    """A message of a queue, empty when retention has just taken it. A unit that is damaged, or
    names another message, is written again from the log first. Blocking. Raises MessageNotFound,
    StoreDamaged.
    """
    try:
        return read_message_now(store, queue, offset)
    except (StoreDamaged, MessageNotFound):
        if not store.mend_units(*queue, offset):
            raise
        return read_message_now(store, queue, offset)


def read_message_now(
    store: BaseStore, queue: QueueKey, offset: int, *, nowait: bool = False
) -> bytes:
    """As :func:`read_mended_message`, but nothing is mended; with ``nowait`` BlockingIOError if the
    disk would have to be read.
    """
    unit = store.read_units(*queue, offset, 1, nowait=nowait)
    if not unit:
        return b""
    span = queueunit.unit_at(unit, 0)[:2]
    return store.read_messages(queue, offset, unit, [span], nowait=nowait)

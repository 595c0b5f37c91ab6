"""Finds a batch in the log that a producer sends again, and compares it record by record."""

from __future__ import annotations

from collections.abc import Sequence

from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import record, timers
from cometmq.format.record import SYS_FLAG_HOSTS, Record
from cometmq.format.relay import walk
from cometmq.format.timers import OUR_TIME, TIMER_OUT_MS, TIMER_TOPIC
from cometmq.member.read.records import is_in_queue
from cometmq.member.storage.member_storage import Segment
from cometmq.messaging.dedup import Ids, StoredRun, id_at_end
from cometmq.model import DELAY_MS_MAX
from cometmq.store.base import BaseStore
from cometmq.store.writer import Appended

CHUNK_BYTES = 1 << 20


def stored_batch(
    store: BaseStore, run: StoredRun, ids: Ids, records: bytes, segments: Sequence[Segment]
) -> Appended | None:
    """Where the batch lies, of which ``run`` holds the first message. Of its records those that are
    stored; ``segment_bytes`` has one entry for each of these. None: other messages are stored
    there.
    """
    sent = record.decode_all(records)
    found: list[Record] = []
    at = run.log_offset
    try:
        while len(found) < min(len(sent), run.end - ids.first):
            chunk = store.read_chunk(at, CHUNK_BYTES)
            if chunk is None:
                break
            for place, end, _ in walk(chunk.data):
                identity = id_at_end(chunk.data, end)
                if identity is None or identity[0] != ids.stream or identity[1] >= run.end:
                    return _appended(store, found, sent, segments)
                if identity[1] >= ids.first and len(found) < len(sent):
                    found.append(record.decode(chunk.data, place))
            at = chunk.next_offset
    except (MessageNotFound, StoreDamaged):  # retention or damage has come past it
        return None
    return _appended(store, found, sent, segments)


def _appended(
    store: BaseStore, found: Sequence[Record], sent: Sequence[Record], segments: Sequence[Segment]
) -> Appended | None:
    count = 0
    while count < len(found) and is_same(found[count], sent[count]):
        count += 1
    if not count:
        return None
    last = found[count - 1]
    queue_offsets: list[int] = []
    first = 0
    for segment in segments:
        if first < count:
            if not is_in_queue(store, found[first]):  # its topic was deleted since
                return None
            queue_offsets.append(found[first].queue_offset)
        first += segment.count
    return Appended(
        found[0].log_offset,
        last.log_offset + last.size,
        queue_offsets,
        [one.size for one in found[:count]],
        last.store_time_ms,
        max([_delay_base_ms(*pair) for pair in zip(found[:count], sent[:count], strict=True)]),
    )


def is_same(stored: Record, sent: Record) -> bool:
    """Whether they differ in nothing but what the broker fills in. Properties are compared as
    pairs: the map of a call of ``Send`` has another order in another process.
    """
    return (
        (stored.topic, stored.queue_id, stored.flag) == (sent.topic, sent.queue_id, sent.flag)
        and (stored.sys_flag | SYS_FLAG_HOSTS) == (sent.sys_flag | SYS_FLAG_HOSTS)
        and stored.born_time_ms == sent.born_time_ms
        and stored.body == sent.body
        and _have_same_properties(stored, sent)
    )


def _have_same_properties(stored: Record, sent: Record) -> bool:
    if stored.raw_properties == sent.raw_properties:
        return True
    base_ms = _delay_base_ms(stored, sent)
    if base_ms > stored.store_time_ms:  # the log may be ahead of the clock, and is never behind
        return False
    pairs = dict(sent.properties)
    if base_ms:
        pairs[TIMER_OUT_MS] = stored.properties[TIMER_OUT_MS]
    return stored.properties in (sent.properties, pairs)


def _delay_base_ms(stored: Record, sent: Record) -> int:
    """From when the broker has counted the delay that ``sent`` names; 0: it names none."""
    delay = OUR_TIME.match(sent.raw_properties) if stored.topic == TIMER_TOPIC else None
    due_ms = timers.due_ms(stored.raw_properties)
    if delay is None or due_ms is None or int(delay[1]) > DELAY_MS_MAX:  # a time, not a delay
        return 0
    return due_ms - int(delay[1])

"""Messages that are not asked for by their offset: by key, by time.

Reads files, so it takes as long as the disk does: for threads that may wait.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from enum import Enum
from itertools import islice
from typing import NamedTuple

from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import queueunit, record
from cometmq.format.indexfile import TIME_MS_MAX, key_hash
from cometmq.format.indexkeys import keys_of
from cometmq.model import QueueKey
from cometmq.store.base import BaseStore

# Of a search by key before it may be stopped: messages, and entries of the index.
PIECE_READS = 16
PIECE_ENTRIES = 256


class Boundary(Enum):
    """Which message a time means, when it is not the store time of exactly one."""

    LOWER = "lower"  # the first that is not older
    UPPER = "upper"  # the last that is not newer


class Found(NamedTuple):
    """A message, decoded and as it lies in the log."""

    message: record.Record
    raw: bytes


class KeySearch:
    """Looks for the messages of ``topic`` that have ``key`` among their keys or as their unique id,
    stored from ``first_ms`` to ``last_ms``; the newest first, each once.

    As far as the index is, and whether consumers may see them or not. What the index says is only a
    hash: every message is looked at. A key may be that of every message, so the search is made in
    pieces, one thread at a time; the caller may stop after each.
    """

    def __init__(
        self,
        store: BaseStore,
        topic: str,
        key: str,
        first_ms: int = 0,
        last_ms: int = TIME_MS_MAX,
    ) -> None:
        self.is_over = False
        self.read_count = 0  # messages that were looked at
        self._store = store
        self._topic = topic
        self._key = key
        self._times_ms = (first_ms, last_ms)
        self._entries = self._all_entries()

    def piece(self) -> list[Found]:
        """What is found next, after some milliseconds in memory; often nothing."""
        found: list[Found] = []
        stop = self.read_count + PIECE_READS
        for log_offset in islice(self._entries, PIECE_ENTRIES):
            if log_offset is not None:
                found += self._read_if_meant(log_offset)
            if self.read_count == stop:
                break
        return found

    def _all_entries(self) -> Iterator[int | None]:
        """Where to look; None: not there."""
        code = key_hash(self._topic, self._key)
        before = -1  # a record that names a key twice has two entries
        for log_offset in self._store.index.find(code, *self._times_ms):
            if log_offset is not None and log_offset < self._store.min_offset:
                break  # the rest is older still
            yield log_offset if log_offset != before else None
            before = before if log_offset is None else log_offset
        self.is_over = True

    def _read_if_meant(self, log_offset: int) -> list[Found]:
        self.read_count += 1
        try:
            raw = self._store.read_record(log_offset)
        except MessageNotFound:  # gone this moment, or damaged
            return []
        found = record.decode(raw)
        return [Found(found, raw)] if self._is_meant(found) else []

    def _is_meant(self, found: record.Record) -> bool:
        if found.topic != self._topic:
            return False
        first_ms, last_ms = self._times_ms
        keys = keys_of(found.raw_properties, found.sys_flag)
        return self._key in keys and first_ms <= found.store_time_ms <= last_ms


def offset_by_time(
    store: BaseStore, key: QueueKey, bounds: tuple[int, int], time_ms: int, boundary: Boundary
) -> int:
    """The offset, within ``bounds`` = [first, end) of the queue, of the message that was stored at
    ``time_ms``.

    Of several of that time the first (lower) or the last (upper). When there is none, the next one
    (lower; ``end`` when all are older) or the one before (upper; the first when all are newer).
    """
    first, end = bounds
    assert 0 <= first <= end, bounds
    wanted = time_ms if boundary is Boundary.LOWER else time_ms + 1
    found = bisect_left(_StoreTimes(store, key), wanted, first, end)
    return found if boundary is Boundary.LOWER else max(first, found - 1)


def store_time_ms(store: BaseStore, key: QueueKey, offset: int) -> int | None:
    """When the message at an offset of a queue was stored; None when there is none."""
    try:
        unit = store.read_units(*key, offset, 1)
        if not unit:
            return None
        return store.store_time_ms(queueunit.unit_at(unit, 0)[0], key[1], offset)
    except (MessageNotFound, StoreDamaged):
        return None


class _StoreTimes:
    """Store times of a queue's messages by their offset; they never decrease. -1 for one that is
    gone: it was older than all that are there. A damaged one has the time of the next that is not.
    """

    def __init__(self, store: BaseStore, key: QueueKey) -> None:
        self._store = store
        self._key = key

    def __len__(self) -> int:
        return self._store.queue_bounds(*self._key)[1]

    def __getitem__(self, offset: int) -> int:
        for place in range(offset, len(self)):
            found = store_time_ms(self._store, self._key, place)
            if found is not None:
                return found
            if self._has_gone(place):
                return -1
        return TIME_MS_MAX

    def _has_gone(self, offset: int) -> bool:
        try:
            unit = self._store.read_units(*self._key, offset, 1)
        except StoreDamaged:
            return False
        return not unit or queueunit.unit_at(unit, 0)[0] < self._store.min_offset

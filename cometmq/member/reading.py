"""Reads of a member: pulls, bounds, single messages. Hot pages are read on the loop, cold ones in
threads.

The rules are :mod:`cometmq.messaging.pull`'s; here they meet the store. What the kernel has in
memory costs a few microseconds and is read in place; for the rest the store says BlockingIOError,
and the same read is done again in a thread, so that a consumer far behind never stalls a producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cometmq.errors import MessageNotFound
from cometmq.format import queueunit, record
from cometmq.member.storage import BaseStorage
from cometmq.messaging import pull
from cometmq.messaging.pull import Choice, PullStatus
from cometmq.messaging.state import BrokerState
from cometmq.model import Position

T = TypeVar("T")

COLD_READ_THREADS = 4


@dataclass(frozen=True, slots=True)
class PullQuery:
    """What a consumer asks of one queue. ``codes``: low 32 bits of the tag hashes wanted; empty
    = everything.
    """

    topic: str
    queue_id: int
    position: Position
    codes: frozenset[int]
    max_count: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """What it gets. ``records`` are encoded, end to end."""

    status: PullStatus
    records: bytes
    count: int
    next_position: Position
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue at one instant."""

    generation: int
    min_offset: int
    max_offset: int  # readable
    appended_offset: int


class Reader:
    """Answers reads from the store, as far as the state lets it."""

    def __init__(self, storage: BaseStorage, state: BrokerState) -> None:
        self._storage = storage
        self._state = state
        self._cold = ThreadPoolExecutor(COLD_READ_THREADS, thread_name_prefix="cold-read")

    async def pull(self, query: PullQuery) -> PullAnswer:
        """Raises what the topic table, the generations and the limits raise (cometmq.errors)."""
        self._state.topics.for_read(query.topic, query.queue_id)
        history = self._state.generations.of(query.topic, query.queue_id)
        position = history.validate(query.position)
        max_count, max_bytes = pull.clamp(query.max_count, query.max_bytes)
        low, readable, appended = self._storage.bounds((query.topic, query.queue_id))
        status, offset = pull.decide(position.offset, low, readable, appended)
        records, choice = b"", Choice([], 0, offset)
        if status is PullStatus.FOUND:
            wanted = min(pull.units_wanted(max_count, query.codes), readable - offset)

            def read(nowait: bool) -> tuple[bytes, Choice]:
                return self._read(query, offset, wanted, (max_count, max_bytes), nowait)

            records, choice = await self._hot_or_cold(read)
            status = choice.status
        elif status is PullStatus.NOT_FOUND:
            self._storage.hungry()
        next_position = Position(history.current, choice.next_offset)
        return PullAnswer(status, records, choice.count, next_position, low, readable)

    def _read(
        self, query: PullQuery, offset: int, wanted: int, limits: tuple[int, int], nowait: bool
    ) -> tuple[bytes, Choice]:
        store = self._storage.store
        units = store.read_units(query.topic, query.queue_id, offset, wanted, nowait=nowait)
        choice = pull.choose(units, offset, *limits, query.codes)
        return store.read_records(choice.spans, nowait=nowait) if choice.spans else b"", choice

    def queue(self, topic: str, queue_id: int) -> QueueView:
        """A queue's bounds, readable or not. Raises TopicNotFound, QueueNotFound."""
        self._state.topics.get(topic)
        history = self._state.generations.of(topic, queue_id)
        low, readable, appended = self._storage.bounds((topic, queue_id))
        return QueueView(history.current, low, readable, appended)

    def tag_codes(self, topic: str, queue_id: int, first: int, end: int) -> frozenset[int]:
        """Low 32 bits of the tag hashes of these readable messages; empty when the kernel does not
        have all their units in memory, or they lie in two files.
        """
        count = end - first
        try:
            units = self._storage.store.read_units(topic, queue_id, first, count, nowait=True)
        except BlockingIOError:
            return frozenset()
        return pull.tag_codes(units) if len(units) == count * queueunit.UNIT_BYTES else frozenset()

    async def last_store_time_ms(self, topic: str, queue_id: int) -> int:
        """Store time of the queue's last readable message; 0 when there is none."""
        view = self.queue(topic, queue_id)
        if view.max_offset == view.min_offset:
            return 0

        def read(nowait: bool) -> bytes:
            store = self._storage.store
            units = store.read_units(topic, queue_id, view.max_offset - 1, 1, nowait=nowait)
            return store.read_records(pull.choose(units, 0, 1, 1).spans, nowait=nowait)

        found = await self._hot_or_cold(read)
        # Nothing: the topic was deleted while a thread went to the disk.
        return record.decode(found).store_time_ms if found else 0

    async def message(self, log_offset: int) -> record.Record:
        """The message that stands at a log offset. Raises MessageNotFound, also for what is not
        readable yet.
        """
        store = self._storage.store
        missing = MessageNotFound(f"no readable message stands at log offset {log_offset}")

        def read_record(nowait: bool) -> bytes:
            return store.read_record(log_offset, nowait=nowait)

        found = record.decode(await self._hot_or_cold(read_record))
        key = (found.topic, found.queue_id)
        low, readable, _ = self._storage.bounds(key)
        topic = self._state.topics.find(found.topic)
        if topic is None or not topic.readable or not low <= found.queue_offset < readable:
            self._storage.hungry()  # it may be on its way to the disk: asked again, it is there
            raise missing

        def read_unit(nowait: bool) -> bytes:
            return store.read_units(*key, found.queue_offset, 1, nowait=nowait)

        # The queue must agree: a body may hold bytes that look like a record, and a topic that was
        # deleted and created again has other messages at these offsets.
        unit = await self._hot_or_cold(read_unit)
        if not unit or queueunit.unit_at(unit, 0)[0] != log_offset:
            raise missing
        return found

    async def _hot_or_cold(self, read: Callable[[bool], T]) -> T:
        try:
            return read(True)
        except BlockingIOError:
            return await asyncio.get_running_loop().run_in_executor(self._cold, read, False)

    def close(self) -> None:
        """Wait for the reads in threads; before the store is closed."""
        self._cold.shutdown(wait=True)

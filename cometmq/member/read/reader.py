"""Reads of a member: pulls, bounds, single messages. Hot pages are read on the loop, cold ones in
threads.

The rules are :mod:`cometmq.messaging.pull`'s; here they meet the store. What the kernel has in
memory costs a few microseconds and is read in place; for the rest the store says BlockingIOError,
and the same read is done again in a thread, so that a consumer far behind never stalls a producer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from cometmq.clock import Clock
from cometmq.errors import CometError, MessageNotFound, NotWriter, StoreDamaged
from cometmq.filters import sql
from cometmq.flight_recorder import named_threads
from cometmq.format import queueunit, record
from cometmq.member.read import queue_ends, sqlscan
from cometmq.member.read.damage import Limits, read_before_damage
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.member.storage.member_storage import BaseStorage
from cometmq.messaging import inline_messages, pull
from cometmq.messaging.inline_messages import InlineMessages
from cometmq.messaging.pull import Choice, PullStatus
from cometmq.messaging.state import BrokerState
from cometmq.model import Position, QueueKey
from cometmq.store.base import BaseStore

T = TypeVar("T")

# Waits until the client may have an answer of so many bytes.
Room: TypeAlias = Callable[[int], Awaitable[None]]

COLD_READ_THREADS = 4
SEARCH_THREADS = 2
SHOW_S_MAX = 0.2  # that a question about bounds waits for the disk
END_S_MAX = 1.0  # that one about the end of a queue does


@dataclass(frozen=True, slots=True)
class PullQuery:
    """What a consumer asks of one queue. ``codes``: low 32 bits of the tag hashes wanted; empty
    = everything. ``program``: the SQL filter instead, None = there is none.
    ``stop``: messages from there on are not wanted now; 0 = all are.
    """

    topic: str
    queue_id: int
    position: Position
    codes: frozenset[int]
    max_count: int
    max_bytes: int
    program: sql.Program | None = None
    stop: int = 0


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """What it gets. ``records`` are encoded, end to end. ``backlog_bytes``: log behind the last
    message that was looked at; 0 = nothing was.
    """

    status: PullStatus
    records: bytes
    count: int
    next_position: Position
    min_offset: int
    max_offset: int
    backlog_bytes: int = 0


@dataclass(frozen=True, slots=True)
class QueueView:
    """One queue at one instant."""

    generation: int
    min_offset: int
    max_offset: int  # readable
    appended_offset: int


class Reader:
    """Answers reads from the store, as far as the state lets it. ``copy``: the store is a
    follower's, which has the last word on nothing that it lacks.
    """

    def __init__(
        self,
        storage: BaseStorage,
        state: BrokerState,
        pace: CatchUpThrottle,
        clock: Clock,
        *,
        copy: bool = False,
    ) -> None:
        self._copy = copy
        self._decide = pull.decide_at_copy if copy else pull.decide
        self._storage = storage
        self._state = state
        self._pace = pace
        self._clock = clock
        self._cold = named_threads("cold-read", COLD_READ_THREADS)
        self._search = named_threads("search", SEARCH_THREADS)

    @property
    def store(self) -> BaseStore:
        """Where everything is read."""
        return self._storage.store

    async def pull(self, query: PullQuery, room: Room) -> PullAnswer:
        """Raises what the topic table, the generations and the limits raise (cometmq.errors), what
        ``room`` raises, and StoreDamaged, whose text has the next readable offset.
        """
        try:
            answer = await self._pull(query, room)
        except MessageNotFound:
            if not self._has_gone(query):
                raise
        else:
            if answer.count or not self._has_gone(query):
                return answer
        return await self._pull(query, room)  # the answer says where the queue begins now

    def _has_gone(self, query: PullQuery) -> bool:
        """Whether retention has come past the position, maybe just now."""
        low, _, _ = self._storage.bounds((query.topic, query.queue_id))
        return query.position.offset < low

    async def _pull(self, query: PullQuery, room: Room) -> PullAnswer:
        self._state.topics.for_read(query.topic, query.queue_id)
        history = self._state.generations.of(query.topic, query.queue_id)
        validate = history.validate_at_copy if self._copy else history.validate
        position = validate(query.position)
        limits = pull.clamp(query.max_count, query.max_bytes)
        low, readable, appended = self._storage.bounds((query.topic, query.queue_id))
        status, offset = self._decide(position.offset, low, readable, appended)
        records, choice, backlog = b"", Choice([], 0, offset), 0
        if status is PullStatus.FOUND:
            found = self._found if query.program is None else self._found_by_sql
            end = min(readable, query.stop) if query.stop > offset else readable
            records, choice = await found(query, offset, end, limits, room)
            assert offset <= choice.next_offset <= end, "a pull shows readable messages only"
            assert choice.count <= limits[0], "a pull keeps its limit"
            status, backlog = choice.status, self._backlog(query, choice)
            await self._keep_pace(choice)
        elif status is PullStatus.NOT_FOUND:
            self._storage.flusher.flush_promptly()
        assert bool(choice.count) == bool(records) == (status is PullStatus.FOUND)
        next_position = Position(history.current, choice.next_offset)
        return PullAnswer(status, records, choice.count, next_position, low, readable, backlog)

    def _backlog(self, query: PullQuery, choice: Choice) -> int:
        """Log behind the last message that a pull looked at."""
        store = self._storage.store
        if choice.spans:
            start, size = choice.spans[-1]
            assert start + size <= store.appended_offset
            return store.appended_offset - start - size
        try:  # nothing passed the filter; the unit was read a moment ago
            last = choice.next_offset - 1
            unit = store.read_units(query.topic, query.queue_id, last, 1, nowait=True)
        except BlockingIOError:
            return 0
        return store.appended_offset - queueunit.unit_at(unit, 0)[0] if unit else 0

    async def _found(
        self, query: PullQuery, offset: int, readable: int, limits: Limits, room: Room
    ) -> tuple[bytes, Choice]:
        """The messages from ``offset`` on, which is below ``readable``, up to the first damaged
        one. MessageNotFound when they are gone, StoreDamaged.
        """
        wanted = min(pull.units_wanted(limits[0], query.codes), readable - offset)
        store, queue = self._storage.store, (query.topic, query.queue_id)

        def choose(nowait: bool) -> tuple[bytes, Choice]:
            units = store.read_units(*queue, offset, wanted, nowait=nowait)
            return units, pull.choose(units, offset, *limits, query.codes)

        def read(nowait: bool) -> bytes:
            return store.read_messages(queue, offset, units, choice.spans, nowait=nowait)

        try:
            units, choice = await self._hot_or_cold(choose)
            if not choice.spans:
                return b"", choice
            await room(sum(size for _, size in choice.spans))
            return await self._hot_or_cold(read), choice
        except (StoreDamaged, MessageNotFound) as error:
            self._note_damage(error, queue, offset)
            return await asyncio.get_running_loop().run_in_executor(
                self._cold, read_before_damage, store, queue, offset, wanted, limits, query.codes
            )

    async def _found_by_sql(
        self, query: PullQuery, offset: int, readable: int, limits: Limits, room: Room
    ) -> tuple[bytes, Choice]:
        """As :meth:`_found`; many messages are looked at in a thread."""
        assert query.program is not None
        queue, count = (query.topic, query.queue_id), readable - offset
        wanted = (self._storage.store, query.program, queue, offset, count, limits)

        def scan(nowait: bool) -> tuple[bytes, Choice]:
            return sqlscan.scan(*wanted, nowait=nowait)

        loop = asyncio.get_running_loop()
        try:
            if count <= sqlscan.IN_PLACE_COUNT_MAX:
                records, choice = await self._hot_or_cold(scan)
            else:
                records, choice = await loop.run_in_executor(self._cold, scan, False)
        except (StoreDamaged, MessageNotFound) as error:
            self._note_damage(error, queue, offset)
            before = partial(sqlscan.scan_before_damage, *wanted)
            records, choice = await loop.run_in_executor(self._cold, before)
        if records:
            await room(len(records))
        return records, choice

    def _note_damage(self, error: CometError, queue: QueueKey, offset: int) -> None:
        """Raises the error when it is no damage."""
        low, _, _ = self._storage.bounds(queue)
        if isinstance(error, MessageNotFound) and offset < low:
            raise error  # retention has come past it
        self._storage.damaged_pulls += 1

    async def _keep_pace(self, choice: Choice) -> None:
        if choice.spans:
            size_bytes = sum(size for _, size in choice.spans)
            end = self._storage.store.appended_offset
            now_s = self._clock.monotonic_s()
            delay_s = self._pace.delay_s(choice.spans[0][0], size_bytes, end, now_s)
            if delay_s:
                await asyncio.sleep(delay_s)

    def queue(self, topic: str, queue_id: int) -> QueueView:
        """A queue's bounds, readable or not. Raises TopicNotFound, QueueNotFound."""
        self._state.topics.get(topic)
        history = self._state.generations.of(topic, queue_id)
        low, readable, appended = self._storage.bounds((topic, queue_id))
        return QueueView(history.current, low, readable, appended)

    async def show_appended(self, queues: Iterable[QueueKey]) -> None:
        """Waits until all that these queues have now is readable, at most SHOW_S_MAX: a client that
        asks for bounds after an acknowledgement expects to see its message.
        """
        await self._show(queue_ends.appended_ends(self._storage, queues), SHOW_S_MAX)

    async def uncertain_ends(self, queues: Iterable[QueueKey]) -> Mapping[QueueKey, CometError]:
        """Waits as :meth:`show_appended`, at most END_S_MAX. The queues whose readable maximum may
        then lie below what was acknowledged or shown before the call, and the error for a reader
        that would begin there: OffsetNotAvailable, NotWriter at a follower.
        """
        if self._copy:
            error = NotWriter("a follower does not know where a queue ends: its writer does")
            return dict.fromkeys(queues, error)
        ends = queue_ends.appended_ends(self._storage, queues)
        await self._show(ends, END_S_MAX)
        return queue_ends.uncertain(self._storage, ends)

    async def _show(self, ends: Mapping[QueueKey, int], within_s: float) -> None:
        if queue_ends.are_shown(self._storage, ends):
            return
        moved = asyncio.Event()
        self._storage.flusher.flush_promptly()
        with self._storage.moved.subscribed(moved), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not queue_ends.are_shown(self._storage, ends):
                    await moved.wait()
                    moved.clear()

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

    def inline_messages(
        self, topic: str, queue_id: int, first: int, end: int
    ) -> InlineMessages | None:
        """These readable messages, as a pull would find them. None: clients may not read them, they
        are not few, or the kernel does not have all of them in memory.
        """
        count, store = end - first, self._storage.store
        if not 0 < count <= inline_messages.COUNT_MAX:
            return None
        if self._state.quotas.limits_reads and self._state.is_metered(topic):
            return None  # a pull counts what a client gets
        try:
            self._state.topics.for_read(topic, queue_id)
            low, _, _ = self._storage.bounds((topic, queue_id))
            recent = self._storage.recent.take((topic, queue_id), first, end)
            if recent is not None:
                sizes, codes = pull.sizes_and_codes(recent.units)
                return InlineMessages(first, low, recent.records, sizes, codes)
            units = store.read_units(topic, queue_id, first, count, nowait=True)
            choice = pull.choose(units, first, count, inline_messages.BYTES_MAX)
            sizes, codes = pull.sizes_and_codes(units)
            if choice.count < count or sum(sizes) > inline_messages.BYTES_MAX:
                return None
            assert len(sizes) == len(codes) == count
            records = store.read_messages(
                (topic, queue_id), first, units, choice.spans, nowait=True
            )
        except (CometError, BlockingIOError):  # a pull will say what is wrong, or wait
            return None
        return InlineMessages(first, low, records, sizes, codes)

    async def last_store_time_ms(self, topic: str, queue_id: int) -> int:
        """Store time of the queue's last readable message; 0 when there is none."""
        view = self.queue(topic, queue_id)
        if view.max_offset == view.min_offset:
            return 0

        def read(nowait: bool) -> bytes:
            store, last = self._storage.store, view.max_offset - 1
            units = store.read_units(topic, queue_id, last, 1, nowait=nowait)
            spans = pull.choose(units, last, 1, 1).spans
            return store.read_messages((topic, queue_id), last, units, spans, nowait=nowait)

        try:
            found = await self._hot_or_cold(read)
        except MessageNotFound:  # retention has just taken it
            return 0
        # Nothing: the topic was deleted while a thread went to the disk.
        return record.decode(found).store_time_ms if found else 0

    async def message(self, log_offset: int) -> record.Record:
        """The message at a log offset. Raises MessageNotFound, also for what is not
        readable yet.
        """
        return (await self.raw_message(log_offset))[1]

    async def raw_message(self, log_offset: int) -> tuple[bytes, record.Record]:
        """As :meth:`message`, with the record's bytes."""
        store = self._storage.store
        missing = MessageNotFound(f"there is no readable message at log offset {log_offset}")

        def read_record(nowait: bool) -> bytes:
            return store.read_record(log_offset, nowait=nowait)

        raw = await self._hot_or_cold(read_record)
        found = record.decode(raw)
        if not await self.shows(found):
            self._storage.flusher.flush_promptly()  # it may be on its way to the disk
            raise missing
        return raw, found

    async def shows(self, found: record.Record) -> bool:
        """Whether consumers may see what seems to be a record of the log."""
        key = (found.topic, found.queue_id)
        low, readable, _ = self._storage.bounds(key)
        topic = self._state.topics.find(found.topic)
        if topic is None or not topic.readable or not low <= found.queue_offset < readable:
            return False

        def read_unit(nowait: bool) -> bytes:
            return self._storage.store.read_units(*key, found.queue_offset, 1, nowait=nowait)

        # The queue must agree: a body may hold bytes that look like a record, and a topic that was
        # deleted and created again has other messages at these offsets.
        unit = await self._hot_or_cold(read_unit)
        return bool(unit) and queueunit.unit_at(unit, 0)[0] == found.log_offset

    def flush_promptly(self) -> None:
        """A reader found nothing: what is on its way to the disk is to be there at once."""
        self._storage.flusher.flush_promptly()

    async def aside(self, search: Callable[[], T]) -> T:
        """What ``search`` returns, which may read a lot: in threads of its own, so that it keeps no
        consumer waiting. It cannot be stopped, so a long one is made in pieces.
        """
        return await asyncio.get_running_loop().run_in_executor(self._search, search)

    async def _hot_or_cold(self, read: Callable[[bool], T]) -> T:
        try:
            return read(True)
        except BlockingIOError:
            return await asyncio.get_running_loop().run_in_executor(self._cold, read, False)

    def close(self) -> None:
        """Wait for the reads in threads; before the store is closed."""
        self._cold.shutdown(wait=True)
        self._search.shutdown(wait=True, cancel_futures=True)

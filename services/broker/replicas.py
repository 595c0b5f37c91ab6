"""The writer's followers: what each gets next, how far it is. Belongs to the event loop.

Nothing is kept for a follower but a few numbers: what it gets is read from the log, from the page
cache as a rule, else in a thread, so that a follower far behind never stalls a producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

from cometmq.clock import Clock
from cometmq.errors import MessageNotFound
from cometmq.member.storage import Bell, MemberStorage
from cometmq.replication.follower import (
    CHUNK_BYTES_MAX,
    HEARTBEAT_S,
    LogView,
    Replica,
    start_of_copy,
)
from cometmq.replication.watermarks import DurabilityClass
from cometmq.store.cleaner import Pin
from cometmq.store.log.commitlog import Chunk

COLD_READ_THREADS = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Frame:
    """What is sent at once: a chunk of the log, or only positions."""

    offset: int
    data: bytes
    writer_end: int
    visible_async: int
    visible_others: int


class Replicas:
    """All followers that are connected, one for each member id: a newer stream takes the place of
    an older.
    """

    def __init__(self, storage: MemberStorage, clock: Clock) -> None:
        self.bytes_sent = 0
        self.changed = Bell()  # rings when a follower is further, comes or goes
        self.clock = clock
        self.storage = storage
        self._by_member: dict[int, Replica] = {}
        self._cold = ThreadPoolExecutor(COLD_READ_THREADS, thread_name_prefix="cold-copy")

    def connected(self) -> list[Replica]:
        """Followers now, in order of member id."""
        # Asked by the metrics' thread too: the list is made in one step.
        return sorted(list(self._by_member.values()), key=lambda replica: replica.member_id)

    def view(self) -> LogView:
        """The writer's own log."""
        store = self.storage.store
        return LogView(tuple(store.epochs), store.min_offset, store.appended_offset)

    async def start_of_copy(self, follower: LogView) -> int:
        """Where the follower goes on. Raises StaleEpoch."""
        store = self.storage.store

        def crc_at(log_offset: int) -> int | None:
            try:
                return crc32(store.read_record(log_offset))
            except MessageNotFound:
                return None

        view = self.view()
        return await self._in_thread(lambda: start_of_copy(view, follower, crc_at))

    @contextmanager
    def join(self, member_id: int, store_id: str, start: int) -> Iterator[Sender]:
        """A follower, as long as its stream lives."""
        replica = Replica(member_id, store_id, start, self.clock.monotonic_s())
        self._by_member[member_id] = replica
        self.changed.ring()
        pins = self.storage.store.cleaner.pins
        try:
            with pins.hold(start) as pin:
                sender = Sender(self, replica, pin)
                with self.storage.moved.heard_by(sender.wake):
                    yield sender
        finally:
            if self._by_member.get(member_id) is replica:
                del self._by_member[member_id]
            self.changed.ring()

    def is_current(self, replica: Replica) -> bool:
        """False: a newer stream of the member has come."""
        return self._by_member.get(replica.member_id) is replica

    async def read_chunk(self, offset: int, bytes_max: int) -> Chunk | None:
        store = self.storage.store
        try:
            return store.read_chunk(offset, bytes_max, nowait=True)
        except BlockingIOError:
            return await self._in_thread(lambda: store.read_chunk(offset, bytes_max))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._cold, work)

    def close(self) -> None:
        """Wait for the reads in threads; before the store is closed."""
        self._cold.shutdown(wait=True)


class Sender:
    """One follower's stream."""

    def __init__(self, replicas: Replicas, replica: Replica, pin: Pin) -> None:
        self.replica = replica
        self.wake = asyncio.Event()
        self._replicas = replicas
        self._pin = pin  # what was not sent yet is wanted
        self._told = (-1, -1)  # the visible positions that the follower was told last
        self._told_s = 0.0

    def acked(self, appended: int, flushed: int) -> None:
        """Raises InvalidRequest."""
        replicas = self._replicas
        end = replicas.storage.store.appended_offset
        self.replica.acked(appended, flushed, end, replicas.clock.monotonic_s())
        self.wake.set()
        replicas.changed.ring()

    async def next_frame(self) -> Frame | None:
        """What to send next, when there is something, and once a second anyway. None: a newer
        stream of the member has come.
        """
        replicas = self._replicas
        while replicas.is_current(self.replica):
            self.wake.clear()
            chunk = await self._chunk()
            now_s = replicas.clock.monotonic_s()
            due_s = self._told_s + HEARTBEAT_S - now_s
            if chunk is not None or self._visible() != self._told or due_s <= 0:
                return self._frame(chunk, now_s)
            try:
                async with asyncio.timeout(due_s):
                    await self.wake.wait()
            except TimeoutError:
                continue
        return None

    async def _chunk(self) -> Chunk | None:
        room = self.replica.room()
        if not room:
            return None
        return await self._replicas.read_chunk(self.replica.sent, min(room, CHUNK_BYTES_MAX))

    def _visible(self) -> tuple[int, int]:
        marks = self._replicas.storage.watermarks
        return marks.visible(DurabilityClass.ASYNC), marks.visible(DurabilityClass.FLUSHED)

    def _frame(self, chunk: Chunk | None, now_s: float) -> Frame:
        offset, data = self.replica.sent, b""
        if chunk is not None:
            data = chunk.data
            self.replica.sent_to(chunk.next_offset)
            self._pin.offset = chunk.next_offset
            self._replicas.bytes_sent += len(data)
        self._told, self._told_s = self._visible(), now_s
        return Frame(offset, data, self._replicas.storage.store.appended_offset, *self._told)

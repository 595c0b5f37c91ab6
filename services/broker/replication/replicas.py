"""The writer's followers: what each gets next, how far it is. Belongs to the event loop.

Nothing is kept for a follower but a few numbers: what it gets is read from the log, from the page
cache as a rule, else in a thread, so that a follower far behind never stalls a producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar
from zlib import crc32

from cometmq.clock import Clock
from cometmq.errors import InvalidRequest, MessageNotFound
from cometmq.flight_recorder import named_threads
from cometmq.member.read.throttle import CatchUpThrottle
from cometmq.member.storage.member_storage import MemberStorage, Notifier
from cometmq.messaging.replica_selection import ReadReplica
from cometmq.replication.follower import (
    CHUNK_BYTES_MAX,
    HEARTBEAT_S,
    Ack,
    LogView,
    Replica,
    start_of_copy,
)
from cometmq.replication.lease import ReplicaId
from cometmq.replication.refusals import Reason, Refusals
from cometmq.replication.watermarks import HighWatermarks
from cometmq.rpc.ticks import TIMER_STEP_S
from cometmq.store.cleaner import Pin
from cometmq.store.log.commitlog import Chunk

COLD_READ_THREADS = 2
# Fewer bytes wait for more while something sent is unanswered: so under load frames get larger, and
# more messages share what each costs whatever its size. With nothing unanswered they go at once.
GATHER_BYTES = CHUNK_BYTES_MAX * 3 // 4
# What consumers of followers may see is sent with the next bytes, or so long after the last frame.
MARKS_S = 0.005

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message to a follower: a chunk of the log, or only positions."""

    offset: int
    data: bytes
    writer_end: int
    visible: HighWatermarks
    flush_to: int  # a send waits until the follower has synced up to here
    sent_boot_ms: int


class FollowerTable:
    """All followers that have connected to this writer, now or before: what each has of the log,
    until when it has promised not to take the lease, and which kinds of state records it reads.
    """

    def __init__(self) -> None:
        self._replicas: dict[ReplicaId, Replica] = {}
        self._state_kinds: dict[int, frozenset[str]] = {}

    @property
    def state_kinds(self) -> Mapping[int, frozenset[str]]:
        """What each member said when it connected last, by member id."""
        return self._state_kinds

    @property
    def by_replica_id(self) -> Mapping[ReplicaId, Replica]:
        return self._replicas

    def promised_until_s(self, replica_id: ReplicaId) -> float:
        """Until when that follower has promised not to take the lease; 0: it has not."""
        replica = self._replicas.get(replica_id)
        return 0.0 if replica is None else replica.promised_until_s

    def join(
        self, replica_id: ReplicaId, start: int, state_kinds: frozenset[str], now_s: float
    ) -> Replica:
        """The follower connects, and copies from ``start`` on."""
        self._state_kinds[replica_id.member_id] = state_kinds
        # A member on another store has lost what it had: what the former store has acknowledged
        # and promised, is kept only as long as that was connected last.
        for other in list(self._replicas):
            if other.member_id == replica_id.member_id and other != replica_id:
                del self._replicas[other]
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._replicas[replica_id] = Replica(replica_id, start, now_s)
        else:
            replica.join(start)
        assert sum(known.member_id == replica_id.member_id for known in self._replicas) == 1
        assert replica.flushed <= replica.appended == replica.sent == start
        return replica


class Replicas:
    """The streams to followers; of each member one at a time: a newer one takes the place of an
    older. ``waits_from``: as of ``Retention``.
    """

    def __init__(
        self,
        storage: MemberStorage,
        followers: FollowerTable,
        pace: CatchUpThrottle,
        clock: Clock,
        waits_from: Callable[[], Awaitable[int]],
    ) -> None:
        self.bytes_sent = 0
        self._waits_from = waits_from
        self.pace = pace  # of those far behind
        self.changed = Notifier()  # a follower is further, comes or goes
        self.refusals = Refusals()
        self.clock = clock
        self.storage = storage
        self._followers = followers
        self._streams: dict[int, Sender] = {}  # by member id
        self._cold = named_threads("cold-copy", COLD_READ_THREADS)

    def connected(self) -> list[Replica]:
        """Followers now, in order of member id."""
        # Asked by the metrics' thread too: the list is made in one step.
        found = [sender.replica for sender in list(self._streams.values())]
        return sorted(found, key=lambda replica: replica.replica_id)

    def copies(self) -> list[ReadReplica]:
        """The connected followers, for readers that may be sent to one of them."""
        end = self.storage.store.appended_offset
        return [ReadReplica(r.member_id, r.behind_bytes(end)) for r in self.connected()]

    def view(self) -> LogView:
        """The writer's own log."""
        store = self.storage.store
        return LogView(tuple(store.epochs), store.min_offset, store.appended_offset)

    async def start_of_copy(self, follower: LogView) -> int:
        """Log offset from which the follower copies. Raises StaleEpoch."""
        store = self.storage.store

        def crc_at(log_offset: int) -> int | None:
            try:
                return crc32(store.read_record(log_offset))
            except MessageNotFound:
                return None

        view, waits_from = self.view(), await self._waits_from()
        with self.refusals.counting(Reason.EPOCH):
            start = await self._in_thread(lambda: start_of_copy(view, follower, crc_at, waits_from))
        assert 0 <= start <= store.appended_offset, start
        return start

    @contextmanager
    def join(
        self, replica_id: ReplicaId, start: int, state_kinds: frozenset[str]
    ) -> Iterator[Sender]:
        """A follower, as long as its stream lives. ``state_kinds``: of the state records that it
        reads.
        """
        replica = self._followers.join(replica_id, start, state_kinds, self.clock.boottime_s())
        pins = self.storage.store.cleaner.pins
        with pins.hold(start) as pin:
            sender = self._streams[replica_id.member_id] = Sender(self, replica, pin)
            self.changed.notify()
            try:
                with self.storage.moved.subscribed(sender.wake):
                    yield sender
            finally:
                assert pin.offset >= start
                if self.is_current(sender):
                    del self._streams[replica_id.member_id]
                    replica.connected = False
                self.changed.notify()

    def let_go(self, named: Collection[ReplicaId]) -> None:
        """End the streams of those that have announced their stop, but of the replicas
        ``named``.
        """
        for sender in self._streams.values():
            if sender.replica.leaving and sender.replica.replica_id not in named:
                sender.let_go()

    def is_current(self, sender: Sender) -> bool:
        """False: a newer stream of the member has come."""
        return self._streams.get(sender.replica.member_id) is sender

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
        self._let_go = False
        # Of its newest acknowledgement: its CLOCK_BOOTTIME, and ours when it came, in ms.
        self._ack_boot_ms: tuple[int, int] | None = None
        # the positions that were sent last: what is visible, and how far to sync
        self._sent_marks: tuple[HighWatermarks, int] | None = None
        self._sent_s = 0.0

    def acked(self, ack: Ack) -> None:
        """Raises InvalidRequest."""
        replicas = self._replicas
        end = replicas.storage.store.appended_offset
        with replicas.refusals.counting(Reason.ACK):
            if not replicas.is_current(self):  # what the replica was sent, another stream sent
                raise InvalidRequest("ack: another stream of this member has come")
            self.replica.acked(ack, end)
        assert self.replica.flushed <= self.replica.appended <= self.replica.sent <= end
        self.wake.set()
        replicas.storage.settle()
        replicas.changed.notify()

    def came(self, sent_boot_ms: int, now_ms: int) -> None:
        """An acknowledgement that was sent then, by the follower's CLOCK_BOOTTIME, comes now."""
        self._ack_boot_ms = sent_boot_ms, now_ms

    def answers_boot_ms(self, now_ms: int) -> int | None:
        """The follower's CLOCK_BOOTTIME is later than this; None: it has not said."""
        if self._ack_boot_ms is None:
            return None
        sent_boot_ms, came_ms = self._ack_boot_ms
        return sent_boot_ms + now_ms - came_ms

    @property
    def has_let_go(self) -> bool:
        """The member has announced its stop, and no send waits for it."""
        return self._let_go

    def let_go(self) -> None:
        """End the stream."""
        self._let_go = True
        self.wake.set()

    async def next_frame(self) -> Frame | None:
        """The next frame to send: bytes and waits for its disk at once, marks soon, and once a
        second something anyway. None: the member was let go, or a newer stream of it has come.
        """
        replicas = self._replicas
        while True:
            self.wake.clear()
            chunk = await self._chunk()
            if self._let_go or not replicas.is_current(self):  # what it was sent, that one sends
                return None
            now_s = replicas.clock.boottime_s()
            assert self._sent_s <= now_s
            assert chunk is None or self.replica.sent < chunk.next_offset
            due_s = self._due_s() - now_s
            if chunk is not None or due_s <= 0:
                return self._frame(chunk, now_s)
            await self._woken(due_s)

    async def _woken(self, delay_s: float) -> None:
        """Until something has changed, at most so long."""
        # Else the loop turns in the last part of a millisecond until the time has come.
        timer = asyncio.get_running_loop().call_later(delay_s + TIMER_STEP_S, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            timer.cancel()

    def _due_s(self) -> float:
        """When a frame is due that has no bytes."""
        shown, flush_to = self._marks_to_send()
        replica = self.replica
        if self._sent_marks is None or self._sent_marks[1] < flush_to <= replica.sent:
            return self._sent_s
        # Else the next frame has the marks anyway, or the acknowledgement that is due wakes us.
        soon = self._sent_marks[0] != shown and replica.has_what_was_sent
        return self._sent_s + (MARKS_S if soon else HEARTBEAT_S)

    async def _chunk(self) -> Chunk | None:
        if not self.replica.has_room or self._gathers():
            return None
        chunk = await self._replicas.read_chunk(self.replica.sent, CHUNK_BYTES_MAX)
        if chunk is None:
            return None
        replicas = self._replicas
        end = replicas.storage.store.appended_offset
        now_s = replicas.clock.monotonic_s()
        delay_s = replicas.pace.delay_s(self.replica.sent, len(chunk.data), end, now_s)
        if delay_s:  # even no time at all would be a turn of the loop
            await asyncio.sleep(min(delay_s, HEARTBEAT_S))  # heartbeats must not wait for it
        return chunk

    def _gathers(self) -> bool:
        """Whether what there is to send waits for more: until the next answer, at the latest."""
        waiting_bytes = self._replicas.storage.store.written_offset - self.replica.sent
        return not self.replica.has_what_was_sent and waiting_bytes < GATHER_BYTES

    def _marks_to_send(self) -> tuple[HighWatermarks, int]:
        storage = self._replicas.storage
        return storage.shown, storage.followers_flush_to

    def _frame(self, chunk: Chunk | None, now_s: float) -> Frame:
        offset, data = self.replica.sent, b""
        if chunk is not None:
            data = chunk.data
            assert chunk.next_offset >= offset + len(data), "a chunk is sent whole"
            assert self._pin.offset <= offset, "retention keeps what was not sent"
            self.replica.sent_to(chunk.next_offset)
            self._pin.offset = chunk.next_offset
            self._replicas.bytes_sent += len(data)
        self._sent_marks, self._sent_s = self._marks_to_send(), now_s
        end, sent_ms = self._replicas.storage.store.appended_offset, int(now_s * 1000)
        assert offset + len(data) <= end
        self.replica.framed(sent_ms, end)
        return Frame(offset, data, end, *self._sent_marks, sent_ms)

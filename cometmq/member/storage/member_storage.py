"""An open store with its positions: what is appended, acknowledged, readable.

The event loop owns everything here. It appends; the flush thread says how far the log is on disk;
from that follow released acknowledgements and readable maxima. Reads may come from any thread: they
use only the store's positional reads and the plain dictionary of maxima.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cometmq.clock import Clock
from cometmq.errors import BrokerDraining, DescriptorsExhausted, DiskFull, Shortage
from cometmq.member.storage.ack_queue import AckQueue
from cometmq.member.storage.arrivals import Arrivals
from cometmq.member.storage.authority import WriteAuthority
from cometmq.member.storage.flusher import Flusher, FlushPolicy
from cometmq.member.storage.index_thread import IndexThread
from cometmq.model import QueueKey
from cometmq.replication.watermarks import (
    REPLICATED,
    DurabilityClass,
    HighWatermarks,
    ReadableMaxima,
    Watermarks,
)
from cometmq.store.base import BaseStore
from cometmq.store.writer import Appended, MessageStore


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of records of one queue, and what its topic demands before it is acknowledged."""

    topic: str
    queue_id: int
    count: int
    demands: DurabilityClass


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch that is in the log. ``acked`` is None when it is acknowledged already; it fails with
    StoreFailed when the disk does, with BrokerDraining when another member writes.
    """

    appended: Appended
    acked: asyncio.Future[None] | None
    demands: DurabilityClass  # before it is acknowledged


class Notifier:
    """Wakes everybody who listens. Costs a look at an empty set while nobody does."""

    def __init__(self) -> None:
        self._events: set[asyncio.Event] = set()

    def notify(self) -> None:
        for event in self._events:
            event.set()

    @contextlib.contextmanager
    def subscribed(self, event: asyncio.Event) -> Iterator[None]:
        """Set ``event`` at each notification, as long as the block lasts."""
        self._events.add(event)
        try:
            yield
        finally:
            self._events.discard(event)


class BaseStorage:
    """What a writer and a follower both do with their store: sync it, tell how far consumers may
    read. Use :meth:`run` as a task; it ends only by an error of the disk.
    """

    def __init__(
        self,
        store: BaseStore,
        maxima: ReadableMaxima,
        policy: FlushPolicy,
        clock: Clock,
        on_flush_s: Callable[[float], None],
    ) -> None:
        self.store = store
        assert store.flushed_offset == store.appended_offset, "recovery leaves everything on disk"
        self.maxima = maxima
        self.arrivals = Arrivals()  # who is told when a queue's readable maximum rises
        self.moved = Notifier()  # notifies when the log has grown, or more of it is on disk
        self.failed = False  # the disk refused: nothing may be written any more
        self.refusal = ""  # why retention lets no sends in; empty: it does
        self.look_wanted = asyncio.Event()  # retention should see how much room there is
        self.out_of_space = False  # the disk took no more since it looked last
        self.damaged_pulls = 0  # that met a damaged message
        self._on_flush_s = on_flush_s
        self._flusher = Flusher(store, policy, clock, self._synced)
        # Queue files are synced and log files built beside the flush thread, so that an
        # acknowledgement never waits for them; one thread each, because a log file takes long to
        # build.
        self._queue_thread = ThreadPoolExecutor(1, thread_name_prefix="flush-queues")
        self._build_thread = ThreadPoolExecutor(1, thread_name_prefix="build-file")
        self._index = IndexThread(store)

    def _synced(self, position: int, seconds: float) -> None:
        self._flushed(position)
        self.moved.notify()
        self._on_flush_s(seconds)

    def _flushed(self, position: int) -> None:
        """The log is on disk up to ``position``."""
        raise NotImplementedError

    def _fail(self, error: Exception) -> None:
        """The disk has failed."""
        self.failed = True

    def fail(self, error: Exception) -> None:
        """The disk has failed at something that is not done here."""
        self._fail(error)

    def note_no_space(self) -> None:
        """The disk took no more."""
        self.out_of_space = True
        self.look_wanted.set()

    # --- reading ---

    def bounds(self, key: QueueKey) -> tuple[int, int, int]:
        """A queue's minimum, readable maximum and appended maximum."""
        low, appended = self.store.queue_bounds(*key)
        return low, max(low, self.maxima.readable(key)), appended

    def flush_promptly(self) -> None:
        """A reader found nothing; what comes next is synced at once."""
        self._flusher.flush_promptly()

    def flush_now(self) -> None:
        """Sync what has been appended: a queue is watched from now on."""
        self._flusher.demand(self.store.appended_offset)

    # --- life ---

    async def run(self, flush_queues_s: float, commit_s: float = 0.0) -> None:
        """Sync the log and the queues, build log files ahead, write what the transient store pool
        holds (0: there is none); until cancelled or the disk fails.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._flusher.run(), name="flush-log")
                tasks.create_task(self._flush_queues(flush_queues_s), name="flush-queues")
                tasks.create_task(self._build_files(), name="build-files")
                tasks.create_task(self._index.run(), name="index")
                if commit_s:
                    tasks.create_task(self._commit(commit_s), name="commit-log")
        except* Exception as failures:  # whatever it was, what is on disk is not known any more
            error = failures.exceptions[0]
            self._fail(error)
            raise error from None

    async def _flush_queues(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            with contextlib.suppress(Shortage):  # what is not synced yet stays noted
                await loop.run_in_executor(self._queue_thread, self.store.flush_queues)

    async def _commit(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            await loop.run_in_executor(self._queue_thread, self._commit_now)
            self.moved.notify()  # followers may copy it

    def _commit_now(self) -> None:
        # What a full disk did not take stays in memory; appends are refused when that is full too.
        with contextlib.suppress(Shortage):
            self.store.commit_log()

    async def _build_files(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if self.store.next_file_wanted:
                await self._build_file(loop)
            await asyncio.sleep(0.1)

    async def _build_file(self, loop: asyncio.AbstractEventLoop) -> None:
        # A shortage is said by the append that needs the file; we come back in a moment.
        try:
            await loop.run_in_executor(self._build_thread, self.store.prepare_next_file)
        except DiskFull:
            self.note_no_space()
        except DescriptorsExhausted:
            pass
        else:
            self.look_wanted.set()

    def end_threads(self) -> None:
        """Wait for what the threads still do; nobody uses the store any more then. Blocking, as
        :meth:`close`.
        """
        self._index.close()
        for thread in (self._queue_thread, self._build_thread):
            thread.shutdown(wait=True)
        self._flusher.close()

    def close(self) -> None:
        """Close the store cleanly; after the disk failed leave it as a crash would.

        Blocking; only after :meth:`run` was cancelled and awaited.
        """
        self.end_threads()
        if self.failed:
            self.store.abandon()
        else:
            self.store.close()


class MemberStorage(BaseStorage):
    """The store of a member that writes. ``maxima``: what is readable from the start, by default
    everything.

    ``authority`` is asked whenever something would be acknowledged or shown; while it says no that
    waits for the next :meth:`settle`. Invariants: :meth:`validate`.
    """

    store: MessageStore

    def __init__(
        self,
        store: MessageStore,
        policy: FlushPolicy,
        clock: Clock,
        authority: WriteAuthority,
        on_flush_s: Callable[[float], None] = lambda _seconds: None,
        maxima: ReadableMaxima | None = None,
    ) -> None:
        if maxima is None:
            maxima = readable_at_start(
                store, lambda _topic: DurabilityClass.ASYNC, HighWatermarks()
            )
        super().__init__(store, maxima, policy, clock, on_flush_s)
        self.watermarks = Watermarks(store.appended_offset, store.flushed_offset)
        self.authority = authority
        self.shown = HighWatermarks()  # by which consumers see messages
        self.followers_flush_to = 0  # end of the newest batch that waits for followers' disks
        self.sealed = False  # nothing may be appended: the role is being handed over, or is lost
        self._deposed = False
        self._alone = False  # in sync: then replicated means on our disk
        self._acks: dict[DurabilityClass, AckQueue] = {}
        self.settle()

    # --- writing ---

    def append(
        self, records: bytes, segments: Sequence[Segment], *, born_host: bytes, store_host: bytes
    ) -> Ticket:
        """Verify and append a whole batch. Raises what ``MessageStore.append`` raises; then
        nothing has changed.
        """
        self.check_open()
        try:
            appended = self.store.append(
                records,
                [(s.topic, s.queue_id, s.count) for s in segments],
                born_host=born_host,
                store_host=store_host,
            )
        except DiskFull:
            self.note_no_space()
            raise
        end = appended.end_offset
        self.watermarks.append_to(end)
        self.moved.notify()
        demands = DurabilityClass.ASYNC
        for segment, first in zip(segments, appended.queue_offsets, strict=True):
            demands |= segment.demands
            key = (segment.topic, segment.queue_id)
            self.maxima.push(segment.demands, end, key, first + segment.count)
            if key in self.arrivals:  # somebody waits for it: visible one fdatasync from now
                self._flusher.demand(end)
        return Ticket(appended, self._acknowledge(demands, end), demands)

    def unseal(self) -> None:
        """The role was not handed over after all; unless it is another's already."""
        self.sealed = self._deposed

    def check_open(self) -> None:
        """Raises BrokerDraining while the log is sealed."""
        if self.sealed:
            raise BrokerDraining("the writer hands its role over")

    def check_room(self) -> None:
        """Raises DiskFull while sends are refused. What the system itself appends goes on as long
        as the disk takes it: a full disk must not stop consumption, nor its own cleaning.
        """
        if self.refusal:
            raise DiskFull(self.refusal)

    def _acknowledge(self, demands: DurabilityClass, end: int) -> asyncio.Future[None] | None:
        self._flusher.appended()
        if self.watermarks.ack(demands) >= end and self.authority.may_acknowledge():
            return None
        return self._wait(demands, end)

    def _wait(self, demands: DurabilityClass, end: int) -> asyncio.Future[None]:
        if demands & _ON_DISK or (demands and self._alone):
            self._flusher.demand(end)
        if demands & DurabilityClass.REPLICATED_FLUSHED:
            self.followers_flush_to = end
        queue = self._acks.get(demands)
        if queue is None:
            queue = self._acks[demands] = AckQueue()
        return queue.wait(end)

    async def on_disk(self, position: int) -> None:
        """Wait until the log is on disk up to ``position``."""
        await self.stored(position, DurabilityClass.FLUSHED)

    async def stored(self, position: int, demands: DurabilityClass) -> None:
        """Wait until the log fulfils what is demanded up to ``position``."""
        assert position <= self.watermarks.appended
        if self.watermarks.ack(demands) < position or not self.authority.may_acknowledge():
            # Ends enter the queue of acknowledgements in order; waiting for all that is appended
            # keeps them so.
            await self._wait(demands, self.watermarks.appended)

    def settle(self) -> None:
        """Acknowledge and show what may be: after a sync, and whenever the authority may answer
        otherwise than before.
        """
        found = self.authority.replicated(self.watermarks)
        if found is not None:
            if found.is_alone and not self._alone:
                # Sends that wait for followers now wait for our disk.
                self._flusher.demand(self.watermarks.appended)
            self.watermarks.advance_replicated(found.appended, found.flushed)
        self._alone = found is not None and found.is_alone
        if not self.authority.may_acknowledge():
            return
        for demands, queue in self._acks.items():
            queue.release(self.watermarks.ack(demands))
        self.arrivals.advanced(self.maxima.advance(self.watermarks))
        if self.shown != self.watermarks.marks:
            self.shown = self.watermarks.marks
            self.moved.notify()  # followers show it too

    def depose(self) -> None:
        """Another member writes: what waits is never acknowledged here."""
        self._deposed = self.sealed = True
        error = BrokerDraining("another member of the broker group writes now")
        for queue in self._acks.values():
            queue.fail(error)

    def drop_topic(self, topic: str) -> None:
        """Delete a topic's queues; the deletion's own record must be on disk already."""
        self.store.drop_topic(topic)
        self.maxima.forget_topic(topic)

    def _flushed(self, position: int) -> None:
        self.watermarks.flush_to(position)
        self.settle()

    def validate(self) -> None:
        """Assert what is promised: no position passes another that bounds it, what consumers see
        never passes what every member of the in-sync set has, and no acknowledgement waits that may
        go while the authority allows it.
        """
        marks, log = self.watermarks, self.store
        self.watermarks.validate()
        assert marks.appended == log.appended_offset, (marks.appended, log.appended_offset)
        assert marks.flushed <= log.flushed_offset, (marks.flushed, log.flushed_offset)
        assert all(map(int.__le__, self.shown, marks.marks)), (self.shown, marks.marks)
        for queue in self._acks.values():
            queue.validate()
        self._flusher.validate()

    def _fail(self, error: Exception) -> None:
        super()._fail(error)
        for queue in self._acks.values():
            queue.fail(error)


def readable_at_start(
    store: BaseStore, demands_of: Callable[[str], DurabilityClass], shown: HighWatermarks
) -> ReadableMaxima:
    """What consumers may read of a log that was just opened for writing: everything, but of topics
    that wait for copies only what consumers have seen before, by marks that were ``shown``; others
    may not have the rest yet.
    """
    maxima, end = ReadableMaxima(), store.appended_offset
    for key in store.queues():
        low, high = store.queue_bounds(*key)
        demands = demands_of(key[0])
        copies = demands & REPLICATED
        seen = store.queue_offset_at(*key, shown.visible(demands)) if copies else high
        if seen > low:
            maxima.push(DurabilityClass.ASYNC, end, key, seen)
        if high > max(low, seen):
            maxima.push(copies, end, key, high)
    maxima.advance(HighWatermarks(flushed=store.flushed_offset))
    return maxima


_ON_DISK = DurabilityClass.FLUSHED | DurabilityClass.REPLICATED_FLUSHED

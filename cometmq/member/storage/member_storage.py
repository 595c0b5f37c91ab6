"""An open store with its positions: what is appended, acknowledged, readable.

The event loop owns everything here. It appends; the flush thread reports how far the log is on
disk; that releases acknowledgements and raises readable maxima. Reads may come from any thread:
they use only the store's positional reads and the plain dictionary of maxima.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.errors import BrokerDraining, DescriptorsExhausted, DiskFull, Shortage
from cometmq.flight_recorder import Stage, named_threads, recorder
from cometmq.format.batch import Stamped
from cometmq.format.relay import OwnRecord
from cometmq.format.relay_run import RelayRun
from cometmq.format.timers import TimerForm
from cometmq.member.storage.arrivals import Arrivals
from cometmq.member.storage.authority import WriteAuthority
from cometmq.member.storage.flusher import Flusher, FlushPolicy
from cometmq.member.storage.recent_appends import RecentAppends, Run
from cometmq.messaging.inline_messages import BYTES_MAX
from cometmq.model import QueueKey
from cometmq.native import accelerator
from cometmq.replication.watermarks import (
    REPLICATED,
    DurabilityClass,
    HighWatermarks,
    ReadableMaxima,
    Watermarks,
    union,
)
from cometmq.rpc.tasks import wait_at_most
from cometmq.rpc.ticks import tick
from cometmq.store.base import BaseStore
from cometmq.store.retention import QuotaRoom
from cometmq.store.writer import Appended, MessageStore, RecordRun

INDEX_STEPS = 16  # that are taken on end: a store that closes waits for one of them
INDEX_PAUSE_S = 0.1  # before the index thread takes up what is synced, so that it has more at once
INDEX_LOOK_S = 10.0  # until it looks anyway: retention may have removed log files
INDEX_STALLED_S = 1.0  # until it looks whether there is room again
# About three times what plain Python takes for a key.
INDEX_REST_S_PER_KEY = 10e-6 if accelerator is None else 0.0
DEPOSED = "another member of the broker group writes now"
QUOTA_USED = (
    "the log has the files that the store's quota allows; what is left is kept for the broker's "
    "state, and for messages that wait"
)
BUILD_PAUSE_S = 0.1  # between two looks whether a log file should be built ahead


@dataclass(slots=True)
class Segment:
    """A run of records of one queue, and what its topic demands before it is acknowledged.
    ``prefix``, ``delay_ms``, ``needs_key`` and ``timer`` as of
    :class:`cometmq.format.batch.SegmentClaim`.
    """

    topic: str
    queue_id: int
    count: int
    demands: DurabilityClass
    prefix: bytes = b""
    delay_ms: int = 0
    wait_store: bool = True  # False: it is acknowledged when it is appended
    needs_key: bool = False
    timer: TimerForm = TimerForm.NONE

    @property
    def ack_demands(self) -> DurabilityClass:
        """What has to be fulfilled before it is acknowledged; ``demands``: before it is shown."""
        return self.demands if self.wait_store else DurabilityClass.ASYNC


class Ticket(NamedTuple):
    """A batch that is in the log. ``acked`` is None when it is acknowledged already; it fails with
    StoreFailed when the disk does, with BrokerDraining when another member writes.
    """

    appended: Appended
    acked: asyncio.Future[None] | None
    demands: DurabilityClass  # before it is acknowledged


class Notifier:
    """Wakes its subscribers. Costs a look at an empty set while there are none."""

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


class AckQueue:
    """Acknowledgements of one durability class in log order, each released when the position of the
    class reaches its end.

    Invariant: ends never decrease, so the head is always the next to go.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def wait(self, end: int) -> asyncio.Future[None]:
        """A future that is done when the class has reached ``end``."""
        assert not self._waiting or self._waiting[-1][0] <= end, "ends never decrease"
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((end, future))
        return future

    def release(self, position: int) -> None:
        """The class has reached ``position``."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= position:
            _, future = waiting.popleft()
            if not future.done():  # its caller may have gone away
                future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Nothing will be released any more."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()  # a caller that has gone away must not leave a warning behind

    def validate(self, position: int) -> None:
        """Assert the invariant, and that nothing waits that ends at or below ``position``."""
        ends = [end for end, _ in self._waiting]
        assert ends == sorted(ends), ends
        assert not ends or position < ends[0], (position, ends[0])


class IndexThread:
    """Indexes what is on the disk, and gives way to sends. :meth:`run` as a task; it ends only by
    an error of the disk.

    In plain Python a key costs a few microseconds of the GIL, which an append needs as well. So
    while the log grows, the thread rests after each step for some times as long as it worked. The
    index falls behind then, and catches up when it is quieter. The C extension holds the GIL for
    next to nothing.
    """

    def __init__(self, store: BaseStore) -> None:
        self._store = store
        self._thread = named_threads("index")
        self._closing = threading.Event()

    async def run(self, moved: Notifier) -> None:
        """Index until cancelled. ``moved`` notifies when more of the log is synced. StoreFailed."""
        loop, more = asyncio.get_running_loop(), asyncio.Event()
        with moved.subscribed(more):
            while True:
                more.clear()
                if await loop.run_in_executor(self._thread, self.take_steps):
                    continue
                if self._store.index.status.stalled:
                    await asyncio.sleep(INDEX_STALLED_S)
                else:
                    await wait_at_most(more, INDEX_LOOK_S)
                    await asyncio.sleep(INDEX_PAUSE_S)

    def take_steps(self) -> bool:
        """In the thread. False: there is nothing more to index now, or the thread is to end."""
        store = self._store
        for _ in range(INDEX_STEPS):
            keys, end = store.index.status.entry_count, store.appended_offset
            if not store.index_some():
                return False
            if store.appended_offset != end:  # a producer sends
                self._closing.wait(INDEX_REST_S_PER_KEY * (store.index.status.entry_count - keys))
            if self._closing.is_set():
                return False
        return True

    def close(self) -> None:
        """Wait for the step that is under way; nothing is indexed any more. Blocking."""
        self._closing.set()
        self._thread.shutdown(wait=True)


class BaseStorage:
    """What a writer and a follower both do with their store: sync it, and say how far consumers may
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
        self.arrivals = Arrivals()  # the watches of queues' readable maxima
        self.recent = RecentAppends()
        self.moved = Notifier()  # notifies when the log has grown, or more of it is on disk
        self.failed = False  # the disk refused: nothing may be written any more
        # Of a writer: nothing may be appended, the role is being handed over, or is lost.
        self.sealed = False
        self.refusal = ""  # why retention refuses sends; empty: it does not
        self.no_room = ""  # why the last append found no room; empty: it found some
        self.look_wanted = asyncio.Event()  # retention should see how much room there is
        self.out_of_space = False  # the disk took no more since it looked last
        self.quota_room = QuotaRoom()
        self.damaged_pulls = 0  # that met a damaged message
        self._on_flush_s = on_flush_s
        self.flusher = Flusher(store, policy, clock, self._synced)
        # Queue files are synced and log files built beside the flush thread, so that an
        # acknowledgement never waits for them; one thread each, because a log file takes long to
        # build.
        self._queue_thread = named_threads("flush-queues")
        self._build_thread = named_threads("build-file")
        self._index = IndexThread(store)

    def _synced(self, position: int, seconds: float) -> None:
        self._flushed(position)
        self.moved.notify()
        self._on_flush_s(seconds)

    def _flushed(self, position: int) -> None:
        """The log is on disk up to ``position``."""
        raise NotImplementedError

    def fail(self, error: Exception) -> None:
        """The disk has failed, here or at the hands of another part of the member."""
        self.failed = True

    @property
    def send_refusal(self) -> str:
        """Why sends are refused for want of room, or would be if this member wrote; empty: they
        are not.
        """
        return self.refusal or self.no_room

    def note_no_space(self, no_room: str = "") -> None:
        """The disk took no more. ``no_room``: why an append was refused."""
        self.no_room = no_room or self.no_room
        self.out_of_space = True
        self.look_wanted.set()

    # --- reading ---

    def bounds(self, key: QueueKey) -> tuple[int, int, int]:
        """A queue's minimum, readable maximum and appended maximum."""
        low, appended = self.store.queue_bounds(*key)
        return low, max(low, self.maxima.readable(key)), appended

    def may_acknowledge(self) -> bool:
        """Whether this member is certainly its group's only writer now."""
        return False

    # --- life ---

    async def is_safe(self, end: int, demands: DurabilityClass, patience_s: float) -> bool:
        """Whether the log up to ``end`` fulfils ``demands``, and is on this member's disk; a writer
        waits for that, but not longer than ``patience_s``. StoreFailed.
        """
        raise NotImplementedError

    async def run(self, flush_queues_s: float, commit_s: float = 0.0) -> None:
        """Sync the log and the queues, build log files ahead, write what the transient store pool
        holds (0: there is none); until cancelled or the disk fails.
        """
        assert not self.failed, "what is on disk is unknown"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.flusher.run(), name="flush-log")
                tasks.create_task(self._flush_queues(flush_queues_s), name="flush-queues")
                tasks.create_task(self._build_files(), name="build-files")
                tasks.create_task(self._index.run(self.moved), name="index")
                if commit_s:
                    tasks.create_task(self._commit(commit_s), name="commit-log")
        except* Exception as failures:  # whatever it was, what is on disk is not known any more
            error = failures.exceptions[0]
            self.fail(error)
            raise error from None

    async def _flush_queues(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await tick(interval_s)
            if not self.store.queues_wait:
                continue
            begun_ns = recorder.now_ns()
            with contextlib.suppress(Shortage):  # what is not synced yet stays noted
                await loop.run_in_executor(self._queue_thread, self.store.flush_queues)
            recorder.note(Stage.QUEUE_FLUSH, begun_ns)

    async def _commit(self, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(interval_s)
            # What a full disk did not take stays in memory; appends are refused when that is full.
            with contextlib.suppress(Shortage):
                await loop.run_in_executor(self._queue_thread, self.store.commit_log)
            self.moved.notify()  # followers may copy it

    async def _build_files(self) -> None:
        grown = asyncio.Event()
        with self.moved.subscribed(grown):
            while True:
                grown.clear()
                if self.store.next_file_wanted:
                    await self._build_file()
                else:
                    await grown.wait()
                await asyncio.sleep(BUILD_PAUSE_S)

    async def _build_file(self) -> None:
        loop = asyncio.get_running_loop()
        begun_ns = recorder.now_ns()
        # The append that needs the file reports a shortage; here it is tried again soon.
        try:
            await loop.run_in_executor(self._build_thread, self.store.prepare_next_file)
        except DiskFull:
            self.note_no_space()
        except DescriptorsExhausted:
            pass
        else:
            recorder.note(Stage.FILE_GROWTH, begun_ns)
            self.look_wanted.set()

    def end_threads(self) -> None:
        """Wait for what the threads still do: then nothing here uses the store any more. Blocking,
        as :meth:`close`.
        """
        self._index.close()
        for thread in (self._queue_thread, self._build_thread):
            thread.shutdown(wait=True)
        self.flusher.close()

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

    Nothing is acknowledged or shown without the ``authority``; what it refuses waits for the next
    :meth:`settle`. Invariants: :meth:`validate`.
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
        self._deposed = False
        self._alone = False  # in sync: then replicated means on our disk
        self._acks: dict[DurabilityClass, AckQueue] = {}
        self.settle()

    def may_acknowledge(self) -> bool:
        return self.authority.may_acknowledge()

    async def until_certain(self) -> None:
        """Wait until no other member can be the writer, as acknowledgements do. BrokerDraining:
        this one is the writer no more; StoreFailed: the disk has failed.
        """
        if self.authority.may_acknowledge() and not self._deposed:
            return
        if self.sealed:
            raise BrokerDraining("another member of the broker group may write now")
        await self._wait(DurabilityClass.ASYNC, self.watermarks.appended)

    # --- writing ---

    def append(
        self, records: bytes, segments: Sequence[Segment], *, born_host: bytes, store_host: bytes
    ) -> Ticket:
        """Verify and append a whole batch. Raises what ``MessageStore.append`` raises; then
        nothing has changed.
        """
        self.check_open()
        runs = [
            RecordRun(s.topic, s.queue_id, s.count, s.prefix, s.delay_ms, s.needs_key, s.timer)
            for s in segments
        ]
        begun_ns = recorder.now_ns()
        try:
            appended = self.store.append(
                records,
                runs,
                born_host=born_host,
                store_host=store_host,
                on_stamped=partial(self._keep_recent, runs) if len(records) <= BYTES_MAX else None,
            )
        except DiskFull as error:
            self.note_no_space(error.message)
            raise
        self.no_room = ""
        recorder.note(Stage.APPEND, begun_ns, appended.end_offset)
        keys = [(segment.topic, segment.queue_id) for segment in segments]
        maxima = [
            first + segment.count
            for segment, first in zip(segments, appended.queue_offsets, strict=True)
        ]
        demands = [segment.demands for segment in segments]
        acks = union([segment.ack_demands for segment in segments])
        return self._appended(appended, zip(keys, demands, maxima, strict=True), acks)

    def _keep_recent(self, runs: Sequence[RecordRun], appended: Appended, stamped: Stamped) -> None:
        """Keeps the messages that the next arrivals of their queues carry."""
        start = 0
        places = zip(
            runs, appended.queue_offsets, appended.segment_bytes, stamped.units, strict=True
        )
        for run, first_offset, size_bytes, units in places:
            key = run.topic, run.queue_id
            if self.arrivals.carries_messages(key):
                records = bytes(memoryview(stamped.buffer)[start : start + size_bytes])
                self.recent.add(key, Run(first_offset, units, records))
            start += size_bytes

    def append_relayed(
        self,
        relayed: Sequence[OwnRecord],
        demands: Mapping[str, DurabilityClass],
        store_host: bytes,
    ) -> Ticket:
        """Append records that this member makes itself; ``demands``: of each topic. Raises what
        ``MessageStore.append_relayed`` raises, BrokerDraining.
        """
        self.check_open()
        try:
            appended = self.store.append_relayed(relayed, store_host)
        except DiskFull as error:
            self.note_no_space(error.message)
            raise
        maxima = {
            (one.topic, one.queue_id): offset + 1
            for one, offset in zip(relayed, appended.queue_offsets, strict=True)
        }
        grown = [(key, demands[key[0]], maximum) for key, maximum in maxima.items()]
        return self._appended(appended, grown, union(demands.values()))

    def append_relay_run(
        self,
        run: RelayRun,
        demands: Mapping[str, DurabilityClass],
        store_host: bytes,
        behind: Sequence[OwnRecord] = (),
    ) -> Ticket:
        """As :meth:`append_relayed`, of many records at once and of some behind them."""
        self.check_open()
        try:
            appended = self.store.append_relay_run(run, store_host, behind)
        except DiskFull as error:
            self.note_no_space(error.message)
            raise
        counts = run.sized()
        keys = [*run.queues, *[(one.topic, one.queue_id) for one in behind]]
        maxima = {
            key: first + count
            for key, first, count in zip(
                keys, appended.queue_offsets, [*counts, *[1] * len(behind)], strict=True
            )
        }
        grown = [(key, demands[key[0]], maximum) for key, maximum in maxima.items()]
        return self._appended(appended, grown, union(demands.values()))

    def _appended(
        self,
        appended: Appended,
        grown: Iterable[tuple[QueueKey, DurabilityClass, int]],
        demands: DurabilityClass,
    ) -> Ticket:
        """``grown``: each queue, what its topic demands, and its maximum now. ``demands``: before
        the batch is acknowledged.
        """
        end = appended.end_offset
        self.watermarks.append_to(end)
        assert end == self.store.appended_offset, "the loop alone appends"
        self.moved.notify()
        for key, wanted, maximum in grown:
            self.maxima.push(wanted, end, key, maximum)
            if key in self.arrivals:  # a watched queue: visible one fdatasync from now
                self.flusher.demand(end)
        self.flusher.appended()
        if self.watermarks.ack(demands) >= end and self.authority.may_acknowledge():
            return Ticket(appended, None, demands)
        return Ticket(appended, self._wait(demands, end), demands)

    def unseal(self) -> None:
        """The hand-over has failed; the log stays sealed if another member writes already."""
        self.sealed = self._deposed

    def check_open(self) -> None:
        """Raises BrokerDraining while the log is sealed."""
        if self.sealed:
            raise BrokerDraining("the writer hands its role over")

    def check_room(self, size_bytes: int) -> None:
        """Raises DiskFull while sends of so many bytes are refused. The member's own records are
        appended as long as the disk takes them: a full disk must not stop consumption, nor its own
        cleaning.
        """
        if self.refusal:
            raise DiskFull(self.refusal)
        self._check_quota(size_bytes, self.quota_room.behind_sends)

    def check_delivery_room(self, size_bytes: int) -> None:
        """Raises DiskFull while so many bytes of messages that have waited are not delivered."""
        self._check_quota(size_bytes, self.quota_room.behind_deliveries)

    def check_moving_room(self, size_bytes: int) -> None:
        """Raises DiskFull while so many bytes of messages that wait are not stored again."""
        self._check_quota(size_bytes, self.quota_room.state)

    def _check_quota(self, size_bytes: int, left_bytes: int) -> None:
        room = self.store.room_behind(max(1, size_bytes))
        if room is not None and room < left_bytes:
            self.note_no_space(QUOTA_USED)
            raise DiskFull(QUOTA_USED)

    def _wait(self, demands: DurabilityClass, end: int) -> asyncio.Future[None]:
        """Raises BrokerDraining when another member writes: nothing would end the wait."""
        assert end <= self.watermarks.appended
        if self._deposed:
            raise BrokerDraining(DEPOSED)
        if demands & _ON_DISK or (demands and self._alone):
            self.flusher.demand(end)
        if demands & DurabilityClass.REPLICATED_FLUSHED:
            self.followers_flush_to = end
        queue = self._acks.get(demands)
        if queue is None:
            queue = self._acks[demands] = AckQueue()
        return queue.wait(end)

    def acked(self, position: int, demands: DurabilityClass) -> asyncio.Future[None] | None:
        """As the ticket of a batch that ends at ``position``, which is in the log already."""
        assert position <= self.watermarks.appended
        if self.watermarks.ack(demands) >= position and self.authority.may_acknowledge():
            return None
        return self._wait(demands, self.watermarks.appended)

    async def stored(self, position: int, demands: DurabilityClass) -> None:
        """Wait until the log fulfils ``demands`` up to ``position``."""
        assert position <= self.watermarks.appended
        if self.watermarks.ack(demands) < position or not self.authority.may_acknowledge():
            # Ends enter the queue of acknowledgements in order; waiting for all that is appended
            # keeps them so.
            await self._wait(demands, self.watermarks.appended)

    async def is_safe(self, end: int, demands: DurabilityClass, patience_s: float) -> bool:
        try:
            async with asyncio.timeout(patience_s):
                await self.stored(end, demands | DurabilityClass.FLUSHED)
        except (TimeoutError, BrokerDraining):
            return False
        return True

    def settle(self) -> None:
        """Acknowledge and show what the positions and the authority allow: after a sync, and
        whenever the authority may answer otherwise than before.
        """
        found = self.authority.replicated(self.watermarks)
        if found is not None:
            if found.is_alone and not self._alone:
                # Sends that wait for followers now wait for our disk.
                self.flusher.demand(self.watermarks.appended)
            self.watermarks.advance_replicated(found.appended, found.flushed)
        self._alone = found is not None and found.is_alone
        if not self.authority.may_acknowledge():
            return
        for demands, queue in self._acks.items():
            queue.release(self.watermarks.ack(demands))
        self.arrivals.advanced(self.maxima.advance(self.watermarks))
        if self.shown != self.watermarks.marks:
            assert self.shown.flushed <= self.watermarks.flushed <= self.store.flushed_offset
            self.shown = self.watermarks.marks
            self.moved.notify()  # followers show it too

    def depose(self) -> None:
        """Another member writes: what waits is never acknowledged here."""
        if self._deposed:
            return
        self._deposed = self.sealed = True
        error = BrokerDraining(DEPOSED)
        for queue in self._acks.values():
            queue.fail(error)

    def drop_topic(self, topic: str) -> None:
        """Delete a topic's queues; the deletion's own record must be on disk already."""
        self.store.drop_topic(topic)
        self.maxima.forget_topic(topic)
        self.recent.forget_topic(topic)

    def _flushed(self, position: int) -> None:
        self.watermarks.flush_to(position)
        self.settle()

    def validate(self) -> None:
        """Assert that no position passes another that bounds it, that consumers see nothing which
        some member of the in-sync set lacks, and that no acknowledgement waits without a reason.
        """
        marks, log = self.watermarks, self.store
        self.watermarks.validate()
        assert marks.appended == log.appended_offset, (marks.appended, log.appended_offset)
        assert marks.flushed <= log.flushed_offset, (marks.flushed, log.flushed_offset)
        assert all(map(int.__le__, self.shown, marks.marks)), (self.shown, marks.marks)
        may_go = self.authority.may_acknowledge() and not self._deposed
        for demands, queue in self._acks.items():
            queue.validate(marks.ack(demands) if may_go else 0)
        self.flusher.validate()

    def fail(self, error: Exception) -> None:
        super().fail(error)
        for queue in self._acks.values():
            queue.fail(error)


def readable_at_start(
    store: BaseStore, demands_of: Callable[[str], DurabilityClass], shown: HighWatermarks
) -> ReadableMaxima:
    """What consumers may read of a log that was just opened for writing: everything, but of topics
    with replication only what consumers have seen before, by marks that were ``shown``. Other
    members may not have the rest yet.
    """
    maxima, end = ReadableMaxima(), store.appended_offset
    assert store.flushed_offset == end, "recovery leaves everything on disk"
    for key in store.queues():
        low, high = store.queue_bounds(*key)
        assert low <= high
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

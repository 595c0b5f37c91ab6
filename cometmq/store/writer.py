"""The store as a writer sees it: open, append, and what ``base.py`` has.

Synchronous and single-writer. One thread (the event loop's) calls :meth:`MessageStore.append` and
:meth:`~MessageStore.drop_topic`; one thread flushes; one prepares log files; any number read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from cometmq.clock import Clock, DelayClock
from cometmq.errors import (
    BatchMalformed,
    BatchTooLarge,
    StoreFailed,
    TopicNameInvalid,
)
from cometmq.format import queueunit
from cometmq.format.batch import SegmentClaim, Stamped, stamp
from cometmq.format.record import BLANK_BYTES
from cometmq.format.relay import OwnRecord, Relayed
from cometmq.format.relay_run import RelayRun
from cometmq.format.timers import TimerForm
from cometmq.model import QueueKey
from cometmq.store import layout
from cometmq.store.base import BaseStore
from cometmq.store.disk.files import Files, OsFiles, permissions
from cometmq.store.follower import FollowerStore
from cometmq.store.recovery.opening import Approve, OpenedStore, StoreOptions
from cometmq.store.recovery.recovery import Progress
from cometmq.store.recovery.replay import Observer

__all__ = ["Appended", "MessageStore", "Observer", "RecordRun", "StoreOptions"]

logger = logging.getLogger(__name__)

QUEUE_ID_MAX = 2**31 - 1
AHEAD_MS = 3_600_000  # of the clock: what is logged


class RecordRun(NamedTuple):
    """Records of one queue that follow each other in a batch. ``prefix``, ``delay_ms``,
    ``needs_key`` and ``timer`` as of :class:`cometmq.format.batch.SegmentClaim`.
    """

    topic: str
    queue_id: int
    record_count: int
    prefix: bytes = b""
    delay_ms: int = 0
    needs_key: bool = False
    timer: TimerForm = TimerForm.NONE


class Appended(NamedTuple):
    """What became of a batch. ``clock_ms``: from which its delays count; before ``store_time_ms``
    while the log is ahead of the clock.
    """

    log_offset: int  # of its first byte
    end_offset: int  # behind its last byte
    queue_offsets: list[int]  # per segment: the offset of its first message
    segment_bytes: list[int]  # per segment: bytes of its records
    store_time_ms: int
    clock_ms: int


class MessageStore(BaseStore):
    """The store of a writer. Made by :meth:`open`, which recovers what a crash left and begins a
    new epoch.
    """

    def __init__(self, opened: OpenedStore, options: StoreOptions, clock: Clock) -> None:
        super().__init__(opened)
        self._options = options
        self._now_ms = clock.wall_ms
        self._promise: Callable[[int], None] = _promise_nothing

    def stamp_by(self, time: DelayClock) -> None:
        """Let store times and due times come from there from now on. Store times still never go
        back; due times do.
        """
        self._now_ms, self._promise = time.wall_ms, time.promise

    # --- opening ----------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: Path,
        options: StoreOptions,
        *,
        clock: Clock,
        files: Files | None = None,
        epoch_floor: int = 0,
        observer: Observer | None = None,
        progress: Progress | None = None,
        approve: Approve | None = None,
    ) -> MessageStore:
        """Open or make the store in ``directory``; takes as long as reading the unflushed end of
        the log needs.

        ``epoch_floor``: the highest epoch that is known elsewhere; the store's becomes higher.
        ``observer`` gets the records that recovery dispatches again. ``progress(done, total)``
        counts the bytes that recovery has read. ``approve`` sees what the store is going to hold;
        what it raises is a refusal too.

        Raises StoreLocked, StoreForeignFile, StoreDamaged, StoreFailed, DiskFull; the folder is
        then free again, and after the first three it is as it was, byte for byte.
        """
        assert epoch_floor >= 0, epoch_floor
        files = OsFiles(options.open_files_max) if files is None else files
        with permissions():
            files.make_directories(directory)
        opened = OpenedStore(directory, options, files)
        try:
            opened.open(observer, progress, approve)
            opened.begin_epoch(epoch_floor)
            _warn_of_the_future(opened, clock)
            return cls(opened, options, clock)
        except BaseException:
            opened.release()
            raise

    @classmethod
    def of_follower(
        cls,
        follower: FollowerStore,
        options: StoreOptions,
        *,
        clock: Clock,
        epoch_floor: int,
        approve: Approve,
    ) -> MessageStore:
        """The store of a member that followed and writes from now on; ``follower`` gives it up.
        Arguments and errors as of :meth:`open`; a refusal leaves a folder to recover.
        """
        assert not options.transient_bytes_max, "a follower opens without the transient store pool"
        opened = follower.give_up()
        try:
            opened.show_to(approve)
            opened.begin_epoch(epoch_floor)
            _warn_of_the_future(opened, clock)
            return cls(opened, options, clock)
        except BaseException:
            opened.release()
            raise

    # --- appending: the writer --------------------------------------------------------------------

    def append(
        self,
        records: bytes,
        segments: Sequence[tuple[str, int, int] | RecordRun],
        *,
        born_host: bytes,
        store_host: bytes,
        on_stamped: Callable[[Appended, Stamped], None] | None = None,
    ) -> Appended:
        """Verify, stamp and write a batch: records end to end, ``segments`` = its runs, each a
        :class:`RecordRun` or the first three fields of one. ``on_stamped`` gets the bytes of the
        log.

        All or nothing: after an error nothing has changed. Raises what
        :func:`cometmq.format.batch.stamp` raises, BatchTooLarge (longer than a log file), DiskFull
        (reads still work, and a later append may succeed), StoreFailed (nothing will be written any
        more).
        """
        self._guarded(self._dispatcher.catch_up)
        self._check_fits(len(records))
        if not records:
            raise BatchMalformed("the batch has no records")
        runs = [s if isinstance(s, RecordRun) else RecordRun(*s) for s in segments]
        claims = self._claims(runs)
        log_offset = self._log.place(len(records))
        now_ms = self._now_ms()
        store_time_ms = max(now_ms, self._log.end[1])
        stamped = stamp(
            records,
            claims,
            log_offset=log_offset,
            store_time_ms=store_time_ms,
            now_ms=now_ms,
            born_host=born_host,
            store_host=store_host,
            limits=self._options.batch_limits,
        )
        try:
            self._log.append(log_offset, stamped.buffer, store_time_ms)
            self._dispatch(runs, stamped.units)
        except StoreFailed as error:
            raise self._failed(error) from error
        queue_offsets = [claim.first_queue_offset for claim in claims]
        end = log_offset + len(records)
        assert self._log.end == (end, store_time_ms), (self._log.end, end, store_time_ms)
        segment_bytes = _segment_bytes(stamped.units, end)
        appended = Appended(log_offset, end, queue_offsets, segment_bytes, store_time_ms, now_ms)
        if on_stamped is not None:
            on_stamped(appended, stamped)
        if any([run.delay_ms or run.timer is TimerForm.AFTER for run in runs]):
            self._promise(_longest_delay_ms(runs, stamped.units, now_ms))
        return appended

    def _check_fits(self, size_bytes: int) -> None:
        if size_bytes + BLANK_BYTES > self._options.commit_log_file_bytes:
            raise BatchTooLarge(
                f"{size_bytes} bytes do not fit into a log file of "
                f"{self._options.commit_log_file_bytes} bytes"
            )

    def _claims(self, runs: Sequence[RecordRun]) -> list[SegmentClaim]:
        """The segments with the queue offsets that their first messages get."""
        following: dict[tuple[str, int], int] = {}  # a queue may come more than once
        claims = []
        for index, run in enumerate(runs):
            topic, queue_id, count = run[:3]
            first = following.get((topic, queue_id))
            if first is None:
                queue = self._dispatcher.find(topic, queue_id)
                first = queue.next_offset if queue else _checked_new_queue(topic, queue_id, index)
            following[topic, queue_id] = first + max(count, 0)
            name = topic.encode("ascii")
            form = run.prefix, run.delay_ms, run.needs_key, run.timer
            claims.append(SegmentClaim(name, queue_id, count, first, *form))
        return claims

    def append_relayed(self, relayed: Sequence[OwnRecord], store_host: bytes) -> Appended:
        """Write records that this member makes from stored ones: they bypass what producers may not
        send. ``queue_offsets`` and ``segment_bytes`` have one entry for each.

        All or nothing. Raises BatchTooLarge, DiskFull, StoreFailed as :meth:`append`.
        """
        assert relayed
        self._guarded(self._dispatcher.catch_up)
        size_bytes = sum([one.size_bytes for one in relayed])
        self._check_fits(size_bytes)
        log_offset = self._log.place(size_bytes)
        now_ms = self._now_ms()
        store_time_ms = max(now_ms, self._log.end[1])
        following: dict[QueueKey, int] = {}
        pieces: list[bytes] = []
        units: dict[QueueKey, list[bytes]] = {}
        queue_offsets: list[int] = []
        at, unit = log_offset, b""
        for one in relayed:
            key = (one.topic, one.queue_id)
            queue_offset = following.get(key)
            if queue_offset is None:
                queue_offset = self._next_offset(key)
            following[key] = queue_offset + 1
            queue_offsets.append(queue_offset)
            pieces.append(one.encode(queue_offset, at, store_time_ms, store_host))
            unit = queueunit.pack(at, one.size_bytes, one.tags_code(store_time_ms))
            units.setdefault(key, []).append(unit)
            at += one.size_bytes
        try:
            self._log.append(log_offset, bytearray().join(pieces), store_time_ms)
            for (topic, queue_id), of_queue in units.items():
                queue = self._dispatcher.get(topic, queue_id)
                self._dispatcher.dispatch(queue, b"".join(of_queue))
            self._last_units = unit
            self._dispatcher.reached(self._log.end)
        except StoreFailed as error:
            raise self._failed(error) from error
        assert self._log.end == (at, store_time_ms), (self._log.end, at, store_time_ms)
        sizes = [one.size_bytes for one in relayed]
        if waits_ms := [one.wait_ms(now_ms) for one in relayed if isinstance(one, Relayed)]:
            self._promise(max(waits_ms))
        return Appended(log_offset, at, queue_offsets, sizes, store_time_ms, now_ms)

    def append_relay_run(
        self, run: RelayRun, store_host: bytes, behind: Sequence[OwnRecord] = ()
    ) -> Appended:
        """As :meth:`append_relayed`, of many records at once, and of some ``behind`` them for other
        queues. ``queue_offsets`` and ``segment_bytes`` have one entry for each queue of the run,
        then one for each record behind it.
        """
        self._guarded(self._dispatcher.catch_up)
        firsts = [self._next_offset(key) for key in run.queues]
        sizes_behind = [one.size_bytes for one in behind]
        room = sum(sizes_behind)
        end, last_time_ms = self._log.end
        now_ms = self._now_ms()
        store_time_ms = max(now_ms, last_time_ms)
        records, units = run.encode(firsts, end, store_time_ms, store_host, room)
        self._check_fits(len(records))
        log_offset = self._log.place(len(records))
        if log_offset != end:  # a new file
            records, units = run.encode(firsts, log_offset, store_time_ms, store_host, room)
        by_queue = dict(zip(run.queues, units, strict=True))
        last_unit = units[run.chosen[-1]] if run.chosen else b""
        following: dict[QueueKey, int] = {}
        offsets_behind: list[int] = []
        at = log_offset + len(records) - room
        for one, size_bytes in zip(behind, sizes_behind, strict=True):
            key = (one.topic, one.queue_id)
            assert key not in run.queues, key
            offset = following[key] if key in following else self._next_offset(key)
            following[key] = offset + 1
            offsets_behind.append(offset)
            place = slice(at - log_offset, at - log_offset + size_bytes)
            records[place] = one.encode(offset, at, store_time_ms, store_host)
            last_unit = queueunit.pack(at, size_bytes, one.tags_code(store_time_ms))
            by_queue[key] = by_queue.get(key, b"") + last_unit
            at += size_bytes
        try:
            self._log.append(log_offset, records, store_time_ms)
            for key, of_queue in by_queue.items():
                self._dispatcher.dispatch(self._dispatcher.get(*key), of_queue)
            self._last_units = last_unit
            self._dispatcher.reached(self._log.end)
        except StoreFailed as error:
            raise self._failed(error) from error
        assert self._log.end == (at, store_time_ms), (self._log.end, at, store_time_ms)
        sizes = [len(records) - room]
        if len(units) != 1:
            sizes = [sum([size for _, size, _ in queueunit.iterate(some)]) for some in units]
        sizes += sizes_behind
        queue_offsets = [*firsts, *offsets_behind]
        return Appended(log_offset, at, queue_offsets, sizes, store_time_ms, now_ms)

    def _next_offset(self, key: QueueKey) -> int:
        queue = self._dispatcher.find(*key)
        return queue.next_offset if queue else _checked_new_queue(*key, 0)

    def _dispatch(self, segments: Sequence[RecordRun], units: list[bytes]) -> None:
        dispatcher = self._dispatcher
        assert dispatcher.dispatched[0] < self._log.end[0], (dispatcher.dispatched, self._log.end)
        for run, segment_units in zip(segments, units, strict=True):
            dispatcher.dispatch(dispatcher.get(run.topic, run.queue_id), segment_units)
        self._last_units = units[-1]
        dispatcher.reached(self._log.end)

    def settle_state(self) -> None:
        """The log has the whole state, on the disk: see ``Identity``."""
        self._guarded(self._opened.settle_state)

    def finish_adoption(self) -> None:
        """What another program left is in our state and our files now: see ``adoption``."""
        self._guarded(self._opened.finish_adoption)

    def drop_topic(self, topic: str) -> None:
        """Forget all queues of ``topic`` and remove their files; its records stay in the log,
        unseen.
        """
        self._guarded(lambda: self._dispatcher.drop(topic))
        assert not self._dispatcher.queues_of(topic), topic

    def validate(self) -> None:
        """As of every store; a follower's last epoch may begin behind its end, a writer's not."""
        super().validate()
        number, start = self.epochs[-1]
        assert number == self.epoch, (self.epochs, self.epoch)
        assert start <= self.appended_offset, (start, self.appended_offset)


def _promise_nothing(_delay_ms: int) -> None:
    """Nobody guards the clock of this store."""


def _longest_delay_ms(runs: Sequence[RecordRun], units: Sequence[bytes], now_ms: int) -> int:
    """How long the messages wait that name no time but a delay."""
    longest_ms = 0
    for run, its in zip(runs, units, strict=True):
        if run.timer is TimerForm.AFTER:
            due_ms = max([due_ms for _, _, due_ms in queueunit.iterate(its)])
            longest_ms = max(longest_ms, due_ms - now_ms)
        longest_ms = max(longest_ms, run.delay_ms)
    return longest_ms


def _warn_of_the_future(opened: OpenedStore, clock: Clock) -> None:
    """Store times never go back: followers and searches by time rely on it. So a log that ends in
    the future, because a clock was wrong or a bit flipped, continues from there.
    """
    time_ms, now_ms = opened.log.end[1], clock.wall_ms()
    if time_ms > now_ms + AHEAD_MS:
        logger.error(
            "the log in %s ends at store time %d, %d s after this machine's clock: messages are "
            "stored with that time until the clock has reached it. If the clock is right, a record "
            "is damaged (cometmq store verify): take the log from another member, or cut it there: "
            "%s",
            opened.paths.commit_log,
            time_ms,
            (time_ms - now_ms) // 1000,
            layout.repair_command(opened.paths.root, "--cut-at OFFSET"),
        )


def _segment_bytes(units: Sequence[bytes], end: int) -> list[int]:
    """Bytes of each segment's records, which lie end to end up to ``end``."""
    starts = [queueunit.unit_at(of_segment, 0)[0] for of_segment in units]
    return [stop - start for start, stop in zip(starts, [*starts[1:], end], strict=True)]


def _checked_new_queue(topic: str, queue_id: int, segment: int) -> int:
    """The first offset of a queue that is not there yet, if its name can be a folder's."""
    if not 0 <= queue_id <= QUEUE_ID_MAX:
        raise BatchMalformed(f"no queue can have the number {queue_id}", segment=segment)
    try:
        layout.checked_topic(topic)
    except TopicNameInvalid as error:
        error.segment = segment
        raise
    return 0

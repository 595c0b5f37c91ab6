"""After a stop: find the end of the log, cut what is behind it, and bring the queues up to it.

``docs/format/store-layout.md`` §5 tells the whole procedure. In short: with a clean mark nothing is
read. Else every queue forgets the units behind a restart position, and the log is read from there
on, each record verified and dispatched again, until the first byte that is no record. What stands
behind it is overwritten with zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import properties, queueunit, record, taghash
from cometmq.store.checkpoint import Checkpoint
from cometmq.store.commitlog import CommitLog
from cometmq.store.consumequeue import ConsumeQueue
from cometmq.store.dispatch import Dispatcher
from cometmq.store.files import Files, clear
from cometmq.store.identity import CleanMark
from cometmq.store.segment import Segment

CHUNK_BYTES = 1024 * 1024
# a size above it is taken for garbage rather than read into memory
RECORD_BYTES_MAX = 64 * 1024 * 1024

Progress = Callable[[int, int], None]


class Observer(Protocol):
    """Who wants to see records of some topics while the log is read again.

    ``drop_topic`` is the store's, set for the time of recovery: messages of a topic that a record
    deletes must not come back, and those of its successor count from 0 again.
    """

    drop_topic: Callable[[str], None] | None

    @property
    def topics(self) -> frozenset[str]: ...

    def dispatched(self, topic: str, log_offset: int, record: bytes) -> None:
        """A record of one of ``topics``, in the order of the log, when all before it are in their
        queues.
        """


@dataclass(frozen=True, slots=True)
class LastRecord:
    """The record that ends the log; ``size`` 0: there is none."""

    log_offset: int = 0
    size: int = 0
    store_time_ms: int = 0


# --- where to begin -------------------------------------------------------------------------------


def first_record(segment: Segment) -> record.Record | None:
    """The record at the start of a log file, if a good one stands there."""
    scan = LogFileScan(segment)
    return next((found for _, found in scan), None)


def durable_position(log: CommitLog, checkpoint: Checkpoint) -> int:
    """A file's start before which log and queues are on the disk, as RocketMQ finds it after an
    abnormal stop.
    """
    for segment in reversed(log.segments):
        first = first_record(segment)
        if first is not None and first.store_time_ms <= checkpoint.restart_time_ms:
            return segment.start
    return log.segments.start


def newest_file_with_data(log: CommitLog) -> int:
    """The start of the newest file that begins with a good record: after the end of a mere process,
    all is well before.
    """
    for segment in reversed(log.segments):
        if first_record(segment) is not None:
            return segment.start
    return log.segments.start


def verify_clean(log: CommitLog, mark: CleanMark) -> LastRecord:
    """The log's last record, when it ends as our clean close left it; :class:`StoreForeignFile`
    when somebody wrote since.
    """
    last = LastRecord(mark.last_offset)
    if mark.last_bytes:
        found = log.segments.pread(mark.last_offset, mark.last_bytes)
        if zlib.crc32(found) != mark.last_crc32:
            raise StoreForeignFile(
                f"{_changed(log)}: its last record, at {mark.last_offset}, is another one"
            )
        last = LastRecord(mark.last_offset, mark.last_bytes, record.decode(found).store_time_ms)
    if any(log.segments.pread(mark.end, record.BLANK_BYTES)):
        raise StoreForeignFile(f"{_changed(log)}: records stand behind its end, {mark.end}")
    return last


def _changed(log: CommitLog) -> str:
    return (
        f"the log in {log.segments.directory} was changed by another program since it was closed; "
        "taking over what Apache RocketMQ wrote is not possible yet"
    )


# --- reading the log ------------------------------------------------------------------------------


class LogFileScan:
    """Iterates over the good records of one log file, as (log offset, record). Afterwards ``end``
    is where the next record would stand and ``reason`` why none does; at an end mark ``end`` is the
    end of the file and the reason is empty."""

    def __init__(self, segment: Segment, start: int | None = None) -> None:
        self.end = segment.start if start is None else start
        self.reason = ""
        self._segment = segment
        self._chunk = b""
        self._chunk_start = self.end

    def __iter__(self) -> Iterator[tuple[int, record.Record]]:
        while self.end < self._segment.end:
            found = self._check()
            if found.kind is record.Kind.MORE:
                if not self._read(found.size):
                    return
            elif found.record is not None:
                yield self.end, found.record
                self.end += found.size
            else:
                self._stop(found)
                return

    def raw(self, log_offset: int, size: int) -> bytes:
        """The bytes of the record that was yielded last."""
        at = log_offset - self._chunk_start
        return self._chunk[at : at + size]

    def _check(self) -> record.Found:
        at = self.end - self._chunk_start
        return record.check(
            self._chunk, at, log_offset=self.end, bytes_left=self._segment.end - self.end
        )

    def _read(self, size: int) -> bool:
        if size > RECORD_BYTES_MAX:
            self.reason = f"TOTALSIZE {size} is more than any record has"
            return False
        room = min(max(size, CHUNK_BYTES), self._segment.end - self.end)
        self._chunk = self._segment.pread(self.end, room)
        self._chunk_start = self.end
        if len(self._chunk) < size:
            raise StoreDamaged(f"{self._segment.file.path} is shorter than it should be")
        return True

    def _stop(self, found: record.Found) -> None:
        if found.kind is record.Kind.BLANK:
            self.end = self._segment.end
        else:
            self.reason = found.reason or "nothing is written there"


# --- bringing the queues up to the log ------------------------------------------------------------


class Replay:
    """Dispatches records that are in the log already, in its order. What it has not :meth:`settled
    <settle>` yet is in no queue.

    ``settled(topic, queue_id, end, next_offset)`` is told, in the order of the log, that a queue
    has all its messages up to ``end`` of the log.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        observer: Observer | None,
        settled: Callable[[str, int, int, int], None] | None = None,
    ) -> None:
        self.last = LastRecord()
        self._dispatcher = dispatcher
        self._observer = observer
        self._observed = frozenset[str]() if observer is None else observer.topics
        self._settled = settled
        self._units: dict[ConsumeQueue, list[bytes]] = {}

    def take(self, found: record.Record, raw: Callable[[], bytes]) -> None:
        """The next record; ``raw`` gives its bytes."""
        self._note_unit(found)
        self.last = LastRecord(found.log_offset, found.size, found.store_time_ms)
        if found.topic in self._observed:
            self.settle()
            assert self._observer is not None
            self._observer.dispatched(found.topic, found.log_offset, raw())

    def _note_unit(self, found: record.Record) -> None:
        queue = self._dispatcher.get(found.topic, found.queue_id)
        units = self._units.setdefault(queue, [])
        if found.queue_offset != queue.next_offset + len(units):
            self.settle()
            queue = self._continued_at(queue, found)
            units = self._units.setdefault(queue, [])
        units.append(queueunit.pack(found.log_offset, found.size, taghash.tags_code(_tag(found))))

    def _continued_at(self, queue: ConsumeQueue, found: record.Record) -> ConsumeQueue:
        """The queue, made to go on at the record's offset although it is not the next one."""
        if found.queue_offset == 0:
            # The topic was deleted and created again. Whoever deletes observes the deletion and
            # drops the topic, so this is only for a record that slipped in between.
            self._dispatcher.restart(queue)
            queue = self._dispatcher.get(found.topic, found.queue_id)
        elif queue.next_offset == 0:
            queue.start_at(found.queue_offset)  # the messages before it went with older log files
        if found.queue_offset != queue.next_offset:
            raise StoreDamaged(
                f"the record at {found.log_offset} of the log is message {found.queue_offset} of "
                f"queue {found.queue_id} of {found.topic}, whose next is {queue.next_offset}"
            )
        return queue

    def settle(self) -> None:
        """Put all that was taken into the queues."""
        ends: list[tuple[int, ConsumeQueue]] = []
        for queue, units in self._units.items():
            if units:
                self._dispatcher.dispatch(queue, b"".join(units))
                if self._settled is not None:
                    position, size, _ = queueunit.unit_at(units[-1], 0)
                    ends.append((position + size, queue))
        self._units.clear()
        if self._settled is not None:
            for end, queue in sorted(ends, key=lambda entry: entry[0]):
                self._settled(queue.topic, queue.queue_id, end, queue.next_offset)


class Rebuild:
    """Reads the log from ``start`` on and dispatches its records again."""

    def __init__(self, log: CommitLog, dispatcher: Dispatcher, observer: Observer | None) -> None:
        self.end = log.segments.start
        self.reason = "the log has no file"
        self._log = log
        self._dispatcher = dispatcher
        self._observer = observer
        self._replay = Replay(dispatcher, observer)

    @property
    def last(self) -> LastRecord:
        """The last good record."""
        return self._replay.last

    def run(self, start: int, progress: Progress | None) -> None:
        """Everything from ``start``, the start of a file, to the first byte that is no record."""
        if self._observer is not None:
            self._observer.drop_topic = self._dispatcher.drop
        try:
            self._run(start, progress)
        finally:
            if self._observer is not None:
                self._observer.drop_topic = None

    def _run(self, start: int, progress: Progress | None) -> None:
        self.end = start
        for segment in self._log.segments:
            if segment.end <= start:
                continue
            self._file(segment)
            if progress is not None:
                progress(segment.end - start, self._log.segments.end - start)
            if self.reason:
                return

    def _file(self, segment: Segment) -> None:
        scan = LogFileScan(segment)
        pending_max = scan.end + CHUNK_BYTES
        for log_offset, found in scan:
            self._replay.take(found, partial(scan.raw, log_offset, found.size))
            if log_offset > pending_max:
                self._settle()
                pending_max = log_offset + CHUNK_BYTES
        self._settle()
        self.end, self.reason = scan.end, scan.reason

    def _settle(self) -> None:
        self._replay.settle()
        self._dispatcher.catch_up()


def _tag(found: record.Record) -> bytes:
    return properties.tag_of(found.raw_properties)


# --- the end --------------------------------------------------------------------------------------


def refuse_damage(log: CommitLog, rebuild: Rebuild, checkpoint: Checkpoint) -> None:
    """The log must reach as far as the checkpoint says that it was on the disk: a shorter one was
    not torn, it was damaged.

    Store times never decrease, so when the last good record is older than the checkpoint's time, a
    record of that time stood behind it.
    """
    if rebuild.last.store_time_ms < checkpoint.log_time_ms:
        raise StoreDamaged(
            f"the log in {log.segments.directory} ends at {rebuild.end} ({rebuild.reason}), "
            f"but records up to store time {checkpoint.log_time_ms} were on the disk"
        )


def cut_tail(log: CommitLog, files: Files, end: int) -> None:
    """Leave nothing behind ``end`` that was ever a record, on the disk at return."""
    segment = log.segments.find(end)
    if segment is None:
        return
    if clear(segment.file, end - segment.start, log.segments.file_bytes):
        segment.file.sync()
    if log.segments.remove_after(files, segment.end):
        files.sync_directory(log.segments.directory)


def last_record_before(log: CommitLog, start: int, end: int) -> LastRecord:
    """The last record of the log before ``end``, where it is known that a record or a file starts
    at ``start``.
    """
    last = LastRecord(start)
    for segment in log.segments:
        if segment.end <= start or segment.start >= end:
            continue
        for log_offset, found in LogFileScan(segment, max(start, segment.start)):
            if log_offset >= end:
                break
            last = LastRecord(log_offset, found.size, found.store_time_ms)
    return last

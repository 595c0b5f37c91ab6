"""What the writer and a follower both do with an open store: look, read, flush, close.

Synchronous. One thread writes (see ``writer.py`` and ``follower.py``), one flushes, one
prepares log files; any number read.

Invariant: flushed_offset ≤ written_offset ≤ appended_offset; dispatched_offset ≤ appended_offset;
none of the four ever goes back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from cometmq.errors import MessageNotFound, StoreDamaged, StoreFailed
from cometmq.format import queueunit, record
from cometmq.format.belonging import first_strange
from cometmq.model import QueueKey
from cometmq.store import layout
from cometmq.store.cleaner import Cleaner, store_time_ms
from cometmq.store.index.indexer import Indexer
from cometmq.store.log.commitlog import Chunk, Span
from cometmq.store.log.scan import find_good, good_stretches
from cometmq.store.metadata import reserve
from cometmq.store.queues.mending import mended
from cometmq.store.recovery.adoption import Adoption
from cometmq.store.recovery.opening import OpenedStore
from cometmq.store.timers.index import TimerIndex

logger = logging.getLogger(__name__)

FIRST_READ_BYTES = 4096  # most records are shorter, so that one call reads a record of unknown size

Result = TypeVar("Result")


class BaseStore:
    """One data folder, held until :meth:`close`."""

    def __init__(self, opened: OpenedStore) -> None:
        self.epoch = opened.epoch
        # False: the last stop was not in order, so what was not flushed may be missing.
        self.clean_start = opened.clean_start
        self._opened = opened
        self._log = opened.log
        self._dispatcher = opened.dispatcher
        # Takes away what is too old, in a thread of its own.
        self.cleaner = Cleaner(opened, self._guarded)
        self._failure: StoreFailed | None = None  # once set, nothing is written any more
        self._last_units = b""  # of what was appended last; the last of them is the log's last
        assert self.dispatched_offset == self.flushed_offset == self.appended_offset

    # --- what there is: any thread ----------------------------------------------------------------

    @property
    def min_offset(self) -> int:
        """Log offset of the oldest byte; rises when retention removes a file."""
        return self._log.start

    @property
    def appended_offset(self) -> int:
        """Log offset behind the last record."""
        return self._log.end[0]

    @property
    def written_offset(self) -> int:
        """Log offset below which everything can be read, and outlives the process."""
        return self._log.written

    @property
    def flushed_offset(self) -> int:
        """Log offset up to which everything is on the disk."""
        return self._log.flushed[0]

    @property
    def dispatched_offset(self) -> int:
        """Log offset up to which every message is in its queue's files."""
        return self._dispatcher.dispatched[0]

    @property
    def last_store_time_ms(self) -> int:
        """Store time of the last record; 0 in an empty log."""
        return self._log.end[1]

    @property
    def log_file_bytes(self) -> int:
        """Size of a log file: no batch is longer."""
        return self._log.segments.file_bytes

    def room_behind(self, size: int) -> int | None:
        """Bytes of log that the quota leaves when ``size`` more are appended; None: no quota."""
        return self._log.room_behind(size)

    def new_timer_index(self) -> TimerIndex:
        """An index over the timer queue; there is one at a time."""
        return TimerIndex(self._opened.paths.timers, self._opened.files, self.epoch)

    @property
    def store_id(self) -> str:
        """What this store is called: the name of an unbroken history."""
        return self._opened.identity.current.store_id

    @property
    def former_store_id(self) -> str:
        """What it was called before the end of its log was lost; empty: it was not."""
        return self._opened.identity.current.former_store_id

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """(number, start offset) of the epochs that own a part of the log, oldest first, and of the
        one that is open.
        """
        return [(epoch.number, epoch.start) for epoch in self._opened.epochs]

    def queues(self) -> Iterator[tuple[str, int]]:
        """(topic, queue id) of every queue that ever got a message."""
        for queue in self._dispatcher.queues():
            yield queue.topic, queue.queue_id

    @property
    def unreadable_pages(self) -> int:
        """Pages that the disk could not read, each time that it was asked for one."""
        return self._opened.files.unreadable_count

    @property
    def has_damage(self) -> bool:
        """Recovery passed over damage: the last messages of a queue may be gone with it, and their
        offsets are given to others.
        """
        return self._opened.has_damage

    @property
    def adoption(self) -> Adoption | None:
        """What another program left here and no writer has settled yet; None: nothing."""
        return self._opened.adoption

    @property
    def state_lost(self) -> Mapping[str, int] | None:
        """A repair gave up a part of the state in the log, and no writer has made it whole since:
        the topics that had queues then, with how many. None: that is not so.
        """
        return self._opened.identity.current.state_lost

    def queue_offset_at(self, topic: str, queue_id: int, log_offset: int) -> int:
        """Queue offset of the first message at ``log_offset`` or behind it. Right after opening."""
        queue = self._dispatcher.find(topic, queue_id)
        return 0 if queue is None else queue.first_at(log_offset)

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        """Offset of the first message that is still there, and of the one to come; (0, 0) without
        such a queue.
        """
        queue = self._dispatcher.find(topic, queue_id)
        return (0, 0) if queue is None else (queue.min_offset, queue.next_offset)

    # --- reading: any thread ----------------------------------------------------------------------

    def read_units(
        self, topic: str, queue_id: int, offset: int, count: int, *, nowait: bool = False
    ) -> bytes:
        """Whole 20-byte units from ``offset`` on: at most ``count``, fewer at the end of the queue
        or of one of its files.

        Raises StoreDamaged when the queue has lost the unit at ``offset``: :meth:`mend_units`, and
        the next start after an orderly stop, rebuild it. With ``nowait``, BlockingIOError when the
        disk would have to be read.
        """
        assert offset >= 0, offset
        queue = self._dispatcher.find(topic, queue_id)
        try:
            return b"" if queue is None else queue.read_units(offset, count, nowait=nowait)
        except StoreDamaged:
            self._dispatcher.is_damaged = True
            raise

    def mend_units(self, topic: str, queue_id: int, offset: int) -> bool:
        """Write units of a queue again, around the damaged one at ``offset``, as the log has them;
        whether any was another one. What the log has lost too is marked, so reading it is
        StoreDamaged for itself alone. Blocking: may read all of the log between two messages of the
        queue, once: the same place is not looked at again.

        Raises StoreDamaged when their records may not be in files yet; StoreFailed, Shortage.
        """
        queue = self._dispatcher.find(topic, queue_id)
        if queue is None or not queue.min_offset <= offset < queue.file_end:
            return False
        if offset in queue.mended:
            return False
        end = self.appended_offset
        found = mended(queue, self._log.segments, self.written_offset, offset)
        if not found.is_closed and self.written_offset < end:
            raise StoreDamaged(f"queue {queue_id} of {topic} is damaged at its end: try again")
        changed = self._guarded(lambda: self._dispatcher.rewrite(queue, found.first, found.units))
        if changed:
            logger.error(
                "queue %d of %s was damaged at message %d and is written again from the log; "
                "lost: %d",
                *(queue_id, topic, offset, found.lost_count),
            )
        count = len(found.units) // queueunit.UNIT_BYTES
        queue.mended = range(found.first, found.first + count)
        return changed

    def read_records(self, spans: Sequence[Span], *, nowait: bool = False) -> bytes:
        """The records at ``spans`` (log offset, size), as units name them, joined; neighbours are
        read with one call.

        Raises MessageNotFound (outside the log), StoreDamaged (there is no record of that size),
        and with ``nowait`` :class:`BlockingIOError`.
        """
        return self._log.read_records(spans, nowait=nowait)

    def read_messages(
        self,
        queue: QueueKey,
        offset: int,
        units: bytes,
        spans: Sequence[Span],
        *,
        nowait: bool = False,
    ) -> bytes:
        """As :meth:`read_records`, of messages of one queue: ``units`` are the queue's from
        ``offset`` on, and ``spans`` what all or some of them name, in their order.

        StoreDamaged too when a record is not the message that its unit says it is: the queue's
        files are not those of the queue. :meth:`mend_units` writes them again.
        """
        found = self._log.read_records(spans, nowait=nowait)
        strange = first_strange(found, units, offset, queue)
        if strange is not None:
            self._dispatcher.is_damaged = True
            raise StoreDamaged(
                f"the units of queue {queue[1]} of {queue[0]} from message {offset} on name "
                "messages of another queue"
            )
        return found

    def read_record(self, log_offset: int, *, nowait: bool = False) -> bytes:
        """The whole record at ``log_offset``, which may be any number; MessageNotFound unless one
        is there.
        """
        segment = self._log.segments.find(log_offset)
        end = self.written_offset
        if segment is None or log_offset >= end:
            raise MessageNotFound(
                f"no message at {log_offset}: the log goes from {self.min_offset} to {end}"
            )
        left = min(segment.end, end) - log_offset
        chunk = self._log.read(log_offset, min(left, FIRST_READ_BYTES), nowait=nowait)
        found = record.check(chunk, 0, log_offset=log_offset, bytes_left=segment.end - log_offset)
        if found.kind is record.Kind.MORE and found.size <= left:
            chunk = self._log.read(log_offset, found.size, nowait=nowait)
            found = record.check(
                chunk, 0, log_offset=log_offset, bytes_left=segment.end - log_offset
            )
        if found.kind is not record.Kind.RECORD:
            raise MessageNotFound(f"no message starts at {log_offset} of the log")
        return chunk[: found.size]

    def store_time_ms(self, log_offset: int, queue_id: int, queue_offset: int) -> int:
        """When the record at ``log_offset`` was stored, from its head alone. MessageNotFound unless
        there seems to be one, of that place in a queue.
        """
        return store_time_ms(self._log, log_offset, (queue_id, queue_offset))

    def read_chunk(self, offset: int, bytes_max: int, *, nowait: bool = False) -> Chunk | None:
        """The log from ``offset``, where a record starts: whole records of one file, at most
        ``bytes_max`` (but at least one record), or a file's end mark alone. None at the end.

        Raises MessageNotFound (outside the log), StoreDamaged, and with ``nowait``
        :class:`BlockingIOError`.
        """
        return self._log.read_chunk(offset, bytes_max, nowait=nowait)

    def read_raw(self, offset: int, bytes_max: int) -> bytes:
        """Bytes of the log from ``offset`` on, of one file; none at the end. MessageNotFound."""
        if offset >= self.written_offset:
            return b""
        segment = self._log.segments.find(offset)
        left = 0 if segment is None else min(segment.end, self.written_offset) - offset
        return self._log.read(offset, min(left, bytes_max), nowait=False)

    def good_records(self, bytes_max: int, start: int) -> Iterator[tuple[int, bytes]]:
        """(log offset, bytes) of pieces of the log, at most its last ``bytes_max`` bytes: whole
        good records, from ``start`` on, which is the offset of one. Damaged places are passed over.
        """
        segments, end = self._log.segments, self.appended_offset
        start = max(start, self.min_offset)
        far = end - bytes_max
        if start < far:
            found = find_good(segments, far, end)
            start = end if found is None else found
        for scan, stretch in good_stretches(segments, start, end):
            yield stretch.start, scan.raw(stretch.start, stretch.end)

    def last_record(self) -> tuple[int, bytes]:
        """Log offset and bytes of the log's last record; (-1, nothing) in an empty log."""
        offset, size = self._last_span()
        return (offset, self._log.read(offset, size, nowait=False)) if size else (-1, b"")

    def _last_span(self) -> Span:
        if self._last_units:
            offset, size, _ = queueunit.unit_at(self._last_units, -1)
            return offset, size
        return self._opened.last.log_offset, self._opened.last.size

    # --- flushing: the flush thread ---------------------------------------------------------------

    def flush_log(self) -> int:
        """Sync the log up to what was appended at entry; returns that position, which is then
        ``flushed_offset``.

        A failed sync may have lost what it should have saved, and a second one would not report it.
        So it raises StoreFailed, and so does every later write.
        """
        return self._guarded(self._log.flush)

    def demand(self, position: int) -> None:
        """A caller waits until the log is on the disk up to ``position``: any thread."""
        self._log.offsets.demand(position)

    def flush_log_while_wanted(self, write_fd: int) -> bool:
        """Sync the log as long as callers wait, without the interpreter lock, which a busy event
        loop hardly releases. After each sync ``write_fd``, a pipe that does not block, gets the
        nanoseconds that it took, as 8 bytes in the machine's order.

        False when nothing was done: no caller waits, or it is not possible (in plain Python, with
        the transient store pool, where the log continues in another file). :meth:`flush_log` is
        always possible. A failed sync raises StoreFailed, as in :meth:`flush_log`.
        """
        return self._guarded(lambda: self._log.flush_while_wanted(write_fd))

    def commit_log(self) -> None:
        """Write what the transient store pool holds; without it there is nothing to do. After
        DiskFull the rest stays in memory.
        """
        self._guarded(self._log.commit)

    @property
    def queues_wait(self) -> bool:
        """Whether :meth:`flush_queues` has something to do."""
        return self._opened.checkpoint.needs_flush

    def flush_queues(self) -> None:
        """Sync the queues' files and folders, then write the checkpoint, and what the files of the
        log begin with.
        """
        self._guarded(lambda: self._opened.checkpoint.flush_queues(self._last_span))
        self._guarded(self._opened.note_heads)

    # --- growing: a thread of its own -------------------------------------------------------------

    @property
    def next_file_wanted(self) -> bool:
        """Time to call :meth:`prepare_next_file`, so that no append has to wait for a new file."""
        return self._log.next_file_wanted

    def prepare_next_file(self) -> None:
        """Make the next log file ahead of its use. DiskFull does no harm: an append tries again."""
        self._guarded(self._log.prepare_next_file)

    # --- indexing: a thread of its own ------------------------------------------------------------

    @property
    def index(self) -> Indexer:
        """The key index: how far it is, and where keys are."""
        return self._opened.indexer

    def index_some(self) -> bool:
        """Put the keys of the next piece of the log into the index, less than a millisecond's work;
        False when there is nothing to do for now. See
        :meth:`cometmq.store.index.indexer.Indexer.step`.
        """
        return self._guarded(self._opened.indexer.step)

    # --- keeping room: a thread of its own --------------------------------------------------------

    def repair_command(self, options: str = "") -> str:
        """What errors of this store advise to call."""
        return layout.repair_command(self._opened.paths.root, options)

    def keep_room(self, state_bytes: int) -> None:
        """Keep what the next opening writes free on the volume, while there is plenty of room;
        ``state_bytes``: how long a snapshot of the state is.
        """
        opened = self._opened
        self._guarded(lambda: reserve.keep(opened.files, opened.paths.reserve, state_bytes))

    # --- ending -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Flush everything, leave the mark of a clean close, let the folder go. The other threads
        must be done.

        When that fails the folder is let go as it is, so that the next opening recovers it, and the
        error is raised.
        """
        offset, size = self._last_span()
        try:
            self._guarded(lambda: self._opened.close(offset, size))
        finally:
            self.abandon()

    @property
    def is_open(self) -> bool:
        """Whether it can still be written: it was not closed, and its disk has not failed."""
        return self._failure is None

    def abandon(self) -> None:
        """Let the folder go and write nothing, as if the process had died. Again does nothing."""
        self._failure = self._failure or StoreFailed("the store is closed")
        self._opened.release()

    def validate(self) -> None:
        """The invariants of an open store; for tests, while no thread writes."""
        self._log.validate()
        self._dispatcher.validate(self.appended_offset)
        self._opened.checkpoint.validate()
        assert self.min_offset <= self.flushed_offset <= self.written_offset <= self.appended_offset
        assert self.dispatched_offset <= self.appended_offset
        known = self.epochs
        assert known == sorted(set(known)), known
        assert all(number <= self.epoch for number, _ in known), (self.epoch, known)

    # --- failing ----------------------------------------------------------------------------------

    def _guarded(self, write: Callable[[], Result]) -> Result:
        """What ``write`` returns; a disk that fails once is not written to again."""
        if self._failure is not None:
            raise StoreFailed(str(self._failure)) from self._failure
        try:
            return write()
        except StoreFailed as error:
            raise self._failed(error) from error

    def _failed(self, error: StoreFailed) -> StoreFailed:
        if self._failure is None:
            self._failure = error
            self._opened.note_failure()
        return error

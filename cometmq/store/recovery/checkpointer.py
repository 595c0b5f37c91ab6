"""Keeps the checkpoint of an open store true: up to where log and queues are on the disk, up to
where the log's files may have been written, and where the log begins.

What the checkpoint says must be true when it is written, and a later crash must not make it false:
``docs/format/checkpoint.md``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import NamedTuple

from cometmq.errors import MessageNotFound
from cometmq.store import layout
from cometmq.store.index.indexer import Indexer
from cometmq.store.log.commitlog import CommitLog, Span
from cometmq.store.metadata.checkpoint import CheckpointFile
from cometmq.store.metadata.recovery_point import UNKNOWN, QueueTotals, RecoveryPoint
from cometmq.store.queues.dispatch import Dispatcher

logger = logging.getLogger(__name__)

# Ahead of the log's end, in bytes and in files: the log should not get so far between two writings
# of the checkpoint, because then an append waits for one. A start after a crash looks for leftovers
# up to there, in the last file.
REACH_BYTES, REACH_FILES = 256 * 1024 * 1024, 4


class Checkpointer:
    """``durable``: log offset before which log and queues are on the disk.

    The flush thread syncs the queues and writes the checkpoint; the writer, and the thread that
    removes old files, change single fields of it.
    """

    def __init__(
        self, log: CommitLog, dispatcher: Dispatcher, indexer: Indexer, file: CheckpointFile
    ) -> None:
        self.durable = 0
        self._log = log
        self._dispatcher = dispatcher
        self._indexer = indexer
        self._file = file
        self._marker = RecoveryPointWriter(log, dispatcher)
        self._flushed_from: object = None  # what the last flush that succeeded began with

    @property
    def needs_flush(self) -> bool:
        """Whether :meth:`flush_queues` has something to do that the last one did not do."""
        return self._dispatcher.has_dirty or self._flushed_from != self._sources()

    def _sources(self) -> object:
        """All that a checkpoint is made of."""
        log, dispatcher = self._log, self._dispatcher
        marks = dispatcher.dispatched, dispatcher.drop_count, self._indexer.durable_time_ms
        return log.flushed, log.end, *marks

    def flush_queues(self, last_span: Callable[[], Span], *, at_once: bool = False) -> None:
        """Sync the queues, then note in the checkpoint what is on the disk now. ``last_span`` gives
        the place of the log's last record, which another thread may be moving. ``at_once``: see
        :meth:`Dispatcher.flush`.
        """
        # Before the queues: nothing newer may be claimed.
        flushed_from = self._sources()
        self._marker.sample(last_span)
        log_offset, log_time_ms = self._log.flushed
        dispatched, queue_time_ms = self._dispatcher.flush(at_once=at_once)
        self.durable = min(log_offset, dispatched)
        with self._file.changing:
            before = self._file.current
            reach = max(self._log.reach, self._reach_above(self._log.end[0]))
            self._file.write(
                dataclasses.replace(
                    before,
                    log_time_ms=max(log_time_ms, before.log_time_ms),
                    queue_time_ms=max(queue_time_ms, before.queue_time_ms),
                    index_time_ms=self._indexer.durable_time_ms,
                    durable_offset=self.durable,
                    mark=self._marker.mark_below(log_offset) or before.mark,
                    reach=reach,
                )
            )
            self._log.reach = reach
        self._flushed_from = flushed_from

    def extend_reach(self, offset: int) -> None:
        """The log is about to be written up to ``offset``. As a rule the checkpoint has said so
        before, at its last writing.
        """
        with self._file.changing:
            reach = self._reach_above(offset)
            self._file.write(dataclasses.replace(self._file.current, reach=reach))
            self._log.reach = reach

    def note_start(self, offset: int) -> None:
        """The log is going to begin at ``offset``: what is in front of it may go. Any thread."""
        with self._file.changing:
            self._file.write(dataclasses.replace(self._file.current, log_start=offset))

    def _reach_above(self, offset: int) -> int:
        ahead = min(REACH_BYTES, REACH_FILES * self._log.segments.file_bytes)
        return min(offset + ahead, layout.OFFSET_MAX)

    # --- taking back what it says: recovery, or a cut ---------------------------------------------

    def correct(self, last_time_ms: int) -> None:
        """The log ends with a record of ``last_time_ms``. Nothing that is younger can be on the
        disk: a checkpoint that says so would make the next crash look like a loss.
        """
        now = self._file.current
        corrected = now.not_after(last_time_ms)
        if corrected != now:
            logger.warning(
                "%s says that records up to store time %d were on the disk (queues: %d), but the "
                "log ends at %d: corrected",
                self._file.path,
                now.log_time_ms,
                now.queue_time_ms,
                last_time_ms,
            )
            self._file.rewind(corrected)

    def forget_queues(self) -> None:
        """Nothing is known of the queues any more."""
        now = self._file.current
        mark = now.mark and dataclasses.replace(now.mark, queue_count=UNKNOWN, unit_count=UNKNOWN)
        self._file.rewind(dataclasses.replace(now, queue_time_ms=0, durable_offset=0, mark=mark))

    def rewind(self, offset: int, time_ms: int) -> None:
        """The log is about to be cut at ``offset``, behind a record of ``time_ms``."""
        self._marker.forget()
        self._flushed_from = None
        now = self._file.current
        self._file.rewind(
            dataclasses.replace(
                now.not_after(time_ms),
                index_time_ms=self._indexer.durable_time_ms,
                durable_offset=min(now.durable_offset, max(offset, 0)),
                mark=now.mark if now.mark is not None and now.mark.end <= offset else None,
            )
        )

    def close(self) -> None:
        self._file.close()

    def validate(self) -> None:
        """What the checkpoint says is true; for tests, while no thread writes."""
        now, log = self._file.current, self._log
        assert self.durable <= min(log.flushed[0], self._dispatcher.dispatched[0])
        assert now.durable_offset <= self.durable, (now, self.durable)
        # The checkpoint need not know of an empty log before that is written to.
        assert log.end[0] <= max(now.reach, log.start), (now, log.start, log.end)
        assert now.log_start <= log.start, (now, log.start)
        assert now.log_time_ms <= log.flushed[1], (now, log.flushed)
        if now.mark is not None:
            assert now.mark.end <= log.flushed[0], (now, log.flushed)


# --- marks: where log and queues were at some moment, as soon as that is on the disk --------------


class Sample(NamedTuple):
    """The end of what is in the queues, at some moment."""

    end: int
    last: Span  # the last record before it
    tally: QueueTotals
    drop_count: int  # of the dispatcher, then: does the tally still speak of the queues there are


class RecoveryPointWriter:
    """Keeps the newest sample, and the oldest that is not on the disk yet: so there are new marks
    also where the disk is always behind.
    """

    def __init__(self, log: CommitLog, dispatcher: Dispatcher) -> None:
        self._log = log
        self._dispatcher = dispatcher
        self._samples: list[Sample] = []  # newest first

    def sample(self, last_span: Callable[[], Span]) -> None:
        """Look where the log ends; before the queues are flushed. ``last_span`` gives the place of
        its last record. The writer may append meanwhile: then end and last record do not fit, and
        no sample is taken.
        """
        drops = self._dispatcher.drop_count
        last = last_span()
        end, tally = self._dispatcher.tallied
        behind = sum(last)
        is_last = behind == end or (behind < end and not end % self._log.segments.file_bytes)
        _, size = last
        if size and is_last and last == last_span():
            self._samples = [Sample(end, last, tally, drops), *self._samples[-1:]]

    def mark_below(self, flushed: int) -> RecoveryPoint | None:
        """A mark of the newest sample that is on the disk, now that the queues have been flushed
        and the log is flushed up to ``flushed``. None: there is no new one.
        """
        drops = self._dispatcher.drop_count
        self._samples = [sample for sample in self._samples if sample.drop_count == drops]
        for index, sample in enumerate(self._samples):
            if sample.end <= flushed:
                del self._samples[index:]
                return self._mark(sample)
        return None

    def _mark(self, sample: Sample) -> RecoveryPoint | None:
        log_offset, size = sample.last
        try:
            last = self._log.read(log_offset, size, nowait=False)
        except MessageNotFound:  # retention has been there since
            return None
        return RecoveryPoint.of(sample.end, log_offset, last, sample.tally)

    def forget(self) -> None:
        """The log is about to be cut."""
        self._samples = []

"""Marks of an open store, for the checkpoint: where its log and its queues were at some moment, as
soon as that is on the disk.

One thread, the one that flushes the queues; the writer goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cometmq.errors import MessageNotFound
from cometmq.store.log.commitlog import CommitLog, Span
from cometmq.store.metadata.logmark import QueueTotals, RecoveryPoint
from cometmq.store.queues.dispatch import Dispatcher


class Sample(NamedTuple):
    """The end of what is in the queues, at some moment."""

    end: int
    last: Span  # the last record before it
    tally: QueueTotals
    drop_count: int  # of the dispatcher, then: does the tally still speak of the queues there are


class RecoveryPointWriter:
    """Keeps the newest sample, and the oldest that is not on the disk yet: so marks go on also
    where the disk is always behind.
    """

    def __init__(self, log: CommitLog, dispatcher: Dispatcher) -> None:
        self._log = log
        self._dispatcher = dispatcher
        self._samples: list[Sample] = []  # newest first

    def sample(self, last_span: Callable[[], Span]) -> None:
        """Look where the log ends; before the queues are flushed. ``last_span`` tells where its
        last record stands, which the writer may be moving: between the one and the other there is
        nothing to be seen.
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

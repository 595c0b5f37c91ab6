"""After a stop: find the end of the log, cut what is behind it, and bring the queues up to it.

``docs/format/store-layout.md`` §5 has the whole procedure and why it holds. In short: a mark says
up to where log and queues are on the disk; from there the log is read, each record verified and
dispatched again, to the first byte that is no record. What is known to have been written and cannot
be read is passed over, not cut. Queues that are not the log's are rebuilt from all of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from cometmq.errors import StoreDamaged
from cometmq.format import record
from cometmq.store.disk.files import Files
from cometmq.store.log.commitlog import CommitLog
from cometmq.store.log.scan import LogScan, end_with_room, find_good, found_at
from cometmq.store.queues.agreement import Comparison
from cometmq.store.queues.dispatch import Dispatcher
from cometmq.store.recovery import witness
from cometmq.store.recovery.plan import Plan
from cometmq.store.recovery.replay import LastRecord, Loss, Observer, OutOfStep, Replay

logger = logging.getLogger(__name__)

# How far behind a broken record a good one is looked for, when none needs to be there: a process
# that died left at most one batch half written.
LOOK_AHEAD_BYTES = 16 * 1024 * 1024

Progress = Callable[[int, int], None]  # bytes read, bytes to read


# --- bringing the queues up to the log ------------------------------------------------------------


class Damage(NamedTuple):
    """Bytes of the log that should be records and are not."""

    start: int
    end: int  # where the log continues
    reason: str
    time_ms: int = 0  # store time of the last record before it


class Rebuild:
    """Reads the log from ``start`` on and dispatches its records again."""

    def __init__(
        self, log: CommitLog, dispatcher: Dispatcher, observer: Observer | None, plan: Plan
    ) -> None:
        self.end = plan.start
        self.kind = record.Kind.END  # of what is at the end
        self.reason = ""
        self.last = plan.last
        self.record_count = 0
        self.damages: list[Damage] = []
        self.losses: list[Loss] = []
        self.explains_absence = False  # of queues: a topic was deleted that had none any more
        self._log = log
        self._dispatcher = dispatcher
        self._observer = observer
        self._plan = plan

    def run(self, start: int, progress: Progress | None) -> None:
        """Everything from ``start`` to the first byte that is no record and was none.

        Raises StoreDamaged when more should be there, and OutOfStep.
        """
        # Without a tally a queue that lacks its beginning may lack it by mistake.
        log_start = self._log.segments.start
        replay = Replay(
            self._dispatcher,
            self._observer,
            may_start_late=start == log_start or self._plan.tally.is_known,
            is_from_first=start == 0 or start > log_start,
        )
        if start == self._plan.start:
            replay.last = self._plan.last
        scan = LogScan(self._log.segments, start, replay.topics)
        total = self._bytes_behind(start)
        goes_on: int | None = start
        while goes_on is not None:
            scan.end = goes_on
            for stretch in scan:
                replay.take(stretch)
                if progress is not None:
                    progress(min(stretch.end - start, total), total)
            goes_on = self._behind(scan, replay)
        replay.dispatch_held()
        self.end, self.kind, self.reason, self.last = scan.end, scan.kind, scan.reason, replay.last
        assert self.last.log_offset + self.last.size <= self.end, (self.last, self.end)
        self.record_count, self.losses = replay.record_count, replay.losses
        self.explains_absence = replay.deleted_what_was_gone
        if progress is not None:
            progress(total, total)

    def _missing(self, place: int, replay: Replay) -> list[Loss]:
        """Messages that the queues' files name, and the log does not have before ``place``."""
        if not self._dispatcher.tails:
            return []
        replay.dispatch_held()
        return list(witness.missing(self._dispatcher.tails, place, self._dispatcher.next_offset))

    def _bytes_behind(self, start: int) -> int:
        """About as many bytes as are going to be read: files are made ahead of their use."""
        for segment in reversed(self._log.segments):
            if any(segment.pread(segment.start, record.BLANK_BYTES)):
                return segment.end - start
        return 0

    def _behind(self, scan: LogScan, replay: Replay) -> int | None:
        """Where the log continues behind the scan's end; None when it ends there."""
        plan, place = self._plan, scan.end
        is_known = place < plan.known_end or replay.last.store_time_ms < plan.known_time_ms
        is_known |= scan.is_unreadable and place != plan.accepted_end
        missing = self._missing(place, replay)
        if is_known or (plan.kept_all and missing):
            behind = find_good(self._log.segments, place, self._log.segments.end)
            if behind is None:
                raise _ends_too_early(self._log, scan, plan, missing)
        elif plan.process_only and scan.kind is record.Kind.BAD:
            behind = find_good(self._log.segments, place, place + LOOK_AHEAD_BYTES)
            if behind is None:
                return None
        else:
            return None
        logger.error(
            "the log is damaged from %d to %d (%s): passed over; messages that lay there cannot "
            "be read. `cometmq store verify` lists them, `cometmq store repair` writes them off",
            place,
            behind,
            scan.reason,
        )
        self.damages.append(Damage(place, behind, scan.reason))
        replay.pass_over(place, behind)
        return behind


def _ends_too_early(log: CommitLog, scan: LogScan, plan: Plan, missing: list[Loss]) -> StoreDamaged:
    """A shorter log than was on the disk was not torn, it was damaged.

    Store times never decrease, so when the last good record is older than the checkpoint's time, a
    record of that time lay behind it.
    """
    if scan.end < plan.known_end:
        known = f"it was on the disk up to {plan.known_end}"
    elif scan.is_unreadable:
        known = "what lies there may be messages"
    elif plan.kept_all and missing:
        known = "its queues have messages behind that"
    else:
        known = f"it was on the disk up to store time {plan.known_time_ms}"
    named = f" Behind the end lay {witness.in_words(missing)}." if missing else ""
    return StoreDamaged(
        f"the log in {log.segments.directory} ends at {scan.end} ({scan.reason}), but {known}. "
        f"Nothing was cut.{named} Take the log from a copy or another member; or accept "
        f"that the rest is lost: {log.segments.repair_command('--accept-end')}"
    )


class Recovery:
    """Brings log and queues in step, in two steps: :meth:`decide` only reads, :meth:`carry_out` has
    nothing left to refuse.
    """

    def __init__(
        self, log: CommitLog, dispatcher: Dispatcher, observer: Observer | None, plan: Plan
    ) -> None:
        self.plan = plan
        self.rebuild = Rebuild(log, dispatcher, observer, plan)
        self.rebuild_reason = ""  # all queues are to be rebuilt; empty: they are kept
        # Some are missing: those of a topic that was deleted, and perhaps others.
        self.may_lack_queues = False
        self._log = log
        self._dispatcher = dispatcher
        self._observer = observer

    def decide(self, progress: Progress | None, disagreement: Callable[[], str]) -> None:
        """Read what has to be read. What queues will have is in memory then: see
        :meth:`cometmq.store.queues.dispatch.Dispatcher.load`. ``disagreement`` says why queues that
        another program wrote cannot be taken as they are.

        Raises StoreDamaged, StoreForeignFile.
        """
        plan = self.plan
        missing = self._load()
        missing = plan.rebuild_reason or missing
        if plan.is_foreign:
            missing = missing or disagreement()
        missing = missing or self._strange_files()
        _, found = self._dispatcher.tallied
        fits = not plan.tally.is_known or found == plan.tally
        has_filler_only = self._dispatcher.has_filler_only
        if not missing:
            try:
                if not plan.is_clean:
                    self.rebuild.run(plan.start, progress)
                if fits or (self.rebuild.explains_absence and not has_filler_only):
                    self.may_lack_queues = not fits
                    return
                missing = (
                    f"{found.queue_count} queues with {found.unit_count} units were found, "
                    f"{plan.tally.queue_count} with {plan.tally.unit_count} were there"
                )
            except OutOfStep as error:
                missing = str(error)
        self.rebuild_reason = missing
        self._dispatcher.wipe()
        self.rebuild = Rebuild(self._log, self._dispatcher, self._observer, plan)
        try:
            self.rebuild.run(self._log.segments.start, progress)
        except OutOfStep as error:
            segments = self._log.segments
            end = end_with_room(segments, error.start, error.end)
            raise StoreDamaged(
                f"{error}. Copy the folder again from another member; or give that record up: "
                + segments.repair_command(f"--write-off {error.start}-{end}")
            ) from error

    def carry_out(self, files: Files, forget_queues: Callable[[], None]) -> None:
        """Do to the disk what was decided, but for the epochs and the small files.
        ``forget_queues`` notes on the disk that nothing is known of the queues any more; it is
        called before they are rebuilt.
        """
        log, plan = self._log, self.plan
        log.segments.mend(files)
        if self.rebuild_reason:
            logger.warning(
                "all queues are rebuilt from the log, from %d on: %s",
                log.segments.start,
                self.rebuild_reason,
            )
            forget_queues()
        if self._dispatcher.holds_all:
            self._dispatcher.carry_out()
        else:
            self._dispatch_again()
        if not plan.is_clean:
            cut_tail(log, files, self.rebuild.end)

    def log_outcome(self) -> None:
        """Write to the log of the process what was recovered, and what was lost."""
        rebuild = self.rebuild
        if not self.plan.is_clean:
            logger.info(
                "recovered %d records; the log ends at %d: %s",
                rebuild.record_count,
                rebuild.end,
                rebuild.reason,
            )
        # Else the units of queues show whether the last record was whole (`witness`).
        if self.plan.kept_all and self.rebuild_reason and rebuild.kind is record.Kind.BAD:
            segment = self._log.segments.find(rebuild.end)
            assert segment is not None, rebuild.end
            logger.error(
                "the log is damaged from %d to %d (%s), and queues that could show which messages "
                "were there had to be rebuilt: they are lost, unless the process died in a write",
                rebuild.end,
                segment.end,
                rebuild.reason,
            )
        for loss in rebuild.losses:
            logger.error(
                "lost: %d messages from offset %d on of queue %d of %s, damaged at %d of the log",
                loss.message_count,
                loss.first_queue_offset,
                loss.queue_id,
                loss.topic,
                loss.log_offset,
            )

    def _dispatch_again(self) -> None:
        """There was more than memory should hold."""
        self._dispatcher.forget()
        self._load()
        if self.rebuild_reason:
            self._dispatcher.wipe()
        self._dispatcher.carry_out()
        start = self._log.segments.start if self.rebuild_reason else self.plan.start
        Rebuild(self._log, self._dispatcher, self._observer, self.plan).run(start, None)
        self._dispatcher.catch_up()

    def _strange_files(self) -> str:
        """What shows that files of a queue are another's; empty: nothing does."""
        return Comparison(self._log.segments).complaint(self._dispatcher.queues())

    def _load(self) -> str:
        start = self.plan.start
        return self._dispatcher.load(
            self._log.segments.start,
            start,
            start,
            is_clean=self.plan.is_clean,
            is_rebuild=bool(self.plan.rebuild_reason),
            held=frozenset() if self._observer is None else self._observer.topics,
        )


# --- the end --------------------------------------------------------------------------------------


def cut_tail(log: CommitLog, files: Files, end: int) -> None:
    """Leave nothing behind ``end`` that was ever a record, on the disk at return."""
    log.clear_behind(end)
    segment = log.segments.find(end)
    if segment is not None and log.segments.remove_after(files, segment.end):
        files.sync_directory(log.segments.directory)


def last_record_before(log: CommitLog, start: int, end: int) -> LastRecord:
    """The last record of the log before ``end``, where it is known that a record or a file starts
    at ``start``.
    """
    last = LastRecord(start)
    for stretch in LogScan(log.segments, start):
        if stretch.start >= end:
            break
        if stretch.end > end:
            return _last_within(log, stretch.start, end)
        last = LastRecord(stretch.last_offset, stretch.run.last_bytes, stretch.run.last_time_ms)
    return last


def _last_within(log: CommitLog, start: int, end: int) -> LastRecord:
    """As :func:`last_record_before`, one record after the other; one starts at ``start``."""
    segment = log.segments.find(start)
    assert segment is not None, start
    last = LastRecord(start)
    while start < end:
        found = found_at(segment, start).record
        assert found is not None, start
        last = LastRecord(start, found.size, found.store_time_ms)
        start += found.size
    return last

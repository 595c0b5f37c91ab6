"""After a stop: where recovery begins to read the log, and what it should find there. Reads only.

A mark says up to where log and queues are on the disk; from there the log is read. A mark that does
not hold is damage, or another store's: ``docs/format/store-layout.md`` §5.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import record
from cometmq.store.disk.segments import Segments
from cometmq.store.log.commitlog import CommitLog
from cometmq.store.log.scan import LogScan, found_at
from cometmq.store.metadata.checkpoint import Checkpoint
from cometmq.store.metadata.epochs import Epoch
from cometmq.store.metadata.heads import Head, is_strange
from cometmq.store.metadata.recovery_point import QueueTotals, RecoveryPoint
from cometmq.store.recovery.replay import LastRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """Where to begin, and what is known of what should be found."""

    start: int  # a record or a file starts here; before it log and queues are on the disk
    why: str  # in words
    is_clean: bool = False  # the log ends at the start, nothing has to be read
    last: LastRecord = field(default_factory=LastRecord)  # before the start, if known
    known_end: int = 0  # the log was on the disk at least up to here
    known_time_ms: int = 0  # … and up to the records of this store time
    # what the queues hold of the log before the start
    tally: QueueTotals = field(default_factory=QueueTotals)
    process_only: bool = False  # the machine runs on: everything that was written is there
    kept_all: bool = False  # … and refused nothing: a unit without a record means a loss
    is_foreign: bool = False  # another program wrote queues, or may have
    is_crash: bool = True
    rebuild_reason: str = ""  # why the queues are rebuilt, whatever they hold; empty: they are not
    accepted_end: int | None = None  # what the disk cannot read from here on is given up

    @property
    def after(self) -> str:
        """What kind of stop it was, in words."""
        if not self.is_crash:
            return "after a clean close"
        return "after a crash, " + ("of the process" if self.process_only else "or a restart")


def refuse_missing_start(log: CommitLog, log_start: int) -> None:
    """Raise StoreDamaged when the log begins behind ``log_start``, where it began."""
    segments = log.segments
    if not len(segments) or not 0 <= log_start < segments.start:
        return
    raise StoreDamaged(
        f"{segments.path(log_start)} is missing: the log began at {log_start}, and retention did "
        f"not remove what lay before {segments.start}. Put it back, from a copy or another member; "
        f"or let {log.segments.repair_command()} say what is lost without it"
    )


def refuse_strange_files(
    log: CommitLog, known: Mapping[int, Head], epochs: Sequence[Epoch]
) -> None:
    """Raise StoreForeignFile for a file of another store in the place of one of the log."""
    for segment in log.segments:
        head = known.get(segment.start)
        if head is not None and is_strange(segment, head, epochs):
            raise StoreForeignFile(
                f"{segment.file.path} is the log file of another store: this store's began with a "
                f"record that was stored at {head.store_time_ms} ms since 1970, that one begins "
                "with another. Put back the right one, from a copy or another member; or let "
                f"{log.segments.repair_command()} say what is lost without it"
            )


def clean_plan(log: CommitLog, mark: RecoveryPoint) -> Plan:
    """After our clean close, when no other program has opened the store since. The whole log is
    read in two cases: the mark does not hold, because then the log may have lost its end; or the
    mark left the queues out.
    """
    if mark.last_bytes and mark.last_offset < log.segments.start:
        refuse_missing_start(log, mark.last_offset - mark.last_offset % log.segments.file_bytes)
    if not mark.holds(log.segments):
        if runs_across(log.segments, mark.last_offset):
            raise StoreForeignFile(
                f"cometmq.json says that the log in {log.segments.directory} ended with a record "
                f"at {mark.last_offset}, but good records run across that place: either is another "
                "store's. Put back what belongs together, from a copy or another member; "
                f"or let {log.segments.repair_command()} say what is lost without it"
            )
        why = f"its last record, at {mark.last_offset}, is not the one of that close: damaged"
        logger.error("%s: %s", log.segments.directory, why)
        return Plan(log.segments.start, why, known_end=mark.end, is_crash=False)
    if not mark.tally.is_known:
        why = "some queue was damaged, so all are rebuilt"
        return Plan(log.segments.start, why, known_end=mark.end, is_crash=False)
    return Plan(
        mark.end,
        "it was closed cleanly",
        is_clean=True,
        last=_last_of(log, mark),
        known_end=mark.end,
        tally=mark.tally,
        is_crash=False,
    )


def crash_plan(
    log: CommitLog, saved: Checkpoint, *, same_boot: bool, kept_all: bool = False
) -> Plan:
    """After any other stop. ``same_boot``: the machine has not been restarted since. ``kept_all``:
    see :mod:`cometmq.store.recovery.witness`.

    Raises StoreForeignFile when the checkpoint speaks of another log.
    """
    mark = saved.mark
    if mark is not None and mark.last_offset < log.segments.start and mark.last_bytes:
        mark = None  # retention has been there since
    last = LastRecord()
    if mark is None:
        start = durable_position(log, saved)
        why = "the checkpoint vouches for no more" if saved.log_time_ms else "without a checkpoint"
    elif not mark.holds(log.segments):
        _refuse_foreign_mark(log, mark)
        start, why = log.segments.start, f"the record at {mark.last_offset} is damaged"
    elif not mark.tally.is_known:
        start, why = log.segments.start, "the queues have to be rebuilt"
    else:
        start, why, last = mark.end, "the checkpoint has a mark there", _last_of(log, mark)
    return Plan(
        start,
        why,
        last=last,
        known_end=0 if mark is None else mark.end,
        known_time_ms=saved.known_time_ms,
        tally=mark.tally if mark is not None and start == mark.end else QueueTotals(),
        process_only=same_boot,
        kept_all=kept_all,
    )


def _last_of(log: CommitLog, mark: RecoveryPoint) -> LastRecord:
    found = mark.last_record(log.segments)
    time_ms = record.decode(found).store_time_ms if found else 0
    return LastRecord(mark.last_offset, mark.last_bytes, time_ms)


def _refuse_foreign_mark(log: CommitLog, mark: RecoveryPoint) -> None:
    """The mark does not hold: is the record damaged, or is it another log's mark?"""
    segment = log.segments.find(mark.last_offset)
    if segment is None or mark.end > log.segments.end:
        raise StoreDamaged(
            f"the file checkpoint says that the log in {log.segments.directory} was on the disk up "
            f"to {mark.end}, but it ends at {log.segments.end} at the latest: "
            f"{log.segments.path(log.segments.end)} is missing, or more. Put it back, from a copy "
            f"or another member; or let {log.segments.repair_command()} say what is lost without it"
        )
    if found_at(segment, mark.last_offset).kind is record.Kind.RECORD:
        complaint = f"another record is at {mark.last_offset}"
    elif runs_across(log.segments, mark.last_offset):
        complaint = f"good records run across {mark.last_offset}, where its last one should begin"
    else:
        return
    raise StoreForeignFile(
        f"the file checkpoint says that the log in {log.segments.directory} was on the disk up to "
        f"{mark.end}, but {complaint}: either is another store's. Put back what belongs together, "
        f"from a copy or another member; or let {log.segments.repair_command()} go by the log"
    )


def runs_across(segments: Segments, offset: int) -> bool:
    """Whether a good record of an unbroken row from its file's start on holds ``offset``, without
    beginning there: what should, was never damaged, it is not in this file.
    """
    segment = segments.find(offset)
    if segment is None:
        return False
    for stretch in LogScan(segments, segment.start):
        at = stretch.start
        while at < offset < stretch.end:
            one = found_at(segment, at).record
            assert one is not None, at
            at += one.size
            if at > offset:
                return True
        if stretch.end > offset:
            break
    return False


def adoption_plan(log: CommitLog, saved: Checkpoint, clean: RecoveryPoint | None) -> Plan:
    """After another program's stop, in order or not: its checkpoint is of RocketMQ's form, and it
    leaves our mark in it as it was. Neither takes anything from what was on the disk before, by
    that mark or by our ``clean`` close: what RocketMQ cuts is behind it, or was damaged.
    """
    mark = saved.mark
    known_end = max((one.end for one in (mark, clean) if one is not None), default=0)
    if mark is not None and not mark.holds(log.segments):
        saved = dataclasses.replace(saved, mark=None)
    plan = crash_plan(log, saved, same_boot=False)
    time_ms = saved.log_time_ms  # which RocketMQ moves on, unlike our mark
    return dataclasses.replace(plan, known_end=known_end, known_time_ms=time_ms, is_foreign=True)


def durable_position(log: CommitLog, saved: Checkpoint) -> int:
    """A file's start before which log and queues are on the disk, as RocketMQ finds it after an
    abnormal stop.
    """
    for segment in reversed(log.segments):
        first = found_at(segment, segment.start).record
        if first is not None and first.store_time_ms <= saved.restart_time_ms:
            return segment.start
    return log.segments.start

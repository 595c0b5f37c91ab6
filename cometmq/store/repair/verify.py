"""Is a store whole? Everything is read once and compared: the log with itself, the queues and the
key index with the log, the small files with all of them. Nothing is changed, no lock is taken.

A store that a broker has open may be verified: what has not reached its mark is not complained of.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cometmq.errors import StoreDamaged, StoreFailed, StoreForeignFile
from cometmq.format.indexfile import Sizes
from cometmq.store import layout
from cometmq.store.disk.files import Files, OsFiles
from cometmq.store.disk.segments import Segments
from cometmq.store.log.scan import Stretch
from cometmq.store.metadata import epochs, heads
from cometmq.store.metadata.heads import is_strange
from cometmq.store.recovery import shape, witness
from cometmq.store.recovery.recovery import Progress
from cometmq.store.recovery.replay import Observer
from cometmq.store.repair import losses
from cometmq.store.repair.survey import Known, Survey, open_row, survey
from cometmq.store.repair.verify_index import IndexCheck
from cometmq.store.repair.verify_queues import Deletions, QueueChecks

OPEN_FILES_MAX = 1024


class Fault(NamedTuple):
    """Something that is not as it should be."""

    area: str  # log, queue, index or file
    path: str  # file or folder
    position: int | None  # log offset; in a queue the message's offset
    what: str


@dataclass(slots=True)
class Report:
    """What :func:`verify` found. ``notes`` are no faults."""

    directory: str
    log_start: int = 0
    log_end: int = 0
    end_reason: str = ""
    record_count: int = 0
    lost_bytes: int = 0  # written off by repairs
    queue_count: int = 0
    unit_count: int = 0
    index_entry_count: int = 0
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def verify(
    directory: Path,
    *,
    index_sizes: Sizes | None = None,
    observer: Observer | None = None,
    progress: Progress | None = None,
) -> Report:
    """Read everything in ``directory``. ``index_sizes``: those of the broker's options; without
    them those that the store has. ``observer`` as of ``MessageStore.open``: without it a topic
    that was deleted a moment ago is taken for one whose queues are missing.

    Raises StoreForeignFile when there is no log, StoreDamaged when ``cometmq.json`` or
    ``checkpoint`` does not read.
    """
    return _Verification(directory, index_sizes, observer).run(progress)


class _Verification:
    def __init__(
        self, directory: Path, index_sizes: Sizes | None, observer: Observer | None
    ) -> None:
        self._report = Report(str(directory))
        self._paths = layout.StorePaths(directory)
        self._files: Files = OsFiles(OPEN_FILES_MAX, writable=False)
        shape.check(self._files, self._paths)
        self._known = Known.of(self._files, self._paths)
        options = None if self._known.identity is None else self._known.identity.options
        self._log_file_bytes = None if options is None else options.log_file_bytes
        self._queue_file_bytes = None if options is None else options.queue_file_bytes
        self._index_sizes = index_sizes or (None if options is None else options.index_sizes)
        self._deletions = Deletions(observer)

    def run(self, progress: Progress | None) -> Report:
        try:
            log, complaints = open_row(self._files, self._paths.commit_log, self._log_file_bytes)
        except StoreForeignFile as error:
            if self._known.identity is None:
                raise
            self._add(
                "log", self._paths.commit_log, None, f"all files are missing: {error.message}"
            )
            return self._report
        self._report_start(log)
        self._report_strange_files(log)
        try:
            for complaint in complaints:
                self._add("file", self._paths.commit_log, None, complaint)
            self._read(log, progress)
        finally:
            log.close()
        if any(fault.area in ("queue", "index") for fault in self._report.faults):
            self._report.notes.append(
                "queues and key index can be rebuilt from the log: stop the broker, then "
                f"cometmq store repair {self._paths.root}"
            )
        return self._report

    def _read(self, log: Segments, progress: Progress | None) -> None:
        mark_end, live = self._mark_end(log), not self._known.is_clean
        queues = QueueChecks(self._files, self._paths, mark_end, self._queue_file_bytes, live=live)
        index = IndexCheck(
            self._files,
            self._paths.index,
            self._index_sizes,
            log.start,
            0 if self._known.identity is None else self._known.checkpoint.index_time_ms,
            live=live,
        )

        def visit(stretch: Stretch, data: bytes) -> None:
            self._deletions.take(stretch)
            queues.take(stretch)
            index.take(stretch, data)

        def begins_at() -> int:
            start = _start_by_now(self._files, log)
            queues.skip()
            index.skip_to(start)
            return start

        known_time_ms = self._known.checkpoint.known_time_ms
        tails = losses.tails(self._files, self._paths, self._known)  # before the log is read
        found = survey(
            log,
            mark_end,
            known_time_ms,
            visit,
            progress,
            apart=self._deletions.topics,
            begins_at=begins_at,
            tails=tails,
        )
        queues.finish(_start_by_now(self._files, log), found.end)
        self._report_log(found)
        self._report_checkpoint(found)
        self._report_queues(queues)
        self._report_index(index)
        self._report_epochs(found)

    # --- the log ----------------------------------------------------------------------------------

    def _report_start(self, log: Segments) -> None:
        known = self._known.checkpoint.log_start
        if 0 <= known < log.start and self._known.identity is not None:
            what = f"is missing: the log began there, and begins at {log.start} now"
            self._add("log", log.path(known), known, what)

    def _report_strange_files(self, log: Segments) -> None:
        known = heads.load(self._files, self._paths.heads)
        # Then nothing is known of epochs, or retention has removed a file meanwhile.
        with suppress(StoreDamaged, StoreFailed):
            its_epochs = epochs.load(self._files, self._paths.epochs)
            for segment in log:
                if is_strange(segment, known.get(segment.start), its_epochs):
                    what = "the log file of another store: it begins with another record"
                    self._add("log", segment.file.path, segment.start, what)

    def _mark_end(self, log: Segments) -> int:
        """Up to where the log should be whole."""
        mark = self._known.mark
        if mark is None or mark.last_offset < log.start:
            return 0
        if not mark.holds(log):
            self._add(
                "file",
                self._paths.identity if self._known.is_clean else self._paths.checkpoint,
                mark.last_offset,
                f"it marks {mark.end} as the end of a good record, which the log does not have",
            )
        return min(mark.end, log.end)

    def _report_log(self, found: Survey) -> None:
        report, path = self._report, self._paths.commit_log
        report.log_start, report.log_end = found.start, found.end
        report.end_reason, report.record_count = found.reason, found.record_count
        report.lost_bytes = sum(lost.end - lost.start for lost in found.written_off)
        for damage in found.damages:
            what = f"damaged up to {damage.end}: {damage.reason}"
            self._add("log", path, damage.start, what)
        if found.ends_too_early:
            named = f": {witness.in_words(found.missing)}" if found.missing else ""
            self._add(
                "log",
                path,
                found.end,
                f"ends here ({found.reason}), but was on the disk at least {found.missing_bytes} "
                f"bytes further{named}",
            )
        if found.older and self._known.identity is not None:
            what = f"a record is older than one before it; so in {len(found.older)} places"
            self._add("log", path, found.older[0], what)

        if found.impossible:
            what = f"a record has an impossible store time; so in {len(found.impossible)} places"
            self._add("log", path, found.impossible[0], what)

    def _report_checkpoint(self, found: Survey) -> None:
        time_ms, youngest_ms = self._known.checkpoint.log_time_ms, found.last.store_time_ms
        if self._known.identity is not None and time_ms > youngest_ms and not found.ends_too_early:
            what = f"knows of store time {time_ms}, the log's youngest record is of {youngest_ms}"
            self._add("file", self._paths.checkpoint, None, what)

    # --- what points to it ------------------------------------------------------------------------

    def _report_queues(self, queues: QueueChecks) -> None:
        self._report.queue_count, self._report.unit_count = queues.queue_count, queues.unit_count
        for folder, offset, what in queues.faults:
            self._add("queue", folder, offset, what)
        mark = self._known.mark
        tally = None if mark is None else mark.tally
        # What the mark counted may have been deleted since, or was removed while it was being read.
        fits = mark is not None and (
            tally == queues.tally_at_mark or bool(queues.gone) or self._deletions.newest >= mark.end
        )
        if tally is not None and tally.is_known and not fits:
            self._add(
                "queue",
                self._paths.consume_queue,
                None,
                f"{queues.tally_at_mark.queue_count} queues with "
                f"{queues.tally_at_mark.unit_count} messages up to the mark, "
                f"{tally.queue_count} with {tally.unit_count} should be there",
            )
        if queues.gone:
            self._report.notes.append(
                f"{len(queues.gone)} queues lost files while they were read, and were not looked "
                f"at: {', '.join(sorted(queues.gone)[:10])}"
            )
        if queues.without_folder and not fits:
            names = ", ".join(sorted(queues.without_folder)[:10])
            self._report.notes.append(
                f"{len(queues.without_folder)} queues have records in the log and no folder: "
                f"deleted, or missing: {names}"
            )

    def _report_index(self, index: IndexCheck) -> None:
        index.finish()
        self._report.index_entry_count = index.entry_count
        for path, offset, what in index.faults:
            self._add("index", path, offset, what)

    def _report_epochs(self, found: Survey) -> None:
        path = self._paths.epochs
        if self._known.identity is None:
            self._report.notes.append("cometmq.json is not there: no broker of ours had the store")
            return
        try:
            known = epochs.load(self._files, path)
        except (StoreDamaged, StoreForeignFile) as error:
            self._add("file", path, None, error.message)
            return
        if not known:
            self._add("file", path, None, "is missing although the store has a log")
        elif known[-1].start > found.end:
            self._add("file", path, known[-1].start, "the last epoch starts behind the log's end")

    # --- the report -------------------------------------------------------------------------------

    def _add(self, area: str, path: Path | str, position: int | None, what: str) -> None:
        self._report.faults.append(Fault(area, str(path), position, what))


def _start_by_now(files: Files, log: Segments) -> int:
    """Where a log begins of which retention may have removed files."""
    starts = (segment.start for segment in log if files.exists(segment.file.path))
    return next(starts, log.end)

"""Reads a whole log and reports what is wrong with it; nothing is changed. What verification and
repair begin with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cometmq.errors import StoreFailed, StoreForeignFile
from cometmq.format import record
from cometmq.format.queueunit import UNIT_BYTES
from cometmq.store import layout
from cometmq.store.disk.files import Files, Kind
from cometmq.store.disk.segments import Segments
from cometmq.store.log.scan import LogScan, Stretch, find_good
from cometmq.store.log.units import LOST_TOPIC
from cometmq.store.metadata import checkpoint, identity
from cometmq.store.metadata.checkpoint import Checkpoint
from cometmq.store.metadata.identity import Identity
from cometmq.store.metadata.recovery_point import RecoveryPoint
from cometmq.store.recovery.recovery import LOOK_AHEAD_BYTES, Damage, Progress
from cometmq.store.recovery.replay import LastRecord, Loss
from cometmq.store.recovery.witness import Counted, Tails


@dataclass(frozen=True, slots=True)
class Known:
    """What the small files say of a store."""

    identity: Identity | None
    checkpoint: Checkpoint
    in_use_or_crashed: bool

    @property
    def mark(self) -> RecoveryPoint | None:
        """Up to where the log should be whole: the clean close's word before the checkpoint's."""
        clean = None if self.identity is None else self.identity.clean
        return clean or self.checkpoint.mark

    @property
    def is_clean(self) -> bool:
        return self.identity is not None and self.identity.clean is not None

    @classmethod
    def of(cls, files: Files, paths: layout.StorePaths) -> Known:
        """StoreDamaged and StoreForeignFile when one does not read."""
        return cls(
            identity.load(files, paths.identity),
            checkpoint.load(files, paths.checkpoint),
            files.exists(paths.abort),
        )


@dataclass(slots=True)
class Survey:
    """What reading the log found."""

    start: int
    end: int = 0
    reason: str = ""  # why there is no record at the end
    record_count: int = 0
    last: LastRecord = field(default_factory=LastRecord)
    damages: list[Damage] = field(default_factory=list)
    written_off: list[Damage] = field(default_factory=list)  # lost before, and marked as such
    older: list[int] = field(default_factory=list)  # records older than the one before them, or so
    impossible: list[int] = field(default_factory=list)  # whose store time no clock gave, or so
    missing_bytes: int = 0  # between the end and where it was known to be
    missing: list[Loss] = field(default_factory=list)  # messages behind it, by the queues

    @property
    def ends_too_early(self) -> bool:
        return self.missing_bytes > 0


Visit = Callable[[Stretch, bytes], None]  # good records, and their bytes


def survey(
    log: Segments,
    known_end: int,
    known_time_ms: int,
    visit: Visit | None = None,
    progress: Progress | None = None,
    *,
    apart: Iterable[str] = (),
    begins_at: Callable[[], int] | None = None,
    tails: Tails | None = None,
) -> Survey:
    """Read all of ``log``, which was on the disk up to ``known_end`` and to records of
    ``known_time_ms``. Records of the topics ``apart`` come by themselves.

    ``tails``: what queues have of messages behind the mark, before the log was read.

    A log may be read while a broker writes to it: its moving end is no fault. ``begins_at`` gives
    its present start, when a file cannot be read that may have been removed.
    """
    found = Survey(log.start, log.start)
    counted = Counted(tails or {})
    scan = LogScan(log, log.start, apart)
    while True:
        try:
            for stretch in scan:
                _take(found, stretch)
                counted.take(stretch)
                if visit is not None:
                    visit(stretch, scan.raw(stretch.start, stretch.end))
                if progress is not None:
                    progress(stretch.end - log.start, log.end - log.start)
        except StoreFailed:
            start = scan.end if begins_at is None else begins_at()
            if start <= scan.end:
                raise
            scan.end = found.start = found.end = start
            continue
        if scan.end != found.end and scan.kind is record.Kind.BAD:
            found.end = scan.end  # it may just be written: look again, once
            scan.forget()
            continue
        found.end, found.reason = scan.end, scan.reason
        behind = _behind(log, scan, found, known_end, known_time_ms, counted)
        if behind is None:
            return found
        damage = Damage(scan.end, behind, scan.reason, found.last.store_time_ms)
        found.damages.append(damage)
        scan.end = found.end = behind


def _take(found: Survey, stretch: Stretch) -> None:
    run = stretch.run
    if run.times_fall or (run.first_time_ms < found.last.store_time_ms):
        found.older.append(stretch.start)
    times = (run.first_time_ms, run.last_time_ms)
    if min(times) < 0 or max(times) > layout.STORE_TIME_MS_MAX:
        found.impossible.append(stretch.start)
    time_ms = max(found.last.store_time_ms, run.last_time_ms)
    found.last = LastRecord(stretch.last_offset, run.last_bytes, time_ms)
    found.record_count += run.record_count
    if stretch.topic == LOST_TOPIC:
        found.written_off.append(Damage(stretch.start, stretch.end, "written off"))


def _behind(
    log: Segments,
    scan: LogScan,
    found: Survey,
    known_end: int,
    known_time_ms: int,
    counted: Counted,
) -> int | None:
    missing = counted.missing(scan.end)
    is_known = scan.end < known_end or found.last.store_time_ms < known_time_ms
    if is_known or missing or scan.is_unreadable:
        behind = find_good(log, scan.end, log.end)
        if behind is None:
            found.missing = missing
            least_end = max(known_end, counted.log_end if missing else 0)
            found.missing_bytes = max(1, least_end - scan.end)
        return behind
    if scan.kind is record.Kind.BAD:
        return find_good(log, scan.end, scan.end + LOOK_AHEAD_BYTES)
    return None


def open_row(
    files: Files, directory: Path, known_bytes: int | None = None
) -> tuple[Segments, list[str]]:
    """The files of a folder, whatever size they have, and what of its entries does not belong
    there: files of another size than most, or than ``known_bytes`` if that is known.
    StoreForeignFile when there is no file of a store at all.
    """
    sizes, complaints = _sizes(files, directory)
    if not sizes:
        raise StoreForeignFile(f"{directory} holds no file of a store")
    [(file_bytes, _)] = Counter(sizes.values()).most_common(1)
    if known_bytes is not None and known_bytes in sizes.values():
        file_bytes = known_bytes
    row = Segments(directory, file_bytes)
    for start, size in sorted(sizes.items()):
        if size != (known_bytes or file_bytes):
            compared = "the store was opened with files of" if known_bytes else "the others have"
            complaints.append(
                f"{row.path(start)} has {size} bytes, {compared} {known_bytes or file_bytes}"
            )
        elif start % file_bytes:
            complaints.append(f"{row.path(start)}: no file of {file_bytes} bytes begins there")
        if size != file_bytes or start % file_bytes:
            continue
        if len(row) and start != row.end:
            complaints.append(f"{row.path(row.end)} is missing")
            break
        else:
            row.add(files, start)
    return row, complaints


def _sizes(files: Files, directory: Path) -> tuple[dict[int, int], list[str]]:
    """Bytes of each file by its start, and what does not belong there."""
    sizes: dict[int, int] = {}
    complaints = []
    entries = [entry for entry in files.entries(directory) if not layout.is_ignored(entry.name)]
    for entry in entries:
        if entry.kind is not Kind.FILE or layout.OFFSET_NAME.fullmatch(entry.name) is None:
            complaints.append(f"{directory / entry.name} does not belong there")
        elif entry.size:
            sizes[int(entry.name)] = entry.size
        elif entry is not entries[-1]:  # the last one may be in the making
            complaints.append(f"{directory / entry.name} is empty and files follow it")
    return sizes, complaints


def open_queue_row(
    files: Files, folder: Path, known_bytes: int | None = None
) -> tuple[Segments, list[str]]:
    """As :func:`open_row`, of a queue. StoreForeignFile too when its files hold no whole units."""
    row, complaints = open_row(files, folder, known_bytes)
    if row.file_bytes % UNIT_BYTES:
        row.close()
        raise StoreForeignFile(f"{folder} has files of {row.file_bytes} bytes: no whole units")
    return row, complaints

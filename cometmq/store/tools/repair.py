"""Mends a store that no process has open: queues and key index are made anew from the log; what
damage took out of the log is written off, where the operator has named it.

Nothing is given up that was not named: :func:`repair` first reads everything, and refuses with the
very options that would accept each loss.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import record
from cometmq.format.indexfile import Sizes
from cometmq.format.queueunit import UNIT_BYTES
from cometmq.store import layout
from cometmq.store.disk.files import Files, OsFiles
from cometmq.store.disk.segment import Segment
from cometmq.store.disk.segments import Segments
from cometmq.store.folder import abortfile, checkpoint, epochs, identity
from cometmq.store.folder.logmark import UNKNOWN
from cometmq.store.following import FollowerStore
from cometmq.store.log.lost import LOST_RECORD_BYTES_MIN, lost_record
from cometmq.store.log.scanning import found_at
from cometmq.store.opening import OpenedStore, StoreOptions
from cometmq.store.queues.consumequeue import ConsumeQueue
from cometmq.store.restart.recovery import Damage, Progress
from cometmq.store.restart.replay import Loss, Observer
from cometmq.store.tools.survey import Known, Survey, open_queue_row, open_row, survey

logger = logging.getLogger(__name__)

LOG_END_MAX = 2**63 - 1
PIECE_BYTES = 16 * 1024 * 1024  # no record is much longer
QueueKey = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The losses that the operator accepts, each as it was told."""

    write_off: Sequence[tuple[int, int]] = ()  # damaged bytes of the log: start and end
    end: int | None = None  # where a log ends that was longer
    cut_at: int | None = None  # a good record, from which on everything goes
    epoch: int | None = None  # number above all that were ever used, when cometmq.epochs is gone


@dataclass(slots=True)
class Repaired:
    """What was done. ``losses``: of each queue, the messages that are gone for good."""

    directory: str
    actions: list[str] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    log_start: int = 0
    log_end: int = 0
    record_count: int = 0
    queue_count: int = 0
    index_entry_count: int = 0


def repair(
    directory: Path,
    accepted: Accepted,
    *,
    observer: Observer | None = None,
    index_sizes: Sizes | None = None,
    queue_file_bytes: int | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Mend the store in ``directory``. ``observer`` as of ``MessageStore.open``: without it queues
    of deleted topics come back. The sizes are those of the broker's options.

    Raises StoreLocked, StoreForeignFile (not a store of ours, or files that do not belong there),
    StoreDamaged (what would be lost, and how to accept it), StoreFailed, DiskFull.
    """
    files = OsFiles()
    if identity.load(files, layout.StorePaths(directory).identity) is None:
        raise StoreForeignFile(
            f"{directory} is no store of CometMQ. One of Apache RocketMQ is taken over by a broker "
            "that is started on it; cometmq store verify reads both"
        )
    row, complaints = open_row(files, layout.StorePaths(directory).commit_log)
    row.close()
    if complaints:
        raise StoreForeignFile(f"{'; '.join(complaints)}: put that right first")
    options = StoreOptions(
        commit_log_file_bytes=row.file_bytes,
        consume_queue_file_bytes=queue_file_bytes or _queue_file_bytes(files, directory),
        index_sizes=index_sizes or Sizes(),
    )
    return _Repair(directory, options, files, accepted).run(observer, progress)


def _queue_file_bytes(files: Files, directory: Path) -> int:
    """The size that most of the queues' files have; else the default."""
    top = layout.StorePaths(directory).consume_queue
    sizes = Counter(
        entry.size
        for topic in files.entries(top)
        for queue in files.entries(top / topic.name)
        for entry in files.entries(top / topic.name / queue.name)
        if layout.OFFSET_NAME.fullmatch(entry.name) and entry.size % UNIT_BYTES == 0 < entry.size
    )
    return max(sizes, key=sizes.__getitem__, default=StoreOptions().consume_queue_file_bytes)


class _Repair:
    def __init__(
        self, directory: Path, options: StoreOptions, files: Files, accepted: Accepted
    ) -> None:
        self._done = Repaired(str(directory))
        self._options = options
        self._files = files
        self._paths = layout.StorePaths(directory)
        self._accepted = accepted

    def run(self, observer: Observer | None, progress: Progress | None) -> Repaired:
        opened = OpenedStore(self._paths.root, self._options, self._files)  # holds the lock
        try:
            before = {(q.topic, q.queue_id): _count_below(q, LOG_END_MAX) for q in self._queues()}
            self._prepare(progress)
            opened.open(observer, progress)
            opened.begin_following()
            store = FollowerStore(opened, self._options)
            if self._accepted.cut_at is not None:
                self._cut(store, self._accepted.cut_at)
            while opened.indexer.step():
                pass
            self._tell(opened, before)
            store.close()
        finally:
            opened.release()
        return self._done

    # --- before opening ---------------------------------------------------------------------------

    def _prepare(self, progress: Progress | None) -> None:
        known = Known.of(self._files, self._paths)
        log, _ = open_row(self._files, self._paths.commit_log)
        try:
            mark = known.mark
            known_end = mark.end if mark is not None and mark.last_offset >= log.start else 0
            found = survey(log, known_end, known.checkpoint.log_time_ms, progress=progress)
            found.damages += self._given_up(log, found)
            self._refuse_what_was_not_accepted(found)
            self._mend_epochs(log)
            self._forget(known, found)  # first: the marks do not speak of what is written now
            self._write_off(log, found)
        finally:
            log.close()
        self._done.record_count = found.record_count

    def _given_up(self, log: Segments, found: Survey) -> Iterator[Damage]:
        """Records that look good and are given up all the same: a wrong queue offset has no
        checksum that would tell.
        """
        damaged = {(damage.start, damage.end) for damage in found.damages}
        for start, end in sorted(set(self._accepted.write_off) - damaged):
            segment = log.find(start)
            one = None if segment is None else found_at(segment, start).record
            if one is not None and start + one.size == end:
                yield Damage(start, end, "given up", one.store_time_ms)

    def _refuse_what_was_not_accepted(self, found: Survey) -> None:
        accepted = self._accepted
        has_epochs = self._files.exists(self._paths.epochs)
        if has_epochs == (accepted.epoch is not None):
            raise StoreDamaged(
                f"{self._paths.epochs} is there: --epoch would lose what it says"
                if has_epochs
                else f"{self._paths.epochs} is missing: give --epoch a number above every epoch "
                "that the group ever had (cometmq broker status)"
            )
        wanted = [
            f"--write-off {d.start}-{d.end}  ({d.reason}): {self._messages(d.start, d.end)}"
            for d in found.damages
        ]
        named = {(damage.start, damage.end) for damage in found.damages}
        if found.ends_too_early and accepted.end != found.end:
            wanted.append(
                f"--accept-end {found.end}  (at least {found.missing_bytes} bytes more were "
                f"there): {self._messages(found.end, LOG_END_MAX)}"
            )
        unknown = set(accepted.write_off) - named
        if unknown:
            raise StoreDamaged(
                f"neither damage nor one whole record stands at {sorted(unknown)}; nothing was "
                "changed"
            )
        if named - set(accepted.write_off) or (found.ends_too_early and accepted.end != found.end):
            raise StoreDamaged(
                "the log is damaged, and what stood there is lost unless a copy or another member "
                "has it. Nothing was changed. To give it up, repair with\n  " + "\n  ".join(wanted)
            )

    def _mend_epochs(self, log: Segments) -> None:
        number = self._accepted.epoch
        if number is None:
            return
        epochs.save(self._files, self._paths.epochs, [epochs.Epoch(number, log.start)])
        self._note(f"wrote {self._paths.epochs.name}: the whole log is epoch {number}'s")

    def _write_off(self, log: Segments, found: Survey) -> None:
        for damage in found.damages:
            for segment in log:
                start, end = max(damage.start, segment.start), min(damage.end, segment.end)
                if start < end:
                    _write_off(segment, start, end, damage.time_ms)
                    self._note(f"wrote off {end - start} bytes of the log at {start}")

    def _forget(self, known: Known, found: Survey) -> None:
        """Let the opening that follows find a crashed store without queues and index."""
        saved, mark = known.checkpoint, known.mark
        assert known.identity is not None
        if found.ends_too_early:
            time_ms = found.last.store_time_ms
            saved = dataclasses.replace(saved, log_time_ms=min(saved.log_time_ms, time_ms))
            self._note(f"accepted {found.end} as the end of the log")
        if found.ends_too_early or found.damages:
            mark = None
        if mark is not None:
            mark = dataclasses.replace(mark, queue_count=UNKNOWN, unit_count=UNKNOWN)
        content = dataclasses.replace(saved, queue_time_ms=0, index_time_ms=0, mark=mark)
        writer = checkpoint.CheckpointFile(self._files, self._paths.checkpoint)
        try:
            writer.rewind(content)
        finally:
            writer.close()
        # An open mark without `abort` would mean that another program was here.
        failed = abortfile.tells_of_failure(self._files, self._paths.abort)
        abortfile.write(self._files, self._paths.abort, failed=failed)
        now = dataclasses.replace(known.identity, boot_id="", clean=None)
        identity.save(self._files, self._paths.identity, now)
        for path in (self._paths.consume_queue, self._paths.index):
            self._files.remove_tree(path)
        self._files.sync_directory(self._paths.root)

    # --- after it ---------------------------------------------------------------------------------

    def _cut(self, store: FollowerStore, offset: int) -> None:
        if not store.min_offset <= offset <= store.appended_offset:
            raise StoreDamaged(
                f"the log goes from {store.min_offset} to {store.appended_offset}: it cannot be "
                f"cut at {offset}; queues and index have been made anew"
            )
        if offset < store.appended_offset:
            store.read_record(offset)  # MessageNotFound unless one starts there
        store.truncate(offset)
        self._note(f"cut the log at {offset}")

    def _messages(self, start: int, end: int) -> str:
        """Which messages the queues have from ``start`` to ``end`` of the log, in words."""
        found = []
        for queue in self._queues():
            first, stop = _count_below(queue, start), _count_below(queue, end)
            if first < stop:
                which = (
                    f"message {first}" if stop == first + 1 else f"messages {first} to {stop - 1}"
                )
                found.append(f"{which} of queue {queue.queue_id} of {queue.topic}")
        return ", ".join(found) or "no message that a queue has"

    def _queues(self) -> Iterator[ConsumeQueue]:
        """The queues as they were found, as far as they can be read."""
        for topic in self._files.entries(self._paths.consume_queue):
            for queue in self._files.entries(self._paths.consume_queue / topic.name):
                folder = self._paths.consume_queue / topic.name / queue.name
                try:
                    number = layout.parse_queue_id(queue.name, folder.parent)
                    row, _ = open_queue_row(self._files, folder)
                except StoreForeignFile:
                    continue
                one = ConsumeQueue(topic.name, number, folder, row.file_bytes)
                one.segments = row
                yield one
                one.close()

    def _tell(self, opened: OpenedStore, before: dict[QueueKey, int]) -> None:
        done = self._done
        done.losses += opened.losses
        done.log_start, done.log_end = opened.log.start, opened.log.end[0]
        after = {(q.topic, q.queue_id): q.next_offset for q in opened.dispatcher.queues()}
        for key, count in sorted(before.items()):
            now = after.get(key, 0)
            if now < count:
                done.losses.append(Loss(*key, now, count - now, done.log_end))
        done.queue_count = sum(count > 0 for count in after.values())
        done.index_entry_count = opened.indexer.status.entry_count
        self._note(f"made {done.queue_count} queues and the key index anew")

    def _note(self, action: str) -> None:
        logger.warning("%s: %s", self._paths.root, action)
        self._done.actions.append(action)


def _count_below(queue: ConsumeQueue, log_offset: int) -> int:
    """The queue offset behind its last message before ``log_offset``."""
    with suppress(StoreDamaged):
        queue.measure(0, log_offset)
    return queue.next_offset


def _write_off(segment: Segment, start: int, end: int, time_ms: int) -> None:
    """Put records of the lost over the bytes from ``start`` to ``end``. At a file's end an end mark
    follows; where only that was damaged, it is all that is written.
    """
    is_rest = end == segment.end
    stop = end - record.BLANK_BYTES if is_rest else end
    at = start
    if is_rest and stop - at < LOST_RECORD_BYTES_MIN:
        stop = at
    while at < stop:
        # The last piece must not be too small for a record.
        size = stop - at if stop - at <= 2 * PIECE_BYTES else PIECE_BYTES
        segment.pwrite(at, lost_record(at, segment.pread(at, size), time_ms))
        at += size
    if is_rest:
        segment.pwrite(stop, record.blank(end - stop))
    segment.file.sync()

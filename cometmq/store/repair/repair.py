"""Mends a store that no process has open: queues and key index are rebuilt from the log; what
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

from cometmq.errors import StoreDamaged
from cometmq.format.indexfile import Sizes
from cometmq.format.queueunit import UNIT_BYTES
from cometmq.store import layout
from cometmq.store.disk.files import Files, OsFiles
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.follower import FollowerStore
from cometmq.store.log.commitlog import CommitLog
from cometmq.store.log.scan import LogScan, end_with_room, find_good, found_at
from cometmq.store.metadata import abortfile, checkpoint, epochs, heads, identity
from cometmq.store.metadata.checkpoint import UNKNOWN_START, Checkpoint
from cometmq.store.metadata.heads import is_own, is_strange
from cometmq.store.metadata.identity import Identity, LastOptions
from cometmq.store.metadata.recovery_point import UNKNOWN, RecoveryPoint
from cometmq.store.queues.dispatch import Dispatcher
from cometmq.store.recovery import shape
from cometmq.store.recovery.opening import OpenedStore, StoreOptions
from cometmq.store.recovery.plan import Plan
from cometmq.store.recovery.recovery import Damage, Progress, Recovery
from cometmq.store.recovery.replay import LastRecord, Loss, Observer
from cometmq.store.repair import holes, losses, smallfiles
from cometmq.store.repair.holes import Incomplete, write_off
from cometmq.store.repair.survey import Known, Survey, survey

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The losses that the operator accepts, each as it was reported."""

    write_off: Sequence[tuple[int, int]] = ()  # damaged bytes of the log: start and end
    end: int | None = None  # where a log ends that was longer
    cut_at: int | None = None  # a good record, from which on everything goes
    epoch: int | None = None  # number above all that were ever used, when cometmq.epochs is gone
    store_id: str | None = None  # what cometmq.json said, when it does not read; or NEW_STORE_ID
    rebuild_tables: bool = False  # of the state, what the log does not have any more
    restored: bool = False  # a copy from before: its group may have written to the original since


@dataclass(slots=True)
class Repaired:
    """What was done. ``losses``: of each queue, the messages that are lost."""

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
    of deleted topics come back. The sizes are those of the broker's options; without them those
    that the store was opened with last.

    Raises StoreLocked, StoreForeignFile (not a store of ours, or files that do not belong there),
    StoreDamaged (what would be lost, and how to accept it), StoreFailed, DiskFull.
    """
    files = OsFiles()
    paths = layout.StorePaths(directory)
    shape.check(files, paths, queues=True)
    known = smallfiles.known_identity(files, paths, accepted.store_id)
    saved = smallfiles.known_checkpoint(files, paths)
    log_start = UNKNOWN_START if saved is None else saved.log_start
    row, _ = holes.open_log(files, paths, known.options, log_start)
    row.close()
    last = known.options or LastOptions(
        log_file_bytes=row.file_bytes,
        queue_file_bytes=_queue_file_bytes(files, directory),
        hash_slots=Sizes().hash_slots,
        index_entries=Sizes().entries,
        transient_bytes_max=0,
    )
    options = StoreOptions(
        commit_log_file_bytes=row.file_bytes,
        consume_queue_file_bytes=queue_file_bytes or last.queue_file_bytes,
        index_sizes=index_sizes or last.index_sizes,
        # An index of other sizes than the broker's would be refused; it builds its own.
        index_enabled=known.options is not None or index_sizes is not None,
    )
    return _Repair(directory, options, files, accepted).run(observer, progress)


def _queue_file_bytes(files: Files, directory: Path) -> int:
    """The size that most of the queues' files have; else the default."""
    top = layout.StorePaths(directory).consume_queue
    sizes = Counter(
        entry.size
        for topic in files.entries(top)
        if topic.is_directory
        for queue in files.entries(top / topic.name)
        if queue.is_directory
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
        self._topics: dict[str, int] = {}  # that had queues, and how many
        self._with_units: set[str] = set()  # topics
        self._in_log: list[Loss] = []  # the messages of each queue that fitted the log
        self._behind_end: list[Loss] = []  # of what is accepted as the log

    def run(self, observer: Observer | None, progress: Progress | None) -> Repaired:
        opened = OpenedStore(self._paths.root, self._options, self._files)  # holds the lock
        try:
            given_up = self._prepare(observer, progress)
            # The old ones stay until the new ones are known: they show what is lost.
            opened.rebuild_reason = "the store is repaired"
            opened.accepted_end = self._accepted.end
            opened.open(observer, progress)
            opened.begin_following()
            store = FollowerStore(opened, self._options)
            if self._accepted.cut_at is not None:
                self._cut(store, self._accepted.cut_at)
            while opened.indexer.step():
                pass
            self._report(opened, given_up)
            self._judge_state(opened, observer)
            store.close()
        finally:
            opened.release()
        return self._done

    # --- before opening ---------------------------------------------------------------------------

    def _prepare(self, observer: Observer | None, progress: Progress | None) -> list[Loss]:
        """Mend what opening would refuse, or take for something else. Returns the messages that
        were in places that are given up, and those that only the queues have.
        """
        known = self._known()
        assert known.identity is not None
        self._topics = losses.topics_found(self._files, self._paths)
        log, incomplete = holes.open_log(
            self._files, self._paths, known.identity.options, known.checkpoint.log_start
        )
        try:
            found = self._survey(log, known, whole=not incomplete, progress=progress)
            found.damages = [
                one._replace(end=end_with_room(log, one.start, one.end)) for one in found.damages
            ]
            found.damages += self._given_up(log, found)
            self._refuse_what_was_not_accepted(log, found)
            if not found.damages:
                self._rehearse(log, observer)
            given_up = self._lost(log, found)
            seen = list(losses.by_log(self._files, self._paths, log, _known_end(log, found)))
            self._with_units = {loss.topic for loss, _ in seen}
            not_in_log = [loss for loss, log_has_it in seen if not log_has_it]
            place = found.damages[0].start if found.damages else log.start
            self._in_log = [loss._replace(log_offset=place) for loss, has in seen if has]
            self._mend_epochs(log)
            self._forget(log, known, found)  # first: the marks do not speak of what is written now
            for action in write_off(log, found.damages):
                self._note(action)
        finally:
            log.close()
        self._done.record_count = found.record_count
        return losses.merged([*given_up, *not_in_log])

    def _known(self) -> Known:
        """What the small files say; of one that does not read, what its absence would say."""
        files, paths = self._files, self._paths
        saved = smallfiles.known_checkpoint(files, paths)
        return Known(
            smallfiles.known_identity(files, paths, self._accepted.store_id),
            Checkpoint() if saved is None else saved,
            files.exists(paths.abort),
        )

    def _survey(
        self, log: Segments, known: Known, *, whole: bool, progress: Progress | None
    ) -> Survey:
        """All of the log, up to where it ends."""
        mark, time_ms = known.mark, known.checkpoint.known_time_ms
        known_end = mark.end if mark is not None and mark.last_offset >= log.start else 0
        if not whole:
            known_end = max(known_end, holes.written_to(log))
        if all(isinstance(segment.file, Incomplete) for segment in log):
            known_end = max(known_end, losses.known_end(self._files, self._paths))
        tails = losses.tails(self._files, self._paths, known)
        found = survey(log, known_end, time_ms, progress=progress, tails=tails)
        if mark is None and not time_ms:
            # Nothing says how far it was written. A good record behind the end does.
            while (behind := find_good(log, found.end, log.end)) is not None:
                found = survey(log, behind, time_ms, progress=progress, tails=tails)
        for segment in log:
            if why := self._strange(log, segment, mark):
                self._leave_out(log, segment, why, found)
        return found

    def _strange(self, log: Segments, segment: Segment, mark: RecoveryPoint | None) -> str:
        """What shows that a file is another log's; empty: nothing does. Its records are good, and
        would be taken for ours.
        """
        if isinstance(segment.file, Incomplete):
            return ""
        head = heads.load(self._files, self._paths.heads).get(segment.start)
        with suppress(StoreDamaged):  # then nothing is known of epochs
            its_epochs = epochs.load(self._files, self._paths.epochs)
            if is_strange(segment, head, its_epochs):
                return "it is the log file of another store: it begins with another record"
            if is_own(segment, head, its_epochs):
                return ""
        is_marked = mark is not None and mark.last_bytes and log.find(mark.last_offset) is segment
        if mark is None or not is_marked or mark.holds(log):
            return ""
        # The queues show whether the file is another log's, or the mark.
        wrong, count = losses.misfits(self._files, self._paths, segment)
        if 2 * wrong <= count:
            return ""
        return f"{wrong} of {count} units of queues name other records: it is another log's file"

    def _leave_out(self, log: Segments, segment: Segment, why: str, found: Survey) -> None:
        before = _last_before(log, segment.start)
        rest = [d for d in found.damages if d.end <= segment.start or d.start >= segment.end]
        mine = Damage(segment.start, segment.end, why, before.store_time_ms)
        found.damages = sorted([*rest, mine])
        if found.end <= segment.end:
            known_end = found.end + found.missing_bytes
            found.end, found.last = segment.end, before
            found.missing_bytes = max(0, known_end - segment.end)

    def _given_up(self, log: Segments, found: Survey) -> Iterator[Damage]:
        """Records that look good and are given up all the same, a short one with the next: no
        checksum covers a wrong queue offset.
        """
        damaged = {(damage.start, damage.end) for damage in found.damages}
        for start, end in sorted(set(self._accepted.write_off) - damaged):
            segment = log.find(start)
            one = None if segment is None else found_at(segment, start).record
            if one is not None and end_with_room(log, start, start + one.size) == end:
                yield Damage(start, end, "given up", one.store_time_ms)

    def _refuse_what_was_not_accepted(self, log: Segments, found: Survey) -> None:
        accepted = self._accepted
        smallfiles.check_epoch(self._files, self._paths, accepted.epoch)
        wanted = [
            f"--write-off {d.start}-{d.end}  ({d.reason}): {self._messages(d.start, d.end)}"
            for d in found.damages
        ]
        named = {(damage.start, damage.end) for damage in found.damages}
        if found.ends_too_early and accepted.end != found.end:
            wanted.append(
                f"--accept-end {found.end}  (at least {found.missing_bytes} bytes more were "
                f"there): {self._messages(found.end, _known_end(log, found))}"
            )
        unknown = set(accepted.write_off) - named
        if unknown:
            raise StoreDamaged(
                f"neither damage nor one whole record lies at {sorted(unknown)}; nothing was "
                "changed"
            )
        if named - set(accepted.write_off) or (found.ends_too_early and accepted.end != found.end):
            raise StoreDamaged(
                "the log is damaged, and what lay there is lost unless a copy or another member "
                "has it. Nothing was changed. To give it up, repair with\n  " + "\n  ".join(wanted)
            )

    def _rehearse(self, row: Segments, observer: Observer | None) -> None:
        """Refuse a record that fits into no queue while nothing has been changed."""
        log = CommitLog(self._paths, self._files, row.file_bytes)
        log.segments = row
        dispatcher = Dispatcher(self._paths, self._files, self._options.consume_queue_file_bytes)
        why = "the store is repaired"
        plan = Plan(row.start, why, rebuild_reason=why, accepted_end=self._accepted.end)
        Recovery(log, dispatcher, observer, plan).decide(None, lambda: "")
        dispatcher.close()

    def _mend_epochs(self, log: Segments) -> None:
        number = self._accepted.epoch
        if number is None:
            return
        epochs.save(self._files, self._paths.epochs, [epochs.Epoch(number, log.start)])
        self._note(f"wrote {self._paths.epochs.name}: the whole log is epoch {number}'s")

    def _lost(self, log: Segments, found: Survey) -> list[Loss]:
        """The messages in the places that are given up."""
        cut_at = self._accepted.cut_at
        end = found.end if cut_at is None else min(found.end, cut_at)
        places = [(damage.start, min(damage.end, end)) for damage in found.damages]
        if found.ends_too_early or cut_at is not None:
            self._behind_end = list(self._losses_between(end, _known_end(log, found)))
        inside = [lost for at, to in places if at < to for lost in self._losses_between(at, to)]
        return [*inside, *self._behind_end]

    def _forget(self, log: Segments, known: Known, found: Survey) -> None:
        """Let the opening that follows find a crashed store without queues and index."""
        saved, mark = known.checkpoint, known.mark
        assert known.identity is not None
        self._files.make_directories(self._paths.commit_log)  # which may be missing as a whole
        if found.ends_too_early:
            time_ms = found.last.store_time_ms
            saved = dataclasses.replace(saved, log_time_ms=min(saved.log_time_ms, time_ms))
            self._note(f"accepted {found.end} as the end of the log")
        if found.ends_too_early or found.damages:
            mark = None
            time_ms = found.last.store_time_ms
            saved = dataclasses.replace(saved, log_time_ms=min(saved.log_time_ms, time_ms))
        if mark is not None and not mark.holds(log):
            mark = None
            time_ms = found.last.store_time_ms
            saved = dataclasses.replace(saved, log_time_ms=min(saved.log_time_ms, time_ms))
            self._note("the marks spoke of another record than the log has: it goes by the log")
        if mark is not None:
            mark = dataclasses.replace(mark, queue_count=UNKNOWN, unit_count=UNKNOWN)
        content = dataclasses.replace(saved, queue_time_ms=0, index_time_ms=0, mark=mark, reach=0)
        if smallfiles.known_checkpoint(self._files, self._paths) is None:
            smallfiles.write_empty_checkpoint(self._files, self._paths)
            self._note(f"wrote another {self._paths.checkpoint.name}")
        if self._accepted.store_id is not None:
            self._note(f"wrote {self._paths.identity.name}: it is store {known.identity.store_id}")
        writer = checkpoint.CheckpointFile(self._files, self._paths.checkpoint)
        try:
            writer.rewind(content)
        finally:
            writer.close()
        # An open mark without `abort` would mean that another program was here.
        failed = abortfile.records_failure(self._files, self._paths.abort)
        abortfile.write(self._files, self._paths.abort, failed=failed)
        now = self._left_open(known.identity, whole=not self._breaks_history(found))
        identity.save(self._files, self._paths.identity, now)
        self._files.remove_tree(self._paths.index)
        self._files.unlink(self._paths.heads)  # files may begin with another record from now on
        self._files.sync_directory(self._paths.root)

    def _breaks_history(self, found: Survey) -> bool:
        """Something is given up, or was never in this copy, or the log's epochs are made up."""
        accepted = self._accepted
        is_cut = found.ends_too_early or accepted.cut_at is not None or accepted.restored
        return is_cut or bool(found.damages) or accepted.epoch is not None

    def _left_open(self, known: Identity, *, whole: bool) -> Identity:
        """As a crash would have left the store: of the machine, which costs it its name, or, where
        it is ``whole``, of the process, unless it had lost its name already.
        """
        if not whole:
            return dataclasses.replace(known, boot_id="", clean=None)
        if known.clean is None:
            return known
        # A close in order left nothing in memory alone.
        options = known.options and dataclasses.replace(known.options, transient_bytes_max=0)
        boot_id = self._files.boot_id()
        return dataclasses.replace(known, boot_id=boot_id, clean=None, options=options)

    # --- after it ---------------------------------------------------------------------------------

    def _cut(self, store: FollowerStore, offset: int) -> None:
        if not store.min_offset <= offset <= store.appended_offset:
            raise StoreDamaged(
                f"the log goes from {store.min_offset} to {store.appended_offset}: it cannot be "
                f"cut at {offset}; queues and index have been rebuilt"
            )
        if offset < store.appended_offset:
            store.read_record(offset)  # MessageNotFound unless one starts there
        store.truncate(offset)
        self._note(f"cut the log at {offset}")

    def _messages(self, start: int, end: int) -> str:
        return losses.in_words(self._losses_between(start, end))

    def _losses_between(self, start: int, end: int) -> Iterator[Loss]:
        return losses.between(self._files, self._paths, start, end)

    def _report(self, opened: OpenedStore, given_up: Sequence[Loss]) -> None:
        done = self._done
        queues = list(opened.dispatcher.queues())
        after = {(q.topic, q.queue_id): (q.min_offset, q.next_offset) for q in queues}
        # A record whose topic or queue was damaged is good, and in another queue than before.
        left_out = [loss for loss in self._in_log if (loss.topic, loss.queue_id) in after]
        gone = losses.merged([*given_up, *left_out])
        # What was behind the end is gone though a topic, whose deletion was there too, is back and
        # has older messages with these offsets.
        done.losses += losses.merged(
            [*losses.all_of(opened.losses, gone, after), *self._behind_end]
        )
        done.log_start, done.log_end = opened.log.start, opened.log.end[0]
        done.queue_count = sum(next_offset > 0 for _, next_offset in after.values())
        done.index_entry_count = opened.indexer.status.entry_count
        if self._accepted.restored:
            self._part_from_the_original(opened)
        if self._options.index_enabled:
            self._note(f"rebuilt {done.queue_count} queues and the key index")
        else:
            self._note(f"rebuilt {done.queue_count} queues; the key index is left to the broker")

    def _judge_state(self, opened: OpenedStore, observer: Observer | None) -> None:
        """Note that a part of the state is lost. The log no longer has what lay behind its new end.
        A start notices what is missing before it, unless there is no other state.
        """
        topics = frozenset[str]() if observer is None else observer.topics
        queues = [queue for name in topics for queue in opened.dispatcher.queues_of(name)]
        left = max((queue.next_offset for queue in queues), default=0)
        gone = self._done.losses
        is_cut = any(loss.topic in topics and loss.first_queue_offset >= left for loss in gone)
        is_lost = bool(topics and gone) and (not left or not topics & self._with_units)
        if is_cut or is_lost or self._accepted.rebuild_tables:
            before = opened.identity.current.state_lost or {}
            found = {name: n for name, n in self._topics.items() if name not in topics}
            opened.identity.note(state_lost={**before, **found})
            self._note(
                "the next writer rebuilds topics, groups and committed offsets: from what the "
                "log still has, config/*.json and the queues; its log lines say what it assumed. "
                "Consumers get messages again"
            )

    def _part_from_the_original(self, opened: OpenedStore) -> None:
        """A lease that names the original says nothing of its copy: neither that it has everything
        nor, as of a store that has lost its end, that it may write when no other was in sync.
        """
        now = opened.identity.current
        opened.forget_former_name()
        self._note(
            f"called the store {now.store_id}: a copy of {now.former_store_id}, not the store"
        )

    def _note(self, action: str) -> None:
        logger.warning("%s: %s", self._paths.root, action)
        self._done.actions.append(action)


def _last_before(log: Segments, offset: int) -> LastRecord:
    """The last record of the files before ``offset``, as far as they are whole."""
    last = LastRecord(log.start)
    for stretch in LogScan(log, log.start):
        if stretch.start >= offset:
            break
        last = LastRecord(stretch.last_offset, stretch.run.last_bytes, stretch.run.last_time_ms)
    return last


def _known_end(log: Segments, found: Survey) -> int:
    """Nothing of the log ever lay behind it, as far as is known."""
    return max(log.end, found.end + found.missing_bytes)

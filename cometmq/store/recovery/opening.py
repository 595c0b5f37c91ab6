"""What an open store is made of, how it is opened and how it is closed.

A crash at any of the steps is harmless because of their order: ``docs/format/store-layout.md`` §4
and §5.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cometmq.errors import StoreDamaged, StoreFailed
from cometmq.format import queueunit
from cometmq.format.batch import BatchLimits
from cometmq.format.indexfile import Sizes
from cometmq.store import layout
from cometmq.store.disk.files import Files
from cometmq.store.index.indexer import Indexer
from cometmq.store.log.commitlog import CommitLog, Span
from cometmq.store.log.scan import RECORD_BYTES_MAX
from cometmq.store.metadata import abortfile, checkpoint, epochs, identity, reserve
from cometmq.store.metadata.dirlock import DirectoryLock
from cometmq.store.metadata.logmark import UNKNOWN, RecoveryPoint
from cometmq.store.queues.dispatch import Dispatcher
from cometmq.store.recovery import foreign, recovery, witness
from cometmq.store.recovery.marking import RecoveryPointWriter
from cometmq.store.recovery.recovery import Plan, Progress, Recovery
from cometmq.store.recovery.replay import LastRecord, Loss, Observer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """``*_file_bytes`` are fixed for a store's life: files of another size are refused."""

    commit_log_file_bytes: int = 1024 * 1024 * 1024
    consume_queue_file_bytes: int = 6_000_000
    open_files_max: int = 4096
    transient_bytes_max: int = 0  # of the transient store pool; 0: appends are written at once
    index_sizes: Sizes = field(default_factory=Sizes)  # as fixed as the files' sizes
    index_enabled: bool = True
    batch_limits: BatchLimits = field(default_factory=BatchLimits)

    def __post_init__(self) -> None:
        assert self.commit_log_file_bytes >= 4096, self.commit_log_file_bytes
        assert self.consume_queue_file_bytes > 0, self.consume_queue_file_bytes
        assert self.consume_queue_file_bytes % queueunit.UNIT_BYTES == 0
        assert self.batch_limits.batch_bytes_max <= RECORD_BYTES_MAX, self.batch_limits


REACH_BYTES = 32 * 1024 * 1024  # ahead of the log's end; a start after a crash reads so much


class _Found(NamedTuple):
    """What a start has read, and what it is going to do."""

    known: identity.Identity | None
    saved: checkpoint.Checkpoint
    disk_failed: bool
    todo: Recovery


class OpenedStore:
    """The parts of one data folder, which is locked until :meth:`release`.

    Complete after :meth:`open`: everything that is there is then on the disk.
    """

    def __init__(self, root: Path, options: StoreOptions, files: Files) -> None:
        self.paths = layout.StorePaths(root)
        self.files = files
        self.log = CommitLog(
            self.paths, files, options.commit_log_file_bytes, options.transient_bytes_max
        )
        self.dispatcher = Dispatcher(self.paths, files, options.consume_queue_file_bytes)
        self.indexer = Indexer(
            self.log, self.paths.index, files, options.index_sizes, enabled=options.index_enabled
        )
        self.store_id = ""
        self.former_store_id = ""  # see Identity
        self.epoch = 0  # the highest that is known
        self.epochs: list[epochs.Epoch] = []
        self.clean_start = False
        self.adoption: foreign.Adoption | None = None
        self.durable = 0  # log offset before which log and queues are on the disk
        self.last = LastRecord()  # of the log, when it was opened
        self._recovered = False  # an unclean stop, which no writer has taken notice of
        self._options = _last_options(options)
        self._last_options: identity.LastOptions | None = None  # ours, once all is recovered
        self._clean: RecoveryPoint | None = None  # what the last stop left, until all is recovered
        self._checkpoint: checkpoint.CheckpointFile | None = None
        self._marker = RecoveryPointWriter(self.log, self.dispatcher)
        self.state_lost: Mapping[str, int] | None = None  # a part of it: see Identity
        self.has_state = False  # see Identity
        self.why_anew = ""  # all queues are to be made anew, whatever they hold; set before opening
        self.losses: list[Loss] = []  # that recovery found
        self.has_damage = False  # which recovery passed over
        self.may_lack_queues = False  # see Preview
        self._is_changed = False  # the folder, by us
        self._lock: DirectoryLock | None = DirectoryLock(self.paths.lock)

    # --- opening ----------------------------------------------------------------------------------

    def open(
        self, observer: Observer | None, progress: Progress | None, look: Look | None = None
    ) -> None:
        """Take up what the last stop left, whatever it was. Then :meth:`begin_epoch` or
        :meth:`begin_following`.

        Until ``look`` has seen what the store is going to hold, nothing is changed in the folder,
        so whatever it raises, as any refusal of ours, leaves it as it was.
        """
        found = self._plan(observer, progress)
        if look is not None:
            look(Preview(self))
        self._is_changed = True
        try:
            self._carry_out(found)
        except StoreFailed:
            self.note_failure()
            raise

    def _plan(self, observer: Observer | None, progress: Progress | None) -> _Found:
        """What is there and what has to be done; reads only."""
        paths, files = self.paths, self.files
        known = identity.load(files, paths.identity)
        if known is not None:
            self._last_options, self._clean = known.options, known.clean
            self.state_lost, self.has_state = known.state_lost, known.has_state
        saved = checkpoint.load(files, paths.checkpoint)
        self.epochs = self._load_epochs(known)
        self.log.segments.load(files)
        self.indexer.load()
        self.adoption = foreign.look(files, paths, known, self.log, saved)
        if self.adoption is None:  # else its retention may have been here
            recovery.refuse_missing_start(self.log, saved.log_start)
        disk_failed = abortfile.tells_of_failure(files, paths.abort)
        plan = self._plan_of(known, saved, disk_failed=disk_failed)
        plan = dataclasses.replace(plan, why_anew=self.why_anew)
        if not plan.is_clean:
            logger.info(
                "%s, %s: the log is read from %d on: %s",
                paths.root,
                plan.after,
                plan.start,
                plan.why,
            )
        todo = recovery.recover(
            self.log,
            self.dispatcher,
            observer,
            plan,
            progress=progress,
            disagreement=lambda: foreign.disagreement(files, paths, self.log, self.dispatcher),
        )
        rebuild = todo.rebuild
        self.losses, self.last = rebuild.losses, rebuild.last
        self.has_damage = bool(rebuild.damages)
        self.may_lack_queues = todo.may_lack_queues
        self.log.end = (rebuild.end, self.last.store_time_ms)
        self.log.flushed = (min(plan.start, rebuild.end), 0)
        # Where damage was passed over, not all that is behind the plan's start was good.
        self.log.trusted_from = rebuild.end if rebuild.damages else min(plan.start, rebuild.end)
        return _Found(known, saved, disk_failed, todo)

    def _carry_out(self, found: _Found) -> None:
        paths, files, known, plan = self.paths, self.files, found.known, found.todo.plan
        # A full volume is to be opened too: what means nothing goes before anything is written.
        foreign.remove_leftovers(files, paths)
        reserve.use(files, paths.reserve)
        # From here on the folder is being changed, which RocketMQ sees by the file `abort`.
        abortfile.write(files, paths.abort, failed=found.disk_failed)
        self._checkpoint = checkpoint.CheckpointFile(files, paths.checkpoint)
        self._name(known, disk_failed=found.disk_failed)
        self._recovered = known is not None and (known.recovered or known.clean is None)
        self.clean_start = not self._recovered
        if self.adoption is not None:
            self._begin_adoption(self.adoption)
        self.log.reach = self._known_reach(plan, found.saved)
        found.todo.carry_out(files, self._forget_queues)
        self._tell(found.todo)
        self.dispatcher.reached(self.log.end)
        self._correct_checkpoint()
        if self.adoption is not None and self.adoption.log_changed:
            self._begin_foreign_epoch(self.adoption.verified)
        if known is not None and known.clean is None:
            self._warn_of_memory(known.options)
        # RocketMQ 5's index lacks keys after a crash of its own, and nothing shows it.
        known_time_ms = 0 if plan.is_foreign else found.saved.index_time_ms
        self.indexer.settle(known_time_ms, crashed=not plan.is_clean)
        if found.disk_failed:
            self.log.write_again(plan.start)
        self.log.flush()
        # What is written from now on stays below what the checkpoint says.
        self.log.reach, self.log.extend = self.log.end[0], self._extend_reach
        self.flush_queues(self._last_span, at_once=True)
        self.note_start(self.log.start)
        # Only now: a crash during recovery must find the old boot id, because not everything was on
        # the disk yet.
        self._last_options = self._options
        self._save_identity(None)
        if found.disk_failed:
            abortfile.write(files, paths.abort, failed=False)

    def _name(self, known: identity.Identity | None, *, disk_failed: bool) -> None:
        """Call the store what it was called, unless the end of its log may be lost."""
        if known is None:
            self.store_id = _new_store_id()
            return
        self.store_id, self.former_store_id = known.store_id, known.former_store_id
        whole = witness.kept_all(self.files, known, disk_failed=disk_failed)
        if known.clean is None and not whole:
            self.former_store_id = known.former_store_id or known.store_id
            self.store_id = _new_store_id()
            logger.warning(
                "%s: the end of the log may be lost: the store is called %s from now on, not %s",
                self.paths.root,
                self.store_id,
                known.store_id,
            )

    def _same_boot(self, known: identity.Identity) -> bool:
        """The page cache is still that which the store was open with."""
        return known.boot_id == self.files.boot_id() != ""

    def _plan_of(
        self, known: identity.Identity | None, saved: checkpoint.Checkpoint, *, disk_failed: bool
    ) -> Plan:
        """How to go on from the last stop."""
        if self.adoption is not None and self.adoption.log_changed:
            return recovery.adoption_plan(self.log, saved, self._clean)
        if known is None:
            return Plan(0, "it is new", is_clean=True)
        if known.clean is not None:
            return recovery.clean_plan(self.log, known.clean)
        return recovery.crash_plan(
            self.log,
            saved,
            same_boot=self._same_boot(known),
            kept_all=witness.kept_all(self.files, known, disk_failed=disk_failed),
        )

    def _known_reach(self, plan: Plan, saved: checkpoint.Checkpoint) -> int:
        """Behind what offset the log's files hold zeros: RocketMQ keeps no such account."""
        return saved.reach if saved.reach and not plan.is_foreign else layout.OFFSET_MAX

    def begin_epoch(self, floor: int) -> None:
        """Open the log for writing: a new epoch starts at its end."""
        # What recovery could not bring back is the epoch's own matter: whoever opened it has been
        # told by `clean_start`.
        self._recovered = False
        end = self.log.end[0]
        self.epoch = epochs.next_number(self.epochs, floor)
        kept = epochs.trim(self.epochs, self.log.start, end)
        self.save_epochs([*kept, epochs.Epoch(self.epoch, end)])
        self.forget_former_name()
        self._make_directories()
        if not len(self.log.segments):
            self.log.prepare_next_file()

    def begin_following(self) -> None:
        """Open the log for a copy of another's."""
        self.epoch = epochs.next_number(self.epochs, 0) - 1
        self.save_epochs(self.epochs)
        self._make_directories()

    def forget_former_name(self) -> None:
        """The store goes on from what it has."""
        if self.former_store_id:
            self.former_store_id = ""
            self._save_identity(None)

    def save_epochs(self, now: list[epochs.Epoch]) -> None:
        """Let the epochs be ``now``, on the disk at return."""
        epochs.save(self.files, self.paths.epochs, now)
        self.epochs = now

    def _load_epochs(self, known: identity.Identity | None) -> list[epochs.Epoch]:
        missing = known is not None and not self.files.exists(self.paths.epochs)
        if missing and self.files.entries(self.paths.commit_log):
            raise StoreDamaged(
                f"{self.paths.epochs} is missing although the store has a log. Put it back from a "
                "copy; or, with a number above every epoch that the group ever had (cometmq broker "
                "status): cometmq store repair DIRECTORY --epoch NUMBER"
            )
        return epochs.load(self.files, self.paths.epochs)

    def _tell(self, done: Recovery) -> None:
        rebuild = done.rebuild
        if not done.plan.is_clean:
            logger.info(
                "recovered %d records; the log ends at %d: %s",
                rebuild.record_count,
                rebuild.end,
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

    def _correct_checkpoint(self) -> None:
        """Nothing that is younger than the log's end can be on the disk: a checkpoint that says so
        would make the next crash look like a loss.
        """
        assert self._checkpoint is not None
        now = self._checkpoint.current
        corrected = now.not_after(self.last.store_time_ms)
        if corrected != now:
            logger.warning(
                "%s says that records up to store time %d were on the disk (queues: %d), but the "
                "log ends at %d: corrected",
                self.paths.checkpoint,
                now.log_time_ms,
                now.queue_time_ms,
                self.last.store_time_ms,
            )
            self._checkpoint.rewind(corrected)

    def _warn_of_memory(self, last: identity.LastOptions | None) -> None:
        """What was acknowledged and in memory alone is gone; nothing on the disk tells of it."""
        if last is not None and last.transient_bytes_max:
            logger.warning(
                "%s was open with the transient store pool when its process ended: up to %d bytes "
                "of messages that were acknowledged may have been in its memory alone, and are "
                "gone. Kept is what was written, up to %d of the log; its last message was stored "
                "at %d ms since 1970",
                self.paths.root,
                last.transient_bytes_max,
                self.log.end[0],
                self.last.store_time_ms,
            )

    def _begin_adoption(self, adoption: foreign.Adoption) -> None:
        """Note that the log is another program's from some place on, so that a crash does not make
        us take its bytes for ours. What our clean close left stays known until all is recovered: a
        log that has lost some of it is refused, at every start.
        """
        logger.warning(
            "%s: another program was here; its records from %d on%s are taken over",
            self.paths.root,
            adoption.verified,
            "".join(f", {name}" for name in adoption.tables),
        )
        self._save_identity(self._clean, boot_id="")

    def _begin_foreign_epoch(self, verified: int) -> None:
        """The log is another program's from ``verified`` on."""
        number = epochs.next_number(self.epochs, 0)
        kept = epochs.trim(self.epochs, self.log.segments.start, verified)
        self.save_epochs([*kept, epochs.Epoch(number, verified)])

    def settle_state(self) -> None:
        """The state is whole, in the log and on the disk."""
        if self.state_lost is not None or not self.has_state:
            self.state_lost, self.has_state = None, True
            self._save_identity(None)

    def finish_adoption(self) -> None:
        """All that the other program left is ours now: its tables, too, are in our log and in our
        files.
        """
        self.adoption = None
        self._save_identity(None)

    def _forget_queues(self) -> None:
        """The queues are about to be made anew: until that is done and on the disk, a crash must
        have it done again.
        """
        assert self._checkpoint is not None
        now = self._checkpoint.current
        mark = now.mark and dataclasses.replace(now.mark, queue_count=UNKNOWN, unit_count=UNKNOWN)
        self._checkpoint.rewind(
            dataclasses.replace(now, queue_time_ms=0, durable_offset=0, mark=mark)
        )
        left = self._clean
        clean = left and dataclasses.replace(left, queue_count=UNKNOWN, unit_count=UNKNOWN)
        self._save_identity(clean, boot_id="")

    def _last_span(self) -> Span:
        return self.last.log_offset, self.last.size

    def _make_directories(self) -> None:
        self.files.make_directories(self.paths.commit_log)
        self.files.make_directories(self.paths.consume_queue)
        reserve.keep(self.files, self.paths.reserve)
        self.files.sync_directory(self.paths.root)

    # --- while it is open -------------------------------------------------------------------------

    def flush_queues(self, last_span: Callable[[], Span], *, at_once: bool = False) -> None:
        """Sync the queues, then note in the checkpoint what is on the disk now. ``last_span`` tells
        where the log's last record stands, which another thread may be moving. ``at_once``: see
        :meth:`Dispatcher.flush`.
        """
        assert self._checkpoint is not None
        # Before the queues: nothing newer may be claimed.
        self._marker.sample(last_span)
        log_offset, log_time_ms = self.log.flushed
        dispatched, queue_time_ms = self.dispatcher.flush(at_once=at_once)
        self.durable = min(log_offset, dispatched)
        with self._checkpoint.changing:
            before = self._checkpoint.current
            reach = max(self.log.reach, self._reach_above(self.log.end[0]))
            self._checkpoint.write(
                dataclasses.replace(
                    before,
                    log_time_ms=max(log_time_ms, before.log_time_ms),
                    queue_time_ms=max(queue_time_ms, before.queue_time_ms),
                    index_time_ms=self.indexer.durable_time_ms,
                    durable_offset=self.durable,
                    mark=self._marker.mark_below(log_offset) or before.mark,
                    reach=reach,
                )
            )
            self.log.reach = reach

    def _extend_reach(self, offset: int) -> None:
        """The log is about to be written up to ``offset``. As a rule the checkpoint has said so
        before, at its last writing.
        """
        assert self._checkpoint is not None
        with self._checkpoint.changing:
            reach = self._reach_above(offset)
            self._checkpoint.write(dataclasses.replace(self._checkpoint.current, reach=reach))
            self.log.reach = reach

    def note_start(self, offset: int) -> None:
        """The log is going to begin at ``offset``: what is in front of it may go. Any thread."""
        assert self._checkpoint is not None
        with self._checkpoint.changing:
            now = self._checkpoint.current
            self._checkpoint.write(dataclasses.replace(now, log_start=offset))

    def _reach_above(self, offset: int) -> int:
        return min(offset + min(REACH_BYTES, self.log.segments.file_bytes), layout.OFFSET_MAX)

    def truncate(self, offset: int, last: LastRecord) -> None:
        """Cut the log at ``offset``, behind its record ``last``, and the queues with it.

        The order makes a crash at any point harmless: recovery must not take the shorter log for a
        damaged one, by a checkpoint or by the units of a queue; no log file may stand behind a gap.
        Queues that are behind the log are brought up to it, and the log is cut again.
        """
        if offset == self.log.start and self.has_state:  # an empty log that had one is refused
            self.has_state = False
            self._save_identity(None)
        self.indexer.truncate(offset)
        self._rewind_checkpoint(offset, last.store_time_ms)
        self.dispatcher.truncate(self.log.segments.start, (offset, last.store_time_ms))
        self.log.truncate(offset, last.store_time_ms)
        self.log.reach = offset
        self.last = last
        self.flush_queues(self._last_span)

    def start_anew(self, offset: int) -> None:
        """Forget the whole log and all queues; the next log begins at ``offset``."""
        # First of all: whoever counts on this store for what it has must not find it again.
        self.store_id, self.former_store_id = _new_store_id(), ""
        self.has_state = False
        self._save_identity(None)
        self._rewind_checkpoint(-1, 0)
        self.dispatcher.drop_all((offset, 0))  # before the log: units without records mean a loss
        self.note_start(offset)
        self.log.start_anew(offset)
        self.log.reach = offset
        self.indexer.truncate(0)
        self.last = LastRecord(offset)
        self.durable = offset

    def _rewind_checkpoint(self, offset: int, time_ms: int) -> None:
        assert self._checkpoint is not None
        self._marker.forget()
        now = self._checkpoint.current
        self._checkpoint.rewind(
            dataclasses.replace(
                now.not_after(time_ms),
                index_time_ms=self.indexer.durable_time_ms,
                durable_offset=min(now.durable_offset, max(offset, 0)),
                mark=now.mark if now.mark is not None and now.mark.end <= offset else None,
            )
        )

    # --- closing ----------------------------------------------------------------------------------

    def close(self, last_offset: int, last_size: int) -> None:
        """Bring everything to the disk and leave the mark of a clean close; ``last_*`` name the
        log's last record.
        """
        self.log.zero_dirty_tail()
        self.dispatcher.catch_up()
        self.dispatcher.reached(self.log.end)
        end = self.log.flush()
        self.indexer.finish()
        self.flush_queues(lambda: (last_offset, last_size))
        assert self.dispatcher.dispatched[0] == end == self.log.end[0]
        last = self.log.read(last_offset, last_size, nowait=False) if last_size else b""
        _, tally = self.dispatcher.tallied
        self._save_identity(RecoveryPoint.of(end, last_offset, last, tally))
        self.files.unlink(self.paths.abort)
        reserve.keep(self.files, self.paths.reserve)
        self.files.sync_directory(self.paths.root)

    def keep_room(self, state_bytes: int) -> None:
        """See :meth:`cometmq.store.base.BaseStore.keep_room`."""
        reserve.keep(self.files, self.paths.reserve, state_bytes)

    def note_failure(self) -> None:
        """The disk has refused: let whoever opens the store next know of it."""
        abortfile.note_failure(self.files, self.paths.abort)

    def release(self) -> None:
        """Close all files and let the folder go, writing nothing; again does nothing."""
        self.log.close()
        self.dispatcher.close()
        self.indexer.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
        if self._lock is not None:
            self._lock.release(undo=not self._is_changed)
            self._lock = None

    def _save_identity(self, clean: RecoveryPoint | None, boot_id: str | None = None) -> None:
        assert self.store_id
        boot_id = self.files.boot_id() if boot_id is None else boot_id
        pending = None if self.adoption is None else self.adoption.verified
        now = identity.Identity(
            self.store_id,
            boot_id,
            clean,
            self._recovered,
            pending,
            self._last_options,
            self.former_store_id,
            self.state_lost,
            self.has_state,
        )
        identity.save(self.files, self.paths.identity, now)


class Preview:
    """What a store will hold once it is open, while nothing has been changed yet. What it does is
    told by the methods of the same names of :class:`cometmq.store.base.BaseStore`.
    """

    def __init__(self, opened: OpenedStore) -> None:
        self._opened = opened

    @property
    def adoption(self) -> foreign.Adoption | None:
        return self._opened.adoption

    @property
    def state_lost(self) -> Mapping[str, int] | None:
        return self._opened.state_lost

    @property
    def has_state(self) -> bool:
        return self._opened.has_state

    @property
    def may_lack_queues(self) -> bool:
        """Queues are missing, and the deletion of a topic may not be all that explains it."""
        return self._opened.may_lack_queues

    @property
    def min_offset(self) -> int:
        return self._opened.log.start

    @property
    def appended_offset(self) -> int:
        return self._opened.log.end[0]

    def queues(self) -> Iterator[tuple[str, int]]:
        return ((queue.topic, queue.queue_id) for queue in self._opened.dispatcher.queues())

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        queue = self._opened.dispatcher.find(topic, queue_id)
        return (0, 0) if queue is None else (queue.min_offset, queue.next_offset)

    def read_units(
        self, topic: str, queue_id: int, offset: int, count: int, *, nowait: bool = False
    ) -> bytes:
        queue = self._opened.dispatcher.find(topic, queue_id)
        return b"" if queue is None else queue.read_units(offset, count, nowait=nowait)

    def read_records(self, spans: Sequence[Span], *, nowait: bool = False) -> bytes:
        return self._opened.log.read_records(spans, nowait=nowait)


Look = Callable[[Preview], None]


def _new_store_id() -> str:
    return uuid.uuid4().hex


def _last_options(options: StoreOptions) -> identity.LastOptions:
    return identity.LastOptions(
        log_file_bytes=options.commit_log_file_bytes,
        queue_file_bytes=options.consume_queue_file_bytes,
        hash_slots=options.index_sizes.hash_slots,
        index_entries=options.index_sizes.entries,
        transient_bytes_max=options.transient_bytes_max,
    )

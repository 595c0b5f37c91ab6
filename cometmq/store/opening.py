"""What an open store is made of, how it is opened and how it is closed.

A crash at any of the steps is harmless because of their order: ``docs/format/store-layout.md`` §4
and §5.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cometmq.errors import StoreDamaged, StoreFailed
from cometmq.format import queueunit
from cometmq.format.batch import BatchLimits
from cometmq.format.indexfile import Sizes
from cometmq.store import layout
from cometmq.store.disk.files import Files
from cometmq.store.folder import abortfile, checkpoint, epochs, identity, reserve
from cometmq.store.folder.dirlock import DirectoryLock
from cometmq.store.folder.logmark import UNKNOWN, LogMark
from cometmq.store.keys.indexing import Indexer
from cometmq.store.log.commitlog import CommitLog, Span
from cometmq.store.log.scanning import RECORD_BYTES_MAX
from cometmq.store.queues.dispatch import Dispatcher
from cometmq.store.restart import foreign, recovery
from cometmq.store.restart.marking import Marker
from cometmq.store.restart.recovery import Plan, Progress
from cometmq.store.restart.replay import LastRecord, Loss, Observer

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
        self.takeover: foreign.Takeover | None = None
        self.durable = 0  # log offset before which log and queues are on the disk
        self.last = LastRecord()  # of the log, when it was opened
        self._recovered = False  # an unclean stop, which no writer has taken notice of
        self._options = _last_options(options)
        self._last_options: identity.LastOptions | None = None  # ours, once all is recovered
        self._clean: LogMark | None = None  # what the last stop left, until all is recovered
        self._checkpoint: checkpoint.CheckpointFile | None = None
        self._marker = Marker(self.log, self.dispatcher)
        self.losses: list[Loss] = []  # that recovery found
        self._lock: DirectoryLock | None = DirectoryLock(self.paths.lock)

    # --- opening ----------------------------------------------------------------------------------

    def open(self, observer: Observer | None, progress: Progress | None) -> None:
        """Take up what the last stop left, whatever it was. Then :meth:`begin_epoch` or
        :meth:`begin_following`.
        """
        try:
            self._open(observer, progress)
        except StoreFailed:
            self.note_failure()
            raise

    def _open(self, observer: Observer | None, progress: Progress | None) -> None:
        paths, files = self.paths, self.files
        known = identity.load(files, paths.identity)
        if known is not None:
            self._last_options, self._clean = known.options, known.clean
        saved_checkpoint = checkpoint.load(files, paths.checkpoint)
        self.epochs = self._load_epochs(known)
        self.log.segments.load(files)
        self.indexer.load()
        self.takeover = foreign.look(files, paths, known, self.log, saved_checkpoint)
        plan = self._plan(known, saved_checkpoint)
        disk_failed = abortfile.tells_of_failure(files, paths.abort)
        # A full volume is to be opened too: what means nothing goes before anything is written.
        foreign.remove_leftovers(files, paths)
        reserve.use(files, paths.reserve)
        # From here on the folder is being changed, which RocketMQ sees by the file `abort`.
        abortfile.write(files, paths.abort, failed=disk_failed)
        self._checkpoint = checkpoint.CheckpointFile(files, paths.checkpoint)
        self._name(known, disk_failed=disk_failed)
        self._recovered = known is not None and (known.recovered or known.clean is None)
        self.clean_start = not self._recovered
        if self.takeover is not None:
            self._begin_takeover(self.takeover)
        self._recover(plan, observer, progress)
        if self.takeover is not None and self.takeover.log_changed:
            self._begin_foreign_epoch(self.takeover.verified)
        if known is not None and known.clean is None:
            self._warn_of_memory(known.options)
        # RocketMQ 5's index lacks keys after a crash of its own, and nothing shows it.
        known_time_ms = 0 if plan.is_foreign else saved_checkpoint.index_time_ms
        self.indexer.settle(known_time_ms, crashed=not plan.is_clean)
        if disk_failed:
            self.log.write_again(plan.start)
        self.log.flush()
        self.flush_queues(self._last_span)
        # Only now: a crash during recovery must find the old boot id, because not everything was on
        # the disk yet.
        self._last_options = self._options
        self._save_identity(None)
        if disk_failed:
            abortfile.write(files, paths.abort, failed=False)

    def _name(self, known: identity.Identity | None, *, disk_failed: bool) -> None:
        """Call the store what it was called, unless the end of its log may be lost."""
        if known is None:
            self.store_id = _new_store_id()
            return
        self.store_id, self.former_store_id = known.store_id, known.former_store_id
        memory_lost = known.options is not None and known.options.transient_bytes_max > 0
        whole = self._same_boot(known) and not disk_failed and not memory_lost
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

    def _plan(self, known: identity.Identity | None, saved: checkpoint.Checkpoint) -> Plan:
        """How to go on from the last stop."""
        if self.takeover is not None and self.takeover.log_changed:
            return recovery.takeover_plan(self.log, saved, self._clean)
        if known is None:
            return Plan(0, "it is new", is_clean=True)
        if known.clean is not None:
            return recovery.clean_plan(self.log, known.clean)
        return recovery.crash_plan(self.log, saved, same_boot=self._same_boot(known))

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

    def _recover(self, plan: Plan, observer: Observer | None, progress: Progress | None) -> None:
        """Bring log and queues to where the last stop left them, or to the end of what it left."""
        if not plan.is_clean:
            logger.info(
                "%s, %s: the log is read from %d on: %s",
                self.paths.root,
                plan.after,
                plan.start,
                plan.why,
            )
        rebuild = recovery.recover(
            self.log,
            self.dispatcher,
            observer,
            plan,
            progress=progress,
            forget_queues=self._forget_queues,
            disagreement=lambda: foreign.disagreement(
                self.files, self.paths, self.log, self.dispatcher
            ),
        )
        if not plan.is_clean:
            recovery.cut_tail(self.log, self.files, rebuild.end)
            logger.info(
                "recovered %d records; the log ends at %d: %s",
                rebuild.record_count,
                rebuild.end,
                rebuild.reason,
            )
        self.losses = rebuild.losses
        for loss in rebuild.losses:
            logger.error(
                "lost: %d messages from offset %d on of queue %d of %s, damaged at %d of the log",
                loss.message_count,
                loss.first_queue_offset,
                loss.queue_id,
                loss.topic,
                loss.log_offset,
            )
        self.last = rebuild.last
        self.log.end = (rebuild.end, self.last.store_time_ms)
        self.log.flushed = (min(plan.start, rebuild.end), 0)
        # Where damage was passed over, not all that is behind the plan's start was good.
        self.log.trusted_from = rebuild.end if rebuild.damages else min(plan.start, rebuild.end)
        self.dispatcher.reached(self.log.end)
        self._correct_checkpoint()

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

    def _begin_takeover(self, takeover: foreign.Takeover) -> None:
        """Note that the log is another program's from some place on, so that a crash does not make
        us take its bytes for ours. What our clean close left stays known until all is recovered: a
        log that has lost some of it is refused, at every start.
        """
        logger.warning(
            "%s: another program was here; its records from %d on%s are taken over",
            self.paths.root,
            takeover.verified,
            "".join(f", {name}" for name in takeover.tables),
        )
        self._save_identity(self._clean, boot_id="")

    def _begin_foreign_epoch(self, verified: int) -> None:
        """The log is another program's from ``verified`` on."""
        number = epochs.next_number(self.epochs, 0)
        kept = epochs.trim(self.epochs, self.log.segments.start, verified)
        self.save_epochs([*kept, epochs.Epoch(number, verified)])

    def settle_takeover(self) -> None:
        """All that the other program left is ours now: its tables, too, are in our log and in our
        files.
        """
        self.takeover = None
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

    def flush_queues(self, last_span: Callable[[], Span]) -> None:
        """Sync the queues, then note in the checkpoint what is on the disk now. ``last_span`` tells
        where the log's last record stands, which another thread may be moving.
        """
        assert self._checkpoint is not None
        # Before the queues: nothing newer may be claimed.
        self._marker.sample(last_span)
        log_offset, log_time_ms = self.log.flushed
        dispatched, queue_time_ms = self.dispatcher.flush()
        self.durable = min(log_offset, dispatched)
        before = self._checkpoint.current
        self._checkpoint.write(
            dataclasses.replace(
                before,
                log_time_ms=max(log_time_ms, before.log_time_ms),
                queue_time_ms=max(queue_time_ms, before.queue_time_ms),
                index_time_ms=self.indexer.durable_time_ms,
                durable_offset=self.durable,
                mark=self._marker.mark_below(log_offset) or before.mark,
            )
        )

    def truncate(self, offset: int, last: LastRecord) -> None:
        """Cut the log at ``offset``, behind its record ``last``, and the queues with it.

        The order makes a crash at any point harmless: recovery must not take the shorter log for a
        damaged one, no log file may stand behind a gap, and a queue may be ahead of the log but not
        behind it.
        """
        self.indexer.truncate(offset)
        self._rewind_checkpoint(offset, last.store_time_ms)
        self.log.truncate(offset, last.store_time_ms)
        self.dispatcher.truncate(self.log.segments.start, self.log.end)
        self.last = last
        self.flush_queues(self._last_span)

    def start_anew(self, offset: int) -> None:
        """Forget the whole log and all queues; the next log begins at ``offset``."""
        # First of all: whoever counts on this store for what it has must not find it again.
        self.store_id, self.former_store_id = _new_store_id(), ""
        self._save_identity(None)
        self._rewind_checkpoint(-1, 0)
        self.log.start_anew(offset)
        self.indexer.truncate(0)
        self.dispatcher.drop_all(self.log.end)
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
        self.log.heal()
        self.dispatcher.catch_up()
        self.dispatcher.reached(self.log.end)
        end = self.log.flush()
        self.indexer.finish()
        self.flush_queues(lambda: (last_offset, last_size))
        assert self.dispatcher.dispatched[0] == end == self.log.end[0]
        last = self.log.read(last_offset, last_size, nowait=False) if last_size else b""
        _, tally = self.dispatcher.tallied
        self._save_identity(LogMark.of(end, last_offset, last, tally))
        self.files.unlink(self.paths.abort)
        reserve.keep(self.files, self.paths.reserve)
        self.files.sync_directory(self.paths.root)

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
            self._lock.release()
            self._lock = None

    def _save_identity(self, clean: LogMark | None, boot_id: str | None = None) -> None:
        assert self.store_id
        boot_id = self.files.boot_id() if boot_id is None else boot_id
        pending = None if self.takeover is None else self.takeover.verified
        now = identity.Identity(
            self.store_id,
            boot_id,
            clean,
            self._recovered,
            pending,
            self._last_options,
            self.former_store_id,
        )
        identity.save(self.files, self.paths.identity, now)


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

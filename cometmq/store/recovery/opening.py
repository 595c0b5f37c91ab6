"""What an open store is made of, how it is opened and how it is closed.

A crash at any of the steps is harmless because of their order: ``docs/format/store-layout.md`` §4
and §5.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cometmq.errors import Shortage, StoreFailed
from cometmq.format import queueunit
from cometmq.format.batch import BatchLimits
from cometmq.format.indexfile import Sizes
from cometmq.store import layout
from cometmq.store.disk.files import Files, permissions
from cometmq.store.index.indexer import Indexer
from cometmq.store.log.commitlog import CommitLog, Span
from cometmq.store.log.scan import RECORD_BYTES_MAX
from cometmq.store.metadata import abortfile, checkpoint, epochs, heads, identity, reserve
from cometmq.store.metadata.checkpoint import Checkpoint, CheckpointFile
from cometmq.store.metadata.dirlock import DirectoryLock
from cometmq.store.metadata.epochs import Epoch
from cometmq.store.metadata.heads import HeadsFile
from cometmq.store.metadata.identity import Identity, IdentityFile
from cometmq.store.metadata.recovery_point import UNKNOWN, RecoveryPoint
from cometmq.store.queues.dispatch import Dispatcher
from cometmq.store.recovery import adoption, plan, shape, witness
from cometmq.store.recovery.adoption import Adoption
from cometmq.store.recovery.checkpointer import Checkpointer
from cometmq.store.recovery.plan import Plan
from cometmq.store.recovery.recovery import Progress, Recovery
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


class _Found(NamedTuple):
    """What a start has read, and what it is going to do."""

    known: Identity | None
    saved: Checkpoint
    disk_failed: bool
    todo: Recovery


class OpenedStore:
    """The parts of one data folder, which is locked until :meth:`release`.

    Complete after :meth:`open`: everything that is there is then on the disk.
    """

    def __init__(self, root: Path, options: StoreOptions, files: Files) -> None:
        self.paths = layout.StorePaths(root)
        self.files = files
        self.identity = IdentityFile(files, self.paths.identity)
        self.log = CommitLog(
            self.paths, files, options.commit_log_file_bytes, options.transient_bytes_max
        )
        self.dispatcher = Dispatcher(self.paths, files, options.consume_queue_file_bytes)
        self.indexer = Indexer(
            self.log, self.paths.index, files, options.index_sizes, enabled=options.index_enabled
        )
        self.epoch = 0  # the highest that is known
        self.epochs: list[Epoch] = []
        self._heads: HeadsFile | None = None  # from the first change of the folder on
        self.clean_start = False
        self.adoption: Adoption | None = None
        self.last = LastRecord()  # of the log, when it was opened
        # Why all queues are to be rebuilt, whatever they hold; set before opening.
        self.rebuild_reason = ""
        # What the disk cannot read from here on is given up; set before opening.
        self.accepted_end: int | None = None
        self.losses: list[Loss] = []  # that recovery found
        self.has_damage = False  # which recovery passed over
        self.may_lack_queues = False  # see Preview
        self._options = options
        self._checkpoint: Checkpointer | None = None  # from the first change of the folder on
        self._is_changed = False  # the folder, by us
        shape.check(files, self.paths)
        self._lock: DirectoryLock | None = DirectoryLock(self.paths.lock)

    @property
    def checkpoint(self) -> Checkpointer:
        """The checkpointer, once :meth:`open` has returned."""
        assert self._checkpoint is not None, self.paths.root
        return self._checkpoint

    # --- opening ----------------------------------------------------------------------------------

    def open(
        self, observer: Observer | None, progress: Progress | None, approve: Approve | None = None
    ) -> None:
        """Take up what the last stop left, whatever it was. Then :meth:`begin_epoch` or
        :meth:`begin_following`.

        Until ``approve`` has seen what the store is going to hold, nothing is changed in the
        folder. So whatever it raises leaves the folder as it was, as any refusal of ours does.
        """
        with permissions():
            found = self._plan(observer, progress)
        if approve is not None:
            self.show_to(approve)
        shape.warn_if_public(self.files, self.paths)
        self._is_changed = True
        try:
            with permissions():
                self._carry_out(found)
        except StoreFailed:
            self.note_failure()
            raise

    def show_to(self, approve: Approve) -> None:
        """Raises what ``approve`` raises about what the store holds."""
        approve(Preview(self))

    def _plan(self, observer: Observer | None, progress: Progress | None) -> _Found:
        """What is there and what has to be done; reads only."""
        paths, files = self.paths, self.files
        known = self.identity.load()
        saved = checkpoint.load(files, paths.checkpoint)
        has_log = known is not None and bool(files.entries(paths.commit_log))
        self.epochs = epochs.load(files, paths.epochs, must_exist=has_log)
        self.log.segments.load(files)
        self.indexer.load()
        self.adoption = adoption.find_adoption(files, paths, known, self.log, saved)
        if self.adoption is None:  # else its retention may have been here
            plan.refuse_missing_start(self.log, saved.log_start)
            plan.refuse_strange_files(self.log, heads.load(files, paths.heads), self.epochs)
        disk_failed = abortfile.records_failure(files, paths.abort)
        chosen = self._plan_after_stop(known, saved, disk_failed=disk_failed)
        chosen = dataclasses.replace(
            chosen, rebuild_reason=self.rebuild_reason, accepted_end=self.accepted_end
        )
        if not chosen.is_clean:
            logger.info(
                "%s, %s: the log is read from %d on: %s",
                paths.root,
                chosen.after,
                chosen.start,
                chosen.why,
            )
        todo = Recovery(self.log, self.dispatcher, observer, chosen)
        todo.decide(
            progress, lambda: adoption.disagreement(files, paths, self.log, self.dispatcher)
        )
        rebuild = todo.rebuild
        self.losses, self.last = rebuild.losses, rebuild.last
        self.has_damage = bool(rebuild.damages)
        self.may_lack_queues = todo.may_lack_queues
        self.log.end = (rebuild.end, self.last.store_time_ms)
        self.log.flushed = (min(chosen.start, rebuild.end), 0)
        # Where damage was passed over, not all that is behind the plan's start was good.
        self.log.trusted_from = rebuild.end if rebuild.damages else min(chosen.start, rebuild.end)
        return _Found(known, saved, disk_failed, todo)

    def _plan_after_stop(
        self, known: Identity | None, saved: Checkpoint, *, disk_failed: bool
    ) -> Plan:
        """How to recover from the last stop."""
        if self.adoption is not None and self.adoption.log_changed:
            return plan.adoption_plan(self.log, saved, self.identity.current.clean)
        if known is None:
            return Plan(0, "it is new", is_clean=True)
        if known.clean is not None:
            return plan.clean_plan(self.log, known.clean)
        return plan.crash_plan(
            self.log,
            saved,
            same_boot=witness.same_boot(self.files, known),
            kept_all=witness.kept_all(self.files, known, disk_failed=disk_failed),
        )

    def _carry_out(self, found: _Found) -> None:
        paths, files, known, chosen = self.paths, self.files, found.known, found.todo.plan
        # A full volume is to be opened too: what means nothing goes before anything is written.
        adoption.remove_leftovers(files, paths)
        reserve.use(files, paths.reserve)
        # From here on the folder is being changed, which RocketMQ sees by the file `abort`.
        abortfile.write(files, paths.abort, failed=found.disk_failed)
        file = CheckpointFile(files, paths.checkpoint)
        self._checkpoint = Checkpointer(self.log, self.dispatcher, self.indexer, file)
        self._heads = HeadsFile(files, paths.heads)
        self._name(known, disk_failed=found.disk_failed)
        self.clean_start = known is None or (known.clean is not None and not known.recovered)
        self.identity.note(recovered=not self.clean_start)
        if self.adoption is not None:
            self._begin_adoption(self.adoption)
        # Behind it the log's files hold zeros; RocketMQ keeps no such account.
        is_known = found.saved.reach and not chosen.is_foreign
        self.log.reach = found.saved.reach if is_known else layout.OFFSET_MAX
        found.todo.carry_out(files, self._forget_queues)
        found.todo.log_outcome()
        self.dispatcher.reached(self.log.end)
        self.checkpoint.correct(self.last.store_time_ms)
        if self.adoption is not None and self.adoption.log_changed:
            self._begin_foreign_epoch(self.adoption.verified)
        if known is not None and known.clean is None:
            self._warn_of_memory(known.options)
        # RocketMQ 5's index lacks keys after a crash of its own, and nothing shows it.
        known_time_ms = 0 if chosen.is_foreign else found.saved.index_time_ms
        self.indexer.settle(known_time_ms, crashed=not chosen.is_clean)
        if found.disk_failed:
            self.log.write_again(chosen.start)
        self.log.flush()
        # What is written from now on stays below what the checkpoint says.
        self.log.reach, self.log.extend = self.log.end[0], self.checkpoint.extend_reach
        self.checkpoint.flush_queues(self._last_span, at_once=True)
        self.checkpoint.note_start(self.log.start)
        # Only now: a crash during recovery must find the old boot id, because not everything was on
        # the disk yet.
        self.identity.write(clean=None, options=_last_options(self._options))
        if found.disk_failed:
            abortfile.write(files, paths.abort, failed=False)

    def _name(self, known: Identity | None, *, disk_failed: bool) -> None:
        """Call the store what it was called, unless the end of its log may be lost."""
        if known is None:
            self.identity.note(store_id=identity.new_store_id())
        elif known.clean is None and not witness.kept_all(
            self.files, known, disk_failed=disk_failed
        ):
            former = known.former_store_id or known.store_id
            self.identity.note(store_id=identity.new_store_id(), former_store_id=former)
            logger.warning(
                "%s: the end of the log may be lost: the store is called %s from now on, not %s",
                self.paths.root,
                self.identity.current.store_id,
                known.store_id,
            )

    def _warn_of_memory(self, last: identity.LastOptions | None) -> None:
        """What was acknowledged and in memory alone is gone; nothing on the disk shows it."""
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

    def _forget_queues(self) -> None:
        """The queues are about to be rebuilt: until that is done and on the disk, a crash must
        have it done again.
        """
        self.checkpoint.forget_queues()
        left = self.identity.current.clean
        clean = left and dataclasses.replace(left, queue_count=UNKNOWN, unit_count=UNKNOWN)
        self.identity.write(boot_id="", clean=clean)

    def _last_span(self) -> Span:
        return self.last.log_offset, self.last.size

    def settle(self, last_offset: int, last_size: int) -> None:
        """Leave an open store as :meth:`open` leaves one; ``last_*`` name the log's last record."""
        self.log.zero_dirty_tail()
        self.dispatcher.catch_up()
        self.dispatcher.reached(self.log.end)
        self.log.flush()
        self.last = LastRecord(last_offset, last_size, self.log.end[1])
        reserve.use(self.files, self.paths.reserve)

    # --- epochs -----------------------------------------------------------------------------------

    def begin_epoch(self, floor: int) -> None:
        """Open the log for writing: a new epoch starts at its end."""
        # What recovery could not bring back is the epoch's own matter: `clean_start` reports it to
        # the caller.
        self.identity.note(recovered=False)
        end = self.log.end[0]
        self.epoch = epochs.next_number(self.epochs, floor)
        kept = epochs.trim(self.epochs, self.log.start, end)
        self.save_epochs([*kept, Epoch(self.epoch, end)])
        self.forget_former_name()
        self._make_directories()
        if not len(self.log.segments):
            self.log.prepare_next_file()

    def begin_following(self) -> None:
        """Open the log for a copy of another's."""
        self.epoch = epochs.next_number(self.epochs, 0) - 1
        self.save_epochs(self.epochs)
        self._make_directories()

    def save_epochs(self, now: list[Epoch]) -> None:
        """Let the epochs be ``now``, on the disk at return."""
        epochs.save(self.files, self.paths.epochs, now)
        self.epochs = now

    def note_heads(self) -> None:
        """Note what the files of the log begin with, as far as it is on the disk. Not on a full
        disk: the list can be done without.
        """
        assert self._heads is not None, self.paths.root
        with suppress(Shortage):
            self._heads.note(self.log.segments, self.log.flushed[0], self.epochs)

    def forget_former_name(self) -> None:
        """The store follows a writer, or writes: its name before a loss is of no use any more."""
        if self.identity.current.former_store_id:
            self.identity.write(former_store_id="")

    def _make_directories(self) -> None:
        self.files.make_directories(self.paths.commit_log)
        self.files.make_directories(self.paths.consume_queue)
        reserve.keep(self.files, self.paths.reserve)
        self.files.sync_directory(self.paths.root)

    # --- what another program left, and the state -------------------------------------------------

    def _begin_adoption(self, found: Adoption) -> None:
        """Note that the log is another program's from some place on, so that a crash does not make
        us take its bytes for ours. What our clean close left stays known until all is recovered: a
        log that has lost some of it is refused, at every start.
        """
        logger.warning(
            "%s: another program was here; its records from %d on%s are taken over",
            self.paths.root,
            found.verified,
            "".join(f", {name}" for name in found.tables),
        )
        self.identity.write(boot_id="", foreign=found.verified)

    def _begin_foreign_epoch(self, verified: int) -> None:
        """The log is another program's from ``verified`` on."""
        number = epochs.next_number(self.epochs, 0)
        kept = epochs.trim(self.epochs, self.log.segments.start, verified)
        self.save_epochs([*kept, Epoch(number, verified)])

    def finish_adoption(self) -> None:
        """All that the other program left is ours now: its tables, too, are in our log and in our
        files.
        """
        self.adoption = None
        self.identity.write(foreign=None)

    def settle_state(self) -> None:
        """The state is whole, in the log and on the disk."""
        now = self.identity.current
        if now.state_lost is not None or not now.has_state:
            self.identity.write(state_lost=None, has_state=True)

    # --- cutting: no other thread uses the store --------------------------------------------------

    def truncate(self, offset: int, last: LastRecord) -> None:
        """Cut the log at ``offset``, behind its record ``last``, and the queues with it.

        The order makes a crash at any point harmless: recovery must not take the shorter log for a
        damaged one, by a checkpoint or by the units of a queue; no log file may follow a gap.
        Queues that are behind the log are brought up to it, and the log is cut again.
        """
        # An empty log that had a state is refused.
        if offset == self.log.start and self.identity.current.has_state:
            self.identity.write(has_state=False)
        self.indexer.truncate(offset)
        self.checkpoint.rewind(offset, last.store_time_ms)
        self.dispatcher.truncate(self.log.segments.start, (offset, last.store_time_ms))
        self.log.truncate(offset, last.store_time_ms)
        self.log.reach = offset
        self.last = last
        self.checkpoint.flush_queues(self._last_span)

    def reset_to(self, offset: int) -> None:
        """Forget the whole log and all queues; the next log begins at ``offset``."""
        # First of all: members that count on this store for what it has must not find it again.
        name = identity.new_store_id()
        self.identity.write(store_id=name, former_store_id="", has_state=False)
        self.checkpoint.rewind(-1, 0)
        self.dispatcher.drop_all((offset, 0))  # before the log: units without records mean a loss
        self.checkpoint.note_start(offset)
        self.log.reset_to(offset)
        self.log.reach = offset
        self.indexer.truncate(0)
        self.last = LastRecord(offset)
        self.checkpoint.durable = offset

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
        self.checkpoint.flush_queues(lambda: (last_offset, last_size))
        self.note_heads()
        assert self.dispatcher.dispatched[0] == end == self.log.end[0]
        last = self.log.read(last_offset, last_size, nowait=False) if last_size else b""
        _, tally = self.dispatcher.tallied
        self.identity.write(clean=RecoveryPoint.of(end, last_offset, last, tally))
        self.files.unlink(self.paths.abort)
        reserve.keep(self.files, self.paths.reserve)
        self.files.sync_directory(self.paths.root)

    def note_failure(self) -> None:
        """The disk has refused: the next process that opens the store is to know of it."""
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


class Preview:
    """What a store will hold once it is open, while nothing has been changed yet. Its methods are
    those of :class:`cometmq.store.base.BaseStore`.
    """

    def __init__(self, opened: OpenedStore) -> None:
        self._opened = opened

    @property
    def adoption(self) -> Adoption | None:
        return self._opened.adoption

    @property
    def state_lost(self) -> Mapping[str, int] | None:
        return self._opened.identity.current.state_lost

    @property
    def has_state(self) -> bool:
        return self._opened.identity.current.has_state

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

    def repair_command(self, options: str = "") -> str:
        return layout.repair_command(self._opened.paths.root, options)


Approve = Callable[[Preview], None]


def _last_options(options: StoreOptions) -> identity.LastOptions:
    return identity.LastOptions(
        log_file_bytes=options.commit_log_file_bytes,
        queue_file_bytes=options.consume_queue_file_bytes,
        hash_slots=options.index_sizes.hash_slots,
        index_entries=options.index_sizes.entries,
        transient_bytes_max=options.transient_bytes_max,
    )

"""What an open store is made of, how it is opened and how it is closed.

A crash at any of the steps is harmless because of their order: ``docs/format/store-layout.md`` §4
and §5.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from cometmq.errors import StoreDamaged
from cometmq.format import queueunit
from cometmq.format.batch import BatchLimits
from cometmq.store import checkpoint, epochs, foreign, identity, layout, recovery
from cometmq.store.commitlog import CommitLog
from cometmq.store.dirlock import DirectoryLock
from cometmq.store.dispatch import Dispatcher
from cometmq.store.files import Files, replace
from cometmq.store.recovery import RECORD_BYTES_MAX, LastRecord, Observer, Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """``*_file_bytes`` are fixed for a store's life: files of another size are refused."""

    commit_log_file_bytes: int = 1024 * 1024 * 1024
    consume_queue_file_bytes: int = 6_000_000
    open_files_max: int = 4096
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
        self.log = CommitLog(self.paths, files, options.commit_log_file_bytes)
        self.dispatcher = Dispatcher(self.paths, files, options.consume_queue_file_bytes)
        self.store_id = ""
        self.epoch = 0  # the highest that is known
        self.epochs: list[epochs.Epoch] = []
        self.clean_start = False
        self.last = LastRecord()  # of the log, when it was opened
        self._recovered = False  # an unclean stop, which no writer has taken notice of
        self._checkpoint: checkpoint.CheckpointFile | None = None
        self._lock: DirectoryLock | None = DirectoryLock(self.paths.lock)

    # --- opening ----------------------------------------------------------------------------------

    def open(self, observer: Observer | None, progress: Progress | None) -> None:
        """Take up what the last stop left, whatever it was. Then :meth:`begin_epoch` or
        :meth:`begin_following`.
        """
        paths, files = self.paths, self.files
        known = identity.load(files, paths.identity)
        foreign.refuse_foreign_store(files, paths, known)
        saved_checkpoint = checkpoint.load(files, paths.checkpoint)
        self.epochs = self._load_epochs()
        self.log.segments.load(files)
        if known is not None and known.clean is not None:
            self.last = recovery.verify_clean(self.log, known.clean)
        # From here on the folder is being changed, which RocketMQ sees by the file `abort`.
        replace(files, paths.abort, str(files.process_id()).encode("ascii"))
        foreign.remove_leftovers(files, paths)
        if known is None or known.clean is not None:
            self._take_up(0 if known is None or known.clean is None else known.clean.end)
        else:
            self._recover(known.boot_id, saved_checkpoint, observer, progress)
        self._checkpoint = checkpoint.CheckpointFile(files, paths.checkpoint)
        self.log.flush()
        self.flush_queues()
        # Only now: a crash during recovery must find the old boot id, because not everything was on
        # the disk yet.
        self.store_id = uuid.uuid4().hex if known is None else known.store_id
        self._recovered = known is not None and (known.recovered or known.clean is None)
        self.clean_start = not self._recovered
        self._save_identity(None)

    def begin_epoch(self, floor: int) -> None:
        """Open the log for writing: a new epoch starts at its end."""
        # What recovery could not bring back is the epoch's own matter: whoever opened it has been
        # told by `clean_start`.
        self._recovered = False
        end = self.log.end[0]
        self.epoch = epochs.next_number(self.epochs, floor)
        self.save_epochs([*epochs.trim(self.epochs, end), epochs.Epoch(self.epoch, end)])
        self._make_directories()
        if not len(self.log.segments):
            self.log.prepare_next_file()

    def begin_following(self) -> None:
        """Open the log for a copy of another's."""
        self.epoch = epochs.next_number(self.epochs, 0) - 1
        self.save_epochs(self.epochs)
        self._make_directories()

    def save_epochs(self, now: list[epochs.Epoch]) -> None:
        """Let the epochs be ``now``, on the disk at return."""
        epochs.save(self.files, self.paths.epochs, now)
        self.epochs = now

    def _load_epochs(self) -> list[epochs.Epoch]:
        if not self.files.exists(self.paths.epochs) and self.files.entries(self.paths.commit_log):
            raise StoreDamaged(f"{self.paths.epochs} is missing although the store has a log")
        return epochs.load(self.files, self.paths.epochs)

    def _take_up(self, end: int) -> None:
        """What a clean close left, or an empty folder."""
        self.dispatcher.load(self.log.segments.start, end, durable=end)
        self._reached(end, durable=end)

    def _recover(
        self,
        boot_id: str,
        saved: checkpoint.Checkpoint,
        observer: Observer | None,
        progress: Progress | None,
    ) -> None:
        """What a crash left: of the process alone when the machine still runs, else of both."""
        durable = recovery.durable_position(self.log, saved)
        same_boot = boot_id == self.files.boot_id() != ""
        start = recovery.newest_file_with_data(self.log) if same_boot else durable
        self.dispatcher.load(self.log.segments.start, start, durable)
        rebuild = recovery.Rebuild(self.log, self.dispatcher, observer)
        rebuild.run(start, progress)
        recovery.refuse_damage(self.log, rebuild, saved)
        recovery.cut_tail(self.log, self.files, rebuild.end)
        self.last = rebuild.last
        self._reached(rebuild.end, durable)
        logger.info("recovered the log from %d to %d: %s", start, rebuild.end, rebuild.reason)

    def _reached(self, end: int, durable: int) -> None:
        self.log.end = (end, self.last.store_time_ms)
        self.log.flushed = (min(durable, end), 0)
        self.dispatcher.reached(self.log.end)

    def _make_directories(self) -> None:
        self.files.make_directories(self.paths.commit_log)
        self.files.make_directories(self.paths.consume_queue)
        self.files.sync_directory(self.paths.root)

    # --- while it is open -------------------------------------------------------------------------

    def flush_queues(self) -> None:
        """Sync the queues, then note in the checkpoint what is on the disk now."""
        assert self._checkpoint is not None
        log_time_ms = self.log.flushed[1]  # before the queues: nothing newer may be claimed
        _, queue_time_ms = self.dispatcher.flush()
        before = self._checkpoint.current
        self._checkpoint.write(
            checkpoint.Checkpoint(
                max(log_time_ms, before.log_time_ms), max(queue_time_ms, before.queue_time_ms)
            )
        )

    def truncate(self, offset: int, last: LastRecord) -> None:
        """Cut the log at ``offset``, behind its record ``last``, and the queues with it.

        The order makes a crash at any point harmless: recovery must not take the shorter log for a
        damaged one, no log file may stand behind a gap, and a queue may be ahead of the log but not
        behind it.
        """
        self._rewind_checkpoint(last.store_time_ms)
        self.log.truncate(offset, last.store_time_ms)
        self.dispatcher.truncate(self.log.segments.start, self.log.end)
        self.last = last
        self.flush_queues()

    def start_anew(self, offset: int) -> None:
        """Forget the whole log and all queues; the next log begins at ``offset``."""
        self._rewind_checkpoint(0)
        self.log.start_anew(offset)
        self.dispatcher.drop_all(self.log.end)
        self.last = LastRecord(offset)

    def _rewind_checkpoint(self, time_ms: int) -> None:
        assert self._checkpoint is not None
        now = self._checkpoint.current
        self._checkpoint.rewind(
            checkpoint.Checkpoint(min(now.log_time_ms, time_ms), min(now.queue_time_ms, time_ms))
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
        self.flush_queues()
        assert self.dispatcher.dispatched[0] == end == self.log.end[0]
        last = self.log.read(last_offset, last_size, nowait=False) if last_size else b""
        self._save_identity(identity.CleanMark.of(end, last_offset, last))
        self.files.unlink(self.paths.abort)
        self.files.sync_directory(self.paths.root)

    def release(self) -> None:
        """Close all files and let the folder go, writing nothing; again does nothing."""
        self.log.close()
        self.dispatcher.close()
        if self._checkpoint is not None:
            self._checkpoint.close()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _save_identity(self, clean: identity.CleanMark | None) -> None:
        assert self.store_id
        now = identity.Identity(self.store_id, self.files.boot_id(), clean, self._recovered)
        identity.save(self.files, self.paths.identity, now)

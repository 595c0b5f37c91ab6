"""The store as a follower sees it: a copy of another's log, byte for byte.

Opened without an epoch of its own. What comes is verified and written at the writer's log offset;
queues are built from it as at recovery. Before a log that has gone another way can be followed it
is cut; no other thread may use the store then.

Synchronous and single-writer, like ``writer.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from cometmq.errors import ReplicationBroken, StoreFailed
from cometmq.format import queueunit, record
from cometmq.format.record import BLANK_BYTES
from cometmq.store.base import BaseStore
from cometmq.store.disk.files import Files, OsFiles, permissions
from cometmq.store.log.scan import Stretch, apart_of, next_stretch
from cometmq.store.metadata import cutoff
from cometmq.store.metadata.epochs import Epoch
from cometmq.store.recovery.opening import Approve, OpenedStore, StoreOptions
from cometmq.store.recovery.recovery import Progress, last_record_before
from cometmq.store.recovery.replay import LastRecord, Observer, Replay


class FollowerObserver(Observer, Protocol):
    """Hears of what is copied, in the order of the log."""

    def approve_record(self, topic: str, log_offset: int, record: bytes) -> None:
        """A record of one of ``topics`` is about to be copied, and is observed afterwards. What it
        raises keeps all of its chunk out of the log.
        """

    def queue_advanced(self, topic: str, queue_id: int, end: int, next_offset: int) -> None:
        """The queue has all its messages up to ``end`` of the log; the next is ``next_offset``."""


class FollowerStore(BaseStore):
    """The store of a follower. Made by :meth:`open`, which recovers what a crash left."""

    def __init__(self, opened: OpenedStore, options: StoreOptions) -> None:
        super().__init__(opened)
        self._file_bytes = options.commit_log_file_bytes

    @classmethod
    def open(
        cls,
        directory: Path,
        options: StoreOptions,
        *,
        files: Files | None = None,
        observer: Observer | None = None,
        progress: Progress | None = None,
        approve: Approve | None = None,
    ) -> FollowerStore:
        """Open or make the store in ``directory``. Arguments and errors as of
        ``MessageStore.open``.
        """
        files = OsFiles(options.open_files_max) if files is None else files
        with permissions():
            files.make_directories(directory)
        opened = OpenedStore(directory, options, files)
        try:
            opened.open(observer, progress, approve)
            opened.begin_following()
            return cls(opened, options)
        except BaseException:
            opened.release()
            raise

    # --- copying: the thread that writes ----------------------------------------------------------

    def adopt_epochs(self, epochs: Sequence[tuple[int, int]]) -> None:
        """From the end of this log on the writer's ``epochs`` are ours: call it when the two logs
        agree up to there, before anything is appended.
        """
        known = [Epoch(number, start) for number, start in epochs]
        assert known, "a writer has at least its own"
        if known != self._opened.epochs:
            self._guarded(lambda: self._opened.save_epochs(known))
        self._guarded(self._opened.forget_former_name)
        self.epoch = max(self.epoch, known[-1].number)

    def append(self, offset: int, data: bytes, observer: FollowerObserver) -> int:
        """Write a chunk of the writer's log: whole records of one file, or a file's end mark alone.
        Returns the new end.

        Raises ReplicationBroken when it is not that, or not what comes next, what ``observer``
        raises that does not approve it, and DiskFull: then nothing has changed. After StoreDamaged
        (the queues do not fit the log) and StoreFailed nothing will be written any more.
        """
        self._guarded(self._dispatcher.catch_up)
        end = self.appended_offset
        if offset != end:
            raise ReplicationBroken(f"the log ends at {end}, what came begins at {offset}")
        file_left = self._file_bytes - end % self._file_bytes
        if len(data) == BLANK_BYTES and data == record.blank(file_left):  # the end of a file
            self._guarded(self._log.end_file)
            self._dispatcher.reached(self._log.end)
            return self.appended_offset
        stretches = list(self._verified(offset, data, apart_of(observer.topics)))
        for stretch in stretches:
            if stretch.topic in observer.topics:
                observer.approve_record(stretch.topic, stretch.start, stretch.apart)
        return self._guarded(lambda: self._append(offset, data, stretches, observer))

    def _append(
        self, offset: int, data: bytes, stretches: Sequence[Stretch], observer: FollowerObserver
    ) -> int:
        assert (stretches[0].start, stretches[-1].end) == (offset, offset + len(data)), offset
        self._log.append(offset, data, stretches[-1].run.last_time_ms)
        replay = Replay(self._dispatcher, observer, observer.queue_advanced)
        try:
            for stretch in stretches:
                replay.take(stretch)
            replay.dispatch_held()
        except Exception as error:  # the queues are no longer the log's
            raise StoreFailed(f"the copy at {offset} cannot be dispatched: {error}") from error
        last = replay.last
        assert last.log_offset + last.size == self.appended_offset, (last, self.appended_offset)
        self._last_units = queueunit.pack(last.log_offset, last.size, 0)
        self._dispatcher.reached(self._log.end)
        return self.appended_offset

    def _verified(self, offset: int, data: bytes, apart: bytes) -> Iterator[Stretch]:
        file_end = offset - offset % self._file_bytes + self._file_bytes
        at = 0
        time_ms = self.last_store_time_ms
        while at < len(data) or not data:
            place = offset + at
            found = next_stretch(
                data, at, log_offset=place, file_left=file_end - place, apart=apart
            )
            if isinstance(found, record.Found):
                raise ReplicationBroken(f"no record came for {place}: {found.reason}")
            if found.run.times_fall or found.run.first_time_ms < time_ms:
                raise ReplicationBroken(f"a record came for {place} that is older than one before")
            time_ms = found.run.last_time_ms
            yield found
            at = found.end - offset

    # --- leading: no other thread uses the store --------------------------------------------------

    @property
    def needs_opening(self) -> bool:
        """Whether a writer has to open the folder again: only an opening mends queues and takes
        over what another program left.
        """
        opened = self._opened
        is_odd = self.has_damage or self.state_lost is not None or opened.dispatcher.is_damaged
        return is_odd or self.adoption is not None

    def give_up(self) -> OpenedStore:
        """The open folder, for a writer: all that was copied is on the disk and in its queue. This
        object writes nothing any more. After an error the folder is free.
        """
        assert not self.needs_opening
        offset, size = self._last_span()
        try:
            self._guarded(lambda: self._opened.settle(offset, size))
        except BaseException:
            self.abandon()
            raise
        self._failure = StoreFailed("the store is a writer's now")
        return self._opened

    # --- cutting: no other thread uses the store --------------------------------------------------

    def keep_aside(self, offset: int) -> int:
        """Keep what lies behind ``offset`` in a file of its own, before it is cut; how many bytes
        are kept. DiskFull: none.
        """
        opened = self._opened
        assert self.min_offset <= offset < self.appended_offset, offset
        return cutoff.keep(
            opened.files,
            opened.paths.cut_off,
            self.read_raw,
            offset,
            self.appended_offset,
            self.epoch,
        )

    def kept_aside_bytes(self) -> int:
        """Bytes in all such files."""
        found = cutoff.kept(self._opened.files, self._opened.paths.cut_off)
        return sum(end - start for _, start, end in found)

    def truncate(self, offset: int) -> None:
        """Cut the log at ``offset``, where a record or a file starts; what was behind it is
        lost. The flush thread and all readers must be done.
        """
        assert self.min_offset <= offset <= self.appended_offset, offset
        self._guarded(self._dispatcher.catch_up)
        last = self._last_before(offset)
        assert last.log_offset + last.size <= offset, (last, offset)
        self._guarded(lambda: self._opened.truncate(offset, last))
        assert self.appended_offset == offset, (self.appended_offset, offset)
        self._last_units = b""

    def _last_before(self, offset: int) -> LastRecord:
        # The queues know it, but for the records of topics that were deleted: from the newest one
        # that is in a queue it is not far.
        positions = [queue.last_below(offset) for queue in self._dispatcher.queues()]
        start = max([self.min_offset, *positions])
        return last_record_before(self._log, start, offset)

    def reset_to(self, offset: int) -> None:
        """Forget everything; the log begins again at ``offset``, the start of a file of the
        writer's. As :meth:`truncate`, no other thread may use the store.
        """
        assert offset % self._file_bytes == 0, offset
        self._guarded(lambda: self._opened.reset_to(offset))
        assert self.min_offset == self.appended_offset == offset, offset
        self._last_units = b""

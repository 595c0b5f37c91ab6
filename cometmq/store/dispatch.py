"""From the log to the queues: owns all queues of a store, and knows which of their files the disk
does not have yet.

Threads: the writer dispatches and drops topics, one thread flushes, any number look queues up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from cometmq.errors import DiskFull, StoreForeignFile
from cometmq.store import layout
from cometmq.store.consumequeue import ConsumeQueue
from cometmq.store.files import Files
from cometmq.store.segment import Segment


class Dispatcher:
    """``dispatched`` is a log position and the store time of the last record before it: every older
    unit is in a file.

    Flushing relies on an order: a unit is written, then its file noted as dirty, then
    ``dispatched`` moves. So whoever reads ``dispatched`` first and then empties the notes has a
    note of every file that the position speaks of.
    """

    def __init__(self, paths: layout.StorePaths, files: Files, file_bytes: int) -> None:
        self.dispatched: tuple[int, int] = (0, 0)
        self._paths = paths
        self._files = files
        self._file_bytes = file_bytes
        self._topics: dict[str, dict[int, ConsumeQueue]] = {}
        self._behind: list[ConsumeQueue] = []  # with units that a full disk kept in memory
        self._dirty_files: set[Segment] = set()
        self._dirty_directories: set[str] = set()
        self._trash_numbers = itertools.count()

    # --- looking up: any thread -------------------------------------------------------------------

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        queues = self._topics.get(topic)
        return None if queues is None else queues.get(queue_id)

    def queues(self) -> Iterator[ConsumeQueue]:
        """All queues, as they are now."""
        for queues in list(self._topics.values()):
            yield from list(queues.values())

    # --- dispatching: the writer ------------------------------------------------------------------

    def get(self, topic: str, queue_id: int) -> ConsumeQueue:
        """The queue; one without units when there was none. Its files are made when units come."""
        queue = self.find(topic, queue_id)
        if queue is None:
            directory = self._paths.queue(topic, queue_id)
            queue = ConsumeQueue(topic, queue_id, directory, self._file_bytes)
            self._topics.setdefault(topic, {})[queue_id] = queue
        return queue

    def dispatch(self, queue: ConsumeQueue, units: bytes) -> None:
        """Append ``units`` to ``queue``. When the disk is full they stay in memory: see
        :meth:`catch_up`.
        """
        queue.append(units)
        try:
            self._write(queue)
        except DiskFull:
            if queue not in self._behind:
                self._behind.append(queue)

    def catch_up(self) -> None:
        """Write what a full disk kept in memory; :class:`DiskFull` while it is still full."""
        while self._behind:
            self._write(self._behind[-1])
            self._behind.pop()

    def reached(self, end: tuple[int, int]) -> None:
        """Everything before ``end`` was given to :meth:`dispatch`."""
        assert end[0] >= self.dispatched[0], (end, self.dispatched)
        if not self._behind:
            self.dispatched = end

    def drop(self, topic: str) -> None:
        """Remove all queues of ``topic``. The folder leaves its place in one step, so a crash
        leaves all or nothing.
        """
        queues = self._topics.pop(topic, {})
        self._forget(list(queues.values()), self._paths.topic(topic))

    def restart(self, queue: ConsumeQueue) -> None:
        """Remove one queue; the next :meth:`get` makes it anew, counting from 0."""
        removed = self._topics[queue.topic].pop(queue.queue_id)
        assert removed is queue, queue.segments.directory
        self._forget([queue], queue.segments.directory)

    def _forget(self, queues: Sequence[ConsumeQueue], folder: Path) -> None:
        self._behind = [queue for queue in self._behind if queue not in queues]
        for queue in queues:
            queue.close()
        if self._files.exists(folder):
            trash = self._paths.trash(next(self._trash_numbers))
            self._files.rename(folder, trash)
            self._note_directories(folder.parent, self._paths.root)
            self._files.remove_tree(trash)

    def _write(self, queue: ConsumeQueue) -> None:
        files_before = len(queue.segments)
        try:
            queue.write(self._files, self._dirty_files)
        finally:
            if len(queue.segments) != files_before:
                self._note_directories(*self._directories_of(queue))

    def _directories_of(self, queue: ConsumeQueue) -> Sequence[Path]:
        directory = queue.segments.directory
        return directory, directory.parent, self._paths.consume_queue, self._paths.root

    def _note_directories(self, *directories: Path) -> None:
        self._dirty_directories.update([str(directory) for directory in directories])

    # --- flushing: the flush thread ---------------------------------------------------------------

    def flush(self) -> tuple[int, int]:
        """Bring the queues' files to the disk; returns the ``dispatched`` up to which that is
        certain.
        """
        dispatched = self.dispatched
        for segment in _drained(self._dirty_files):
            segment.file.sync()
        for directory in _drained(self._dirty_directories):
            self._files.sync_directory(directory)
        return dispatched

    # --- cutting: nobody else uses the queues ---

    def truncate(self, log_start: int, log_end: tuple[int, int]) -> None:
        """Forget every unit that points to ``log_end`` or later."""
        assert not self._behind, "what is in memory alone would be lost"
        for queue in self.queues():
            if not queue.ends_below(log_end[0]):
                queue.cut(self._files, log_start, log_end[0])
                self._dirty_files.update(queue.segments)
                self._note_directories(*self._directories_of(queue))
        self.dispatched = log_end

    def drop_all(self, log_end: tuple[int, int]) -> None:
        """Remove all queues of all topics."""
        for topic in list(self._topics):
            self.drop(topic)
        self.dispatched = log_end

    # --- opening and closing ----------------------------------------------------------------------

    def load(self, log_start: int, log_end: int, durable: int) -> None:
        """Take up all queues from their folders, cut at ``log_end`` of the log.

        Files with units that point to ``durable`` or later may not be on the disk: they are noted
        as dirty.
        """
        assert not self._topics
        for entry in self._directories(self._paths.consume_queue):
            topic = layout.parse_topic(entry, self._paths.consume_queue)
            for name in self._directories(self._paths.topic(topic)):
                queue = self.get(topic, layout.parse_queue_id(name, self._paths.topic(topic)))
                cut = queue.load(self._files, log_start, log_end)
                self._note_unsynced(queue, durable, cut)

    def _directories(self, path: Path) -> Sequence[str]:
        entries = self._files.entries(path)
        for entry in entries:
            if not entry.is_directory:
                raise StoreForeignFile(f"{path / entry.name} is a file where folders are expected")
        return [entry.name for entry in entries]

    def _note_unsynced(self, queue: ConsumeQueue, durable: int, cut: bool) -> None:
        if not cut and queue.ends_below(durable):
            return
        self._note_directories(*self._directories_of(queue))
        for segment in reversed(queue.segments):
            self._dirty_files.add(segment)
            if queue.starts_below(segment, durable):
                return

    def close(self) -> None:
        for queue in self.queues():
            queue.close()


Note = TypeVar("Note")


def _drained(notes: set[Note]) -> Iterator[Note]:
    """Take the notes out one by one; the writer may add more meanwhile.

    Both are one step under the GIL, because the notes are compared by C code: texts and identities,
    not paths.
    """
    while notes:
        yield notes.pop()

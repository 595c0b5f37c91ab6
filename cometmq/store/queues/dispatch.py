"""From the log to the queues: owns all queues of a store, and knows which of their files the disk
does not have yet.

Threads: the writer dispatches and drops topics, one thread flushes, one removes what has gone from
the log, any number look queues up.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from cometmq.errors import Shortage, StoreDamaged, StoreForeignFile
from cometmq.format import queueunit
from cometmq.store import layout
from cometmq.store.disk.files import Files
from cometmq.store.disk.segments import Segment
from cometmq.store.metadata.recovery_point import QueueTotals
from cometmq.store.queues.consumequeue import ConsumeQueue, Tail

Note = TypeVar("Note")

HELD_UNITS_MAX = 4_000_000  # in memory, while a start is planned


class DirtySet(Generic[Note]):
    """What is to be synced, each once. The writer adds while the flush thread takes out: both are
    one step under the GIL, because notes are compared by C code (texts and identities, not paths).

    Not a set, whose order differs from run to run: a crash between two syncs can be played again.
    """

    def __init__(self) -> None:
        self._notes: dict[Note, None] = {}

    def add(self, note: Note) -> None:
        self._notes[note] = None

    def __bool__(self) -> bool:
        """Whether something is to be synced."""
        return bool(self._notes)

    def drained(self) -> Iterator[Note]:
        """Take the notes out one by one, newest first."""
        while self._notes:
            yield self._notes.popitem()[0]

    def sync_all(self, sync: Callable[[Note], None]) -> None:
        """``sync`` each and take it out. After a :class:`Shortage` what is left stays noted."""
        for note in self.drained():
            try:
                sync(note)
            except Shortage:
                self.add(note)
                raise


@dataclass(slots=True)
class _Held:
    """What a start will do to the queues' files, once it has decided to."""

    topics: frozenset[str]  # whose units are held, however many there are
    durable: int  # log offset: units of messages before it are on the disk
    removals: list[Path] = field(default_factory=list)
    # Queues with files: how many of their units stay, and whether all these are on the disk.
    found: dict[ConsumeQueue, tuple[int, bool]] = field(default_factory=dict)
    unit_count: int = 0  # in memory
    is_whole: bool = True  # no units were too many to be held


class Dispatcher:
    """``dispatched`` is a log position and the store time of the last record before it: every older
    unit is in a file.

    Flushing relies on an order: a unit is written, then its file noted as dirty, then
    ``dispatched`` moves. So a thread that reads ``dispatched`` first and then empties the notes has
    a note of every file that the position speaks of.
    """

    def __init__(self, paths: layout.StorePaths, files: Files, file_bytes: int) -> None:
        self.dispatched: tuple[int, int] = (0, 0)
        self._paths = paths
        self._files = files
        self._file_bytes = file_bytes
        self._topics: dict[str, dict[int, ConsumeQueue]] = {}
        self._behind: list[ConsumeQueue] = []  # with units that a full disk kept in memory
        self._dirty_files = DirtySet[Segment]()
        self._dirty_directories = DirtySet[str]()
        self._trash_numbers = itertools.count()
        self._tallied: tuple[int, QueueTotals] = (0, QueueTotals(0, 0))
        # A queue's files were found to hold something else than its units: the next start
        # rebuilds all queues. Any thread may set it.
        self.is_damaged = False
        self.tails: dict[tuple[str, int], Tail] = {}  # that :meth:`load` found, of what it cut off
        # Some queue's files hold filler alone: only the log has how far it had counted.
        self.has_filler_only = False
        self.drop_count = 0  # how often queues went: what was tallied before speaks of them
        self._queue_count = 0  # with a message, ever
        self._unit_count = 0  # sum of their next offsets
        self._held: _Held | None = None  # from :meth:`load` to :meth:`carry_out`
        # Held while files are removed: a queue that was dropped and made again has the same names.
        self._removing = threading.Lock()

    # --- looking up: any thread -------------------------------------------------------------------

    def find(self, topic: str, queue_id: int) -> ConsumeQueue | None:
        queues = self._topics.get(topic)
        return None if queues is None else queues.get(queue_id)

    def next_offset(self, topic: str, queue_id: int) -> int:
        """The queue offset of the next message; 0 if there is no such queue."""
        queue = self.find(topic, queue_id)
        return 0 if queue is None else queue.next_offset

    def queues(self) -> Iterator[ConsumeQueue]:
        """All queues, as they are now."""
        for queues in list(self._topics.values()):
            yield from list(queues.values())

    @property
    def tallied(self) -> tuple[int, QueueTotals]:
        """What the queues held when ``dispatched`` was reached, together with its position. Of
        damaged queues nothing is known.
        """
        dispatched, tally = self._tallied
        return dispatched, QueueTotals() if self.is_damaged else tally

    def queues_of(self, topic: str) -> list[ConsumeQueue]:
        """The queues of one topic, as they are now."""
        return list(self._topics.get(topic, {}).values())

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
        """Append ``units`` to ``queue``. When the disk is full, or no file can be opened, they stay
        in memory: see :meth:`catch_up`.
        """
        if not queue.next_offset:
            self._queue_count += 1
        self._unit_count += len(units) // queueunit.UNIT_BYTES
        if self._held is None:
            queue.append(units)
            self._write_or_keep(queue)
        else:
            queue.hold(units)
            self._count_held(self._held, len(units) // queueunit.UNIT_BYTES)

    def start_at(self, queue: ConsumeQueue, offset: int) -> None:
        """Let a queue without messages begin at ``offset``: see :meth:`ConsumeQueue.start_at`."""
        assert queue is self.find(queue.topic, queue.queue_id), queue.segments.directory
        self._queue_count += 1
        self._unit_count += offset
        queue.start_at(offset)
        if self._held is None:
            self._write_or_keep(queue)

    def _count_held(self, held: _Held, unit_count: int) -> None:
        held.unit_count += unit_count
        if held.unit_count > HELD_UNITS_MAX:
            held.unit_count, held.is_whole = 0, False
            for queue in self.queues():
                if queue.topic not in held.topics:
                    queue.forget_held()

    def _write_or_keep(self, queue: ConsumeQueue) -> None:
        try:
            self._write(queue)
        except Shortage:
            if queue not in self._behind:
                self._behind.append(queue)

    def catch_up(self) -> None:
        """Write what a shortage kept in memory; :class:`Shortage` while it lasts."""
        while self._behind:
            self._write(self._behind[-1])
            written = self._behind.pop()
            assert not written.has_unwritten, written.segments.directory

    def reached(self, end: tuple[int, int]) -> None:
        """Everything before ``end`` was given to :meth:`dispatch`."""
        assert end[0] >= self.dispatched[0], (end, self.dispatched)
        if not self._behind:
            self.dispatched = end
            self._tally()

    def drop(self, topic: str) -> None:
        """Remove all queues of ``topic``. The folder leaves its place in one step, so a crash
        leaves all or nothing.
        """
        queues = self._topics.pop(topic, {})
        self._forget(list(queues.values()), self._paths.topic(topic))

    def restart(self, queue: ConsumeQueue) -> None:
        """Remove one queue; the next :meth:`get` makes another, counting from 0."""
        removed = self._topics[queue.topic].pop(queue.queue_id)
        assert removed is queue, queue.segments.directory
        self._forget([queue], queue.segments.directory)

    def _forget(self, queues: Sequence[ConsumeQueue], folder: Path) -> None:
        with self._removing:
            self._move_away(queues, folder)
        self.drop_count += 1
        self._queue_count -= sum(queue.next_offset > 0 for queue in queues)
        self._unit_count -= sum(queue.next_offset for queue in queues)
        assert 0 <= self._queue_count <= self._unit_count, (self._queue_count, self._unit_count)
        if not self._behind:
            self._tally()

    def _tally(self) -> None:
        self._tallied = (self.dispatched[0], QueueTotals(self._queue_count, self._unit_count))

    def _move_away(self, queues: Sequence[ConsumeQueue], folder: Path) -> None:
        self._behind = [queue for queue in self._behind if queue not in queues]
        for queue in queues:
            queue.close()
        if self._held is not None:
            self._held.removals.append(folder)
        else:
            self._remove(folder)

    def _remove(self, folder: Path) -> None:
        if self._files.exists(folder):
            names = map(self._paths.trash, self._trash_numbers)
            trash = next(path for path in names if not self._files.exists(path))
            self._files.rename(folder, trash)
            self._note_directories(folder.parent, self._paths.root)
            with suppress(Shortage):  # then the next opening removes it
                self._files.remove_tree(trash)

    def _write(self, queue: ConsumeQueue) -> None:
        end_before = queue.segments.end
        try:
            queue.write(self._files, self._dirty_files.add)
        finally:
            if queue.segments.end != end_before:
                self._note_directories(*self._directories_of(queue))

    def _directories_of(self, queue: ConsumeQueue) -> Sequence[Path]:
        directory = queue.segments.directory
        return directory, directory.parent, self._paths.consume_queue, self._paths.root

    def _note_directories(self, *directories: Path) -> None:
        for directory in directories:
            self._dirty_directories.add(str(directory))

    # --- mending: any thread ----------------------------------------------------------------------

    def rewrite(self, queue: ConsumeQueue, offset: int, units: bytes) -> bool:
        """Put ``units`` in the place of those that the files have from ``offset`` on; False: they
        are the same, or the queue has gone.
        """
        with self._removing:  # no file goes meanwhile
            if self.find(queue.topic, queue.queue_id) is not queue:
                return False
            return queue.rewrite(offset, units, self._dirty_files.add)

    # --- removing from the front: a thread of its own ---------------------------------------------

    def forget_before(self, log_start: int) -> None:
        """Let all queues begin with their first message at ``log_start`` or later."""
        for queue in self.queues():
            queue.forget_while(lambda log_offset, _size: log_offset < log_start)

    def remove_spare_files(self, log_start: int) -> int:
        """Remove the queues' files of which nothing is left; how many."""
        removed = 0
        for queue in self.queues():
            if len(queue.segments) > 1:
                with self._removing:
                    if self.find(queue.topic, queue.queue_id) is queue:
                        removed += queue.remove_spare_files(self._files, log_start)
        return removed

    # --- flushing: the flush thread ---------------------------------------------------------------

    @property
    def has_dirty(self) -> bool:
        """Whether files or folders are to be synced."""
        return bool(self._dirty_files or self._dirty_directories)

    def flush(self, *, at_once: bool = False) -> tuple[int, int]:
        """Bring the queues' files to the disk; returns the ``dispatched`` up to which that is
        certain. ``at_once``: no caller waits for the disk.
        """
        dispatched = self.dispatched
        if at_once:
            files = [segment.file for segment in self._dirty_files.drained()]
            self._files.sync_all(files, list(self._dirty_directories.drained()))
        self._dirty_files.sync_all(lambda segment: segment.file.sync())
        self._dirty_directories.sync_all(self._files.sync_directory)
        return dispatched

    # --- cutting: no other thread uses the queues ---

    def truncate(self, log_start: int, log_end: tuple[int, int]) -> None:
        """Forget every unit that points to ``log_end`` or later."""
        assert not self._behind, "what is in memory alone would be lost"
        assert log_start <= log_end[0] <= self.dispatched[0], (log_start, log_end, self.dispatched)
        for queue in self.queues():
            if not queue.ends_below(log_end[0]):
                queue.cut(self._files, log_start, log_end[0])
                for segment in queue.segments:
                    self._dirty_files.add(segment)
                self._note_directories(*self._directories_of(queue))
        self.dispatched = log_end
        self._count()

    def _count(self) -> None:
        self._queue_count = sum(queue.next_offset > 0 for queue in self.queues())
        self._unit_count = sum(queue.next_offset for queue in self.queues())
        self._tally()

    def wipe(self) -> None:
        """Remove all that lies in the queues' folder, known or not: they are rebuilt."""
        queues = list(self.queues())
        self._topics.clear()
        self.is_damaged = False
        self._dirty_files = DirtySet[Segment]()
        if self._held is not None:
            self._held = _Held(self._held.topics, self._held.durable)
        self._forget(queues, self._paths.consume_queue)
        self._count()
        assert self._unit_count == 0, self._unit_count

    def drop_all(self, log_end: tuple[int, int]) -> None:
        """Remove all queues of all topics."""
        for topic in list(self._topics):
            self.drop(topic)
        assert (self._queue_count, self._unit_count) == (0, 0), self._unit_count
        assert not self._behind, "their queues have gone"
        self.dispatched = log_end

    # --- opening and closing ----------------------------------------------------------------------

    def load(
        self,
        log_start: int,
        log_end: int,
        durable: int,
        *,
        is_clean: bool = False,
        is_rebuild: bool = False,
        held: frozenset[str] = frozenset(),
    ) -> str:
        """Take up all queues from their folders, up to ``log_end`` of the log. Returns what shows
        that they are not this log's, or not all; empty: nothing does, though ``tallied`` may.

        Nothing is changed on the disk, now and by whatever is dispatched and dropped from here on,
        before :meth:`carry_out`. Units that are too many to be kept in memory until then are
        counted and forgotten, but those of the topics ``held``: see :attr:`holds_all`.

        Files with units that point to ``durable`` or later may not be on the disk: they will be
        noted as dirty. ``is_clean``: there are no such, and nothing has to be cut. ``is_rebuild``:
        none is taken up, whatever there is; then call :meth:`wipe`.
        """
        assert not self._topics
        assert durable <= log_end, (durable, log_end)
        self._held = _Held(held, durable)
        self.tails = {}
        self.has_filler_only = False
        missing = ""
        for entry in () if is_rebuild else self._directories(self._paths.consume_queue):
            topic = layout.parse_topic(entry, self._paths.consume_queue)
            folder = self._paths.topic(topic)
            queues = self._topics.setdefault(topic, {})
            for name in self._directories(folder):
                number = layout.parse_queue_id(name, folder)
                queue = ConsumeQueue(topic, number, folder / name, self._file_bytes)
                queues[number] = queue
                found = self._load(queue, log_start, log_end, durable, is_clean)
                missing = missing or found
        self._count()
        return missing

    def _load(
        self, queue: ConsumeQueue, log_start: int, log_end: int, durable: int, is_clean: bool
    ) -> str:
        if not queue.load(self._files):
            return f"the files in {queue.segments.directory} do not follow each other"
        try:
            queue.measure(log_start, log_end)
            self.has_filler_only |= queue.is_filler_only
            tail = None if is_clean else queue.tail()
            if tail is not None:
                self.tails[queue.topic, queue.queue_id] = tail
        except StoreDamaged as error:  # its units are not those of this log
            return error.message
        assert self._held is not None
        if not is_clean or queue.segments.is_unfinished:
            self._held.found[queue] = (queue.next_offset, is_clean or queue.ends_below(durable))
        return queue.missing_in_front(log_start)

    @property
    def holds_all(self) -> bool:
        """All that was dispatched since :meth:`load` is still there. Else it has to be dispatched
        once more, to queues that were loaded again.
        """
        return self._held is None or self._held.is_whole

    def carry_out(self) -> None:
        """Do to the files what was held back since :meth:`load`; from here on all is done at once.

        Raises Shortage: what could not be written stays in memory.
        """
        held, self._held = self._held, None
        assert held is not None, "load was called before"
        for folder in held.removals:
            with self._removing:
                self._remove(folder)
        for queue, (kept, is_synced) in held.found.items():
            if self.find(queue.topic, queue.queue_id) is queue:
                cut = queue.cut_at(self._files, kept)
                if cut or not is_synced:
                    self._note_unsynced(queue, held.durable)
        for queue in self.queues():
            if queue.has_unwritten:
                queue.release_held()
                self._behind.append(queue)
        self.catch_up()

    def forget(self) -> None:
        """Be as before :meth:`load`; the files stay as they are."""
        self.close()
        self._topics.clear()
        self._held = None
        self._behind = []
        self.is_damaged = False
        self._count()

    def _directories(self, path: Path) -> Sequence[str]:
        entries = self._files.entries(path)
        entries = [entry for entry in entries if not layout.is_ignored(entry.name)]
        for entry in entries:
            if not entry.is_directory:
                raise StoreForeignFile(
                    f"{path / entry.name} is a {entry.kind.value} where folders are expected: "
                    "move it out of the store"
                )
        return [entry.name for entry in entries]

    def _note_unsynced(self, queue: ConsumeQueue, durable: int) -> None:
        self._note_directories(*self._directories_of(queue))
        for segment in reversed(queue.segments):
            self._dirty_files.add(segment)
            if queue.starts_below(segment, durable):
                return

    def validate(self, log_end: int) -> None:
        """The counts are those of the queues, and every unit is in its queue; for tests, while no
        thread writes.
        """
        assert self._held is None, "the start has not been carried out"
        queues = list(self.queues())
        for queue in queues:
            queue.validate()
            assert queue is self.find(queue.topic, queue.queue_id), queue.segments.directory
            assert queue.has_unwritten == (queue in self._behind), queue.segments.directory
        assert all(queue in queues for queue in self._behind), "their queues have gone"
        assert self._queue_count == sum(queue.next_offset > 0 for queue in queues)
        assert self._unit_count == sum(queue.next_offset for queue in queues)
        assert self.dispatched[0] <= log_end, (self.dispatched, log_end)
        if self.dispatched[0] == log_end:
            assert self._tallied[0] == log_end, (self._tallied, log_end)
            assert self._tallied[1] == (self._queue_count, self._unit_count), self._tallied

    def close(self) -> None:
        for queue in self.queues():
            queue.close()

"""Queues against the log, both ways: each record has its unit, each unit its record."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cometmq.errors import StoreDamaged, StoreFailed, StoreForeignFile
from cometmq.format import queueunit
from cometmq.format.delayed import DELAY_S_MAX, SCHEDULE_TOPIC
from cometmq.format.scan import QueueRun
from cometmq.format.timers import TIMER_TOPIC
from cometmq.store import layout
from cometmq.store.disk.files import Files
from cometmq.store.log.scan import Stretch
from cometmq.store.metadata.recovery_point import QueueTotals
from cometmq.store.queues.consumequeue import ConsumeQueue
from cometmq.store.recovery.replay import Observer
from cometmq.store.repair.survey import open_queue_row

UNIT_BYTES = queueunit.UNIT_BYTES
LOG_END_MAX = 2**63 - 1
FAULTS_PER_QUEUE_MAX = 5

Finding = tuple[Path, int | None, str]  # folder, queue offset, what


class QueueCheck:
    """One queue. What the log says of an earlier queue of the same name does not count."""

    def __init__(self, topic: str, queue: ConsumeQueue | None, tail_from: int) -> None:
        self.queue = queue
        self._is_delayed = topic == SCHEDULE_TOPIC
        self._is_timer = topic == TIMER_TOPIC
        self.files_gone = False  # retention or a deletion removed one while it was being read
        self.first: int | None = None  # queue offset of the first record in the log
        self.next = 0
        self.faults: list[tuple[int, str]] = []
        self._tail_from = tail_from  # units that point here or further may still be written

    def take(self, run: QueueRun) -> None:
        if self.files_gone:
            return
        if self.first is None or (run.first_queue_offset == 0 and self.next):
            self.first = self.next = run.first_queue_offset
            self.faults.clear()
        if run.first_queue_offset != self.next:
            self._jump(run.first_queue_offset)
        if self.queue is not None:
            self._compare(run)
        self.next = run.first_queue_offset + run.unit_count

    def skip(self) -> None:
        """What comes next of the log does not follow what was before."""
        self.first = None
        self.next = 0

    def _jump(self, offset: int) -> None:
        if self.queue is None:  # nothing could show a loss
            return
        units = self._units(self.next, offset - self.next) if offset > self.next else b""
        if not units or any(size != queueunit.LOST_SIZE for _, size, _ in queueunit.iterate(units)):
            self._add(self.next, f"the log continues with message {offset}")

    def _compare(self, run: QueueRun) -> None:
        found = self._units(run.first_queue_offset, run.unit_count)
        if found == run.units:
            return
        for index, expected in enumerate(queueunit.iterate(run.units)):
            stored = found[index * UNIT_BYTES : (index + 1) * UNIT_BYTES]
            is_same = stored == queueunit.UNIT.pack(*expected) or self._is_due(stored, expected)
            if not is_same and expected[0] < self._tail_from:
                what = f"the unit is {_text(stored)}, the log has {_text_of(*expected)}"
                self._add(run.first_queue_offset + index, what)
                return

    def _is_due(self, stored: bytes, expected: tuple[int, int, int]) -> bool:
        """Whether the unit differs only in when its message is due: the writer may have had other
        delay levels than this program knows, or have been Apache RocketMQ.
        """
        if len(stored) < UNIT_BYTES:
            return False
        *place, due_ms = queueunit.unit_at(stored, 0)
        if self._is_timer:  # Apache RocketMQ wrote the tag's hash
            return place == [*expected[:2]] and -(2**31) <= due_ms < 2**31
        is_near = abs(due_ms - expected[2]) <= 1000 * DELAY_S_MAX
        return self._is_delayed and place == [*expected[:2]] and is_near

    def _units(self, offset: int, count: int) -> bytes:
        """As many of them as there are; they may lie in several files."""
        found = b""
        assert self.queue is not None
        while len(found) < count * UNIT_BYTES:
            at = offset * UNIT_BYTES + len(found)
            segment = self.queue.segments.find(at)
            if segment is None:
                break
            left = count * UNIT_BYTES - len(found)
            units = segment.pread(at, min(left, segment.end - at))
            if not units:  # the file has become shorter meanwhile
                break
            found += units
        return found

    def finish(self, log_start: int, log_end: int) -> None:
        """The log has been read, to ``log_end``; it begins at ``log_start`` by now."""
        assert self.queue is not None
        if self.files_gone:
            return
        try:
            self.queue.measure(log_start, log_end)
        except StoreDamaged as error:
            self._add(self.next, error.message)
            return
        if self.first is None:
            self.first = self.next = 0
            if self.queue.min_offset < self.queue.next_offset:
                self._add(self.queue.min_offset, "its messages are not in the log")
        elif self.queue.next_offset > self.next:
            count = self.queue.next_offset - self.next
            self._add(self.next, f"{count} messages from here on are not in the log")

    def _add(self, offset: int, what: str) -> None:
        if len(self.faults) < FAULTS_PER_QUEUE_MAX:
            self.faults.append((offset, what))


def _text(unit: bytes) -> str:
    if not any(unit):
        return "zeros" if unit else "not there"
    return _text_of(*queueunit.unit_at(unit, 0))


def _text_of(log_offset: int, size: int, tags_code: int) -> str:
    return f"({log_offset}, {size}, {tags_code})"


class QueueChecks:
    """All queues. ``live``: units that point behind ``mark_end`` may still be on their way."""

    def __init__(
        self,
        files: Files,
        paths: layout.StorePaths,
        mark_end: int,
        file_bytes: int | None,
        *,
        live: bool,
    ) -> None:
        self.faults: list[Finding] = []
        self.gone: list[str] = []  # queues whose files went while they were being read
        self.without_folder: set[str] = set()
        self.queue_count = 0
        self.unit_count = 0
        self.tally_at_mark = QueueTotals(0, 0)
        self._files = files
        self._paths = paths
        self._mark_end = mark_end
        self._file_bytes = file_bytes
        self._tail_from = mark_end if live else LOG_END_MAX
        self._checks = {(q.topic, q.queue_id): self._check(q.topic, q) for q in self._queues()}

    def _check(self, topic: str, queue: ConsumeQueue | None) -> QueueCheck:
        return QueueCheck(topic, queue, self._tail_from)

    def _queues(self) -> list[ConsumeQueue]:
        found = []
        for topic in self._folders(self._paths.consume_queue):
            for folder in self._folders(topic):
                try:
                    name = layout.parse_topic(topic.name, topic.parent)
                    number = layout.parse_queue_id(folder.name, topic)
                    row, complaints = open_queue_row(self._files, folder, self._file_bytes)
                except StoreForeignFile as error:
                    if self._files.entries(folder):
                        self.faults.append((folder, None, error.message))
                    continue
                self.faults += [(folder, None, complaint) for complaint in complaints]
                queue = ConsumeQueue(name, number, folder, row.file_bytes)
                queue.segments = row
                found.append(queue)
        return found

    def _folders(self, path: Path) -> list[Path]:
        found = []
        for entry in self._files.entries(path):
            if entry.is_directory and not layout.is_ignored(entry.name):
                found.append(path / entry.name)
            elif not layout.is_ignored(entry.name):
                self.faults.append((path / entry.name, None, "is not a folder of queues"))
        return found

    def take(self, stretch: Stretch) -> None:
        """The next records of the log."""
        for run in stretch.run.queues:
            key = (run.topic, run.queue_id)
            check = self._checks.get(key)
            if check is None:
                check = self._checks[key] = self._check(key[0], None)
            with self._minding_removal(check):
                check.take(run)

    def skip(self) -> None:
        """What comes next of the log does not follow what was before."""
        for check in self._checks.values():
            check.skip()

    @contextmanager
    def _minding_removal(self, check: QueueCheck) -> Iterator[None]:
        """Retention, or a deletion of the topic, may remove a file before it is opened."""
        try:
            yield
        except StoreFailed:
            assert check.queue is not None
            paths = [segment.file.path for segment in check.queue.segments]
            if all(self._files.exists(path) for path in paths):
                raise
            check.files_gone = True

    def finish(self, log_start: int, log_end: int) -> None:
        """The log has been read, to ``log_end``; it begins at ``log_start`` by now."""
        at_mark = []
        for (topic, queue_id), check in self._checks.items():
            queue = check.queue
            if queue is None:
                self.without_folder.add(f"{topic}/{queue_id}")
                continue
            with self._minding_removal(check):
                check.finish(log_start, log_end)
                folder = queue.segments.directory
                self.faults += [(folder, offset, what) for offset, what in check.faults]
                self.queue_count += queue.next_offset > 0
                self.unit_count += queue.next_offset - queue.min_offset
                at_mark.append(_count_below(queue, self._mark_end))
            if check.files_gone:
                self.gone.append(f"{topic}/{queue_id}")
            queue.close()
        self.tally_at_mark = QueueTotals(sum(count > 0 for count in at_mark), sum(at_mark))


def _count_below(queue: ConsumeQueue, log_offset: int) -> int:
    try:
        queue.measure(0, log_offset)
    except StoreDamaged:
        return 0
    return queue.next_offset


class Deletions:
    """Where the log has deletions of topics, as far as ``observer`` understands it."""

    def __init__(self, observer: Observer | None) -> None:
        self.newest = -1  # log offset of the last one
        self.topics = frozenset[str]() if observer is None else observer.topics
        self._observer = observer
        self._at = -1

    def take(self, stretch: Stretch) -> None:
        """The next records of the log; a record about topics comes by itself."""
        if self._observer is not None and stretch.topic in self.topics:
            self._at = stretch.start
            self._observer.observe_record(stretch.topic, stretch.start, stretch.apart, self)

    def drop_topic(self, topic: str) -> None:
        """A record of the log deletes it."""
        self.newest = self._at

    def start_queue(self, topic: str, queue_id: int, offset: int) -> None:
        """Nothing to note: it deletes no topic."""

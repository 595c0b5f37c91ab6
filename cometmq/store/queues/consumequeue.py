"""One queue: a row of 20-byte units that say where its messages lie in the log.
``docs/format/store-layout.md`` §3.

Threads: the writer appends, one other removes from the front, any number read. ``_unwritten`` is
one tuple, replaced whole, so that a reader sees every unit either in memory or in a file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from cometmq.errors import StoreDamaged
from cometmq.format import queueunit
from cometmq.format.record import LAYOUTS
from cometmq.store.disk.files import Files, clear
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.layout import OFFSET_MAX

UNIT_BYTES = queueunit.UNIT_BYTES
RECORD_BYTES_MIN = LAYOUTS[0].record_bytes_min
BLOCK_BYTES = 4096 // UNIT_BYTES * UNIT_BYTES  # whole units within a page of the file


class Tail(NamedTuple):
    """The units of a queue's files behind those that it keeps."""

    first_offset: int  # of the first one
    next_offset: int  # behind the last one
    log_end: int  # behind the record that it points to


class ConsumeQueue:
    """``min_offset`` and ``next_offset`` count messages; offsets in ``segments`` are bytes."""

    __slots__ = (
        "_unwritten",
        "mended",
        "min_offset",
        "next_offset",
        "queue_id",
        "segments",
        "topic",
    )

    def __init__(self, topic: str, queue_id: int, directory: Path, file_bytes: int) -> None:
        assert file_bytes % UNIT_BYTES == 0, file_bytes
        self.topic = topic
        self.queue_id = queue_id
        self.segments = Segments(directory, file_bytes)
        self.min_offset = 0  # of the first message that is still in the log
        self.next_offset = 0  # of the message to come
        self.mended = range(0)  # the units that were compared with the log last
        # offset of the first unit that is in no file, and the units
        self._unwritten: tuple[int, bytes | bytearray] = (0, b"")

    # --- reading: any thread ----------------------------------------------------------------------

    def read_units(self, offset: int, count: int, *, nowait: bool) -> bytes:
        """Up to ``count`` units from ``offset`` on, whole ones; fewer at the end of a file and of
        the queue, and in front of a hole. StoreDamaged: there is one at ``offset``.
        """
        first_unwritten, units = self._unwritten
        if offset >= first_unwritten:
            skip = (offset - first_unwritten) * UNIT_BYTES
            return bytes(units[skip : skip + count * UNIT_BYTES])
        segment = self.segments.find(offset * UNIT_BYTES)
        if segment is None or offset < self.min_offset or count <= 0:
            return b""
        stop = min((offset + count) * UNIT_BYTES, segment.end, first_unwritten * UNIT_BYTES)
        found = segment.pread(offset * UNIT_BYTES, stop - offset * UNIT_BYTES, nowait=nowait)
        assert len(found) % UNIT_BYTES == 0, (self.segments.directory, offset)
        sound = queueunit.before_hole(found)
        if found and not sound:
            raise StoreDamaged(
                f"the units of queue {self.queue_id} of {self.topic} from message {offset} on are "
                f"damaged, in {segment.file.path}; what the log has of them is written again when "
                "they are read. When the member is stopped and started again it rebuilds all its "
                "queues from the log, and so does " + self.segments.repair_command()
            )
        return sound

    @property
    def file_end(self) -> int:
        """Behind the last unit that is in a file."""
        return self._unwritten[0]

    def stored_unit(self, offset: int) -> bytes:
        """The unit at ``offset`` as its file has it; zeros if the file has gone."""
        return self.segments.pread(offset * UNIT_BYTES, UNIT_BYTES).ljust(UNIT_BYTES, b"\0")

    def validate(self) -> None:
        """What is counted is in the files or in memory; for tests."""
        first_unwritten, units = self._unwritten
        assert 0 <= self.min_offset <= self.next_offset, (self.min_offset, self.next_offset)
        assert first_unwritten * UNIT_BYTES + len(units) == self.next_offset * UNIT_BYTES
        assert first_unwritten * UNIT_BYTES <= self.segments.end, self.segments.directory

    # --- writing: the writer ----------------------------------------------------------------------

    @property
    def has_unwritten(self) -> bool:
        return bool(self._unwritten[1])

    def append(self, units: bytes) -> None:
        """Take ``units`` in; they are readable at once, in a file after :meth:`write`."""
        assert units
        assert len(units) % UNIT_BYTES == 0, len(units)
        first_unwritten, before = self._unwritten
        held = first_unwritten * UNIT_BYTES + len(before)
        assert held == self.next_offset * UNIT_BYTES, self.segments.directory
        self._unwritten = (first_unwritten, before + units)
        self.next_offset += len(units) // UNIT_BYTES

    def hold(self, units: bytes) -> None:
        """As :meth:`append`, while no reader has the queue: a piece costs its own length."""
        first_unwritten, held = self._unwritten
        if not isinstance(held, bytearray):
            held = bytearray(held)
            self._unwritten = (first_unwritten, held)
        held += units
        self.next_offset += len(units) // UNIT_BYTES

    def release_held(self) -> None:
        """What was held is to be written: others may know the queue from now on."""
        first_unwritten, held = self._unwritten
        self._unwritten = (first_unwritten, bytes(held))

    def forget_held(self) -> None:
        """Go on counting without what is in memory."""
        self._unwritten = (self.next_offset, b"")

    def write(self, files: Files, note: Callable[[Segment], None]) -> None:
        """Put what is in memory into the files, and call ``note`` with each. An error leaves the
        rest in memory.
        """
        while self.has_unwritten:
            first, units = self._unwritten
            segment = self.segments.find(first * UNIT_BYTES) or self._new_segment(files, first)
            part = units[: segment.end - first * UNIT_BYTES]
            segment.pwrite(first * UNIT_BYTES, part)
            note(segment)
            self._unwritten = (first + len(part) // UNIT_BYTES, units[len(part) :])
        assert self._unwritten[0] == self.next_offset, (self._unwritten[0], self.next_offset)

    def rewrite(self, offset: int, units: bytes, note: Callable[[Segment], None]) -> bool:
        """Put ``units`` in the place of those in files from ``offset`` on, but where the files have
        gone, and tell ``note`` which files changed; False: none. By any thread: nobody else writes
        there, and a reader sees the old or the new unit.
        """
        changed = False
        start, at = offset * UNIT_BYTES, max(0, self.segments.start - offset * UNIT_BYTES)
        while at < len(units):
            segment = self.segments.find(start + at)
            assert segment is not None, (self.segments.directory, offset)
            part = units[at : at + segment.end - (start + at)]
            if part != segment.pread(start + at, len(part)):
                segment.pwrite(start + at, part)
                note(segment)
                changed = True
            at += len(part)
        return changed

    def start_at(self, offset: int) -> None:
        """Let an empty queue begin at ``offset``: its older units are gone, RocketMQ's filler
        takes their place.
        """
        assert self.next_offset == 0, (self.segments.directory, self.next_offset)
        assert offset > 0, self.segments.directory
        # The one before it, for the first of a file: without filler a file seems to be missing.
        last = offset - 1
        first_of_file = last - last % (self.segments.file_bytes // UNIT_BYTES)
        self._unwritten = (first_of_file, b"")
        self.next_offset = first_of_file
        self.append(queueunit.PREFILL * (offset - first_of_file))
        self.min_offset = offset
        assert self.next_offset == offset, (self.next_offset, offset)

    # --- removing from the front: a thread of its own ---------------------------------------------

    @property
    def written_bytes(self) -> int:
        """Bytes that its units take in files."""
        return max(0, self._unwritten[0] * UNIT_BYTES - self.segments.start)

    def forget_while(self, is_gone: Callable[[int, int], bool]) -> None:
        """Raise ``min_offset`` above the messages that are gone: ``is_gone(log offset, size)`` is
        true of the first so many, and of no other. No file is touched.

        A queue that is being deleted meanwhile may stay as it is.
        """
        low = max(self.min_offset, self.segments.start // UNIT_BYTES)
        high = self.next_offset
        step = 1
        while low < high:
            # In growing steps from the front: as a rule little or nothing has gone.
            middle = min(low + step - 1, high - 1) if step else (low + high) // 2
            place, unit = self._first_sound(middle, high)
            if not unit and place < high:
                return
            if unit and _has_gone(unit, is_gone):
                low, step = place + 1, step * 2
            else:
                high, step = middle, 0
        assert low <= self.next_offset, (low, self.next_offset)
        if low > self.min_offset:  # the writer may just have begun an empty queue further up
            self.min_offset = low

    def _first_sound(self, offset: int, end: int) -> tuple[int, bytes]:
        """The first unit from ``offset`` on that is no hole, and where; without one before ``end``
        nothing.
        """
        for place in range(offset, end):
            with suppress(StoreDamaged):
                return place, self.read_units(place, 1, nowait=False)
        return end, b""

    def remove_spare_files(self, files: Files, log_start: int) -> int:
        """Remove the files of which nothing is left; how many.

        One goes only when its successor begins with a message that is gone too, and so is surely on
        the disk. The last file stays: it shows the queue's next offset.
        """
        removed = 0
        while len(self.segments) > 1:
            _, second, *_ = self.segments
            if not self.starts_below(second, log_start):
                break
            self.segments.remove_first(files)
            removed += 1
        assert self.segments.start <= self.next_offset * UNIT_BYTES, self.segments.directory
        return removed

    def close(self) -> None:
        self.segments.close()

    def _new_segment(self, files: Files, offset: int) -> Segment:
        start = offset * UNIT_BYTES
        start -= start % self.segments.file_bytes
        files.make_directories(self.segments.directory)
        # Sparse: a queue that holds ten messages costs one block, not six megabytes.
        files.create(self.segments.path(start), self.segments.file_bytes).close()
        return self.segments.add(files, start)

    # --- opening ----------------------------------------------------------------------------------

    def load(self, files: Files) -> bool:
        """Take up the queue's files; False when one in the middle is missing, and the queue has to
        be rebuilt. Then :meth:`measure`. Changes nothing.
        """
        return self.segments.load(files, gaps_allowed=True)

    def missing_in_front(self, log_start: int) -> str:
        """What shows that the oldest file is missing; empty: nothing does.

        A file goes only when the next one begins below the log's start, and a queue that begins
        late begins with filler.
        """
        first = next(iter(self.segments), None)
        if first is None or not first.start or not self.next_offset:
            return ""
        position, size, _ = self._unit(first, first.start // UNIT_BYTES)
        if position < log_start or not queueunit.is_message(position, size):
            return ""
        return f"the file before {first.file.path} is missing"

    def cut(self, files: Files, log_start: int, log_end: int) -> bool:
        """Forget every unit that points to ``log_end`` or later; True when some were cut. All units
        must be in files.

        Units point ever further, and a crash leaves holes only behind those that were synced, so
        the units to keep are exactly those before the first that is empty or points too far.
        """
        assert not self.has_unwritten, self.segments.directory
        self.measure(log_start, log_end)
        return self.cut_at(files, self.next_offset)

    def measure(self, log_start: int, log_end: int) -> None:
        """Find the offsets of the first and the next message from the files."""
        kept = self._count_all_below(log_end)
        self.next_offset = kept
        self._unwritten = (kept, b"")
        # Without a message the files go, wherever they begin: the queue starts from nothing.
        self.min_offset = self._first_at_or_above(log_start) if kept else 0
        assert 0 <= self.min_offset <= self.next_offset, (self.min_offset, self.next_offset)

    @property
    def is_filler_only(self) -> bool:
        """Whether its files begin with filler and have no message behind it: see :meth:`start_at`.
        After :meth:`measure`.
        """
        first = next(iter(self.segments), None)
        if first is None or self.next_offset:
            return False
        return self._unit(first, first.start // UNIT_BYTES)[:2] == (0, queueunit.PREFILL_SIZE)

    def tail(self) -> Tail | None:
        """What is in the files behind the units that :meth:`measure` counted; None: nothing."""
        first = max(self.next_offset, self.segments.start // UNIT_BYTES)
        segment = self.segments.find(first * UNIT_BYTES)
        if segment is None or self._unit(segment, first)[1] < RECORD_BYTES_MIN:
            return None
        with suppress(StoreDamaged):
            count = self._count_all_below(OFFSET_MAX)
            last = self.segments.find((count - 1) * UNIT_BYTES)
            if count > first and last is not None:
                position, size, _ = self._unit(last, count - 1)
                return Tail(first, count, position + size)
        return None

    def last_below(self, log_offset: int) -> int:
        """Log offset of the queue's last message before ``log_offset``; -1 when there is none. All
        its units must be in files.
        """
        assert not self.has_unwritten, self.segments.directory
        kept = self._count_all_below(log_offset)
        last = self.segments.find((kept - 1) * UNIT_BYTES) if kept > self.min_offset else None
        return -1 if last is None else self._unit(last, kept - 1)[0]

    def first_at(self, log_offset: int) -> int:
        """Offset of the first message from ``log_offset`` on. All units must be in files."""
        return self._count_all_below(log_offset)

    def last_unit(self) -> tuple[int, int, int] | None:
        """The unit of the last message; None in a queue without one. All must be in files."""
        if self.next_offset <= self.min_offset:
            return None
        last = self.segments.find((self.next_offset - 1) * UNIT_BYTES)
        return None if last is None else self._unit(last, self.next_offset - 1)

    def _count_all_below(self, log_end: int) -> int:
        for segment in reversed(self.segments):
            kept = self._count_below(segment, log_end)
            if kept:
                # Filler comes before messages. With none behind it, it is what a crash left of the
                # beginning of a queue, and there may be too little of it.
                position, size, _ = self._unit(segment, kept - 1)
                return kept if queueunit.is_message(position, size) else 0
        return 0

    def ends_below(self, log_offset: int) -> bool:
        """Whether all units point to before ``log_offset``."""
        last = self.segments.find((self.next_offset - 1) * UNIT_BYTES) if self.next_offset else None
        return last is None or self._unit(last, self.next_offset - 1)[0] < log_offset

    def starts_below(self, segment: Segment, log_offset: int) -> bool:
        """Whether the file's first unit points to before ``log_offset``; of a file that was closed
        meanwhile nothing is known.
        """
        unit = segment.pread(segment.start, UNIT_BYTES)
        if len(unit) < UNIT_BYTES:
            return False
        position, size, _ = queueunit.unit_at(unit, 0)
        return size > 0 and position < log_offset

    def _count_below(self, segment: Segment, log_end: int) -> int:
        """The queue offset behind the last unit of ``segment`` that points below ``log_end``; 0
        when none does.
        """
        first = segment.start // UNIT_BYTES
        # Most queues are short: one read of their first block shows all.
        block = segment.pread(segment.start, min(BLOCK_BYTES, segment.end - segment.start))
        in_block = len(block) // UNIT_BYTES

        def unit(index: int) -> tuple[int, int, int]:
            if index < in_block:
                return queueunit.unit_at(block, index)
            return self._unit(segment, first + index)

        low, high = 0, (segment.end - segment.start) // UNIT_BYTES
        # First the last unit that is not zeros, and the one behind it: nearly always these tell.
        written = -(-len(block.rstrip(b"\0")) // UNIT_BYTES)
        middle, behind = max(0, written - 1), written
        while low < high:
            position, size, _ = unit(middle)
            if size > 0 and position < log_end:
                low = middle + 1
            else:
                high = middle
            middle = behind if low <= behind < high else (low + high) // 2
            behind = -1
        if not low:
            return 0
        position, size, _ = unit(low - 1)
        if position < 0 or (queueunit.is_message(position, size) and position + size > log_end):
            raise StoreDamaged(
                f"unit {first + low - 1}, in {segment.file.path}, points across {log_end} of the "
                "log"
            )
        return first + low

    def cut_at(self, files: Files, offset: int) -> bool:
        """Remove the units from ``offset`` on from the files; True when there were any."""
        self.segments.mend(files)
        end = offset * UNIT_BYTES
        cut = self.segments.remove_after(files, end)
        last = self.segments.find(end)
        if last is not None:
            # Zeros are written rather than the file cut short and stretched: a crash must not leave
            # a short file.
            cut |= clear(last.file, end - last.start, self.segments.file_bytes) > 0
        return cut

    def _first_at_or_above(self, log_start: int) -> int:
        low = self.segments.start // UNIT_BYTES
        high = self.next_offset
        first = next(iter(self.segments), None)
        if first is not None and low < high:
            position, size, _ = self._unit(first, low)
            # Of most queues nothing has gone since their first file began.
            if position >= log_start and queueunit.is_message(position, size):
                return low
        while low < high:
            middle = (low + high) // 2
            place, position, size = self._first_written(middle, high)
            if size and (position < log_start or not queueunit.is_message(position, size)):
                low = place + 1
            else:
                high = middle
        return low

    def _first_written(self, offset: int, end: int) -> tuple[int, int, int]:
        """The first unit from ``offset`` on that is no hole: where it is, its log offset and size;
        without one before ``end`` the size is 0.
        """
        for place in range(offset, end):
            segment = self.segments.find(place * UNIT_BYTES)
            assert segment is not None, place
            position, size, _ = self._unit(segment, place)
            if size:
                return place, position, size
        return end, 0, 0

    def _unit(self, segment: Segment, offset: int) -> tuple[int, int, int]:
        return queueunit.unit_at(segment.pread(offset * UNIT_BYTES, UNIT_BYTES), 0)


def _has_gone(unit: bytes, is_gone: Callable[[int, int], bool]) -> bool:
    position, size, _ = queueunit.unit_at(unit, 0)
    return not queueunit.is_message(position, size) or is_gone(position, size)

"""Takes away what :mod:`cometmq.store.retention` has decided on: log files from the front, then
what points to them.

The order makes a crash at any point harmless. First all readers see where the log and its queues
begin from now on. Then log files go one by one, the oldest first and each off the disk before the
next, so that a log never has a gap. A queue's file goes after the log files that it points to, when
its successor does not point further: else a crash could forget how far the queue had counted.

One thread, next to the writer, the flush thread and any number of readers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from cometmq.errors import MessageNotFound, Shortage
from cometmq.format import record
from cometmq.store.log.commitlog import CommitLog
from cometmq.store.recovery.opening import OpenedStore
from cometmq.store.retention import LogFile, Space, quota

FILES_MIN = 3  # of the log: with one of them full, the oldest can go
BLOCK_BYTES = 4096  # a sparse file takes whole blocks of the disk
HEAD_BYTES = record.LAYOUTS[0].head_bytes  # no record is shorter, and the store time lies within
OFFSET_AT = record.LAYOUTS[0].offsets["log_offset"]
OFFSET_AND_FLAG = struct.Struct(
    ">"
    "q"  # PHYSICALOFFSET
    "i"  # SYSFLAG, which says how long the hosts are
)
PLACE_AT = record.LAYOUTS[0].offsets["queue_id"]
PLACE = struct.Struct(
    ">"
    "i"  # QUEUEID
    "4x"  # FLAG
    "q"  # QUEUEOFFSET
)
STORE_TIME = struct.Struct(">q")
STORE_TIME_AT = {flags: its.offsets["store_time_ms"] for flags, its in record.LAYOUTS.items()}


class Pin:
    """The log offset from which a reader will read; ``offset`` may be moved."""

    __slots__ = ("offset",)

    def __init__(self, offset: int) -> None:
        self.offset = offset


class Pins:
    """Readers that read the log in several steps, and want its files to stay that long.

    When the disk is nearly full, or after two minutes, retention removes the files all the same,
    and the reader gets MessageNotFound.
    """

    def __init__(self) -> None:
        self._pins: set[Pin] = set()

    @contextmanager
    def hold(self, offset: int) -> Iterator[Pin]:
        """A reader reads from ``offset`` on, as long as the block lasts. Any thread."""
        assert offset >= 0, offset
        pin = Pin(offset)
        self._pins.add(pin)
        try:
            yield pin
        finally:
            self._pins.discard(pin)

    def lowest(self) -> int | None:
        """Log offset; None: there is no reader."""
        return min((pin.offset for pin in list(self._pins)), default=None)


class Cleaner:
    """``guarded`` runs what changes the disk, and refuses every later call after a failure."""

    def __init__(self, opened: OpenedStore, guarded: Callable[[Callable[[], int]], int]) -> None:
        self.pins = Pins()
        self._opened = opened
        self._log = opened.log
        self._dispatcher = opened.dispatcher
        self._guarded = guarded
        self._first_times: dict[int, int] = {}  # store time of a file's first record, by its start

    # --- what there is ----------------------------------------------------------------------------

    def log_files(self) -> list[LogFile]:
        """The files that may be thought of, oldest first: all before the last that has records, as
        far as the log and its queues are on the disk.
        """
        durable, end = self._opened.checkpoint.durable, self._log.end[0]
        files = [
            (segment.start, segment.end)
            for segment in self._log.segments
            if segment.end < min(durable, end)
        ]
        newest_ms = self._log.end[1]
        found: list[LogFile] = []
        for start, file_end in reversed(files):
            newest_ms = min(newest_ms, self._first_time_ms(file_end, newest_ms))
            found.append(LogFile(start, file_end, newest_ms))
        assert not files or files[-1][1] < self._log.segments.end, "the last file stays"
        return found[::-1]

    def _first_time_ms(self, start: int, default_ms: int) -> int:
        if start not in self._first_times:
            with suppress(MessageNotFound):  # a damaged record: take the one behind for its age
                self._first_times[start] = store_time_ms(self._log, start)
        return self._first_times.get(start, default_ms)

    def oldest_time_ms(self) -> int:
        """Store time of the log's first record; 0: there is none."""
        start = self._log.start
        return self._first_time_ms(start, 0) if start < self._log.written else 0

    def spaces(self, quota_bytes: int) -> list[Space]:
        """The volume, and the quota if it is not 0."""
        found = [Space(*self._opened.files.usage(self._opened.paths.root))]
        return [*found, quota(self.store_bytes(), quota_bytes)] if quota_bytes else found

    def limit(self, quota_bytes: int) -> None:
        """Let the log make no file that does not fit into the quota; 0: there is none."""
        assert quota_bytes >= 0, quota_bytes
        file_bytes = self._log.segments.file_bytes
        left = quota_bytes - self._other_bytes()
        self._log.files_max = max(FILES_MIN, left // file_bytes) if quota_bytes else 0

    def store_bytes(self) -> int:
        """Bytes of the disk that log, queues and index take, without asking the disk for each."""
        return len(self._log.segments) * self._log.segments.file_bytes + self._other_bytes()

    def _other_bytes(self) -> int:
        queues = sum(
            -(-queue.written_bytes // BLOCK_BYTES) * BLOCK_BYTES
            for queue in self._dispatcher.queues()
        )
        index = sum(entry.size for entry in self._opened.files.entries(self._opened.paths.index))
        return queues + index

    # --- what goes --------------------------------------------------------------------------------

    def forget_before(self, offset: int) -> None:
        """Let log and queues begin at ``offset``, the end of one of :meth:`log_files`."""
        assert offset <= self._opened.checkpoint.durable, (offset, self._opened.checkpoint.durable)
        # The queues first: a reader that finds a message in its queue must find it in the log.
        self._dispatcher.forget_before(offset)
        self._log.forget_before(offset)
        assert self._log.start == offset, (self._log.start, offset)

    def remove_first(self) -> int:
        """Remove the oldest log file, after :meth:`forget_before` with its end or more; its bytes.

        Raises StoreFailed.
        """
        return self._guarded(self._remove_first)

    def _remove_first(self) -> int:
        is_noted = self._note_start()
        removed = self._log.remove_first()
        assert removed.end <= self._log.start, (removed.end, self._log.start)
        if not is_noted:
            self._note_start()
        self._first_times.pop(removed.start, None)
        return removed.end - removed.start

    def _note_start(self) -> bool:
        """Before a file goes, so that nobody takes it for lost; False: only its going makes room
        for that.
        """
        with suppress(Shortage):
            self._opened.checkpoint.note_start(self._log.start)
            return True
        return False

    def remove_spare_files(self) -> int:
        """Remove files of queues of which nothing is left; how many. Raises StoreFailed."""
        return self._guarded(lambda: self._dispatcher.remove_spare_files(self._log.start))

    def forget_older(self, topic: str, time_ms: int) -> None:
        """Let the queues of ``topic`` begin with their first message of ``time_ms`` or later. The
        log keeps them until their file goes.
        """

        def is_older(log_offset: int, _size: int) -> bool:
            try:
                return store_time_ms(self._log, log_offset) < time_ms
            except MessageNotFound:  # gone, or damaged: then it is not to be read anyway
                return log_offset < self._log.start

        for queue in self._dispatcher.queues_of(topic):
            queue.forget_while(is_older)


def store_time_ms(log: CommitLog, log_offset: int, place: tuple[int, int] | None = None) -> int:
    """When the record at ``log_offset`` was stored. MessageNotFound: there seems to be none, or it
    says that it has another ``place``, a queue id and a queue offset.
    """
    head = log.read(log_offset, HEAD_BYTES, nowait=False)
    own_offset, sys_flag = OFFSET_AND_FLAG.unpack_from(head, OFFSET_AT)
    if own_offset != log_offset:
        raise MessageNotFound(f"no record starts at {log_offset} of the log")
    if place is not None and PLACE.unpack_from(head, PLACE_AT) != place:
        raise MessageNotFound(f"the record at {log_offset} of the log is another message")
    (time_ms,) = STORE_TIME.unpack_from(head, STORE_TIME_AT[sys_flag & record.SYS_FLAG_HOSTS])
    return int(time_ms)

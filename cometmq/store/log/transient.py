"""RocketMQ's transient store pool: what is appended waits in private memory before the kernel gets
it.

An append then costs no system call, and many appends reach the file with one. The price is the
promise that an acknowledgement survives the process: what waits here is lost with it. So it serves
asynchronous flushing only; consumers never notice, because they see what is on the disk.

Threads: the writer puts, the writer or one other writes out, any number ask how far that has come.
"""

from __future__ import annotations

import threading
from collections import deque

from cometmq.store.disk.files import Buffer
from cometmq.store.disk.segments import Segment

# Pieces end to end are joined up to here, so that many small appends make one call.
WRITE_BYTES_MAX = 1024 * 1024


class TransientBuffer:
    """Pieces of the log in its order, end to end but for the gaps behind a file's end mark.

    Invariant: a piece is here until it is in its file, so a reader that does not find it here can
    read it there.
    """

    def __init__(self, bytes_max: int) -> None:
        assert bytes_max > 0, bytes_max
        self._put_bytes = 0  # in its life; the writer's
        self._written_bytes = 0  # of them; changed under the lock
        self._bytes_max = bytes_max
        self._pieces: deque[tuple[int, Buffer, Segment]] = deque()
        self._writing = threading.Lock()

    @property
    def size_bytes(self) -> int:
        """Bytes that only this process has."""
        return self._put_bytes - self._written_bytes

    def has_room(self, size: int) -> bool:
        """Whether a batch of ``size`` bytes may be put; into an empty buffer always."""
        return not self.size_bytes or self.size_bytes + size <= self._bytes_max

    def put(self, offset: int, data: Buffer, segment: Segment) -> None:
        """Keep ``data``, which belongs at ``offset`` of the log."""
        self._put_bytes += len(data)
        self._pieces.append((offset, data, segment))

    def written(self, end: int) -> int:
        """Log offset below which everything is in the files, in a log that ends at ``end``."""
        try:
            return min(end, self._pieces[0][0])
        except IndexError:
            return end

    def write_out(self) -> None:
        """Give the kernel all that is here. After DiskFull and StoreFailed the rest stays."""
        with self._writing:
            while self._pieces:
                offset, data, segment, count = self._joined()
                segment.pwrite(offset, data)
                for _ in range(count):
                    self._pieces.popleft()
                self._written_bytes += len(data)
                assert self.size_bytes >= 0, self.size_bytes

    def _joined(self) -> tuple[int, Buffer, Segment, int]:
        """The first pieces of one file that lie end to end: where, what, their file, how many."""
        start, first, segment = self._pieces[0]
        parts, end = [first], start + len(first)
        for index in range(1, len(self._pieces)):
            offset, data, of = self._pieces[index]
            if of is not segment or offset != end or end + len(data) - start > WRITE_BYTES_MAX:
                break
            parts.append(data)
            end += len(data)
        return start, first if len(parts) == 1 else b"".join(parts), segment, len(parts)

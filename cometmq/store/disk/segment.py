"""One file of fixed size that holds a range of a larger row of bytes."""

from __future__ import annotations

from cometmq.store.disk.files import Buffer, File


class Segment:
    """The bytes from ``start`` to ``end`` of the row; all offsets here are offsets in the row, not
    in the file.
    """

    __slots__ = ("end", "file", "start")

    def __init__(self, file: File, start: int, size: int) -> None:
        assert size > 0, (file.path, size)
        assert start >= 0, (file.path, start)
        assert start % size == 0, (file.path, start, size)
        self.file = file
        self.start = start
        self.end = start + size

    def pread(self, offset: int, size: int, *, nowait: bool = False) -> bytes:
        """``size`` bytes at ``offset``, which must not cross the end; fewer when the file was
        closed meanwhile.
        """
        assert self.start <= offset <= offset + size <= self.end, (self.file.path, offset, size)
        return self.file.pread(size, offset - self.start, nowait=nowait)

    def pwrite(self, offset: int, data: Buffer) -> None:
        assert self.start <= offset <= offset + len(data) <= self.end, (self.file.path, offset)
        self.file.pwrite(data, offset - self.start)

"""A disk that cannot read some pages, below the system calls that the store makes: a read of a bad
page fails, and so does a write to a part of one, which has to read the rest. A write to all of it
heals it, as a disk takes another sector then.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

PAGE_BYTES = 4096


class BadPages:
    """``pages``: numbers of the bad pages of each file, by its inode: a file that takes another's
    name is another file.
    """

    def __init__(self, number: int = errno.EIO) -> None:
        self.pages: dict[int, set[int]] = {}
        self._number = number

    def spoil(self, path: Path, *pages: int) -> None:
        """Let these pages of a file be bad."""
        self.pages.setdefault(path.stat().st_ino, set()).update(pages)

    @contextmanager
    def met(self) -> Iterator[None]:
        """Within it reads and writes meet the pages."""
        pread, preadv, pwrite, ftruncate = os.pread, os.preadv, os.pwrite, os.ftruncate

        def bad_pread(fd: int, size: int, offset: int) -> bytes:
            self._read(fd, size, offset)
            return pread(fd, size, offset)

        def bad_preadv(fd: int, rooms: Sequence[memoryview], offset: int, flags: int = 0) -> int:
            self._read(fd, sum(map(len, rooms)), offset)
            return preadv(fd, rooms, offset, flags)

        def bad_pwrite(fd: int, data: bytes | memoryview, offset: int) -> int:
            self._write(fd, len(data), offset)
            return pwrite(fd, data, offset)

        def fresh_ftruncate(fd: int, size: int) -> None:
            ftruncate(fd, size)  # of a new file, which may have the inode of one that is gone
            self.pages.pop(os.fstat(fd).st_ino, None)

        with (
            patch("os.ftruncate", fresh_ftruncate),
            patch("os.pread", bad_pread),
            patch("os.preadv", bad_preadv),
            patch("os.pwrite", bad_pwrite),
        ):
            yield

    def _met(self, fd: int, size: int, offset: int) -> set[int]:
        bad = self.pages.get(os.fstat(fd).st_ino)
        touched = range(offset // PAGE_BYTES, -(-(offset + size) // PAGE_BYTES)) if size else ()
        return bad.intersection(touched) if bad else set()

    def _read(self, fd: int, size: int, offset: int) -> None:
        if self._met(fd, size, offset):
            raise OSError(self._number, os.strerror(self._number))

    def _write(self, fd: int, size: int, offset: int) -> None:
        for page in self._met(fd, size, offset):
            end = os.fstat(fd).st_size
            is_whole = offset <= page * PAGE_BYTES and (
                offset + size >= min((page + 1) * PAGE_BYTES, end)
            )
            if not is_whole:
                raise OSError(self._number, os.strerror(self._number))
            self.pages[os.fstat(fd).st_ino].discard(page)

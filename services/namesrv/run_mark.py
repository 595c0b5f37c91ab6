"""Whether the name server before this one ended in order: a file beside the key-value table that is
there while one runs.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


class RunMark:
    """``table`` is the file of the key-value table. Its folder is not made for this."""

    def __init__(self, table: Path) -> None:
        self._path = table.with_name(f"{table.name}.running")
        self._file: int | None = None  # locked while this process lives

    def begin(self) -> bool:
        """True: the process before has not ended in order. Where the file cannot be kept, or
        another process has it, nothing is known.
        """
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_left = os.fstat(file).st_size > 0
            os.write(file, f"{os.getpid()}\n".encode())
        except OSError:
            os.close(file)
            return False
        self._file = file
        return is_left

    def end(self) -> None:
        """This process ends in order."""
        if self._file is not None:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._file)
            self._file = None

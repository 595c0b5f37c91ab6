"""One process per data folder: the lock file of RocketMQ (a lock on its first byte; the content is
the text ``lock``).

The lock is POSIX's, so a Java broker and we keep each other out. Such a lock belongs to a process
and is lost when *any* descriptor of the file is closed, so a second opening in this process is
caught by a set, before it opens the file.
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

from cometmq.errors import StoreFailed, StoreForbidden, StoreLocked
from cometmq.store.disk.files import FILE_MODE, whose

CONTENT = b"lock"

_held: set[tuple[int, int]] = set()  # (device, inode) of the folders that this process has locked
_held_lock = threading.Lock()


class DirectoryLock:
    """Holds ``path`` (a file that is made when missing) until :meth:`release`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_new = not path.exists()
        try:
            folder = os.stat(path.parent)
            self._key = (folder.st_dev, folder.st_ino)
            with _held_lock:
                if self._key in _held:
                    raise StoreLocked(f"{path.parent} is in use by this process already")
                _held.add(self._key)
            self._fd = self._lock()
        except OSError as error:
            raise StoreFailed(f"cannot lock {path}: {error.strerror}") from error

    def release(self, *, undo: bool = False) -> None:
        """Let the folder go; the file stays, as RocketMQ's does. ``undo``: if it was there before.

        A process that opened the file meanwhile and locks it later finds that it is gone.
        """
        with _held_lock:
            assert self._key in _held, self._path
            if undo and self._is_new:
                with suppress(OSError):
                    os.unlink(self._path)
            os.close(self._fd)
            _held.discard(self._key)

    def _lock(self) -> int:
        try:
            fd = self._opened()
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
                if not os.fstat(fd).st_nlink:
                    raise BlockingIOError  # the process that had it has just removed it
                if self._is_new:
                    os.pwrite(fd, CONTENT, 0)
            except BaseException as error:
                os.close(fd)
                # POSIX allows either for a lock that is held
                if isinstance(error, BlockingIOError | PermissionError):
                    raise StoreLocked(
                        f"another process uses the data folder {self._path.parent}"
                    ) from error
                raise
        except BaseException:
            with _held_lock:
                _held.discard(self._key)
            raise
        return fd

    def _opened(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
        except PermissionError as error:
            raise StoreForbidden(f"{self._path} cannot be written: {whose(self._path)}") from error

"""Numbers from a thread that does not hold the interpreter lock to the event loop: a pipe."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

READ_BYTES = 4096  # whole numbers: who writes puts each into the pipe in one step


class NotifyPipe:
    """``heard(numbers)`` is called on the loop, oldest first, while somebody listens.

    ``write_fd``, once that was so, takes int64 in the machine's order; it does not block. What
    comes when thousands wait to be heard is lost.
    """

    def __init__(self, heard: Callable[[array[int]], None]) -> None:
        self.write_fd = self._read_fd = -1
        self._heard = heard

    @contextmanager
    def listening(self) -> Iterator[None]:
        """As long as the block lasts, on the running loop."""
        if self._read_fd < 0:
            self._read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._read_fd, self._hear)
        try:
            yield
        finally:
            loop.remove_reader(self._read_fd)

    def close(self) -> None:
        """Nobody writes any more."""
        if self._read_fd >= 0:
            os.close(self._read_fd)
            os.close(self.write_fd)
            self.write_fd = self._read_fd = -1

    def _hear(self) -> None:
        self._heard(array("q", os.read(self._read_fd, READ_BYTES)))

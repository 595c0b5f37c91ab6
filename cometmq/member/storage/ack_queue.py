"""From "the log is on disk up to X" to acknowledgements that can be awaited."""

from __future__ import annotations

import asyncio
from collections import deque


class AckQueue:
    """Acknowledgements in log order, each released when the position of its class reaches its end.

    One queue serves one durability class, so ends never decrease and the head is always the next to
    go.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, end: int) -> asyncio.Future[None]:
        """A future that is done when the class has reached ``end``."""
        assert not self._waiting or self._waiting[-1][0] <= end, (
            "ends never decrease within a class"
        )
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((end, future))
        return future

    def release(self, position: int) -> None:
        """The class has reached ``position``."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= position:
            _, future = waiting.popleft()
            if not future.done():  # its caller may have gone away
                future.set_result(None)

    def validate(self) -> None:
        """Assert that ends never decrease from the head to the tail."""
        ends = [end for end, _ in self._waiting]
        assert ends == sorted(ends), ends

    def fail(self, error: Exception) -> None:
        """Nothing will be released any more."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(error)
                future.exception()  # a caller that has gone away must not leave a warning behind

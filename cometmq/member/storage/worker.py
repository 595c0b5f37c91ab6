"""A thread that does one thing, each time it is told to, and says on the event loop how it ended.

The two changes of thread cost a fraction of an executor's: no future, no task, no lock in Python;
what waits for the end is called in the loop's next turn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Worker(Generic[T]):
    """``work()`` runs in the thread, one at a time; ``done(result or error, more)`` on the loop.

    ``more``: the thread has begun again by itself, because ``goes_on()``, which it asks after each
    success, was true. So it does not wait for a busy loop between the two.

    The thread is there from the first :meth:`start` to :meth:`close`.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], T],
        done: Callable[[T | Exception, bool], None],
        goes_on: Callable[[], bool] = lambda: False,
    ) -> None:
        self._name = name
        self._work = work
        self._done = done
        self._goes_on = goes_on
        self._loops: SimpleQueue[asyncio.AbstractEventLoop | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Do it, soon. To be called on the loop, not again before ``done`` without more is."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._loops.put(asyncio.get_running_loop())

    def close(self) -> None:
        """Wait for what is under way, end the thread. Blocking."""
        if self._thread is not None:
            self._loops.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (loop := self._loops.get()) is not None:
            more = True
            while more:
                result: T | Exception
                try:
                    result = self._work()
                    more = self._goes_on()
                except Exception as error:
                    result, more = error, False
                try:
                    loop.call_soon_threadsafe(self._done, result, more)
                except RuntimeError:  # the loop was closed: nobody is left to tell
                    break

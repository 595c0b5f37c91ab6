"""A thread of the process that writes where an event loop is that stands still: no task of the loop
can tell that.

Once a second it asks each watched loop for a sign. It counts its looks without one, not the time: a
process that was stopped has not looked meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import traceback
from collections.abc import Callable
from math import ceil

from cometmq.telemetry import fields, logger

LOOK_S = 1.0
FRAMES_MAX = 64

_log = logger(__name__)


class _Loop:
    """A loop, from the first watch on it to the end of the last."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self.watchers: list[tuple[float, Callable[[], None]]] = []
        self._is_asked = False
        self._silent_looks = 0
        self._tell_at = 0  # silent looks
        self._is_told = False

    def look(self) -> bool:
        """False: the loop is closed. A loop that does not run, between two runs, does not stand."""
        if self._loop.is_closed():
            return False
        if not self._is_asked:
            return self._ask()
        if self._loop.is_running():
            self._silent_looks += 1
            if self._silent_looks == self._tell_at:
                self._tell_at *= 2
                self._tell()
        return True

    def _ask(self) -> bool:
        stall_s = min((stall_s for stall_s, _ in self.watchers), default=LOOK_S)
        self._silent_looks, self._tell_at = 0, max(1, ceil(stall_s / LOOK_S))
        self._is_asked = True
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            return False
        return True

    def _answer(self) -> None:
        """In the loop."""
        if self._is_told:
            self._is_told = False
            after_s = self._silent_looks * LOOK_S
            _log.warning("the event loop turns again", extra=fields(after_s=after_s))
        self._is_asked = False

    def _tell(self) -> None:
        self._is_told = True
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame, FRAMES_MAX)) if frame is not None else ""
        _log.error(
            "the event loop stands still",
            extra=fields(for_s=self._silent_looks * LOOK_S, stack=stack.rstrip()),
        )
        for _, on_stall in self.watchers:
            on_stall()


class LoopWatch:
    """The thread runs while a loop is watched. There is one in a process: :data:`loop_watch`."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A child has neither the thread nor the loops."""
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._ended = threading.Event()

    def watch(
        self, stall_s: float, on_stall: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Watch the running loop until the answer is called. When the loop has not turned for
        ``stall_s``, and again each time that has doubled, the log has the stack of its thread, and
        ``on_stall`` is called in another thread.
        """
        loop, watcher = asyncio.get_running_loop(), (stall_s, on_stall)
        with self._lock:
            if not self._loops:
                self._ended = threading.Event()
                threading.Thread(
                    target=self._run, args=(self._ended,), name="loop watch", daemon=True
                ).start()
            watched = self._loops.setdefault(loop, _Loop(loop))
            watched.watchers = [*watched.watchers, watcher]

        def end() -> None:
            with self._lock:
                watched.watchers = [one for one in watched.watchers if one is not watcher]
                if not watched.watchers and self._loops.get(loop) is watched:
                    self._drop(loop)

        return end

    def _drop(self, loop: asyncio.AbstractEventLoop) -> None:
        del self._loops[loop]
        if not self._loops:
            self._ended.set()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(LOOK_S):
            # Without the lock: a handler of the log may wait for the loop, which may want the lock.
            for loop, watched in list(self._loops.items()):
                if not watched.look():
                    with self._lock:
                        if self._loops.get(loop) is watched:
                            self._drop(loop)


loop_watch = LoopWatch()

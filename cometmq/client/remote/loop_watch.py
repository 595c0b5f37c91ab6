"""Finds listener calls that block the event loop: no task of the loop can tell that."""

from __future__ import annotations

import threading
from types import CodeType

from cometmq.client.remote.stacks import thread_stack
from cometmq.telemetry import fields, logger

LOOK_S_MIN = 0.1
LOOKS_PER_LIMIT = 10

_log = logger(__name__)


class LoopWatch:
    """A thread that logs where the event loop's thread is when no :meth:`beat` has come for
    ``limit_s``: once for each such time, and only what one of ``callers`` has called.

    It counts its looks and not the time: a process that was stopped has not looked meanwhile.
    """

    def __init__(self, limit_s: float, *callers: CodeType) -> None:
        self._limit_s = limit_s
        self._look_s = max(LOOK_S_MIN, limit_s / LOOKS_PER_LIMIT)
        self._callers = callers
        self._loop_thread = 0
        self._beats = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="event loop watch", daemon=True)

    def start(self) -> None:
        """The calling thread is the event loop's."""
        self._loop_thread = threading.get_ident()
        self._thread.start()

    def beat(self) -> None:
        """The event loop turns."""
        self._beats += 1

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        beats, silent_s, is_told = self._beats, 0.0, False
        while not self._ended.wait(self._look_s):
            if self._beats != beats:
                beats, silent_s, is_told = self._beats, 0.0, False
                continue
            silent_s += self._look_s
            if silent_s > self._limit_s and not is_told:
                is_told = self._tell()

    def _tell(self) -> bool:
        stack = thread_stack(self._loop_thread, *self._callers)
        if stack:
            _log.error(
                "a listener call blocks the event loop",
                extra=fields(after_s=self._limit_s, stack=stack),
            )
        return bool(stack)

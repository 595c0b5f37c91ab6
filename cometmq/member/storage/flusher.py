"""When the log is synced: one thread, one fdatasync at a time, "flushed up to X" as the only
result.

While sends or readers wait for the disk the flusher runs back to back: all sends that came during
one fdatasync share the next (group commit). Where it can, the thread then syncs without the
interpreter lock, and reports each sync to the loop through a pipe. Otherwise RocketMQ's intervals
rule (flushIntervalCommitLog, flushCommitLogLeastPages, flushCommitLogThoroughInterval).
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from cometmq.clock import Clock
from cometmq.errors import Shortage
from cometmq.flight_recorder import Stage, name_thread, recorder
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
# A reader that found nothing this recently makes the flusher run back to back: what it waits for
# becomes visible one fdatasync after it was appended.
PROMPT_S = 1.0
SHORTAGE_RETRY_S = 1.0
PIPE_READ_BYTES = 4096  # whole numbers: the thread writes each in one step


class FlushableLog(Protocol):
    """The part of the store that the flusher needs."""

    @property
    def appended_offset(self) -> int: ...
    @property
    def flushed_offset(self) -> int: ...
    def demand(self, position: int) -> None: ...
    def flush_log(self) -> int: ...
    def flush_log_while_wanted(self, write_fd: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class FlushPolicy:
    """RocketMQ's intervals: sync after ``interval_s`` if at least ``least_bytes`` wait, after
    ``thorough_s`` anyway.
    """

    interval_s: float = 0.5
    least_bytes: int = 4 * PAGE_BYTES
    thorough_s: float = 10.0

    def delay_s(self, idle_s: float, waiting_bytes: int, urgent: bool) -> float | None:
        """Seconds until the next sync, given the seconds since the last one; None when there is
        nothing to sync.
        """
        if waiting_bytes == 0:
            return None
        if urgent:
            return 0.0
        wait_s = self.interval_s if waiting_bytes >= self.least_bytes else self.thorough_s
        return max(0.0, wait_s - idle_s)


class Flusher:
    """Decides when the flush thread syncs. All methods belong to the event loop, but for those that
    say otherwise.

    ``on_flushed(position, seconds)`` is called on the loop after each sync, while :meth:`run` runs.
    A failed sync ends :meth:`run` with its error: what is on disk is unknown then, and asking again
    would report success over lost pages.

    Invariant: while :meth:`run` runs and there is something to sync, a sync is under way or a timer
    runs to when one is due.
    """

    def __init__(
        self,
        store: FlushableLog,
        policy: FlushPolicy,
        clock: Clock,
        on_flushed: Callable[[int, float], None],
    ) -> None:
        self._store = store
        self._policy = policy
        self._clock = clock
        self._on_flushed = on_flushed
        self._failed: asyncio.Future[None] | None = None  # while `run` runs
        self._syncing = False
        self._timer: asyncio.TimerHandle | None = None
        self._demanded = 0  # highest log offset that a send or a reader waits for
        self._prompt_until_s = 0.0
        self._last_sync_s = clock.monotonic_s()
        # The thread, from the first sync to `close`. A queue and `call_soon_threadsafe` cost a
        # fraction of an executor: no future, no task, no lock in Python.
        self._thread: threading.Thread | None = None
        self._loops: SimpleQueue[tuple[asyncio.AbstractEventLoop, int] | None] = SimpleQueue()
        # From the first `run` to `close`: nanoseconds of each sync without the interpreter lock, as
        # int64. The thread never waits for room in it: numbers that find none are lost.
        self._read_fd = self._write_fd = -1

    def demand(self, position: int) -> None:
        """A send or a reader waits until the log is on disk up to ``position``."""
        if position > self._demanded:
            assert position <= self._store.appended_offset
            self._demanded = position
            self._store.demand(position)
            self._plan()

    def flush_now(self) -> None:
        """Sync what has been appended."""
        self.demand(self._store.appended_offset)

    def flush_promptly(self) -> None:
        """A reader found nothing: for the next second whatever arrives is synced at once."""
        self._prompt_until_s = self._clock.monotonic_s() + PROMPT_S
        self.flush_now()

    def appended(self) -> None:
        """The log has grown: there may now be something to sync."""
        if self._clock.monotonic_s() < self._prompt_until_s:
            self.flush_now()
        else:
            self._plan()

    async def run(self) -> None:
        """Sync until cancelled."""
        assert self._failed is None, "the flusher runs already"
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        if self._read_fd < 0:
            self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        loop.add_reader(self._read_fd, self._hear)
        try:
            self._plan()
            await self._failed
        finally:
            loop.remove_reader(self._read_fd)
            self._failed = None
            self._set_timer(None)

    def close(self) -> None:
        """End the thread; a running sync is waited for, and what is demanded of that appended."""
        assert self._failed is None, "the flusher still runs"
        if self._thread is not None:
            self._loops.put(None)
            self._thread.join()
            self._thread = None
        if self._read_fd >= 0:
            os.close(self._read_fd)
            os.close(self._write_fd)
            self._read_fd = self._write_fd = -1

    def validate(self) -> None:
        """Assert the class's invariant."""
        if self._failed is not None and not self._failed.done() and self._delay_s() is not None:
            assert self._syncing or self._timer is not None, "what waits for the disk is forgotten"

    def _plan(self) -> None:
        """Sync now, or when it is due, if nothing changes before that."""
        if self._syncing or self._failed is None or self._failed.done():
            return
        delay_s = self._delay_s()
        if delay_s != 0.0:
            self._set_timer(delay_s)
            return
        self._syncing = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._sync, name="flush", daemon=True)
            self._thread.start()
        self._loops.put((asyncio.get_running_loop(), recorder.now_ns()))

    def _delay_s(self) -> float | None:
        now_s = self._clock.monotonic_s()
        flushed = self._store.flushed_offset
        waiting_bytes = self._store.appended_offset - flushed
        return self._policy.delay_s(
            now_s - self._last_sync_s, waiting_bytes, urgent=self._demanded > flushed
        )

    def _set_timer(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s is not None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._plan)

    def _sync(self) -> None:
        """The thread: each loop in the queue asks for one sync, and says since when. The thread
        begins the next one by itself when it is demanded already, so that it does not wait for a
        busy loop.
        """
        name_thread("flush")
        while (asked := self._loops.get()) is not None:
            loop, asked_ns = asked
            recorder.note(Stage.THREAD_WAIT, asked_ns)
            is_next_begun = True
            while is_next_begun:
                result: float | Exception | None = None
                try:
                    if not self._store.flush_log_while_wanted(self._write_fd):
                        started_s = self._clock.monotonic_s()
                        self._store.flush_log()
                        result = self._clock.monotonic_s() - started_s
                    is_next_begun = self._demanded > self._store.flushed_offset
                except Exception as error:
                    result, is_next_begun = error, False
                try:
                    loop.call_soon_threadsafe(self._ended, result, is_next_begun)
                except RuntimeError:  # the loop is closed
                    break

    def _hear(self) -> None:
        """The thread has synced without the interpreter lock, and may be syncing again."""
        for duration_ns in array("q", os.read(self._read_fd, PIPE_READ_BYTES)):
            self._synced(duration_ns / 1e9)

    def _synced(self, seconds: float) -> None:
        self._last_sync_s = self._clock.monotonic_s()
        begun_ns = recorder.now_ns() - int(seconds * 1e9)
        recorder.note_limited(Stage.FLUSH, begun_ns, self._store.flushed_offset)
        # Not where that sync began: the loop may have handled a later one before.
        self._on_flushed(self._store.flushed_offset, seconds)

    def _ended(self, result: float | Exception | None, is_next_begun: bool) -> None:
        """The thread has synced for ``result`` seconds, or failed. None: the pipe has the duration.
        ``is_next_begun``: the thread has begun the next sync.
        """
        assert self._syncing
        self._syncing = is_next_begun
        if self._failed is None or self._failed.done():  # `run` has ended
            return
        if isinstance(result, Shortage):  # nothing was written or synced: nothing is lost
            log.error("the commit log cannot be flushed", extra=fields(reason=str(result)))
            self._set_timer(SHORTAGE_RETRY_S)
            return
        if isinstance(result, Exception):
            log.critical("the disk refused to sync the commit log")
            self._failed.set_exception(result)
            return
        if result is not None:
            self._synced(result)
        self._plan()

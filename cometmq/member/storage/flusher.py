"""When the log is synced: one thread, one fdatasync at a time, "flushed up to X" as the only
result.

While somebody waits for the disk the flusher runs back to back, so that all who came during one
fdatasync share the next (group commit); where it can, the thread then syncs without the interpreter
lock, and the loop hears of each sync through a pipe. Otherwise RocketMQ's intervals rule
(flushIntervalCommitLog, flushCommitLogLeastPages, flushCommitLogThoroughInterval).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from cometmq.clock import Clock
from cometmq.errors import Shortage
from cometmq.member.storage.notify_pipe import NotifyPipe
from cometmq.member.storage.worker import Worker
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
# A reader that found nothing this recently makes the flusher run back to back: what it waits for
# becomes visible one fdatasync after it was appended.
PROMPT_S = 1.0
SHORTAGE_RETRY_S = 1.0


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
        self._worker = Worker("flush", self._flush, self._ended, self._is_demanded)
        self._pipe = NotifyPipe(self._heard)
        self._failed: asyncio.Future[None] | None = None  # while `run` runs
        self._syncing = False
        self._timer: asyncio.TimerHandle | None = None
        self._demanded = 0  # highest log offset that somebody waits for
        self._prompt_until_s = 0.0
        self._last_sync_s = clock.monotonic_s()

    def demand(self, position: int) -> None:
        """Somebody waits until the log is on disk up to ``position``."""
        if position > self._demanded:
            self._demanded = position
            self._store.demand(position)
            self._plan()

    def flush_promptly(self) -> None:
        """A reader found nothing: for the next second whatever arrives is synced at once."""
        self._prompt_until_s = self._clock.monotonic_s() + PROMPT_S
        self.demand(self._store.appended_offset)

    def appended(self) -> None:
        """The log has grown: there may now be something to sync."""
        if self._clock.monotonic_s() < self._prompt_until_s:
            self.demand(self._store.appended_offset)
        else:
            self._plan()

    async def run(self) -> None:
        """Sync until cancelled."""
        self._failed = asyncio.get_running_loop().create_future()
        try:
            with self._pipe.listening():
                self._plan()
                await self._failed
        finally:
            self._failed = None
            self._set_timer(None)

    def close(self) -> None:
        """End the thread; a running sync is waited for, and what is demanded of that appended."""
        self._worker.close()
        self._pipe.close()

    def validate(self) -> None:
        """Assert the class's invariant."""
        if self._failed is not None and not self._failed.done() and self._delay_s() is not None:
            assert self._syncing or self._timer is not None, "what waits for the disk is forgotten"

    def _plan(self) -> None:
        """Sync now, or when it is due, if nothing changes before that."""
        if self._syncing or self._failed is None or self._failed.done():
            return
        delay_s = self._delay_s()
        if delay_s == 0.0:
            self._syncing = True
            self._worker.start()
        else:
            self._set_timer(delay_s)

    def _flush(self) -> float | None:
        """In the thread: the seconds that it took; None when the loop has heard of them."""
        if self._store.flush_log_while_wanted(self._pipe.write_fd):
            return None
        started_s = self._clock.monotonic_s()
        self._store.flush_log()
        return self._clock.monotonic_s() - started_s

    def _is_demanded(self) -> bool:
        """In the thread: somebody waits already for what came during the last sync."""
        return self._demanded > self._store.flushed_offset

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

    def _heard(self, durations_ns: Iterable[int]) -> None:
        """The thread has synced so often, and may be syncing again."""
        for duration_ns in durations_ns:
            self._synced(duration_ns / 1e9)

    def _synced(self, seconds: float) -> None:
        self._last_sync_s = self._clock.monotonic_s()
        # Not where that sync began: the loop may have heard of a later one before.
        self._on_flushed(self._store.flushed_offset, seconds)

    def _ended(self, result: float | Exception | None, more: bool) -> None:
        """What the thread was told to do is done; ``more``: it has begun again."""
        self._syncing = more
        if self._failed is None or self._failed.done():  # nobody runs us any more
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

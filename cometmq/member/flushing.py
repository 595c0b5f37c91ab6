"""When the log is synced: one thread, one fdatasync at a time, "flushed up to X" as the only
result.

While somebody waits for the disk the flusher runs back to back, so that all who came during one
fdatasync share the next (group commit). Otherwise RocketMQ's intervals rule (`rocketmq-facts`
§3.12: flushIntervalCommitLog, flushCommitLogLeastPages, flushCommitLogThoroughInterval).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cometmq.clock import Clock
from cometmq.errors import DiskFull
from cometmq.member.worker import Worker
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
# A reader that found nothing this recently makes the flusher run back to back: what it waits for
# becomes visible one fdatasync after it was appended.
HUNGRY_S = 1.0
DISK_FULL_RETRY_S = 1.0


class FlushableLog(Protocol):
    """The part of the store that the flusher needs."""

    @property
    def appended_offset(self) -> int: ...
    @property
    def flushed_offset(self) -> int: ...
    def flush_log(self) -> int: ...


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
    """Decides when the flush thread syncs. All methods belong to the event loop; only ``flush_log``
    runs in the thread.

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
        self._worker = Worker("flush", self._flush, self._synced, self._is_demanded)
        self._failed: asyncio.Future[None] | None = None  # while `run` runs
        self._syncing = False
        self._timer: asyncio.TimerHandle | None = None
        self._demanded = 0  # highest log offset that somebody waits for
        self._hungry_until_s = 0.0
        self._last_sync_s = clock.monotonic_s()

    def demand(self, position: int) -> None:
        """Somebody waits until the log is on disk up to ``position``."""
        if position > self._demanded:
            self._demanded = position
            self._plan()

    def hungry(self) -> None:
        """A reader found nothing: for the next second whatever arrives is synced at once."""
        self._hungry_until_s = self._clock.monotonic_s() + HUNGRY_S
        self._plan()

    def appended(self) -> None:
        """The log has grown: there may now be something to sync."""
        self._plan()

    async def run(self) -> None:
        """Sync until cancelled."""
        self._failed = asyncio.get_running_loop().create_future()
        self._plan()
        try:
            await self._failed
        finally:
            self._failed = None
            self._set_timer(None)

    def close(self) -> None:
        """End the thread; a running sync is waited for."""
        self._worker.close()

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

    def _flush(self) -> tuple[int, float]:
        """In the thread: the position that is on disk, and the seconds that it took."""
        started_s = self._clock.monotonic_s()
        position = self._store.flush_log()
        return position, self._clock.monotonic_s() - started_s

    def _is_demanded(self) -> bool:
        """In the thread: somebody waits already for what came during the last sync."""
        return self._demanded > self._store.flushed_offset

    def _delay_s(self) -> float | None:
        now_s = self._clock.monotonic_s()
        flushed = self._store.flushed_offset
        urgent = self._demanded > flushed or now_s < self._hungry_until_s
        return self._policy.delay_s(
            now_s - self._last_sync_s, self._store.appended_offset - flushed, urgent
        )

    def _set_timer(self, delay_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if delay_s is not None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._plan)

    def _synced(self, result: tuple[int, float] | Exception, more: bool) -> None:
        self._syncing = more
        if self._failed is None or self._failed.done():  # nobody runs us any more
            return
        if isinstance(result, DiskFull):  # of what the transient store pool holds: nothing is lost
            log.error("the commit log cannot be written", extra=fields(reason=str(result)))
            self._set_timer(DISK_FULL_RETRY_S)
            return
        if isinstance(result, Exception):
            log.critical("the disk refused to sync the commit log")
            self._failed.set_exception(result)
            return
        self._last_sync_s = self._clock.monotonic_s()
        self._on_flushed(*result)
        self._plan()

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from cometmq.clock import Clock
from cometmq.errors import StoreFailed

log = logging.getLogger(__name__)

PAGE_BYTES = 4096
# A reader that found nothing this recently makes the flusher run back to back: what it waits for
# becomes visible one fdatasync after it was appended.
HUNGRY_S = 1.0


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
    """Owns the flush thread. All methods belong to the event loop; only ``flush_log`` runs in the
    thread.

    ``on_flushed(position, seconds)`` is called on the loop after each sync. A failed sync ends
    :meth:`run` with StoreFailed: what is on disk is unknown then, and asking again would report
    success over lost pages.
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
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")
        self._wake = asyncio.Event()
        self._demanded = 0  # highest log offset that somebody waits for
        self._hungry_until_s = 0.0
        self._last_sync_s = clock.monotonic_s()

    def demand(self, position: int) -> None:
        """Somebody waits until the log is on disk up to ``position``."""
        if position > self._demanded:
            self._demanded = position
            self._wake.set()

    def hungry(self) -> None:
        """A reader found nothing: for the next second whatever arrives is synced at once."""
        self._hungry_until_s = self._clock.monotonic_s() + HUNGRY_S
        if self._store.appended_offset > self._store.flushed_offset:
            self._wake.set()

    def appended(self) -> None:
        """The log has grown: there may now be something to sync."""
        if not self._wake.is_set():
            self._wake.set()

    async def run(self) -> None:
        """Sync until cancelled."""
        while True:
            delay_s = self._delay_s()
            if delay_s == 0.0:
                await self.sync()
                continue
            self._wake.clear()
            if delay_s is None:
                await self._wake.wait()
                continue
            try:
                async with asyncio.timeout(delay_s):
                    await self._wake_for_more_than_appends()
            except TimeoutError:
                await self.sync()

    async def sync(self) -> int:
        """One sync now; returns the position that is on disk."""
        started_s = self._clock.monotonic_s()
        loop = asyncio.get_running_loop()
        try:
            position = await loop.run_in_executor(self._thread, self._store.flush_log)
        except StoreFailed:
            log.critical("the disk refused to sync the commit log")
            raise
        self._last_sync_s = self._clock.monotonic_s()
        self._on_flushed(position, self._last_sync_s - started_s)
        return position

    def close(self) -> None:
        """End the thread; a running sync is waited for."""
        self._thread.shutdown(wait=True)

    def _delay_s(self) -> float | None:
        now_s = self._clock.monotonic_s()
        flushed = self._store.flushed_offset
        urgent = self._demanded > flushed or now_s < self._hungry_until_s
        return self._policy.delay_s(
            now_s - self._last_sync_s, self._store.appended_offset - flushed, urgent
        )

    async def _wake_for_more_than_appends(self) -> None:
        # An append alone does not shorten the interval unless it makes enough bytes or somebody
        # waits for it.
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._delay_s() == 0.0:
                raise TimeoutError

"""What a member tells while its store is being recovered: a log line every few seconds, and two
gauges. The metrics port is open by then; the health name ``started`` is still NOT_SERVING.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cometmq.clock import Clock
from cometmq.member.metrics import MemberMetrics
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

INTERVAL_S = 5.0  # between two lines


class RecoveryStopped(Exception):
    """A signal to stop has come. The store is left as by a crash; the next start recovers it."""


class RecoveryProgress:
    """Call it with bytes read and bytes to read, from the thread that recovers. Raises
    RecoveryStopped once ``stopping`` says so.
    """

    def __init__(
        self, metrics: MemberMetrics, clock: Clock, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._stopping = stopping
        self._told_s = clock.monotonic_s()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._stopping():
            raise RecoveryStopped(f"after {done_bytes} of {total_bytes} bytes")
        self._metrics.recovery_read_bytes.set(done_bytes)
        self._metrics.recovery_total_bytes.set(total_bytes)
        now_s = self._clock.monotonic_s()
        if now_s - self._told_s >= INTERVAL_S:
            self._told_s = now_s
            percent = 100 * done_bytes // max(total_bytes, 1)
            log.info(
                "recovering", extra=fields(read=done_bytes, total=total_bytes, percent=percent)
            )

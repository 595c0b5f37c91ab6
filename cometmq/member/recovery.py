"""Progress of a member whose store is being recovered: a log line every few seconds, and
gauges. The metrics port is open by then; the health name ``started`` is still NOT_SERVING.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Gauge

from cometmq.clock import Clock
from cometmq.telemetry import fields

log = logging.getLogger(__name__)

INTERVAL_S = 5.0  # between two lines


class RecoveryStopped(Exception):
    """A signal to stop has come. The store is left as by a crash; the next start recovers it."""


class RecoveryGauges:
    """Metrics of a recovery, there from the start of the process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        gauge = partial(Gauge, registry=registry)
        self.seconds = gauge("cometmq_recovery_seconds", "Time that opening the store took.")
        self.read_bytes = gauge(
            "cometmq_recovery_read_bytes",
            "Bytes of the log that recovery has read since the process started.",
        )
        self.total_bytes = gauge(
            "cometmq_recovery_total_bytes", "Bytes of the log that recovery has to read, at most."
        )


class RecoveryProgress:
    """Call it with bytes read and bytes to read, from the thread that recovers. Raises
    RecoveryStopped once ``stopping`` says so.
    """

    def __init__(
        self, gauges: RecoveryGauges, clock: Clock, stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._gauges = gauges
        self._clock = clock
        self._stopping = stopping
        self._logged_s = clock.monotonic_s()

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._stopping():
            raise RecoveryStopped(f"after {done_bytes} of {total_bytes} bytes")
        self._gauges.read_bytes.set(done_bytes)
        self._gauges.total_bytes.set(total_bytes)
        now_s = self._clock.monotonic_s()
        if now_s - self._logged_s >= INTERVAL_S:
            self._logged_s = now_s
            percent = 100 * done_bytes // max(total_bytes, 1)
            log.info(
                "recovering", extra=fields(read=done_bytes, total=total_bytes, percent=percent)
            )

"""The time by which messages are due, for delay levels and times of their own."""

from __future__ import annotations

import logging

from cometmq.clock import Clock
from cometmq.member.metrics import MemberMetrics
from cometmq.messaging.believed_clock import BelievedClock
from cometmq.telemetry import fields

log = logging.getLogger(__name__)


class BelievedTime:
    """Belongs to the event loop. ``stored_ms``: when the newest record of the log was stored; 0:
    there is none.
    """

    def __init__(self, clock: Clock, metrics: MemberMetrics, stored_ms: int) -> None:
        self._clock = clock
        self._metrics = metrics
        self._believed = BelievedClock(stored_ms)
        self._jumps = (0, 0)  # that the metrics know

    def now_ms(self) -> int:
        """Never before messages should be due; late for a while after the wall clock jumped."""
        boot_ms = int(self._clock.boottime_s() * 1000)
        now_ms = self._believed.now_ms(self._clock.wall_ms(), boot_ms)
        jumps = self._believed.forward_count, self._believed.back_count
        if jumps != self._jumps:
            log.error("the wall clock has jumped", extra=fields(forward=jumps[0], back=jumps[1]))
            self._metrics.clock_jumps.labels("forward").inc(jumps[0] - self._jumps[0])
            self._metrics.clock_jumps.labels("back").inc(jumps[1] - self._jumps[1])
            self._jumps = jumps
        return now_ms

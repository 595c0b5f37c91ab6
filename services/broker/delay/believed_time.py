"""The time of a writer: from it come store times and the times at which messages are due."""

from __future__ import annotations

import logging

from cometmq.clock import Clock
from cometmq.member.clocks import Clocks, GuardedClock
from cometmq.member.metrics import MemberMetrics
from cometmq.telemetry import fields

log = logging.getLogger(__name__)


class BelievedTime(GuardedClock):
    """Tells of jumps, in the log and in metrics. Belongs to the event loop."""

    def __init__(
        self,
        clock: Clock,
        metrics: MemberMetrics,
        stored_ms: int,
        clocks: Clocks | None = None,
    ) -> None:
        super().__init__(clock, clocks, stored_ms)
        self._metrics = metrics
        self._jumps = (0, 0)  # that the metrics know
        self._behind_ms = 0  # the same

    def _look(self) -> int:
        behind_ms = super()._look()
        jumps = self.believed.forward_count, self.believed.back_count
        if jumps != self._jumps:
            log.error("the wall clock has jumped", extra=fields(forward=jumps[0], back=jumps[1]))
            self._metrics.clock_jumps.labels("forward").inc(jumps[0] - self._jumps[0])
            self._metrics.clock_jumps.labels("back").inc(jumps[1] - self._jumps[1])
            self._jumps = jumps
        if behind_ms != self._behind_ms:
            self._behind_ms = behind_ms
            self._metrics.due_clock_behind_s.set(behind_ms / 1000)
        return behind_ms

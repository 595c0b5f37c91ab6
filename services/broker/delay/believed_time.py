"""The time of a writer: from it come store times and the times at which messages are due."""

from __future__ import annotations

import logging

from cometmq.clock import Clock
from cometmq.member.clocks import Clocks
from cometmq.member.metrics import MemberMetrics
from cometmq.messaging.believed_clock import BelievedClock
from cometmq.telemetry import fields

log = logging.getLogger(__name__)


class BelievedTime:
    """A :class:`~cometmq.clock.Clock` whose wall clock is the believed one. Belongs to the event
    loop. ``stored_ms``: when the newest record of the log was stored; 0: there is none. ``clocks``:
    what other clocks show, in place of this machine's while it is off.
    """

    def __init__(
        self,
        clock: Clock,
        metrics: MemberMetrics,
        stored_ms: int,
        clocks: Clocks | None = None,
    ) -> None:
        self._clock = clock
        self._clocks = clocks
        self._stored_ms = stored_ms
        self._metrics = metrics
        self._believed = BelievedClock(stored_ms)
        self._jumps = (0, 0)  # that the metrics know
        self._behind_ms = 0  # the same
        self.monotonic_s = clock.monotonic_s
        self.boottime_s = clock.boottime_s

    def now_ms(self) -> int:
        """By which messages are due: never before they should be; late for a while after the wall
        clock jumped.
        """
        self._look()
        return self._believed.due_ms

    def wall_ms(self) -> int:
        """From which delays count."""
        self._look()
        return self._believed.now_ms

    def promise(self, delay_ms: int) -> None:
        """A message is stored that waits for so long from :meth:`wall_ms`."""
        if delay_ms > 0:
            self._believed.promise(delay_ms, self._boot_ms())

    def _boot_ms(self) -> int:
        return int(self._clock.boottime_s() * 1000)

    def _look(self) -> None:
        believed, wall_ms = self._believed, self._clock.wall_ms()
        time_ms = wall_ms if self._clocks is None else self._clocks.time_ms(self._stored_ms)
        believed.look(time_ms, self._boot_ms())
        jumps = believed.forward_count, believed.back_count
        if jumps != self._jumps:
            log.error("the wall clock has jumped", extra=fields(forward=jumps[0], back=jumps[1]))
            self._metrics.clock_jumps.labels("forward").inc(jumps[0] - self._jumps[0])
            self._metrics.clock_jumps.labels("back").inc(jumps[1] - self._jumps[1])
            self._jumps = jumps
        behind_ms = wall_ms - believed.due_ms
        if behind_ms != self._behind_ms:
            self._behind_ms = behind_ms
            self._metrics.due_clock_behind_s.set(behind_ms / 1000)

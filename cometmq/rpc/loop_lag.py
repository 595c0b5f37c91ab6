"""What every server tells about itself: whether it serves, and whether its event loop keeps up."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Gauge, Histogram

from cometmq.clock import Clock
from cometmq.flight_recorder import Stage, recorder
from cometmq.rpc.gate import Gate

INTERVAL_S = 0.1
NOTED_S = 0.002  # less is the timer's own inaccuracy
_LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LoopLagMonitor:
    """``cometmq_ready`` and ``cometmq_event_loop_lag_seconds``; use :meth:`run` as a task.

    Everything that a process does, it does on one loop: a timer that fires late has been waiting as
    long as every request has.
    """

    def __init__(self, registry: CollectorRegistry, gate: Gate, clock: Clock) -> None:
        self._clock = clock
        ready = Gauge(
            "cometmq_ready",
            "1 while the process serves; 0 while it starts and while it drains.",
            registry=registry,
        )
        ready.set_function(lambda: gate.refusal is None)
        self._lag_s = Histogram(
            "cometmq_event_loop_lag_seconds",
            "How much later than asked the event loop woke a timer.",
            buckets=_LAG_BUCKETS_S,
            registry=registry,
        )

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            begun_ns, before_s = recorder.now_ns(), self._clock.monotonic_s()
            await asyncio.sleep(INTERVAL_S)
            late_s = self._clock.monotonic_s() - before_s - INTERVAL_S
            self._lag_s.observe(max(0.0, late_s))
            if late_s > NOTED_S:
                recorder.note_limited(Stage.TIMER_LATE, begun_ns + int(INTERVAL_S * 1e9))

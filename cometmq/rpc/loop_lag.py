"""Metrics of every server: whether it serves, and how late its event loop is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from cometmq.clock import Clock, process_cpu_s
from cometmq.flight_recorder import Stage, recorder
from cometmq.rpc.gate import Gate
from cometmq.rpc.loop_watch import loop_watch
from cometmq.rpc.ticks import until_tick_s

INTERVAL_S = 0.1
REST_INTERVAL_S = 1.0
BUSY_SHARE = 0.02  # of a core: a process that has used more since the last look is not idle
NOTED_S = 0.002  # less is the timer's own inaccuracy
_LAG_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class LoopLagMonitor:
    """``cometmq_ready`` and ``cometmq_event_loop_lag_seconds``; use :meth:`run` as a task.

    Everything that a process does, it does on one loop: a timer that fires late has been waiting as
    long as every request has. An idle process is measured less often, because each timer wakes
    it. A loop that does not turn for ``stall_ms`` (0: it may) is counted, and the log says where it
    stands. ``cpu_s``: the processor seconds of the process so far.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        gate: Gate,
        clock: Clock,
        stall_ms: int = 0,
        cpu_s: Callable[[], float] = process_cpu_s,
    ) -> None:
        self._clock = clock
        self._stall_ms = stall_ms
        self._cpu_s = cpu_s
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

        self._stalls = Counter(
            "cometmq_event_loop_stalls",
            "How often the event loop did not turn for so long that the log says where it stands.",
            registry=registry,
        )

    async def run(self) -> None:
        """Measure until cancelled."""
        if not self._stall_ms:
            return await self._measure()
        end_watch = loop_watch.watch(self._stall_ms / 1000, self._stalls.inc)
        try:
            await self._measure()
        finally:
            end_watch()

    async def _measure(self) -> None:
        is_busy = True
        while True:
            wait_s = INTERVAL_S if is_busy else until_tick_s(REST_INTERVAL_S)
            cpu_s = self._cpu_s()
            begun_ns, before_s = recorder.now_ns(), self._clock.monotonic_s()
            await asyncio.sleep(wait_s)
            late_s = self._clock.monotonic_s() - before_s - wait_s
            self._lag_s.observe(max(0.0, late_s))
            if late_s > NOTED_S:
                recorder.note_limited(Stage.TIMER_LATE, begun_ns + int(wait_s * 1e9))
            is_busy = self._cpu_s() - cpu_s > BUSY_SHARE * wait_s

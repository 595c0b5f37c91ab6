"""Readiness and the loop's lag, as Prometheus sees them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry

from cometmq.rpc import loop_lag
from cometmq.rpc.gate import Gate
from cometmq.rpc.loop_lag import LoopLagMonitor
from tests.support.waiting import until


class Late:
    """A clock on which each look takes 30 ms."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        self.now_s += 0.03
        return self.now_s

    def wall_ms(self) -> int:
        return 0

    def boottime_s(self) -> float:
        return 0.0


def test_ready_follows_the_gate() -> None:
    registry, gate = CollectorRegistry(), Gate()
    LoopLagMonitor(registry, gate, Late())
    assert registry.get_sample_value("cometmq_ready") == 0
    gate.open()
    assert registry.get_sample_value("cometmq_ready") == 1
    gate.drain()
    assert registry.get_sample_value("cometmq_ready") == 0


async def test_a_late_timer_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "INTERVAL_S", 0.001)
    registry = CollectorRegistry()
    running = asyncio.create_task(LoopLagMonitor(registry, Gate(), Late()).run())
    lag = "cometmq_event_loop_lag_seconds"
    await until(lambda: registry.get_sample_value(f"{lag}_count"))
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    # 30 ms between two looks, of which 1 ms was asked for.
    assert registry.get_sample_value(f"{lag}_bucket", {"le": "0.02"}) == 0
    assert registry.get_sample_value(f"{lag}_bucket", {"le": "0.05"}) != 0


async def test_a_process_at_rest_is_measured_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """0.1 s of work in each of the first two intervals, then none, then some again."""
    used_s, waits_s = iter([0.0, 0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.5, 0.5]), []

    async def sleep(seconds: float) -> None:
        waits_s.append(seconds)

    monkeypatch.setattr(loop_lag, "until_tick_s", lambda _: 0.75)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    monitor = LoopLagMonitor(CollectorRegistry(), Gate(), Late(), cpu_s=used_s.__next__)
    with pytest.raises(RuntimeError):  # the list is at its end
        await monitor.run()
    assert waits_s == [loop_lag.INTERVAL_S] * 3 + [0.75, loop_lag.INTERVAL_S]

"""The time by which waiting messages are due, and what the metrics tell of it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from cometmq.member.metrics import MemberMetrics
from services.broker.delay.believed_time import BelievedTime
from tests.support.stores.small_stores import START_MS, WallClock

HOUR_MS = 3_600_000


class WrongClock(WallClock):
    wrong_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self.wrong_ms


def test_a_jump_forward_is_counted_and_delivers_nothing_early() -> None:
    registry = CollectorRegistry()
    clock = WrongClock()
    time = BelievedTime(clock, MemberMetrics(registry, "c", "g"), START_MS)

    def jumps(direction: str) -> float | None:
        return registry.get_sample_value("cometmq_clock_jumps_total", {"direction": direction})

    assert time.now_ms() == START_MS
    clock.wrong_ms = HOUR_MS
    clock.now_ms += 1_000
    assert time.now_ms() == START_MS + 1_000
    clock.now_ms += 59_000
    assert time.now_ms() == START_MS + 60_000
    assert (jumps("forward"), jumps("back")) == (1, 0)
    clock.now_ms += 1_000
    assert time.now_ms() == START_MS + 61_000 + HOUR_MS
    clock.wrong_ms = 0
    assert time.now_ms() == START_MS + 61_000
    assert (jumps("forward"), jumps("back")) == (1, 1)

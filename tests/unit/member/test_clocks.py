"""This member's clock beside others: off or not, the time that counts, metrics, the log."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry

from cometmq.member.clocks import Clocks, member_name
from cometmq.member.metrics import MemberMetrics
from cometmq.member.role_change import RoleChange
from services.broker.delay.believed_time import BelievedTime
from tests.support.stores.small_stores import START_MS, WallClock


class WrongClock(WallClock):
    wrong_ms = 0

    def wall_ms(self) -> int:
        return self.now_ms + self.wrong_ms


def beside(clock: WrongClock, clocks: Clocks, *names: str) -> None:
    """These others are right."""
    for name in names:
        clocks.note(name, clocks.boot_ms(), clock.now_ms)


@pytest.mark.parametrize("wrong_ms", [20_000, 600_000, 3_600_000, -20_000, -600_000])
def test_a_wrong_clock_is_corrected_by_most_others(
    wrong_ms: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock, registry = WrongClock(), CollectorRegistry()
    clocks = Clocks(clock, 2.0, None)
    registry.register(clocks)
    assert registry.get_sample_value("cometmq_clock_skew_seconds") is None
    beside(clock, clocks, "member 1", "namesrv a")
    assert (clocks.is_off, clocks.skew_ms, clocks.time_ms()) == (False, 0, START_MS)
    clock.wrong_ms = wrong_ms
    with caplog.at_level(logging.INFO):
        beside(clock, clocks, "member 1")
        assert (clocks.is_off, clocks.skew_ms, clocks.time_ms()) == (True, wrong_ms, START_MS)
        assert registry.get_sample_value("cometmq_clock_skew_seconds") == wrong_ms / 1000
        member = {"member": "1"}
        ahead_s = registry.get_sample_value("cometmq_member_clock_skew_seconds", member)
        assert ahead_s == -wrong_ms / 1000
        assert registry.get_sample_value("cometmq_member_clock_error_seconds", member) == 0.001
        clock.wrong_ms = 1_500
        beside(clock, clocks, "member 1")
    assert (clocks.is_off, clocks.time_ms()) == (False, START_MS + 1_500), "near enough"
    lines = [one.getMessage() for one in caplog.records]
    assert lines == ["the clock of this machine is off", "the clock is right again"]


def test_a_member_knows_whose_clock_is_off() -> None:
    clock = WrongClock()
    clocks = Clocks(clock, 2.0, None)
    beside(clock, clocks, "namesrv a", member_name(1))
    clocks.note(member_name(2), clocks.boot_ms(), clock.now_ms + 600_000)
    assert [clocks.is_other_off(number) for number in (1, 2, 3)] == [False, True, False]


def test_the_process_that_comes_next_knows_the_clocks_of_this_one() -> None:
    clock = WrongClock()
    clocks = Clocks(clock, 2.0, None)
    beside(clock, clocks, "member 0")
    clock.wrong_ms = 600_000
    change = RoleChange("services.broker", "failover", clocks=clocks.readings)
    again = Clocks(clock, 2.0, change)
    assert again.time_ms() == START_MS


@pytest.mark.parametrize("wrong_ms", [20_000, 600_000, 130_000_000_000, -600_000])
def test_messages_are_due_by_what_most_clocks_show(wrong_ms: int) -> None:
    """However long the own clock is wrong."""
    clock = WrongClock()
    clocks = Clocks(clock, 2.0, None)
    time = BelievedTime(clock, MemberMetrics(CollectorRegistry(), "c", "g"), START_MS, clocks)
    for second in range(300):
        clock.wrong_ms = wrong_ms if second > 10 else 0
        beside(clock, clocks, "member 1", "namesrv a")
        assert abs(time.now_ms() - clock.now_ms) <= 1, second
        assert abs(time.wall_ms() - clock.now_ms) <= 1, second
        clock.now_ms += 1_000

"""Parts of a take-over are read off the new writer's log."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from bench.failover import PARTS, Failover, failover_of, missed, table

DAY = "2026-11-21T23:06:"
LOG = [
    f"{DAY}48.743Z INFO    services.haslave.following stream ended error=gone",
    f"{DAY}53.931Z INFO    services.haslave.elector takes the lease reason=failover",
    f"{DAY}53.934Z INFO    cometmq.member.app role ends next=services.broker reason=failover",
    f"{DAY}54.427Z INFO    cometmq.member.state.opening store open clean=True seconds=0.055",
    f"{DAY}54.551Z INFO    cometmq.member.app ready role=writer address=127.0.0.1:46649",
]
KILLED_S = datetime(2026, 11, 21, 23, 6, 48, 731_000, tzinfo=UTC).timestamp()


def test_the_parts_add_up() -> None:
    found = failover_of(KILLED_S, LOG, KILLED_S + 6.0)
    assert found.seconds == 6.0
    assert list(found.parts) == list(PARTS)
    assert [round(seconds, 3) for seconds in found.parts.values()] == [
        5.2,
        0.003,
        0.438,
        0.055,
        0.124,
        0.18,
    ]
    assert sum(found.parts.values()) == pytest.approx(found.seconds)


@pytest.mark.parametrize("missing", [1, 2, 3, 4])
def test_a_log_without_one_of_the_events_is_refused(missing: int) -> None:
    with pytest.raises(ValueError, match="the log does not say"):
        failover_of(KILLED_S, LOG[:missing] + LOG[missing + 1 :], KILLED_S + 6.0)


def test_the_slowest_decides() -> None:
    quick, slow = (Failover(seconds, dict.fromkeys(PARTS, 1.0)) for seconds in (6.5, 9.1))
    assert missed([quick, quick], [1.0, 2.9]) == []
    assert missed([quick, slow], [1.0]) == ["take-over within 9 s"]
    assert missed([quick], [1.0, 3.1]) == ["hand-over within 3 s"]
    assert "| take-over " in table([quick, slow], [1.0])

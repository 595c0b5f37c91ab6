"""The arithmetic of the holds benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.holds import (
    CLIENT_COUNT,
    HOLDS_PER_CLIENT,
    QUEUES_PER_TOPIC,
    TOPIC_COUNT,
    IdleHolds,
    missed,
    queue_of,
    text_of,
)
from bench.processes import Line

GOOD = IdleHolds(
    holds=10_000,
    seconds=60.0,
    broker_cpu=0.008,
    idle_broker_cpu=0.003,
    pullhold_cpu=0.2,
    pullhold_rss_mib=110.0,
    broker_calls={"QueryQueues": 24},
    holds_ended=40_000,
    pulls=0,
    safety_finds=0,
)
FAST: Line = {"p50_ms": 1.5, "p99_ms": 5.0, "max_ms": 9.0, "count": 5_000}


def test_the_holds_cover_every_queue_evenly() -> None:
    numbers = range(CLIENT_COUNT * HOLDS_PER_CLIENT)
    queues = [(queue.topic, queue.queue_id) for queue in map(queue_of, numbers)]
    assert len(set(queues)) == TOPIC_COUNT * QUEUES_PER_TOPIC
    assert len(queues) == 2 * len(set(queues))


@pytest.mark.parametrize(
    ("change", "target"),
    [
        ({"holds": 9_000}, "every pull is held"),
        ({"broker_cpu": 0.014}, "broker CPU"),
        ({"broker_calls": {"Pull": 1}}, "no call for a hold"),
        ({"pulls": 1}, "no call for a hold"),
        ({"safety_finds": 1}, "safety finds"),
    ],
)
def test_each_target_can_be_missed(change: dict[str, object], target: str) -> None:
    assert missed(GOOD, FAST) == []
    assert missed(replace(GOOD, **change), FAST) == [target]  # type: ignore[arg-type]
    assert missed(GOOD, FAST | {"p50_ms": 2.1}) == ["latency p50"]


def test_the_text_tells_all_figures() -> None:
    text = text_of(GOOD, FAST, FAST)
    for figure in ("0.80%", "0.30%", "+0.50%", "QueryQueues 24", "110 MiB", "p50_ms 1.50"):
        assert figure in text

"""Metrics are summed over labels and processes, and a metric that stood still is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, generate_latest

from cometmq.admin.local import MEMBER, NAMESRV, PULLHOLD, LocalCluster, LocalProcess
from examples.roundtrip.metrics import (
    Expectation,
    Movement,
    compare,
    expectations,
    rise,
    scrape,
    totals,
)
from examples.roundtrip.workers import WorkerFailed


def exposition(**counts: int) -> str:
    registry = CollectorRegistry()
    counter = Counter("messages_in_total", "Help.", ["topic"], registry=registry)
    for topic, count in counts.items():
        counter.labels(topic=topic).inc(count)
    return generate_latest(registry).decode()


def test_labels_are_summed() -> None:
    assert totals(exposition(a=3, b=4))["messages_in_total"] == 7


SCRAPES = [
    {"g1": {"in": 5.0, "idle": 1.0, "odd": 7.0}, "g2": {"in": 0.0, "idle": 1.0, "odd": 7.0}},
    {"g1": {"in": 8.0, "idle": 2.0, "odd": 7.0}, "g2": {"in": 1.0, "idle": 1.0, "odd": 7.0}},
    {"g1": {"in": 2.0, "idle": 2.0, "odd": 7.0}, "g2": {"in": 4.0, "idle": 1.0, "odd": 7.0}},
]


def movement(metric: str, least: float = 0.0, still: bool = False) -> Movement:
    (found,) = compare(SCRAPES, [Expectation(metric, "both", ("g1", "g2"), least, still)])
    return found


def test_the_rise_is_that_of_all_processes_and_of_both_lives_of_one() -> None:
    assert movement("in").rises == (3 + 2, 4)
    assert movement("in", 9).good
    assert not movement("in", 10).good


def test_every_process_has_to_move() -> None:
    assert movement("idle").moved_processes == 1
    assert not movement("idle").good


def test_an_absent_metric_stands_still() -> None:
    assert movement("absent").moved_processes == 0
    assert not movement("absent").good


def test_what_has_to_stand_still_must_not_move() -> None:
    assert movement("odd", still=True).good
    assert not movement("in", still=True).good


@given(st.lists(st.lists(st.integers(0, 9), min_size=1), min_size=1))
def test_a_counter_that_begins_anew_loses_only_what_nobody_saw(lives: list[list[int]]) -> None:
    """Each life counts up from 0; what it showed before its end is in the sum."""
    values: list[float] = [0.0]
    seen = 0
    for steps in lives:
        count = 0
        if values[-1]:
            values.append(0.0)  # a look right after the change
        for step in steps:
            count += step
            values.append(float(count))
        seen += count
    assert rise(values) == seen


def process(name: str, kind: str) -> LocalProcess:
    return LocalProcess(name, kind, 1, 1)


async def test_a_process_that_is_gone_is_named(unused_tcp_port: int) -> None:
    gone = LocalProcess("g2-1", MEMBER, 1, 1, metrics_address=f"127.0.0.1:{unused_tcp_port}")
    with pytest.raises(WorkerFailed, match=r"g2-1 does not answer.*g2-1/log\.txt"):
        await scrape(LocalCluster(Path(), (gone,)))


def test_every_process_is_expected_to_do_something() -> None:
    members = [process(f"g{n}-{m}", MEMBER) for n in (1, 2) for m in (0, 1)]
    others = [process("namesrv-1", NAMESRV), process("pullhold-1", PULLHOLD)]
    cluster = LocalCluster(Path(), (*members, *others))
    wanted = expectations(cluster, "g1", steady_messages=30, body_bytes=100)
    assert {name for one in wanted for name in one.processes} == {p.name for p in cluster.processes}
    exact = {(one.processes, one.least) for one in wanted if "messages" in one.metric and one.least}
    assert exact == {(("g2-0",), 30)}
    copies = {one.least for one in wanted if one.metric == "cometmq_replication_bytes_total"}
    assert copies == {200.0}  # every byte lies on two members

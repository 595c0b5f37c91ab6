"""The arithmetic of the replication benchmark."""

from __future__ import annotations

from bench.figures import rows
from bench.processes import Line
from bench.replication import throughput_figures

LINES: dict[str, Line] = {
    "alone": {"rate": 100_000, "cpu_us_writer": 5.0},
    "async": {"rate": 70_000, "cpu_us_writer": 6.0},
    "sync": {"rate": 50_000, "cpu_us_writer": 7.0},
}


def test_shares_are_of_the_broker_alone() -> None:
    found = {figure.name: figure.value for figure in throughput_figures(LINES)}
    assert found["produce, async / alone"] == 0.7
    assert found["produce, sync / alone"] == 0.5
    assert found["CPU of the writer, sync / alone"] == 1.4


def test_what_is_not_reached_is_named() -> None:
    missed = [row.figure.name for row in rows([list(throughput_figures(LINES))]) if not row.reached]
    assert missed == ["produce, sync / alone", "CPU of the writer, sync / alone"]

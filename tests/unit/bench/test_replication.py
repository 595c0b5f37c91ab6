"""The arithmetic of the replication benchmark."""

from __future__ import annotations

import pytest

from bench.processes import Line
from bench.replication import Figure, cells, rows, table, throughput_figures

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


@pytest.mark.parametrize(("at_most", "reached"), [(False, True), (True, False)])
def test_the_median_decides(at_most: bool, reached: bool) -> None:
    runs = [[Figure("a", value, "s", 2.5, at_most)] for value in (1.0, 9.0, 3.0)]
    (row,) = rows(runs)
    assert (row.values.median, row.reached) == (3.0, reached)


def test_a_figure_without_a_limit_is_only_told() -> None:
    (row,) = rows([[Figure("a", 12_345.0, "messages/s")]])
    assert row.reached
    assert cells(row) == ("a", "12,345", "12,345–12,345", "messages/s", "", "")
    assert "| a " in table([row])

"""Figures against their limits."""

from __future__ import annotations

import pytest

from bench.figures import Figure, cells, rows, table


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

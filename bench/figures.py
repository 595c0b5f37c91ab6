"""Figures of several runs, the limits that they have to keep, and the table of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import markdown
from bench.stats import Spread, spread


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one run. ``limit`` is the issue's: a least or, with ``at_most``, a most; None:
    there is none.
    """

    name: str
    value: float
    unit: str
    limit: float | None = None
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One figure over all runs."""

    figure: Figure  # of the first run
    values: Spread

    @property
    def reached(self) -> bool:
        limit, value = self.figure.limit, self.values.median
        if limit is None:
            return True
        return value <= limit if self.figure.at_most else value >= limit


def rows(runs: Sequence[Sequence[Figure]]) -> list[Row]:
    """The figures of several runs, as they come in each of them."""
    return [
        Row(figures[0], spread([figure.value for figure in figures]))
        for figures in zip(*runs, strict=True)
    ]


def table(found: Sequence[Row]) -> str:
    header = ("what", "median", "lowest–highest", "unit", "limit", "reached")
    return markdown(header, [cells(row) for row in found])


def cells(row: Row) -> tuple[str, ...]:
    figure, values = row.figure, row.values
    limit = ""
    if figure.limit is not None:
        limit = f"{'≤' if figure.at_most else '≥'} {figure.limit:g}"
    extent = f"{number(values.lowest)}–{number(values.highest)}"
    reached = ("yes" if row.reached else "NO") if limit else ""
    return figure.name, number(values.median), extent, figure.unit, limit, reached


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"

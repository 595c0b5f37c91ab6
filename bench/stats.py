"""The arithmetic of a report: medians, percentiles and ratios. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


def percentile(values: Sequence[float], fraction: float) -> float:
    """The smallest value that at least ``fraction`` of all values do not exceed (nearest rank, no
    interpolation).

    ``values`` need not be sorted; ``fraction`` is above 0 and at most 1.
    """
    assert 0 < fraction <= 1
    if not values:
        raise ValueError("no values")
    rank = -(-fraction * len(values) // 1)  # ceiling: the rank counts from 1
    return sorted(values)[max(int(rank), 1) - 1]


@dataclass(frozen=True, slots=True)
class Spread:
    """What several runs of the same measurement gave."""

    median: float
    lowest: float
    highest: float
    runs: int


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values), len(values))


def ratios(numerators: dict[int, float], denominators: dict[int, float]) -> list[float]:
    """One quotient for each run that has both: a run's figure is divided by what the same run's
    machine could do.

    Keys are run numbers. A noisy neighbour slows both sides of one run, so their quotient moves
    less than either.
    """
    return [
        numerators[run] / denominators[run] for run in sorted(numerators) if run in denominators
    ]


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """Milliseconds."""

    p50_ms: float
    p99_ms: float
    p999_ms: float
    max_ms: float
    count: int


def summarise_latency(latencies_ms: Sequence[float]) -> LatencySummary:
    return LatencySummary(
        percentile(latencies_ms, 0.5),
        percentile(latencies_ms, 0.99),
        percentile(latencies_ms, 0.999),
        max(latencies_ms),
        len(latencies_ms),
    )

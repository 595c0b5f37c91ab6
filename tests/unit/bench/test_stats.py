"""The figures of a report against counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import stats

VALUES = st.lists(st.integers(-1000, 1000), min_size=1)


@given(VALUES, st.floats(0.001, 1.0))
def test_percentile_is_the_smallest_value_that_covers_the_fraction(
    values: list[float], fraction: float
) -> None:
    found = stats.percentile(values, fraction)
    assert found in values
    assert sum(v <= found for v in values) >= fraction * len(values)
    assert sum(v < found for v in values) < fraction * len(values)


def test_percentiles_of_a_hundred() -> None:
    values = list(range(100, 0, -1))
    assert [stats.percentile(values, f) for f in (0.5, 0.99, 1.0)] == [50, 99, 100]


def test_no_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        stats.percentile([], 0.5)


def test_a_ratio_takes_its_denominator_from_the_same_run() -> None:
    assert stats.ratios({1: 10, 2: 30, 3: 99}, {1: 100, 2: 100}) == [0.1, 0.3]


def test_latency_summary() -> None:
    summary = stats.summarise_latency([float(n) for n in range(1, 201)])
    assert summary == stats.LatencySummary(
        p50_ms=100, p99_ms=198, p999_ms=200, max_ms=200, count=200
    )

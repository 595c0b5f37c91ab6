"""Which figure is divided by which, and what the tables look like."""

from __future__ import annotations

from bench.report import Measurement, summarise


def rate(kind: str, run: int, value: float, flush: str = "", body: int = 1024) -> Measurement:
    return Measurement(
        kind, body, flush, run, {"rate": value, "cpu_us_broker": value / 10, "other_cores": run}
    )


def latency(run: int, p50: float, worst: float) -> Measurement:
    values = {"p50_ms": p50, "p99_ms": p50 * 2, "max_ms": worst, "count": 100}
    return Measurement("latency", 1024, "sync", run, values)


RUNS = [
    rate("bare stream", 1, 1000),
    rate("produce", 1, 200, "async"),
    rate("bare stream", 2, 500),  # a busy minute: both sides are slower
    rate("produce", 2, 110, "async"),
    rate("bare stream", 3, 1000),
    rate("produce", 3, 210, "async"),
    latency(1, 5, 90),
    latency(2, 7, 20),
    latency(3, 6, 30),
]


def test_rates_are_medians_over_the_runs() -> None:
    rows = {row.kind: row for row in summarise(RUNS).rates}
    assert rows["produce"].rate.median == 200
    assert (rows["produce"].rate.lowest, rows["produce"].rate.highest) == (110, 210)
    assert rows["produce"].cpu_us == {"broker": 20}
    assert rows["produce"].other_cores == 2
    assert "latency" not in rows


def test_a_ratio_is_the_median_of_ratios_within_runs() -> None:
    (row,) = summarise(RUNS).ratios
    assert (row.kind, row.flush, row.denominator) == ("produce", "async", "bare stream")
    assert row.ratio.median == 0.21  # of 0.2, 0.22 and 0.21; the ratio of medians would be 0.2


def test_body_sizes_are_not_mixed() -> None:
    report = summarise([rate("bare stream", 1, 10, body=128), rate("produce", 1, 5, "async")])
    assert report.ratios == []


def test_sync_is_also_divided_by_the_disk() -> None:
    runs = [
        rate("bare disk", 1, 100),
        rate("produce", 1, 50, "sync"),
        rate("produce", 1, 60, "async"),
    ]
    assert [(r.flush, r.denominator) for r in summarise(runs).ratios] == [("sync", "bare disk")]


def test_latency_keeps_the_worst_maximum() -> None:
    (row,) = summarise(RUNS).latencies
    assert (row.p50_ms, row.p99_ms, row.max_ms, row.count) == (6, 12, 90, 300)

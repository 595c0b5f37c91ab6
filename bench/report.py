"""From single measurements to medians, ratios and tables. Pure, but for :func:`machine`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from statistics import median

from bench.stats import Spread, ratios, spread

BARE_STREAM = "bare stream"
BARE_PULL = "bare pull"
BARE_DISK = "bare disk"
PRODUCE = "produce"
PRODUCE_MANY = "produce by send_many"
CONSUME = "consume"
LATENCY = "latency"

# Which measurement is divided by which; the flush mode restricts the row to topics of that mode.
RATIOS = (
    (PRODUCE, "async", BARE_STREAM),
    (PRODUCE, "sync", BARE_STREAM),
    (PRODUCE_MANY, "async", BARE_STREAM),
    (PRODUCE_MANY, "sync", BARE_STREAM),
    (PRODUCE, "sync", BARE_DISK),
    (CONSUME, "async", BARE_PULL),
    (CONSUME, "sync", BARE_PULL),
)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One figure of one run. ``flush`` is empty where no topic is involved."""

    kind: str
    body_bytes: int
    flush: str
    run: int
    values: Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True)
class RateRow:
    """Messages a second over all runs, and what a message costs each process in CPU time."""

    kind: str
    body_bytes: int
    flush: str
    rate: Spread
    cpu_us: dict[str, float]  # process → median microseconds a message
    other_cores: float  # what else the machine was busy with, median


@dataclass(frozen=True, slots=True)
class RatioRow:
    """A measurement as a share of what the bare loop did in the same run."""

    kind: str
    body_bytes: int
    flush: str
    denominator: str
    ratio: Spread


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """Medians over the runs, in milliseconds; the maximum is the worst of all runs."""

    body_bytes: int
    flush: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    count: int


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a bench run gave."""

    rates: Sequence[RateRow]
    ratios: Sequence[RatioRow]
    latencies: Sequence[LatencyRow]

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def as_text(self) -> str:
        """Three Markdown tables."""
        rates = (
            "measurement",
            "body",
            "flush",
            "messages/s",
            "lowest–highest",
            "CPU µs/message",
            "other",
        )
        shares = ("measurement", "body", "flush", "denominator", "ratio", "lowest–highest")
        late = ("body", "flush", "p50 ms", "p99 ms", "max ms", "messages")
        tables = (
            markdown(rates, (_rate_cells(row) for row in self.rates)),
            markdown(shares, (_ratio_cells(row) for row in self.ratios)),
            markdown(late, (_latency_cells(row) for row in self.latencies)),
        )
        return "\n\n".join(tables)


def summarise(measurements: Sequence[Measurement]) -> Report:
    return Report(
        list(_rate_rows(measurements)),
        list(_ratio_rows(measurements)),
        list(_latency_rows(measurements)),
    )


Key = tuple[str, int, str]


def _grouped(measurements: Iterable[Measurement]) -> dict[Key, list[Measurement]]:
    """The runs of the same measurement, in order of first appearance."""
    groups: dict[Key, list[Measurement]] = {}
    for one in measurements:
        groups.setdefault((one.kind, one.body_bytes, one.flush), []).append(one)
    return groups


def _numbers(group: Iterable[Measurement], field: str) -> list[float]:
    return [float(one.values[field]) for one in group]


def _rate_rows(measurements: Sequence[Measurement]) -> Iterator[RateRow]:
    for (kind, body_bytes, flush), group in _grouped(measurements).items():
        if kind == LATENCY:
            continue
        prefix = "cpu_us_"
        fields = [field for field in group[0].values if field.startswith(prefix)]
        cpu_us = {field.removeprefix(prefix): median(_numbers(group, field)) for field in fields}
        rates, other_cores = spread(_numbers(group, "rate")), _numbers(group, "other_cores")
        yield RateRow(kind, body_bytes, flush, rates, cpu_us, median(other_cores))


def _ratio_rows(measurements: Sequence[Measurement]) -> Iterator[RatioRow]:
    by_run = {
        key: {one.run: float(one.values["rate"]) for one in group}
        for key, group in _grouped(measurements).items()
        if key[0] != LATENCY
    }
    for body_bytes in sorted({one.body_bytes for one in measurements}):
        for kind, flush, denominator in RATIOS:
            above = by_run.get((kind, body_bytes, flush), {})
            below = by_run.get((denominator, body_bytes, ""), {})
            if quotients := ratios(above, below):
                yield RatioRow(kind, body_bytes, flush, denominator, spread(quotients))


def _latency_rows(measurements: Sequence[Measurement]) -> Iterator[LatencyRow]:
    for (kind, body_bytes, flush), group in _grouped(measurements).items():
        if kind == LATENCY:
            yield LatencyRow(
                body_bytes,
                flush,
                median(_numbers(group, "p50_ms")),
                median(_numbers(group, "p99_ms")),
                max(_numbers(group, "max_ms")),
                int(sum(_numbers(group, "count"))),
            )


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns line up in plain text too."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    texts = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([texts[0], rule, *texts[1:]])


def _rate_cells(row: RateRow) -> list[str]:
    costs = ", ".join(f"{name} {us:.1f}" for name, us in row.cpu_us.items())
    limits = f"{row.rate.lowest:,.0f}–{row.rate.highest:,.0f}"
    what = [row.kind, f"{row.body_bytes} B", row.flush]
    return [*what, f"{row.rate.median:,.0f}", limits, costs, f"{row.other_cores:.1f}"]


def _ratio_cells(row: RatioRow) -> list[str]:
    limits = f"{row.ratio.lowest:.1%}–{row.ratio.highest:.1%}"
    share = f"{row.ratio.median:.1%}"
    return [row.kind, f"{row.body_bytes} B", row.flush, row.denominator, share, limits]


def _latency_cells(row: LatencyRow) -> list[str]:
    times = (f"{ms:.2f}" for ms in (row.p50_ms, row.p99_ms, row.max_ms))
    return [f"{row.body_bytes} B", row.flush, *times, f"{row.count:,}"]


def machine() -> dict[str, str | int]:
    """What the figures were measured on."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": version("grpcio"),
        "protobuf": version("protobuf"),
        "uvloop": version("uvloop"),
        "cometmq": version("cometmq"),
    }

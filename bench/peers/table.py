"""From the lines of a measurement to tables: rates and CPU, quotients within a round, latency, and
the limits of issue 14. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeAlias

from bench import figures
from bench.figures import Figure, Row
from bench.report import markdown
from bench.stats import ratios, spread

SKIP = "skip"
VERSIONS = "versions"
LATENCY = "latency"
OURS = "cometmq"
# Ways of ours that the limits name.
ONE_EACH = "one future each"
SEND_MANY = "send_many of 1,024"
BATCHES = "batches of 256"

Line: TypeAlias = Mapping[str, Any]


class Key(NamedTuple):
    """What is the same in all rounds."""

    what: str
    body_bytes: int
    flush: str
    way: str
    peer: str


Rounds: TypeAlias = Mapping[Key, Mapping[int, Line]]  # round, counted over all runs → its line


@dataclass(frozen=True, slots=True)
class Limit:
    """``field`` of ours, over that of ``beside`` in the same round if there is one."""

    name: str
    ours: Key
    field: str
    unit: str
    limit: float
    beside: Key | None = None
    at_most: bool = False


def callers(count: int) -> str:
    return "1 caller" if count == 1 else f"{count} callers"


def rate(messages_per_s: int) -> str:
    return f"{messages_per_s}/s"


def _ours(what: str, body_bytes: int, way: str, flush: str = "async") -> Key:
    return Key(what, body_bytes, flush, way, OURS)


def _limits() -> Iterator[Limit]:
    for body_bytes, flush, least in (
        *((128, "async", 1.3), (128, "sync", 1.3)),
        *((1024, "async", 1.2), (1024, "sync", 1.2)),
    ):
        key = _ours("batch", body_bytes, SEND_MANY, flush)
        beside = key._replace(way="batches of 1,024", peer="rocketmq")
        name = f"send_many / RocketMQ's batches, {body_bytes} B {flush}"
        yield Limit(name, key, "rate", "×", least, beside)
    for body_bytes, least in ((128, 0.9), (1024, 1.0)):
        key = _ours("batch", body_bytes, ONE_EACH)
        beside = key._replace(way="batches of 1,024", peer="rocketmq")
        name = f"one future each / RocketMQ's batches, {body_bytes} B"
        yield Limit(name, key, "rate", "×", least, beside)
    for way, most in ((ONE_EACH, 1.6), (SEND_MANY, 0.5)):
        key = _ours("batch", 128, way)
        yield Limit(f"producer CPU, 128 B, {way}", key, "cpu_us_client", "µs", most, at_most=True)
    for body_bytes, least in ((128, 1.3), (1024, 1.0)):
        key = _ours("consume", body_bytes, BATCHES)
        beside = key._replace(way="tuned", peer="rocketmq")
        name = f"consume / RocketMQ tuned, {body_bytes} B"
        yield Limit(name, key, "rate", "×", least, beside)
    key = _ours("consume", 128, BATCHES)
    yield Limit("consumer CPU, 128 B", key, "cpu_us_client", "µs", 0.8, at_most=True)
    yield Limit("one caller, 128 B", _ours("single", 128, callers(1)), "rate", "messages/s", 3_500)
    key = _ours("single", 128, callers(512))
    yield Limit("512 callers / NATS, 128 B", key, "rate", "×", 5, key._replace(peer="nats"))
    for messages, field, most in (
        *((500, "p50_ms", 1.2), (500, "p99_ms", 4), (500, "p999_ms", 20)),
        *((100, "p50_ms", 1.5), (100, "p99_ms", 5)),
    ):
        key = _ours(LATENCY, 1024, rate(messages))
        name = f"end to end at {messages}/s, {PERCENTILES[field]}"
        yield Limit(name, key, field, "ms", most, at_most=True)
    key = _ours(LATENCY, 1024, rate(500))
    yield Limit("cores for 500/s, all processes", key, "cores", "cores", 0.6, at_most=True)


PERCENTILES = {"p50_ms": "p50", "p99_ms": "p99", "p999_ms": "p99.9"}
LIMITS = tuple(_limits())


def markdown_of(texts: Iterable[str]) -> str:
    """All tables of the JSON lines of one or more runs."""
    lines: list[Line] = [json.loads(text) for text in texts]
    rounds = _grouped(line for line in lines if line["what"] not in (SKIP, VERSIONS))
    versions = {
        f"{name} {value}"
        for line in lines
        if line["what"] == VERSIONS
        for name, value in line.items()
        if name not in ("run", "what", "peer")
    }
    lates = {key: its for key, its in rounds.items() if key.what == LATENCY}
    rates = {key: its for key, its in rounds.items() if key.what != LATENCY}
    reached = list(_reached(rounds))
    parts = [
        _rates(rates),
        _latencies(lates),
        _quotients(rounds),
        figures.table(reached) if reached else "",
        "\n".join(sorted({_skip(line) for line in lines if line["what"] == SKIP})),
        "; ".join(sorted(versions)),
    ]
    return "\n\n".join(part for part in parts if part)


def _grouped(lines: Iterable[Line]) -> Rounds:
    rounds: dict[Key, dict[int, Line]] = {}
    numbers: dict[tuple[str, int], int] = {}
    for line in lines:
        number = numbers.setdefault((line["run"], line["round"]), len(numbers))
        cores = sum(line[field] for field in _processes(line)) * line["rate"] / 1e6
        key = Key(*(line[field] for field in Key._fields))
        rounds.setdefault(key, {})[number] = {**line, "cores": cores}
    ways = list(dict.fromkeys(key.way for key in rounds))
    return {key: rounds[key] for key in sorted(rounds, key=lambda key: _order(key, ways))}


def _order(key: Key, ways: Sequence[str]) -> tuple[str, int, str, int, str]:
    """As they are measured, so 64 callers come before 512."""
    return key.what, key.body_bytes, key.flush, ways.index(key.way), key.peer


def _processes(line: Line) -> list[str]:
    """The fields of its CPU times; that of all server processes together is none of them."""
    return [name for name in line if name.startswith("cpu_us_") and name != "cpu_us_server"]


def _values(rounds: Mapping[int, Line], field: str) -> list[float]:
    return [float(line[field]) for line in rounds.values()]


def _extent(values: Sequence[float]) -> str:
    found = spread(values)
    number = figures.number
    return f"{number(found.median)} ({number(found.lowest)}–{number(found.highest)})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Nothing when there are no rows."""
    found = list(rows)
    return markdown(header, found) if found else ""


def _rates(rounds: Rounds) -> str:
    header = (
        *("what", "body", "flush", "way", "system", "messages/s"),
        *("server µs", "client µs", "p50 / p99 ms", "other", "n"),
    )
    return _table(
        header,
        (
            (
                *_cells(key),
                _extent(_values(its, "rate")),
                f"{median(_values(its, 'cpu_us_server')):.2f}",
                f"{median(_values(its, 'cpu_us_client')):.2f}",
                _call_times(its),
                f"{median(_values(its, 'other_cores')):.2f}",
                str(len(its)),
            )
            for key, its in rounds.items()
        ),
    )


def _cells(key: Key) -> tuple[str, str, str, str, str]:
    return key.what, f"{key.body_bytes} B", key.flush, key.way, key.peer


def _call_times(its: Mapping[int, Line]) -> str:
    if any("p50_ms" not in line for line in its.values()):
        return ""
    return " / ".join(f"{median(_values(its, field)):.2f}" for field in ("p50_ms", "p99_ms"))


def _latencies(rounds: Rounds) -> str:
    header = (
        *("rate", "system", *(f"{name} ms" for name in PERCENTILES.values()), "max ms"),
        *("cores: server", "producer", "consumer", "other", "n"),
    )
    return _table(
        header,
        (
            (
                *(key.way, key.peer),
                *(_extent(_values(its, field)) for field in (*PERCENTILES, "max_ms")),
                *(
                    f"{median(line[field] * line['rate'] / 1e6 for line in its.values()):.2f}"
                    for field in ("cpu_us_server", "cpu_us_client", "cpu_us_consumer")
                ),
                f"{median(_values(its, 'other_cores')):.2f}",
                str(len(its)),
            )
            for key, its in rounds.items()
        ),
    )


def _quotients(rounds: Rounds) -> str:
    """Ours over theirs; of latencies, the medians."""
    header = ("what", "body", "flush", "cometmq", "/", "its way", "quotient", "n")
    return _table(header, _quotient_rows(rounds))


def _quotient_rows(rounds: Rounds) -> Iterator[tuple[str, ...]]:
    for ours in (key for key in rounds if key.peer == OURS):
        for theirs in (key for key in rounds if key.peer != OURS and key[:3] == ours[:3]):
            if ours.what in ("single", LATENCY) and ours.way != theirs.way:
                continue
            field = "p50_ms" if ours.what == LATENCY else "rate"
            if found := _quotient(rounds, ours, theirs, field):
                where = (*_cells(ours)[:4], theirs.peer, theirs.way)
                yield (*where, _extent(found), str(len(found)))


def _quotient(rounds: Rounds, ours: Key, theirs: Key, field: str) -> list[float]:
    above, below = (
        {number: float(line[field]) for number, line in rounds.get(key, {}).items()}
        for key in (ours, theirs)
    )
    return ratios(above, below)


def _reached(rounds: Rounds) -> Iterator[Row]:
    """Of the limits whose measurements are there."""
    for one in LIMITS:
        if one.beside:
            values = _quotient(rounds, one.ours, one.beside, one.field)
        else:
            values = _values(rounds.get(one.ours, {}), one.field)
        if values:
            figure = Figure(one.name, values[0], one.unit, one.limit, one.at_most)
            yield Row(figure, spread(values))


def _skip(line: Line) -> str:
    return f"skipped: {line['peer']} {line['flush']}: {line['why']}"

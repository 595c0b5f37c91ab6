"""A run's summary → text for a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]
NONE = "–"


def count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


def lag(row: Row) -> str:
    """The sum; where some queues are unknown, what is known and how many are not."""
    if row["unknown_count"]:
        known = row["lag_known_sum"]
        return (
            f"{count(known)} + {row['unknown_count']} unknown" if known is not None else "unknown"
        )
    return count(row["lag_sum"])


def duration(milliseconds: float | None) -> str:
    """12 ms, 3.4 s, 5 m 06 s, 2 h 05 m, 3 d 04 h."""
    if milliseconds is None:
        return NONE
    seconds = milliseconds / 1000
    if seconds < 1:
        return f"{milliseconds:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, smaller, size, part in (("m", "s", 60, 1), ("h", "m", 3600, 60)):
        if whole < size * (60 if unit == "m" else 24):
            return f"{whole // size} {unit} {whole % size // part:02d} {smaller}"
    return f"{whole // 86400:,} d {whole % 86400 // 3600:02d} h"


def rate(value: float | None) -> str:
    return NONE if value is None else f"{value:+,.1f}/s"


def eta(seconds: float | None) -> str:
    return NONE if seconds is None else duration(seconds * 1000)


_LAG: tuple[Column, ...] = (
    ("kind", lambda row: row["topic_kind"]),
    ("status", lambda row: row["status"]),
    ("queues", lambda row: count(row["queue_count"])),
    ("lag", lag),
    ("max", lambda row: count(row["lag_max"])),
    ("in queue", lambda row: row["lag_max_queue"] or NONE),
    ("oldest", lambda row: duration(row["lag_ms_max"])),
    ("trend", lambda row: rate(row["lag_velocity"])),
    ("drained in", lambda row: eta(row["drain_eta_s"])),
    ("lost", lambda row: count(row["lost_known_sum"])),
    ("because", lambda row: f"{row['worst_queue']}: {row['reason']}"),
)
_GROUP: Column = ("group", lambda row: row["group"])
_TOPIC: Column = ("topic", lambda row: row["topic"])
_DEPTHS: tuple[Column, ...] = (
    _TOPIC,
    ("kind", lambda row: row["topic_kind"]),
    ("queues", lambda row: count(row["queue_count"])),
    ("messages", lambda row: count(row["message_count"])),
    ("groups", lambda row: count(row["group_count"])),
)


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Left-aligned columns, as wide as what is in them."""
    lines = [[title for title, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["─" * width for width in widths]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [lines[0], rule, *lines[1:]]
    )


def text(summary: Mapping[str, Any]) -> str:
    """The whole report."""
    share = f"{summary['completeness']:.0%} of {len(summary['expected'])} broker groups"
    counts = [f"{status} {number:,}" for status, number in summary["status_counts"].items()]
    parts = [
        f"snapshot {summary['snapshot_id']}: {share}, trend over {summary['snapshot_count']}"
        f" snapshots, queues by status: {', '.join(counts) or 'no queue'}"
    ]
    parts += [f"missing: {group}: {why}" for group, why in summary["missing"].items()]
    parts += [f"left out: {file}: {why}" for file, why in summary["left_out"].items()]
    for title, name, columns in (
        ("groups", "groups", (_GROUP, *_LAG)),
        ("topics of groups", "topics", (_GROUP, _TOPIC, *_LAG)),
        ("messages in topics", "depths", _DEPTHS),
    ):
        rows = summary[name]
        left_out = summary["rows"][name] - len(rows)
        more = f"\n… and {left_out:,} more in {summary['path']}/{name}" if left_out else ""
        body = table(columns, rows) if rows else "(none)"
        parts.append(f"\n{title}\n{body}{more}")
    return "\n".join(parts)

"""Snapshots on disk, written by the code that writes them in earnest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cometmq.admin import offsets

T0 = 1_700_000_000_000
MINUTE = 60_000

Point = Mapping[str, Any]  # a row, by column; what is missing has its default
_DEFAULTS: dict[str, Any] = {
    "cluster": "c",
    "broker_epoch": 1,
    "topic": "T",
    "topic_kind": "normal",
    "queue_id": 0,
    "generation": 1,
    "min_offset": 0,
    "group": "G",
    "committed_generation": 1,
    "member_count": 1,
}


def export(
    directory: Path,
    number: int,
    brokers: Mapping[str, Iterable[Point]],
    *,
    missing: Iterable[str] = (),
    name: str = "",
) -> Path:
    """Snapshot ``number`` with the rows of each broker group; its folder."""
    snapshot_id = f"s{number:02d}"
    folder = directory / f"snapshot={name or snapshot_id}"
    taken_ms = T0 + number * MINUTE
    exported = []
    for group, points in brokers.items():
        of = {"snapshot_id": snapshot_id, "broker_group": group, "taken_ms": taken_ms}
        found = [{**_DEFAULTS, **of, **point} for point in points]
        rows = [tuple(row.get(column) for column, _, _ in offsets.COLUMNS) for row in found]
        file = f"broker_group={group}/{offsets.PART}"
        offsets.write_rows(folder / file, rows)
        entry = offsets.ExportedGroup(group, "c", 1, taken_ms, 0, len(rows), len(rows), file)
        exported.append(entry)
    failed = [offsets.FailedGroup(group, "PEER_UNAVAILABLE", "silent") for group in missing]
    expected = sorted([*brokers, *(group.broker_group for group in failed)])
    manifest = offsets.Snapshot(
        schema_version=offsets.SCHEMA_VERSION,
        snapshot_id=snapshot_id,
        started_ms=taken_ms,
        expected=expected,
        exported=exported,
        failed=failed,
        completeness=len(exported) / len(expected),
    )
    offsets.write_manifest(folder, manifest)
    return folder

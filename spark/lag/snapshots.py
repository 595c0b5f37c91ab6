"""Which snapshots there are and which files of them to read. Plain Python over the manifests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spark.lag.schema import SCHEMA_VERSION

MANIFEST = "_manifest.json"


class NoSnapshot(Exception):
    """There is nothing to compute from."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run looks at: the newest snapshot, and those before it for the trend."""

    snapshot_id: str  # the newest
    started_ms: int
    snapshot_count: int
    completeness: float  # broker groups in the newest snapshot / those expected there
    expected: tuple[str, ...]
    missing: dict[str, str]  # broker group → why it is not in the newest snapshot
    brokers: tuple[
        tuple[str, str, int], ...
    ]  # broker group, snapshot it was last in, 1 = not the newest
    files: tuple[str, ...] = field(repr=False)

    @property
    def complete(self) -> bool:
        return not self.missing


def plan(directory: Path, window: int) -> Plan:
    """The newest ``window`` finished snapshots below ``directory``; a folder without a manifest was
    never finished and counts for nothing. Raises NoSnapshot.
    """
    assert window > 0
    manifests = _manifests(directory)[:window]
    if not manifests:
        raise NoSnapshot(f"no finished snapshot of schema {SCHEMA_VERSION} in {directory}")
    newest = manifests[0][1]
    files: list[str] = []
    last: dict[str, str] = {}
    for folder, manifest in manifests:  # newest first
        for exported in manifest["exported"]:
            files.append(str(folder / exported["file"]))
            last.setdefault(exported["broker_group"], manifest["snapshot_id"])
    return Plan(
        snapshot_id=newest["snapshot_id"],
        started_ms=newest["started_ms"],
        snapshot_count=len(manifests),
        completeness=newest["completeness"],
        expected=tuple(newest["expected"]),
        missing={g["broker_group"]: f"{g['error']}: {g['message']}" for g in newest["failed"]},
        brokers=tuple(_brokers(last, newest)),
        files=tuple(files),
    )


def _manifests(directory: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Folder and manifest of each finished snapshot, newest first, each snapshot id once."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in sorted(directory.glob(f"snapshot=*/{MANIFEST}")):
        manifest = json.loads(path.read_bytes())
        if manifest["schema_version"] == SCHEMA_VERSION:
            found.setdefault(manifest["snapshot_id"], (path.parent, manifest))
    return [found[snapshot_id] for snapshot_id in sorted(found, reverse=True)]


def _brokers(last: dict[str, str], newest: dict[str, Any]) -> Iterable[tuple[str, str, int]]:
    """Groups that the newest snapshot expects; one that is not expected any more is gone."""
    for group in sorted(set(last) & set(newest["expected"])):
        yield group, last[group], int(last[group] != newest["snapshot_id"])

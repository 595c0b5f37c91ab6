"""Results appear as a whole or not at all: a run's folder is renamed into place, then the pointer
``latest.json`` is replaced. A run that was killed leaves nothing that readers see.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spark.lag.snapshots import AHEAD_MS_MAX

LATEST = "latest.json"
_BEGAN = re.compile(r"(?<==)\d{8}T\d{6}")  # in the names of runs and snapshots
SUMMARY = "_summary.json"  # in the run's folder; readers of Parquet folders pass over it


def new_run_id(now: datetime | None = None) -> str:
    """Sorts by time; unique even among runs of the same second."""
    now = now or datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


@contextmanager
def building(results: Path, run_id: str) -> Iterator[Path]:
    """A folder to write a run's tables into; at the end of the block it is ``run=<run_id>``."""
    unfinished = results / f".run={run_id}.tmp"
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        unfinished.rename(results / f"run={run_id}")
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def point_to(results: Path, summary: dict[str, Any], now_ms: int) -> bool:
    """Let ``latest.json`` be this run, unless it is of a newer snapshot already: a slow run that
    ends late must not take the newest numbers away. A snapshot from the future is not newer: the
    clock of its exporter was wrong. Answers whether it is.
    """
    latest = read_latest(results) or {"snapshot_id": "", "started_ms": 0}
    is_newer = latest["snapshot_id"] > summary["snapshot_id"]
    if is_newer and latest["started_ms"] <= now_ms + AHEAD_MS_MAX:
        return False
    write_json(results / LATEST, summary)
    return True


def read_latest(results: Path) -> dict[str, Any] | None:
    """What ``latest.json`` says; None before the first run, and if the file is damaged."""
    try:
        found: dict[str, Any] = json.loads((results / LATEST).read_bytes())
        types = [type(found[name]) for name in ("snapshot_id", "run_id", "started_ms")]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if types == [str, str, int] else None


def remove_old(results: Path, snapshots: Path, before: datetime, kept: Collection[Path]) -> int:
    """Remove runs and snapshots that began before a time, finished or not; how many.
    What ``latest.json`` points to stays, and the ``kept`` snapshots. Other names are not ours.
    """
    latest = read_latest(results)
    stays = {*kept, *([results / f"run={latest['run_id']}"] if latest else ())}
    removed = 0
    for folder in [
        *results.glob("run=*"),
        *results.glob(".run=*.tmp"),
        *snapshots.glob("snapshot=*"),
    ]:
        began = _began(folder.name)
        if began is not None and began < before and folder not in stays and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)  # another run may remove it too
            removed += 1
    return removed


def _began(name: str) -> datetime | None:
    """When a run or a snapshot began, by its folder's name; None: the name has no such time."""
    found = _BEGAN.search(name)
    if found is None:
        return None
    try:
        return datetime.strptime(found[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """All or nothing under this name."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

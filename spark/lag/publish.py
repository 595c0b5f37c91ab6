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


def point_to(results: Path, summary: dict[str, Any]) -> bool:
    """Let ``latest.json`` be this run, unless it is of a newer snapshot already: a slow run that
    ends late must not take the newest numbers away. Answers whether it is.
    """
    latest = read_latest(results)
    if latest is not None and latest["snapshot_id"] > summary["snapshot_id"]:
        return False
    write_json(results / LATEST, summary)
    return True


def read_latest(results: Path) -> dict[str, Any] | None:
    """What ``latest.json`` says; None before the first run."""
    path = results / LATEST
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_bytes())
    return found


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
        began = _BEGAN.search(folder.name)
        if began is None or folder in stays or not folder.is_dir():
            continue
        if datetime.strptime(began[0], "%Y%m%dT%H%M%S").replace(tzinfo=UTC) < before:
            shutil.rmtree(folder, ignore_errors=True)  # another run may remove it too
            removed += 1
    return removed


def write_json(path: Path, content: dict[str, Any]) -> None:
    """All or nothing under this name."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)

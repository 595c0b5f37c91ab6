"""Which snapshots there are and which files of them to read. Plain Python and pyarrow.

A file that cannot be used is left out and named, whatever is wrong with it: it is damaged, of
another program, or of a newer release. Its broker group counts as missing in that snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow
import pyarrow.parquet

from spark.lag.schema import ARROW_TYPES, SCHEMA_VERSION

MANIFEST = "_manifest.json"
MANIFEST_BYTES_MAX = 64 * 1024 * 1024
# Clocks differ by so much at most. A snapshot from further ahead would stay the newest for years.
AHEAD_MS_MAX = 600_000

T = TypeVar("T")


class NoSnapshot(Exception):
    """There is nothing to compute from."""


class Unusable(Exception):
    """A file cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the job reads of a snapshot's manifest."""

    folder: Path
    snapshot_id: str
    started_ms: int
    expected: tuple[str, ...]
    files: Mapping[str, Path]  # broker group → its file
    failed: Mapping[str, str]  # broker group → why it was not exported


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
    left_out: dict[str, str] = field(default_factory=dict)  # file → why it was not read

    @property
    def complete(self) -> bool:
        return not self.missing


def plan(directory: Path, window: int, now_ms: int) -> Plan:
    """The newest ``window`` finished snapshots below ``directory``; a folder without a manifest was
    never finished and counts for nothing. Raises NoSnapshot.
    """
    assert window > 0
    left_out: dict[str, str] = {}
    manifests = _manifests(directory, now_ms, left_out)[:window]
    if not manifests:
        raise NoSnapshot(f"no finished snapshot in {directory}{_named(left_out)}")
    newest = manifests[0]
    missing = dict(newest.failed)
    files: list[str] = []
    last: dict[str, str] = {}
    for manifest in manifests:  # newest first
        for group, path in manifest.files.items():
            try:
                _check_rows(path, manifest.snapshot_id, group)
            except Unusable as why:
                left_out[str(path)] = str(why)
                if manifest is newest:
                    missing[group] = f"FILE_UNUSABLE: {why}"
                continue
            files.append(str(path))
            last.setdefault(group, manifest.snapshot_id)
    if not files:
        raise NoSnapshot(f"no file of the newest {window} snapshots can be read{_named(left_out)}")
    return Plan(
        snapshot_id=newest.snapshot_id,
        started_ms=newest.started_ms,
        snapshot_count=len(manifests),
        completeness=1 - len(missing) / len(newest.expected),
        expected=newest.expected,
        missing=missing,
        brokers=tuple(_brokers(last, newest)),
        files=tuple(files),
        left_out=left_out,
    )


def _named(left_out: Mapping[str, str]) -> str:
    return "".join(f"\n  left out: {file}: {why}" for file, why in left_out.items())


def _manifests(directory: Path, now_ms: int, left_out: dict[str, str]) -> list[Manifest]:
    """The finished snapshots, newest first, each snapshot id once. Adds files to ``left_out``."""
    found: dict[str, Manifest] = {}
    for path in sorted(directory.glob(f"snapshot=*/{MANIFEST}")):
        try:
            manifest = _manifest(path)
            if manifest.started_ms > now_ms + AHEAD_MS_MAX:
                raise Unusable("it began in the future: a clock was wrong")
        except Unusable as why:
            left_out[str(path)] = str(why)
        else:
            found.setdefault(manifest.snapshot_id, manifest)
    return [found[snapshot_id] for snapshot_id in sorted(found, reverse=True)]


def _manifest(path: Path) -> Manifest:
    """Raises Unusable."""
    try:
        with path.open("rb") as file:
            text = file.read(MANIFEST_BYTES_MAX + 1)
        if len(text) > MANIFEST_BYTES_MAX:
            raise Unusable(f"it has more than {MANIFEST_BYTES_MAX:,} bytes")
        content: dict[str, Any] = json.loads(text)
        if content["schema_version"] != SCHEMA_VERSION:
            raise Unusable(
                f"its schema is {content['schema_version']}, this job reads {SCHEMA_VERSION}"
            )
        manifest = Manifest(
            path.parent,
            _typed(content["snapshot_id"], str),
            _typed(content["started_ms"], int),
            tuple(_typed(group, str) for group in content["expected"]),
            {
                _typed(one["broker_group"], str): path.parent / _typed(one["file"], str)
                for one in content["exported"]
            },
            {
                _typed(one["broker_group"], str): f"{one['error']}: {one['message']}"
                for one in content["failed"]
            },
        )
    except OSError as error:
        raise Unusable(f"it cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"it is no manifest: {type(error).__name__}: {error}") from error
    if not manifest.expected or set(manifest.expected) != {*manifest.files, *manifest.failed}:
        raise Unusable("the broker groups that it expects are not those exported and failed")
    for rows in manifest.files.values():
        if not rows.resolve().is_relative_to(path.parent.resolve()):
            raise Unusable(f"it names a file outside of its folder: {rows}")
    return manifest


def _typed(value: Any, kind: type[T]) -> T:
    """The value, if it is of this type. Raises TypeError."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is not of type {kind.__name__}")
    return value


def _check_rows(path: Path, snapshot_id: str, group: str) -> None:
    """Raises Unusable unless the file has rows of this snapshot and broker group only, in the
    columns that the job reads. All pages are read: Spark would end the run at a damaged one.
    """
    try:
        table = pyarrow.parquet.read_table(
            path, columns=list(ARROW_TYPES), page_checksum_verification=True, partitioning=None
        )
    except OSError as error:
        raise Unusable(f"it cannot be read: {error.strerror or error}") from error
    except (pyarrow.ArrowException, ValueError) as error:
        raise Unusable(f"it is no Parquet file of the export: {error}") from error
    found = {name: str(table.schema.field(name).type) for name in table.schema.names}
    if wrong := {name for name, kind in ARROW_TYPES.items() if found.get(name) != kind}:
        raise Unusable(f"its columns are others: {', '.join(sorted(wrong))}")
    for name, value in (("snapshot_id", snapshot_id), ("broker_group", group)):
        if others := set(table.column(name).unique().to_pylist()) - {value}:
            raise Unusable(f"it has rows of {name} {min(map(str, others))!r}, not {value!r}")


def _brokers(last: Mapping[str, str], newest: Manifest) -> Iterable[tuple[str, str, int]]:
    """Groups that the newest snapshot expects; one that is not expected any more is gone."""
    for group in sorted(set(last) & set(newest.expected)):
        yield group, last[group], int(last[group] != newest.snapshot_id)

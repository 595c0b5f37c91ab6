from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is missing (extra lag: make setup)")
pytest.importorskip("pyarrow", reason="pyarrow is missing (extra lag: make setup)")

import pyarrow
from pyarrow import parquet

from cometmq.admin import offsets
from spark.lag import schema, snapshots
from spark.lag.snapshots import NoSnapshot, plan
from tests.spark.files import MINUTE, T0, export

NOW_MS = T0 + 10 * MINUTE
POINT = {"max_offset": 10, "committed_offset": 4}


def test_nothing_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(NoSnapshot, match="no finished snapshot"):
        plan(tmp_path, 10, NOW_MS)


def test_an_unfinished_snapshot_counts_for_nothing(tmp_path: Path) -> None:
    export(tmp_path, 1, {"g1": [POINT]})
    (export(tmp_path, 2, {"g1": [POINT]}) / snapshots.MANIFEST).unlink()
    assert plan(tmp_path, 10, NOW_MS).snapshot_id == "s01"


def test_a_newer_schema_is_passed_over(tmp_path: Path) -> None:
    export(tmp_path, 1, {"g1": [POINT]})
    manifest = export(tmp_path, 2, {"g1": [POINT]}) / snapshots.MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "schema_version": 99}))
    assert plan(tmp_path, 10, NOW_MS).snapshot_id == "s01"


def test_the_window_is_the_newest(tmp_path: Path) -> None:
    for number in range(1, 6):
        export(tmp_path, number, {"g1": [POINT], "g2": [POINT]})
    work = plan(tmp_path, 3, NOW_MS)
    assert (work.snapshot_id, work.snapshot_count, len(work.files)) == ("s05", 3, 6)
    assert all(Path(file).exists() for file in work.files)
    assert not any("s02" in file for file in work.files)


def test_a_copy_of_a_snapshot_is_read_once(tmp_path: Path) -> None:
    export(tmp_path, 1, {"g1": [POINT]})
    export(tmp_path, 1, {"g1": [POINT]}, name="s01-copy")
    assert len(plan(tmp_path, 10, NOW_MS).files) == 1


def test_a_missing_broker_is_stale(tmp_path: Path) -> None:
    export(tmp_path, 1, {"g1": [POINT], "g2": [POINT], "g3": [POINT]})
    export(tmp_path, 2, {"g1": [POINT], "g2": [POINT]}, missing=["g3"])
    export(tmp_path, 3, {"g1": [POINT]}, missing=["g2", "g4"])
    work = plan(tmp_path, 10, NOW_MS)
    assert work.brokers == (("g1", "s03", 0), ("g2", "s02", 1))  # g3 is not expected any more
    assert work.completeness == pytest.approx(1 / 3)
    assert work.missing == {g: "PEER_UNAVAILABLE: silent" for g in ("g2", "g4")}
    assert not work.complete


def manifest_of(folder: Path) -> Path:
    return folder / snapshots.MANIFEST


def rows_of(folder: Path) -> Path:
    return folder / "broker_group=g1" / offsets.PART


def change(path: Path, name: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


def flip(path: Path) -> None:
    """One byte of a value is another: the page's checksum is wrong."""
    content = bytearray(path.read_bytes())
    content[content.index(b"normal") + 2] ^= 1
    path.write_bytes(content)


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD_MANIFESTS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "no object": lambda path: path.write_text("7"),
    "deep": lambda path: path.write_text("[" * 99_999),
    "foreign": lambda path: path.write_text('{"schema_version": 1, "files": []}'),
    "folder": folder_instead,
    "later schema": lambda path: change(path, "schema_version", 2),
    "id is no text": lambda path: change(path, "snapshot_id", 9),
    "time is no number": lambda path: change(path, "started_ms", "now"),
    "nothing expected": lambda path: change(path, "expected", []),
    "others expected": lambda path: change(path, "expected", ["g1", "g7"]),
    "of the future": lambda path: change(path, "started_ms", NOW_MS + 3_600_000),
    "outside": lambda path: change(
        path, "exported", [{"broker_group": "g1", "file": "../snapshot=s01/_manifest.json"}]
    ),
}


@pytest.mark.parametrize("damage", BAD_MANIFESTS)
def test_a_bad_manifest_is_left_out_and_named(tmp_path: Path, damage: str) -> None:
    """The kinds of bad files: damaged, of another program, of a later release, of a wrong clock."""
    export(tmp_path, 1, {"g1": [POINT]})
    manifest = manifest_of(export(tmp_path, 2, {"g1": [POINT]}))
    BAD_MANIFESTS[damage](manifest)
    work = plan(tmp_path, 10, NOW_MS)
    assert (work.snapshot_id, work.complete, len(work.files)) == ("s01", True, 1)
    assert list(work.left_out) == [str(manifest)]
    for snapshot in tmp_path.glob("snapshot=s01"):
        (snapshot / snapshots.MANIFEST).unlink()
    with pytest.raises(NoSnapshot, match="snapshot=s02"):
        plan(tmp_path, 10, NOW_MS)


BAD_ROWS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "one byte": flip,
    "foreign": lambda path: path.write_text("PAR1 is not enough PAR1"),
    "folder": folder_instead,
    "other columns": lambda path: parquet.write_table(pyarrow.table({"a": [1]}), path),
    "other types": lambda path: parquet.write_table(
        parquet.read_table(path, partitioning=None)
        .drop_columns("queue_id")
        .append_column("queue_id", [["0"]]),
        path,
    ),
    "another snapshot's": lambda path: path.write_bytes(
        rows_of(path.parent.parent.with_name("snapshot=s01")).read_bytes()
    ),
    "another group's": lambda path: path.write_bytes(
        (path.parent.parent / "broker_group=g2" / offsets.PART).read_bytes()
    ),
}


@pytest.mark.parametrize("damage", BAD_ROWS)
def test_a_bad_file_of_rows_is_left_out_and_named(tmp_path: Path, damage: str) -> None:
    """Its broker group is missing in that snapshot; the others are read."""
    export(tmp_path, 1, {"g1": [POINT], "g2": [POINT]})
    file = rows_of(export(tmp_path, 2, {"g1": [POINT], "g2": [POINT]}))
    BAD_ROWS[damage](file)
    work = plan(tmp_path, 10, NOW_MS)
    assert (work.snapshot_id, work.completeness, len(work.files)) == ("s02", 0.5, 3)
    assert work.brokers == (("g1", "s01", 1), ("g2", "s02", 0))
    assert list(work.left_out) == [str(file)]
    assert list(work.missing) == ["g1"]


def test_a_column_of_a_later_release_is_ignored(tmp_path: Path) -> None:
    file = rows_of(export(tmp_path, 1, {"g1": [POINT]}))
    table = parquet.read_table(file, partitioning=None)
    parquet.write_table(table.append_column("later", [[1]]), file)
    assert plan(tmp_path, 10, NOW_MS).left_out == {}


def test_exporter_and_job_agree_on_the_schema() -> None:
    types = {"string": "string", "int64": "bigint", "int32": "int"}
    written = [(name, types[kind], null) for name, kind, null in offsets.COLUMNS]
    read = [(f.name, f.dataType.simpleString(), f.nullable) for f in schema.SNAPSHOT.fields]
    assert written == read
    assert (schema.SCHEMA_VERSION, snapshots.MANIFEST) == (offsets.SCHEMA_VERSION, offsets.MANIFEST)


CHANGED: list[dict[str, object]] = [
    {},
    {"more": "of a later release"},
    {"schema_version": 2},
    {"started_ms": NOW_MS + offsets.AHEAD_MS_MAX},
    {"started_ms": NOW_MS + offsets.AHEAD_MS_MAX + 1},
    {"started_ms": str(T0)},
    {"snapshot_id": 7},
    {"expected": "g1"},
    {"expected": [1]},
    {"expected": None},
    {"exported": [{}]},
    {"exported": None},
    {"failed": [{}]},
    {"failed": 3},
]


@pytest.mark.parametrize("changed", CHANGED, ids=str)
def test_the_job_and_the_exporter_take_the_same_manifests(
    tmp_path: Path, changed: dict[str, object]
) -> None:
    """The job knows exported files only, so each has a reader of its own."""
    assert (snapshots.MANIFEST, schema.SCHEMA_VERSION) == (
        offsets.MANIFEST,
        offsets.SCHEMA_VERSION,
    )
    manifest = export(tmp_path, 1, {"g1": [POINT]}) / snapshots.MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, **changed}))
    exporter = offsets.newest(tmp_path, NOW_MS)
    try:
        job = plan(tmp_path, 10, NOW_MS).snapshot_id
    except NoSnapshot:
        job = ""
    assert (exporter.snapshot_id if exporter else "") == job

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is missing (extra lag: make setup)")
pytest.importorskip("pyarrow", reason="pyarrow is missing (extra lag: make setup)")

from cometmq.admin import offsets
from spark.lag import schema, snapshots
from spark.lag.snapshots import NoSnapshot, plan
from tests.spark.files import export

POINT = {"max_offset": 10, "committed_offset": 4}


def test_nothing_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(NoSnapshot, match="no finished snapshot"):
        plan(tmp_path, 10)


def test_an_unfinished_snapshot_counts_for_nothing(tmp_path: Path) -> None:
    export(tmp_path, 1, {"g1": [POINT]})
    (export(tmp_path, 2, {"g1": [POINT]}) / snapshots.MANIFEST).unlink()
    assert plan(tmp_path, 10).snapshot_id == "s01"


def test_a_newer_schema_is_passed_over(tmp_path: Path) -> None:
    export(tmp_path, 1, {"g1": [POINT]})
    manifest = export(tmp_path, 2, {"g1": [POINT]}) / snapshots.MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "schema_version": 99}))
    assert plan(tmp_path, 10).snapshot_id == "s01"


def test_the_window_is_the_newest(tmp_path: Path) -> None:
    for number in range(1, 6):
        export(tmp_path, number, {"g1": [POINT], "g2": [POINT]})
    work = plan(tmp_path, 3)
    assert (work.snapshot_id, work.snapshot_count, len(work.files)) == ("s05", 3, 6)
    assert all(Path(file).exists() for file in work.files)
    assert not any("s02" in file for file in work.files)


def test_a_copy_of_a_snapshot_is_read_once(tmp_path: Path) -> None:
    export(tmp_path, 1, {"g1": [POINT]})
    export(tmp_path, 1, {"g1": [POINT]}, name="s01-copy")
    assert len(plan(tmp_path, 10).files) == 1


def test_a_missing_broker_is_stale(tmp_path: Path) -> None:
    export(tmp_path, 1, {"g1": [POINT], "g2": [POINT], "g3": [POINT]})
    export(tmp_path, 2, {"g1": [POINT], "g2": [POINT]}, missing=["g3"])
    export(tmp_path, 3, {"g1": [POINT]}, missing=["g2", "g4"])
    work = plan(tmp_path, 10)
    assert work.brokers == (("g1", "s03", 0), ("g2", "s02", 1))  # g3 is not expected any more
    assert work.completeness == pytest.approx(1 / 3)
    assert work.missing == {g: "PEER_UNAVAILABLE: silent" for g in ("g2", "g4")}
    assert not work.complete


def test_exporter_and_job_agree_on_the_schema() -> None:
    types = {"string": "string", "int64": "bigint", "int32": "int"}
    written = [(name, types[kind], null) for name, kind, null in offsets.COLUMNS]
    read = [(f.name, f.dataType.simpleString(), f.nullable) for f in schema.SNAPSHOT.fields]
    assert written == read
    assert (schema.SCHEMA_VERSION, snapshots.MANIFEST) == (offsets.SCHEMA_VERSION, offsets.MANIFEST)

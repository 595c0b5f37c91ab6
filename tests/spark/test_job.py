"""The whole job over files on disk."""

from __future__ import annotations

import json
from datetime import UTC
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is missing (extra lag: make setup)")
pytest.importorskip("pyarrow", reason="pyarrow is missing (extra lag: make setup)")

from pyspark.sql import SparkSession

from spark.lag import job, publish, report
from spark.lag.snapshots import plan
from tests.spark.files import MINUTE, T0, export

STORED = T0 + 2 * MINUTE - 10_000  # ten seconds before the newer snapshot
pytestmark = pytest.mark.timeout(240)  # of a busy machine: the first test starts the JVM


@pytest.fixture(scope="module")
def results(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two snapshots with g2 missing in the newer one, and the run over them."""
    directory = tmp_path_factory.mktemp("lag")
    snapshots = directory / "snapshots"
    dead = {"group": None, "committed_generation": None, "member_count": None}
    export(snapshots, 1, {
        "g1": [{"max_offset": 100, "committed_offset": 40}],
        "g2": [{"max_offset": 10, "committed_offset": 10}],
    })  # fmt: skip
    export(snapshots, 2, {
        "g1": [
            {"max_offset": 130, "committed_offset": 100, "committed_store_time_ms": STORED},
            {"topic": "%DLQ%G", "topic_kind": "dlq", "max_offset": 3, **dead},
        ],
    }, missing=["g2"])  # fmt: skip
    job.run(spark, plan(snapshots, 10, job.now_ms()), directory / "results")
    return directory / "results"


@pytest.fixture(scope="module")
def summary(results: Path) -> dict[str, Any]:
    found = publish.read_latest(results)
    assert found is not None
    return found


def test_the_pointer_leads_to_the_run(results: Path, summary: dict[str, Any]) -> None:
    [run] = [path for path in results.iterdir() if path.is_dir()]
    assert run.name == f"run={summary['run_id']}"
    assert Path(summary["path"]) == run
    assert json.loads((run / publish.SUMMARY).read_text()) == summary
    tables = {path.name for path in run.iterdir() if path.is_dir()}
    assert tables == {"queues", "topics", "groups", "clusters", "depths"} == set(summary["rows"])


def test_the_summary_says_what_was_seen(summary: dict[str, Any]) -> None:
    assert (summary["snapshot_id"], summary["snapshot_count"]) == ("s02", 2)
    assert summary["completeness"] == 0.5
    assert summary["missing"] == {"g2": "PEER_UNAVAILABLE: silent"}
    assert summary["status_counts"] == {"UNKNOWN": 1, "OK": 1}
    [group] = summary["groups"]
    assert (group["lag_sum"], group["lag_known_sum"], group["unknown_count"]) == (None, 30, 1)
    assert group["lag_ms_max"] == 10_000
    assert "30 + 1 unknown" in report.text(summary)
    assert "missing: g2" in report.text(summary)


def test_the_parquet_files_hold_the_rows(spark: SparkSession, summary: dict[str, Any]) -> None:
    rows = spark.read.parquet(f"{summary['path']}/queues").collect()
    assert len(rows) == summary["rows"]["queues"] == 2
    found = {row["broker_group"]: row for row in rows}
    assert found["g1"]["lag_count"] == 30
    assert found["g1"]["lag_velocity"] == pytest.approx(-0.5)
    assert found["g1"]["drain_eta_s"] == pytest.approx(60.0)
    assert found["g2"]["lag_count"] is None
    assert {(row["run_id"], row["completeness"]) for row in rows} == {(summary["run_id"], 0.5)}
    taken = found["g1"]["taken_time"].replace(tzinfo=UTC)
    assert taken.timestamp() * 1000 == found["g1"]["taken_ms"]


@pytest.mark.parametrize(
    "arguments", [[], ["--snapshots", "x"], ["--snapshots", "x", "--results", "y", "--window", "0"]]
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        job.main(arguments)
    assert ended.value.code == 2


def test_without_a_snapshot_the_exit_code_is_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--snapshots", str(tmp_path), "--results", str(tmp_path / "results")]
    assert job.main(folders) == 1
    assert "no finished snapshot" in capsys.readouterr().err

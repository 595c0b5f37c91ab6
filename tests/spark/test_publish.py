from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from spark.lag import publish
from spark.lag.snapshots import AHEAD_MS_MAX


def test_run_ids_sort_by_time_and_differ() -> None:
    at = [datetime(2027, 1, 15, 8, 0, second, tzinfo=UTC) for second in (1, 2)]
    early, late, again = (publish.new_run_id(now) for now in (*at, at[1]))
    assert early.startswith("20270115T080001Z-")
    assert early < min(late, again)
    assert late != again


def test_a_run_appears_as_a_whole(tmp_path: Path) -> None:
    with publish.building(tmp_path, "r1") as folder:
        (folder / "table").mkdir()
        assert not list(tmp_path.glob("run=*"))
    assert [p.name for p in tmp_path.iterdir()] == ["run=r1"]
    assert (tmp_path / "run=r1" / "table").is_dir()


def fail_within(results: Path) -> None:
    with publish.building(results, "r1") as folder:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fail_within(tmp_path)
    assert not list(tmp_path.iterdir())


def summary(snapshot_id: str, run_id: str, started_ms: int = 0) -> dict[str, object]:
    return {"snapshot_id": snapshot_id, "run_id": run_id, "started_ms": started_ms}


def test_the_pointer_never_goes_back(tmp_path: Path) -> None:
    assert publish.read_latest(tmp_path) is None
    assert publish.point_to(tmp_path, summary("s02", "slow"), 0)
    assert not publish.point_to(tmp_path, summary("s01", "late"), 0)
    assert publish.point_to(tmp_path, summary("s02", "again"), 0)
    assert publish.read_latest(tmp_path) == summary("s02", "again")
    assert [p.name for p in tmp_path.iterdir()] == [publish.LATEST]


def test_a_run_of_a_snapshot_from_the_future_is_replaced(tmp_path: Path) -> None:
    ahead = summary("s09", "ahead", AHEAD_MS_MAX + 2)
    assert publish.point_to(tmp_path, ahead, 1)
    assert publish.point_to(tmp_path, summary("s01", "right"), 1)


@pytest.mark.parametrize("text", ["", "{", "7", "{}", '{"snapshot_id": 1}', "\xff", "[" * 99_999])
def test_a_damaged_pointer_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / publish.LATEST).write_text(text, encoding="latin-1")
    assert publish.read_latest(tmp_path) is None
    assert publish.point_to(tmp_path, summary("s01", "r"), 0)
    assert publish.read_latest(tmp_path) == summary("s01", "r")


def test_json_is_written_whole(tmp_path: Path) -> None:
    publish.write_json(tmp_path / "x.json", {"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_old_folders_go_and_what_is_needed_stays(tmp_path: Path) -> None:
    snapshots, results = tmp_path / "snapshots", tmp_path / "results"
    names = {
        snapshots: ["snapshot=20270101T080000.123Z-1a", "snapshot=20270102T080000.123Z-1b"],
        results: [
            "run=20270101T080000Z-2a",
            ".run=20270101T080100Z-2b.tmp",
            "run=20270102T080000Z-2c",
        ],
    }
    for folder, children in names.items():
        for name in [*children, "run=mine", "run=20209999T999999Z-1", "other=20200101T000000Z"]:
            (folder / name).mkdir(parents=True)
    publish.point_to(results, summary("s", "20270102T080000Z-2c"), 0)
    kept = {snapshots / "snapshot=20270102T080000.123Z-1b"}
    removed = publish.remove_old(results, snapshots, datetime(2027, 2, 1, tzinfo=UTC), kept)
    assert removed == 3
    left = {path.name for folder in names for path in folder.iterdir()}
    assert left == {
        "snapshot=20270102T080000.123Z-1b", "run=20270102T080000Z-2c", "latest.json",
        "run=mine", "run=20209999T999999Z-1", "other=20200101T000000Z",
    }  # fmt: skip
    assert publish.remove_old(results, snapshots, datetime(2026, 1, 1, tzinfo=UTC), set()) == 0

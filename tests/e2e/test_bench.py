"""The whole benchmark at its shortest: every figure is there and above zero."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def run(module: str, folder: Path, *options: str) -> list[dict[str, object]]:
    """The JSON lines that a benchmark of the store prints."""
    result = subprocess.run(
        [sys.executable, "-m", module, "--folder", str(folder), *options],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_the_benchmarks_of_the_store_run(tmp_path: Path) -> None:
    small = ("--mib", "24", "--queues", "8", "--file_mib", "8")
    recovered = run("bench.recover", tmp_path, *small, "--many", "64", "--unflushed_mib", "4")
    assert [line["queues"] for line in recovered[:3]] == [8, 8, 8]
    assert len(recovered) == 5
    (flushed,) = run("bench.flush", tmp_path, "--seconds", "0.2", "--runs", "1", "--delay_ms", "0")
    assert flushed["callers"] == 64
    read = run("bench.read", tmp_path, *small, "--runs", "1", "--backlog_s", "1", "--seconds", "1")
    assert [len(line["runs"]) for line in read] == [1, 1]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_run_gives_every_row(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COMETMQ_")}
    options = ["--quick", "--seconds", "0.2", "--folder", str(tmp_path)]
    result = subprocess.run(
        [sys.executable, "-m", "bench", *options],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["rates"]) == 2 * 3 + 2 * 2 * 2  # bare loops; produce and consume by flush
    assert all(row["rate"]["median"] > 0 for row in report["rates"])
    assert len(report["ratios"]) == 2 * 5
    assert [row["count"] for row in report["latencies"]] == [1000] * 4
    assert not (tmp_path / "cluster" / "local.json").exists()

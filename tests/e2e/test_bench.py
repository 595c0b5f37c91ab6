"""The whole benchmark at its shortest: every figure is there and above zero."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]


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

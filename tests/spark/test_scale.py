"""A hundred thousand queues: the whole job as a process of its own, measured and printed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="pyspark is missing (extra lag: make setup)")
pytest.importorskip("pyarrow", reason="pyarrow is missing (extra lag: make setup)")

from tests.spark.files import MINUTE, T0, export

ROOT = Path(__file__).resolve().parents[2]
ROWS = 100_000
QUEUES_PER_TOPIC = 16
GROUPS = 50


def points(number: int) -> Iterator[dict[str, Any]]:
    """Queue n of snapshot k ends at 1000·k + n and n % 97 of it wait; every 1000th was never
    committed."""
    for n in range(ROWS):
        topic, queue_id = divmod(n, QUEUES_PER_TOPIC)
        high = 1000 * number + n
        yield {
            "topic": f"T{topic}",
            "queue_id": queue_id,
            "group": f"G{topic % GROUPS}",
            "max_offset": high,
            "committed_offset": None if n % 1000 == 0 else high - n % 97,
            "committed_generation": None if n % 1000 == 0 else 1,
            "max_store_time_ms": T0,
            "committed_store_time_ms": T0 + number * MINUTE - 10 * (n % 97) if n % 97 else None,
        }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_queues(tmp_path: Path) -> None:
    for number in (1, 2):
        export(tmp_path / "snapshots", number, {"g1": points(number)})
    folders = [f"--snapshots={tmp_path / 'snapshots'}", f"--results={tmp_path / 'results'}"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "spark.lag.job", *folders, "--master=local[2]", "--output=json"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    print(f"\n{ROWS:,} queue rows, 2 snapshots, local[2]: {seconds:.1f} s with the JVM's start")
    summary = json.loads(done.stdout)
    assert summary["rows"]["queues"] == ROWS
    assert summary["rows"]["topics"] == ROWS // QUEUES_PER_TOPIC
    assert summary["rows"]["groups"] == GROUPS
    [cluster] = summary["clusters"]
    assert cluster["lag_known_sum"] == sum(n % 97 for n in range(ROWS) if n % 1000)
    assert (cluster["lag_sum"], cluster["unknown_count"]) == (None, ROWS // 1000)
    assert cluster["lag_ms_max"] == 960

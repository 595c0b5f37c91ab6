"""Clients in several processes, threads and event loops: the tables of docs/how-to/workers.md, each
row played by a program of its own (tests/support/cluster/workers.py).
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.support.cluster.fake_cluster import fake_cluster
from tests.support.cluster.workers import ROWS, SILENT_TOPIC, TOPIC

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "workers.md"
_ROW = re.compile(r"^\| (?P<row>.+) \| `?(?P<result>works|[A-Z_]+)`? \|$", re.MULTILINE)
RESULTS = {found["row"]: found["result"] for found in _ROW.finditer(PAGE.read_text())}
PROCESSES = PAGE.read_text().split("## Threads")[0]
# In which clients of either kind may take part.
BOTH = [row for row in RESULTS if row in PROCESSES and "receipt" not in row]


def test_each_row_has_its_program() -> None:
    assert list(RESULTS) == list(ROWS)
    assert len(RESULTS) == PAGE.read_text().count("\n| ") - 3  # without the heads of the tables


@pytest.mark.parametrize(
    ("row", "style"),
    [(row, style) for row in RESULTS for style in ("sync", *(["asyncio"] if row in BOTH else []))],
)
async def test_a_row(row: str, style: str) -> None:
    async with fake_cluster("g1", "g2") as (namesrv, [answering, silent]):
        await namesrv.put(TOPIC, answering)
        await namesrv.put(SILENT_TOPIC, silent)
        silent.answering.clear()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.support.cluster.workers",
            row,
            namesrv.address,
            style,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 0, err.decode()
    assert out.decode().splitlines()[-1] == f"outcome: {RESULTS[row]}", err.decode()

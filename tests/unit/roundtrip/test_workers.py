"""Child processes that end, well or badly."""

from __future__ import annotations

from pathlib import Path
from signal import Signals

import pytest

from examples.roundtrip.workers import Worker, WorkerFailed

SCRIPT = """
import json, sys
print(json.dumps({"acked": 1}), flush=True)
if "--fail" in sys.argv:
    sys.exit("the reason")
print(json.dumps({"acked": 2, "ended_ms": 7}), flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "talker.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


async def test_the_newest_value_of_each_field_is_kept(folder: Path) -> None:
    worker = await Worker.start("one", "talker", folder, number=1)
    await worker.wait_for("ended_ms", 10)
    await worker.finish()
    assert worker.said == {"acked": 2, "ended_ms": 7}
    assert not worker.running


async def test_a_failure_carries_the_end_of_the_log(folder: Path) -> None:
    worker = await Worker.start("one", "talker", folder, fail=1)
    with pytest.raises(WorkerFailed, match=r"(?s)one ended with status 1.*the reason"):
        await worker.finish()


async def test_a_worker_that_has_ended_is_told_nothing(folder: Path) -> None:
    worker = await Worker.start("one", "talker", folder, number=1)
    await worker.finish()
    worker.signal(Signals.SIGUSR1)
    assert not worker.running


async def test_waiting_for_what_is_never_said_ends_with_the_process(folder: Path) -> None:
    worker = await Worker.start("one", "talker", folder)
    with pytest.raises(WorkerFailed, match="before it was ready"):
        await worker.wait_for("ready", 10)
    await worker.kill()

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.admin import processes
from cometmq.admin.connection import until
from cometmq.admin.processes import ProcessId

# Says that it is ready, then waits for a signal.
SLEEPER = "import signal; {}; print('ready', flush=True); signal.pause()"
STUBBORN = SLEEPER.format("signal.signal(signal.SIGTERM, signal.SIG_IGN)")
POLITE = SLEEPER.format("pass")


async def start(code: str, log: Path) -> ProcessId:
    process = processes.spawn([sys.executable, "-I", "-S", "-c", code], log, {})

    async def ready() -> bool:
        return log.stat().st_size > 0  # noqa: ASYNC240

    assert await until(ready, 10)
    return process


async def test_a_process_is_stopped_in_order(tmp_path: Path) -> None:
    process = await start(POLITE, tmp_path / "log")
    assert process.alive()
    assert await processes.stop([process], grace_s=10) == 0
    assert not process.alive()


async def test_who_does_not_listen_is_killed(tmp_path: Path) -> None:
    process = await start(STUBBORN, tmp_path / "log")
    assert await processes.stop([process], grace_s=0.1) == 1
    assert not process.alive()


async def test_a_pid_that_now_belongs_to_another_is_left_alone(tmp_path: Path) -> None:
    process = await start(POLITE, tmp_path / "log")
    earlier = replace(process, start_ticks=process.start_ticks - 1)
    assert not earlier.alive()
    assert await processes.stop([earlier], grace_s=0.1) == 0
    assert process.alive()
    await processes.stop([process], grace_s=10)


async def test_a_process_has_a_session_of_its_own(tmp_path: Path) -> None:
    process = await start(POLITE, tmp_path / "log")
    assert os.getsid(process.pid) == process.pid
    process.signal(signal.SIGKILL)
    await processes.stop([process], grace_s=10)


def test_signalling_the_dead_does_nothing() -> None:
    ProcessId(pid=2**22 + 1, start_ticks=1).signal(signal.SIGTERM)


async def test_the_log_is_added_to(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    log.write_text("earlier\n")
    code = "import sys; print('ready', file=sys.stderr)"
    process = processes.spawn([sys.executable, "-I", "-S", "-c", code], log, {})

    async def ended() -> bool:
        return not process.alive()

    assert await until(ended, 10)
    assert log.read_text() == "earlier\nready\n"
    assert capfd.readouterr() == ("", "")

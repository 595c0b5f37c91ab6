"""Child processes of the round trip, and the time that they share with it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cometmq.admin.connection import until

MODULE = "examples.roundtrip.worker"


class WorkerFailed(Exception):
    """A child process ended with an error; the text holds the end of its log."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Worker:
    """A child process; its standard output and its standard error go to two files."""

    def __init__(self, folder: Path, name: str, module: str, *arguments: str) -> None:
        self.name, self.output, self._log = name, folder / f"{name}.out", folder / f"{name}.log"
        command = [sys.executable, "-m", module, *arguments]
        with self.output.open("wb") as stdout, self._log.open("wb") as stderr:
            self._process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
        self.signal = self._process.send_signal

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    @property
    def running(self) -> bool:
        """Raises WorkerFailed if the process has ended with an error."""
        status = self._process.poll()
        if status:
            tail = self._log.read_text(errors="replace")[-2_000:]
            raise WorkerFailed(f"{self.name} ended with status {status}:\n{tail}")
        return status is None

    def latest(self) -> dict[str, Any]:
        """The last whole line of JSON that the process has printed; empty before the first."""
        lines = self.output.read_bytes().rpartition(b"\n")[0].splitlines()
        found: dict[str, Any] = json.loads(lines[-1]) if lines else {}
        return found


async def ended(workers: Sequence[Worker], seconds_max: float) -> None:
    """Until the workers have ended by themselves. Errors: WorkerFailed, TimeoutError."""

    async def all_ended() -> bool:
        return not any([worker.running for worker in workers])

    if not await until(all_ended, seconds_max):
        names = ", ".join(worker.name for worker in workers)
        raise TimeoutError(f"{names}: still running after {seconds_max:.0f} s")

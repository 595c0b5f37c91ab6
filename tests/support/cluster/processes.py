"""Services as processes of their own, for tests that look at them from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from scripts.releases import THIS, Program
from tests.support.waiting import wait_until

GRACE_S = 15.0


@dataclass(frozen=True)
class Service:
    """A process that has announced itself."""

    name: str
    kind: str
    address: str
    metrics_address: str
    pid: int
    internal_address: str = ""


class Processes:
    """Starts processes in ``directory`` and ends them with the block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = ExitStack()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def spawn(
        self, name: str, command: list[str], folder: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a command, in ``folder``; what it says goes into ``<name>.log``."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("COMETMQ_")}
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        self._stack.callback(_end, process)
        self._running[name] = process
        return process

    def kill(self, name: str) -> None:
        """End a process as a loss of its machine would."""
        self.end(name, signal.SIGKILL)

    def end(self, name: str, number: signal.Signals) -> int:
        """End a process by a signal; its exit status."""
        self._running[name].send_signal(number)
        return self._running[name].wait(GRACE_S)

    def log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def service(self, name: str, kind: str, **flags: Any) -> Service:
        """Start ``services.<kind>`` on free ports and wait until it is ready."""
        return self.service_of(THIS, name, kind, **flags)

    def service_of(self, program: Program, name: str, kind: str, **flags: Any) -> Service:
        """The same, of another release."""
        announcement = self.directory / f"{name}.json"
        announcement.unlink(missing_ok=True)  # of its life before
        every = {"port": 0, "metrics_port": 0, "announce_file": announcement, **flags}
        words = [word for flag, value in every.items() for word in (f"--{flag}", str(value))]
        command = [str(program.python), "-m", f"services.{kind}", *words]
        process = self.spawn(name, command, program.tree)
        wait_until(f"{name} is ready", lambda: announcement.exists() or process.poll() is not None)
        assert process.poll() is None, self.log(name).read_text()
        said = json.loads(announcement.read_text())
        return Service(name, kind, **said)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

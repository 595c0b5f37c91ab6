"""One detached process: start it, recognise it again later, stop it.

A process is known by its pid *and* its start time, because the machine hands out a pid again: what
we stop is what we started. Where both were read from a file, an argument of the command line proves
whose process it is. Linux only, like the services themselves.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

POLL_INTERVAL_S = 0.02
# Fields of /proc/<pid>/stat after the program's name, which may itself hold blanks and brackets.
_STATE = 0
_START_TICKS = 19


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process of this machine, now or in the past."""

    pid: int
    start_ticks: int  # kernel clock ticks from boot to the start of the process
    argument: str = ""  # that its command line has, if anything is known of it

    def alive(self) -> bool:
        """True while the process runs and has the argument. A zombie does not run.

        A process has no command line while it becomes another program.
        """
        with suppress(ChildProcessError):  # the process was started by another one
            os.waitpid(self.pid, os.WNOHANG)
        fields = _stat(self.pid)
        if fields is None or fields[_STATE] in "ZX":
            return False
        if int(fields[_START_TICKS]) != self.start_ticks:
            return False
        line = _command_line(self.pid)
        return not self.argument or not line or self.argument in line

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process is gone."""
        if self.alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def spawn(command: list[str], log: Path, environment: Mapping[str, str]) -> ProcessId:
    """Start ``command`` in a session of its own, so that a Ctrl-C here does not reach it.

    Its output is added to ``log``; its input is empty.
    """
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    # Not subprocess.Popen: its objects want to outlive their process, ours must not.
    pid = os.posix_spawn(command[0], command, environment, file_actions=actions, setsid=True)
    fields = _stat(pid)
    assert fields is not None, "a child that nobody has waited for has an entry in /proc"
    return ProcessId(pid, int(fields[_START_TICKS]))


async def stop(processes: Iterable[ProcessId], *, grace_s: float) -> int:
    """Ask the processes to stop, kill those that still live after ``grace_s``; returns how many.

    Returns when all of them are gone.
    """
    living = [process for process in processes if process.alive()]
    for process in living:
        process.signal(signal.SIGTERM)
    killed = await _wait_gone(living, grace_s)
    for process in killed:
        process.signal(signal.SIGKILL)
    await _wait_gone(killed, grace_s)
    return len(killed)


async def _wait_gone(processes: Iterable[ProcessId], patience_s: float) -> list[ProcessId]:
    """Wait until all are gone, at most ``patience_s``; returns those that are not."""
    living = list(processes)
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while living := [process for process in living if process.alive()]:  # noqa: ASYNC110
                await asyncio.sleep(POLL_INTERVAL_S)  # the end of another's child notifies nobody
    return living


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def _command_line(pid: int) -> list[str]:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return os.fsdecode(arguments).split("\0") if arguments else []

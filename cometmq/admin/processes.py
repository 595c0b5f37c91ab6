"""One detached process: start it, recognise it again later, stop it.

A process is known by its pid *and* its start time, because the machine hands out a pid again: what
we stop is what we started. Where both were read from a file, an argument of the command line proves
whose process it is. Linux only, like the services themselves.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

POLL_INTERVAL_S = 0.02
# Fields of /proc/<pid>/stat after the program's name, which may itself hold blanks and brackets.
_STATE = 0
_START_TICKS = 19
_USER_TICKS, _SYSTEM_TICKS = 11, 12
# In the time that a process has for a step it works if it did so much.
BUSY_SHARE = 0.1
MOVED_BYTES = 1024 * 1024
STEPS_MAX = 10


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


class Effort(NamedTuple):
    """What a process has done: how long its threads ran or waited for a processor, and bytes from
    and to the disk.
    """

    busy_s: float
    moved_bytes: int

    def works_since(self, before: Effort, step_s: float) -> bool:
        """Whether the process has worked in this time, as far as the machine let it."""
        is_busy = self.busy_s - before.busy_s >= BUSY_SHARE * step_s
        return is_busy or self.moved_bytes - before.moved_bytes >= MOVED_BYTES


def effort(process: ProcessId) -> Effort:
    """What a process has done so far; nothing if it is gone."""
    moved_bytes = sum(
        int(line.partition(" ")[2])
        for line in _lines(Path(f"/proc/{process.pid}/io"))
        if line.startswith(("read_bytes", "write_bytes"))
    )
    waited = [
        int(number)
        for task in Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        for line in _lines(task)
        for number in line.split()[:2]
    ]
    busy_s = sum(waited) / 1e9
    fields = _stat(process.pid)
    if fields is not None and not waited:  # a kernel without statistics of its scheduler
        ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
        busy_s = ticks / os.sysconf("SC_CLK_TCK")
    return Effort(busy_s, moved_bytes)


class Patience:
    """How long to wait for processes: a step, and again as long as any of them works, STEPS_MAX at
    most.
    """

    def __init__(self, those: Sequence[ProcessId], step_s: float, now_s: float) -> None:
        self._those = those
        self._step_s = step_s
        self._ends_s = now_s + step_s
        self._efforts = [effort(process) for process in those]
        self.step_count = 0  # that are over
        self.works = True  # in the last step

    @property
    def waited_s(self) -> float:
        """In the steps that are over."""
        return self.step_count * self._step_s

    def is_over(self, now_s: float) -> bool:
        """Whether there is nothing more to wait for."""
        if now_s < self._ends_s:
            return False
        self.step_count += 1
        efforts = [effort(process) for process in self._those]
        pairs = zip(efforts, self._efforts, strict=True)
        self.works = any(now.works_since(before, self._step_s) for now, before in pairs)
        self._efforts, self._ends_s = efforts, now_s + self._step_s
        return not self.works or self.step_count >= STEPS_MAX


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


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # it is gone, or another user's
        return []


def _command_line(pid: int) -> list[str]:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    return os.fsdecode(arguments).split("\0") if arguments else []

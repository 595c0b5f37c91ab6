"""Child processes that speak JSON lines, and what they and the servers cost in CPU seconds."""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

Line: TypeAlias = dict[str, float | int | str]

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STOP_S_MAX = 20.0
REPOSITORY = Path(__file__).resolve().parent.parent


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads of a process so far, in steps of 10 ms."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets
    user_ticks, system_ticks = int(fields[11]), int(fields[12])
    return (user_ticks + system_ticks) / CLOCK_TICKS_PER_S


def machine_cpu_seconds() -> float:
    """CPU time that the whole machine has spent on anything but idling."""
    first = Path("/proc/stat").read_text().partition("\n")[0].split()
    user, nice, system, _idle, _iowait, interrupts, soft_interrupts = map(int, first[1:8])
    return (user + nice + system + interrupts + soft_interrupts) / CLOCK_TICKS_PER_S


class Meter:
    """Wall and CPU seconds of a stretch of work: this process's and those of the named others."""

    def __init__(self, others: Mapping[str, int]) -> None:
        self._pids = dict(others)
        self._cpu_s = self._read()
        self._machine_s = machine_cpu_seconds()
        self._started_s = time.perf_counter()

    def _read(self) -> dict[str, float]:
        others = {name: cpu_seconds(pid) for name, pid in self._pids.items()}
        return {"client": time.process_time(), **others}

    def stop(self, messages: int) -> Line:
        """The measurement so far: ``seconds``, ``messages``, ``rate``, ``cpu_us_<name>`` (a
        message), and ``other_cores``: how many cores everything else on the machine kept busy.
        """
        seconds = time.perf_counter() - self._started_s
        spent_s = {name: after_s - self._cpu_s[name] for name, after_s in self._read().items()}
        other_s = machine_cpu_seconds() - self._machine_s - sum(spent_s.values())
        line: Line = {"messages": messages, "seconds": seconds, "rate": messages / seconds}
        line["other_cores"] = max(other_s / seconds, 0.0)
        for name, cpu_s in spent_s.items():
            line[f"cpu_us_{name}"] = cpu_s / max(messages, 1) * 1e6
        return line


def watch_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``--watch name=pid``, which may be repeated; :func:`watched` reads it."""
    parser.add_argument(
        "--watch", action="append", default=[], metavar="NAME=PID", help="also report its CPU time"
    )


def watched(arguments: argparse.Namespace) -> dict[str, int]:
    pairs = (item.split("=", 1) for item in arguments.watch)
    return {name: int(pid) for name, pid in pairs}


def say(line: Line) -> None:
    """One JSON line for the parent."""
    print(json.dumps(line), flush=True)


class Program:
    """A running program; leaving the ``with`` block ends it."""

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """``environment``: variables beside those of this process."""
        self._name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **(environment or {})},
        )
        self.pid = self._process.pid
        self._lines: queue.SimpleQueue[Line] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def tell(self, word: str) -> None:
        """A line for the child."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def poll(self) -> Line | None:
        """The child's next line, None when it has said nothing. Not together with :meth:`read`."""
        if self._lines is None:
            self._lines = queue.SimpleQueue()
            threading.Thread(target=self._collect, args=(self._lines,), daemon=True).start()
        try:
            return self._lines.get_nowait()
        except queue.Empty:
            return None

    def _collect(self, lines: queue.SimpleQueue[Line]) -> None:
        with suppress(RuntimeError, ValueError):  # it has ended
            while True:
                lines.put(self.read())

    def read(self) -> Line:
        """The child's next line; waits for it. A child that ends without one is an error."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if not text:
            raise RuntimeError(
                f"{self._name} ended with status {self._process.wait()} before it had answered"
            )
        line: Line = json.loads(text)
        return line


class Child(Program):
    """A module run as a program."""

    def __init__(self, module: str, *arguments: str, **options: str | int | float) -> None:
        flags = [item for name, value in options.items() for item in (f"--{name}", str(value))]
        super().__init__(module, [sys.executable, "-m", module, *arguments, *flags])

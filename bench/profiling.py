"""Where the CPU goes: py-spy's native stacks by room and by function, and CPU by thread.

Samples in which a thread waits (for events, a lock, the interpreter lock, a disk) are left out.
Each other sample has a home: the innermost frame that is Python code, gRPC's core, protobuf or
uvloop; what a Python function calls in plain C (checksums, system calls, struct) is its own time.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from bench.processes import CLOCK_TICKS_PER_S
from bench.report import markdown

SAMPLES_PER_S = 250
FUNCTIONS_SHOWN = 20
CALLS_SHOWN = 8
SHOWN_SHARE_MIN = 0.005  # rows below are left out

WAITING = frozenset(
    [
        "poll",
        "epoll_wait",
        "epoll_pwait",
        "select",
        "nanosleep",
        "clock_nanosleep",
        "fsync",
        "fdatasync",
    ]
)
LOCKS = frozenset(
    ["pthread_cond_wait", "pthread_cond_timedwait", "sem_wait", "PyThread_acquire_lock_timed"]
)
LOCK_DEPTH = 4  # a wait for a lock shows within so many of the innermost frames
# Compiled code that is a room of its own; file names as py-spy shows them.
COMPILED = {
    "cygrpc": "gRPC core",
    "_message.abi3": "protobuf",
    "loop.c": "uvloop",
    "core.c": "uvloop",
    "linux.c": "uvloop",
    "stream.c": "uvloop",
}
ADDRESS = re.compile(r"0x[0-9a-f]+")

Stack = tuple[str, ...]
Stacks = list[tuple[Stack, int]]


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds so far of the main thread, and of the others by their name."""
    seconds: dict[str, float] = {}
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        text = stat.read_text()
        name = text[text.index("(") + 1 : text.rindex(")")]
        if name.startswith("python"):
            name = "main thread" if stat.parent.name == str(pid) else "other Python threads"
        fields = text[text.rindex(")") + 2 :].split()
        ticks = int(fields[11]) + int(fields[12])
        seconds[name] = seconds.get(name, 0.0) + ticks / CLOCK_TICKS_PER_S
    return seconds


class Recorder:
    """py-spy on a running process, from the making of this object on, for ``seconds``."""

    def __init__(self, pid: int, seconds: float, output: Path) -> None:
        self._pid = pid
        self._output = output
        flags = ["--pid", str(pid), "--duration", str(int(seconds)), "--rate", str(SAMPLES_PER_S)]
        shape = ["--format", "raw", "--nolineno", "--native", "--output", str(output)]
        tool = str(Path(sys.executable).parent / "py-spy")
        self._before = thread_seconds(pid)
        self._started_s = time.perf_counter()
        self._process = subprocess.Popen(
            [tool, "record", *flags, *shape], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )

    @property
    def elapsed_s(self) -> float:
        """Since the start of the recording."""
        return time.perf_counter() - self._started_s

    def threads(self) -> dict[str, float]:
        """CPU seconds of each thread since the start of the recording."""
        after = thread_seconds(self._pid)
        return {name: seconds - self._before.get(name, 0.0) for name, seconds in after.items()}

    def stacks(self) -> Stacks:
        """Waits for the end of the recording. Error: RuntimeError with what py-spy said."""
        _, said = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError(f"py-spy: {said.decode().strip()}")
        return parse(self._output.read_text())


def parse(collapsed: str) -> Stacks:
    """Lines of ``frame;frame;… count``, outermost frame first."""
    stacks: Stacks = []
    for line in collapsed.splitlines():
        frames, _, count = line.rpartition(" ")
        stacks.append((tuple(frames.split(";")), int(count)))
    return stacks


def function_of(frame: str) -> str:
    """``stamp (cometmq/format/batch.py)`` → ``stamp``."""
    return frame.rpartition(" (")[0] or frame


def file_of(frame: str) -> str:
    """``stamp (cometmq/format/batch.py)`` → ``cometmq/format/batch.py``."""
    return frame.rpartition(" (")[2].rstrip(")")


def is_python(file: str) -> bool:
    """``<string>`` and its like are generated: the methods of dataclasses."""
    return file.endswith(".py") or file.startswith("<")


def waits(stack: Stack) -> bool:
    """Whether the thread did nothing but wait."""
    innermost = [function_of(frame) for frame in stack[-LOCK_DEPTH:]]
    return innermost[-1] in WAITING or not LOCKS.isdisjoint(innermost)


def home(stack: Stack) -> str:
    """The frame, or the name of the compiled library, that a sample belongs to."""
    for frame in reversed(stack):
        file = file_of(frame)
        if is_python(file):
            return frame
        for mark, name in COMPILED.items():
            if file == mark or (mark in file and file.endswith(".so")):
                return name
    return "other C code"


def room(home_frame: str) -> str:
    """The package that a home lies in: ``cometmq/format``, ``asyncio``, ``gRPC core``."""
    file = file_of(home_frame)
    if not is_python(file):
        return home_frame
    parts = Path(file).parts
    if parts[0] in {"cometmq", "services"} and len(parts) > 2:
        return "/".join(parts[:2])
    return parts[0]


def by_home(stacks: Stacks) -> Counter[str]:
    """Samples of each home."""
    counts: Counter[str] = Counter()
    for stack, count in stacks:
        counts[home(stack)] += count
    return counts


def by_call(stacks: Stacks) -> Counter[str]:
    """Samples of each innermost compiled function that has a name."""
    counts: Counter[str] = Counter()
    for stack, count in stacks:
        frame = stack[-1]
        if not is_python(file_of(frame)) and not ADDRESS.fullmatch(function_of(frame)):
            counts[frame] += count
    return counts


def inclusive(stacks: Stacks) -> Counter[str]:
    """Samples in which a frame was anywhere on the stack; recursion counts once."""
    counts: Counter[str] = Counter()
    for stack, count in stacks:
        for frame in set(stack):
            counts[frame] += count
    return counts


def summary(stacks: Stacks, threads: dict[str, float], messages: int) -> str:
    """Four Markdown tables: threads, rooms, functions, calls into C. Shares of samples are shares
    of those that did not wait.
    """
    busy = [(stack, count) for stack, count in stacks if not waits(stack)]
    total = max(sum(count for _, count in busy), 1)
    homes, calls, anywhere = by_home(busy), by_call(busy), inclusive(busy)
    rooms: Counter[str] = Counter()
    for frame, count in homes.items():
        rooms[room(frame)] += count
    functions = [
        [f"`{frame}`", share(count, total), share(anywhere.get(frame, count), total)]
        for frame, count in homes.most_common(FUNCTIONS_SHOWN)
        if count / total >= SHOWN_SHARE_MIN
    ]
    tables = (
        (("thread", "CPU", "µs/message"), thread_rows(threads, messages)),
        (("room", "CPU"), share_rows(rooms.most_common(), total)),
        (("function", "own", "with callees"), functions),
        (("inside them, C function", "CPU"), share_rows(calls.most_common(CALLS_SHOWN), total)),
    )
    return "\n\n".join(markdown(header, rows) for header, rows in tables)


def thread_rows(threads: dict[str, float], messages: int) -> list[list[str]]:
    whole_s = max(sum(threads.values()), 1e-9)
    return [
        [name, share(seconds, whole_s), f"{seconds / max(messages, 1) * 1e6:.2f}"]
        for name, seconds in sorted(threads.items(), key=lambda item: -item[1])
        if seconds / whole_s >= SHOWN_SHARE_MIN
    ]


def share_rows(counts: Iterable[tuple[str, int]], total: int) -> list[list[str]]:
    return [
        [name if " (" not in name else f"`{name}`", share(count, total)]
        for name, count in counts
        if count / total >= SHOWN_SHARE_MIN
    ]


def share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"

"""Replace this process by one of another role: the same pid, arguments, ports and folders.

A process never switches roles, it is replaced. What its successor has to know is passed in one
environment variable, which the successor takes out again: why, which ports were bound, where a log
was handed over, when roles changed before, and the values of metrics.

What survives an exec and must not: blocked signals, ignored signals, open descriptors. Only the
signals that a process listens to stay blocked, so that one that comes between two programs waits
for the second to listen: by default it would kill it, or, in a container's first process, be lost.
Descriptors
are marked to be closed by the exec itself, not closed before it: threads of gRPC still wait in
them, and would use a number that is free or, worse, of another file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TRACE_SIGNAL = signal.SIGUSR2  # the flight recorder keeps its ring
HELD_SIGNALS = (*STOP_SIGNALS, TRACE_SIGNAL)
VARIABLE = "_COMETMQ_REEXEC"  # not an option: those begin with COMETMQ_

CHANGES_FREE_MAX = 3  # so many within the window cost no waiting
WINDOW_S = 60.0
DELAY_FIRST_S = 2.0
DELAY_MAX_S = 32.0
CHANGES_KEPT_MAX = 16


@dataclass(frozen=True, slots=True)
class RoleChange:
    """What a process passes to its successor. ``changed_s`` are times of CLOCK_BOOTTIME, oldest
    first, this change included.
    """

    module: str  # services.broker, services.haslave
    reason: str  # one word, for the log
    ports: Mapping[str, int] = field(default_factory=dict)  # option name → the port that was bound
    log_end: int | None = None  # where a writer handed its log over; None: none did
    changed_s: tuple[float, ...] = ()
    heard_s: float | None = None  # CLOCK_BOOTTIME of the newest frame of the writer before us
    elections: Mapping[str, int] = field(default_factory=dict)  # by reason, since the process began
    # What is known of other clocks: offset, error and when, as ``clock_comparison.Reading`` has it.
    clocks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unplanned_ms: int = 0  # when this process last began without a plan; 0: it never did

    def encode(self) -> str:
        return json.dumps(asdict(self))

    def after(self, before: RoleChange | None, now_s: float) -> RoleChange:
        """This change with its time, and the times of those before it that still count."""
        times = () if before is None else before.changed_s
        kept = [time_s for time_s in times if now_s - WINDOW_S < time_s <= now_s]
        return replace(self, changed_s=(*kept, now_s)[-CHANGES_KEPT_MAX:])


def received(environ: MutableMapping[str, str]) -> RoleChange | None:
    """What the predecessor has passed on, taken out of the environment; None: there was none."""
    text = environ.pop(VARIABLE, None)
    if text is None:
        return None
    passed = json.loads(text)
    return RoleChange(**{**passed, "changed_s": tuple(passed["changed_s"])})


def recent(change: RoleChange | None, now_s: float) -> int:
    """Role changes within the last minute."""
    times = () if change is None else change.changed_s
    return sum(now_s - WINDOW_S < time_s <= now_s for time_s in times)


def delay_s(change: RoleChange | None, now_s: float) -> float:
    """How long the successor waits before it opens its store: a process that goes to and fro does
    so ever slower.
    """
    surplus = recent(change, now_s) - CHANGES_FREE_MAX
    return min(DELAY_MAX_S, DELAY_FIRST_S * 2.0 ** (surplus - 1)) if surplus > 0 else 0.0


def hold_signals() -> None:
    """What a process listens to waits from now on. Signals that came before have been handled on
    return.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD_SIGNALS)


def take_signals() -> None:
    """Signals are delivered from now on, those that waited at once: handlers are in place."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)


def replace_process(argv: Sequence[str], change: RoleChange) -> NoReturn:
    """Become ``python -m change.module argv``. Main thread only; returns never, raises OSError."""
    environment = {**os.environ, VARIABLE: change.encode()}
    command = [sys.executable, *interpreter_flags(sys.orig_argv), "-m", change.module, *argv]
    _flush()
    _reset_signals()
    _close_at_exec()
    os.execve(sys.executable, command, environment)


def interpreter_flags(command: Sequence[str]) -> list[str]:
    """The arguments between the interpreter and ``-m`` in the command of this process."""
    return list(command[1 : command.index("-m")]) if "-m" in command else []


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the listener is closed
            stream.flush()


def _reset_signals() -> None:
    hold_signals()  # before they get their default again, which ends the process
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):  # the C library keeps two for itself
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals() - set(HELD_SIGNALS))


def _close_at_exec() -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the descriptor of the listing itself is gone by now
                flags = fcntl.fcntl(int(name), fcntl.F_GETFD)
                fcntl.fcntl(int(name), fcntl.F_SETFD, flags | fcntl.FD_CLOEXEC)

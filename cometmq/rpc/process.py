"""What every service's ``__main__`` does: signals first, an event loop, the announce file.

A program may have several parts, one after the other, as a member has roles. Each has an event loop
of its own, which ends with all tasks and threads of that part: nothing of it is left in the next.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

from cometmq.errors import CometError
from cometmq.flight_recorder import name_threads, recorder
from cometmq.rpc.descriptors import raise_limit
from cometmq.rpc.memory import keep_freed
from cometmq.rpc.polling import poll_in_one_thread

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
TRACE_SIGNAL = signal.SIGUSR2  # the flight recorder keeps its ring


def settle(trace_limit_ms: int) -> None:
    """The start is over: what it made stays, and the collector need not look at it again and again.
    The flight recorder compares with the limit from now on.
    """
    gc.freeze()
    recorder.limit_ms = trace_limit_ms
    name_threads()


def release() -> None:
    """Free what :func:`settle` took from the collector, as far as nothing refers to it any more.
    What comes next is a start again.
    """
    recorder.limit_ms = 0
    gc.unfreeze()
    gc.collect()


class StopSignal:
    """SIGTERM or SIGINT as something to wait for. Made before anything slow: none is missed."""

    def __init__(self) -> None:
        self._came = False
        self._event = asyncio.Event()
        self._listen()

    @property
    def is_set(self) -> bool:
        return self._came

    def set(self) -> None:
        """As if a signal had come."""
        self._came = True
        self._event.set()

    def bind(self) -> None:
        """From now on the running loop is woken by the signals."""
        self._event = asyncio.Event()  # that of a loop before belongs to it
        if self._came:
            self._event.set()
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.set)

    def unbind(self) -> None:
        """The loop is about to end. A signal that comes from now on is noted, no more: without a
        handler it would kill a process that has done everything in order.
        """
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)
        self._listen()

    def _listen(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: self.set())

    async def wait(self) -> None:
        await self._event.wait()


Main: TypeAlias = Callable[[StopSignal], Coroutine[Any, Any, "Main | None"]]
"""A part of a program; it returns the part that comes next, or None."""


def run(main: Main) -> int:
    """Run ``main`` in a uvloop until it returns, then in another what it returned, until that is
    None. The exit status: 0, or 1 for a catalogue error, which goes to standard error with its
    advice.
    """
    _keep_at_signal()
    stop = StopSignal()
    raise_limit()
    keep_freed()
    poll_in_one_thread()
    # gRPC writes lines of its own for each connection that a peer ends. Errors of calls reach us.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    recorder.watch_collector()
    try:
        from cometmq.rpc.recorded_loop import RecordedLoop

        parts = [main]
        while parts:
            with asyncio.Runner(loop_factory=RecordedLoop) as runner:
                parts += runner.run(_bound(parts.pop(), stop))
            _assert_ended()
    except (CometError, ExceptionGroup) as error:
        return _report(error)
    return 0


def _assert_ended() -> None:
    """Nothing of a part goes on: the runner ends tasks and the threads of the loop, the part its
    own. Threads that belong to the process are daemons.
    """
    left = [one.name for one in threading.enumerate() if not one.daemon]
    assert left == [threading.main_thread().name], f"threads that were to end: {left}"


async def _bound(main: Main, stop: StopSignal) -> list[Main]:
    """Run ``main``; what comes next, if anything does."""
    stop.bind()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(TRACE_SIGNAL, recorder.keep, TRACE_SIGNAL.name)
    try:
        following = await main(stop)
        if following is None:
            return []
        del main  # it refers to what it was given; no caller does
        release()  # in the loop, where gRPC gives up what belongs to it
        return [following]
    finally:
        loop.remove_signal_handler(TRACE_SIGNAL)
        _keep_at_signal()
        stop.unbind()


def _keep_at_signal() -> None:
    """Where no loop listens to it: by default the signal would end the process."""
    signal.signal(TRACE_SIGNAL, lambda *_: recorder.keep(TRACE_SIGNAL.name))


def _report(error: Exception) -> int:
    """Print a CometError; raises any other error again, with its traceback."""
    if isinstance(error, ExceptionGroup):
        known, other = error.split(CometError)
        if known is None or other is not None:
            raise error
        return max(_report(each) for each in known.exceptions)
    assert isinstance(error, CometError)
    sys.stderr.write(f"{error.name()}: {error.message}\n  {error.advice}\n")
    return 1


def announce(path: Path | None, **addresses: str) -> None:
    """Write ``{"pid", …addresses}`` as JSON to ``path``, whole or not at all; None: do nothing."""
    if path is None:
        return
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    draft.write_text(json.dumps({"pid": os.getpid(), **addresses}) + "\n", encoding="utf-8")
    draft.replace(path)

"""What every service's ``__main__`` does: signals first, one event loop, the announce file, and the
change into another role when the loop has ended.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cometmq import reexec
from cometmq.errors import CometError
from cometmq.flight_recorder import name_threads, recorder
from cometmq.reexec import STOP_SIGNALS, TRACE_SIGNAL, RoleChange
from cometmq.rpc.descriptors import raise_limit
from cometmq.rpc.memory import keep_freed
from cometmq.rpc.polling import poll_in_one_thread


def settle(trace_limit_ms: int) -> None:
    """The start is over: what it made stays, and the collector need not look at it again and again.
    The flight recorder compares with the limit from now on.
    """
    gc.freeze()
    recorder.limit_ms = trace_limit_ms
    name_threads()


class StopSignal:
    """SIGTERM or SIGINT as something to wait for. Made before anything slow: none is missed."""

    def __init__(self) -> None:
        self._came = False
        self._event = asyncio.Event()
        self._listen()
        reexec.take_signals()  # a predecessor may have held them

    @property
    def is_set(self) -> bool:
        return self._came

    def set(self) -> None:
        """As if a signal had come."""
        self._came = True
        self._event.set()

    def bind(self) -> None:
        """From now on the running loop is woken by the signals."""
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


def run(main: Callable[[StopSignal], Coroutine[Any, Any, RoleChange | None]]) -> int:
    """Run ``main`` in a uvloop until it returns. The exit status: 0, or 1 for a catalogue error.

    The error goes to standard error with its advice. When ``main`` returns a role change, and no
    signal to stop has come, the process is replaced.
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

        with asyncio.Runner(loop_factory=RecordedLoop) as runner:
            change = runner.run(_bound(main, stop))
    except (CometError, ExceptionGroup) as error:
        return _report(error)
    if change is not None:
        reexec.hold_signals()  # from here on they are the successor's
        if not stop.is_set:
            reexec.replace_process(sys.argv[1:], change)
    return 0


async def _bound(
    main: Callable[[StopSignal], Coroutine[Any, Any, RoleChange | None]], stop: StopSignal
) -> RoleChange | None:
    stop.bind()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(TRACE_SIGNAL, recorder.keep, TRACE_SIGNAL.name)
    try:
        return await main(stop)
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

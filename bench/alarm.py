"""Waking a coroutine at a time, to some tens of microseconds.

The timers of an event loop count whole milliseconds: a schedule of 2 ms kept with them is early or
late by up to one, by how its start lies between two ticks. That would stand in a latency as half a
millisecond more or less that nobody had to wait.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
import time
from types import TracebackType

# timerfd_create(2); Python has it from 3.13 on.
_LIBC = ctypes.CDLL(None, use_errno=True)
_TFD_TIMER_ABSTIME = 1
_ITIMERSPEC = struct.Struct("qqqq")  # interval and first time, each in seconds and nanoseconds


class Alarm:
    """One wait at a time, of one coroutine. Belongs to the running loop."""

    def __init__(self) -> None:
        self._fd = _checked(_LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK))
        self._loop = asyncio.get_running_loop()
        self._rung: asyncio.Future[None] | None = None
        self._loop.add_reader(self._fd, self._ring)

    async def until(self, when_ns: int) -> None:
        """Returns when CLOCK_MONOTONIC is past ``when_ns``; at once when it is already."""
        self._rung = self._loop.create_future()
        spec = _ITIMERSPEC.pack(0, 0, *divmod(when_ns, 1_000_000_000))
        _checked(_LIBC.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, spec, None))
        await self._rung

    def _ring(self) -> None:
        os.read(self._fd, 8)
        if self._rung is not None and not self._rung.done():
            self._rung.set_result(None)

    def __enter__(self) -> Alarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

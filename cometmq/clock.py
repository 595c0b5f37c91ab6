"""Time, as a thing that can be handed in. The only import of :mod:`time` in the library; waiting
is asyncio's.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Three clocks: the wall's for timestamps, monotonic for durations, boot time for leases."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may jump."""

    def monotonic_s(self) -> float:
        """Seconds from some start; never goes back, stops while the machine is suspended."""

    def boottime_s(self) -> float:
        """As :meth:`monotonic_s`, and counts while the machine is suspended."""


class DelayClock(Protocol):
    """The time from which delays count."""

    def wall_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC; may go back."""

    def promise(self, delay_ms: int) -> None:
        """A message is stored that waits for so long from :meth:`wall_ms` on."""


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()

    def boottime_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)


monotonic_ns = time.monotonic_ns
"""Nanoseconds of the clock of :meth:`Clock.monotonic_s`, for what is too short or too frequent to
have its clock handed in.
"""

process_cpu_s = time.process_time
"""Processor seconds that all threads of this process have used."""

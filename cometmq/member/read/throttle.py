"""Readers far behind go slower while producers send.

A consumer that works through a backlog takes all that a core gives, and every send then waits in
the same process: on two cores its 99th percentile rose from 8 to 60 ms and more. So while the log
grows, all catch-up reads together get a fixed rate, and in any case twice what comes in, else a
reader would never arrive. No reader is slowed while no producer sends, or when it is near the end.
RocketMQ's counterpart is the flow control of cold reads (100 MiB/s for a broker, off by default).

Pure; time is passed in.
"""

from __future__ import annotations

# A reader this far behind the end of the log is catching up.
BEHIND_BYTES_MIN = 64 * 1024 * 1024
SAMPLE_S = 0.5  # over which the rate of what comes in is measured
ADVANTAGE = 2.0  # over what comes in
# Less than this is hardly felt, and offsets that consumers commit are a little too.
INCOMING_BYTES_PER_S_MIN = 1024 * 1024


class CatchUpThrottle:
    """``bytes_per_s``: for all catch-up reads together; 0 = as fast as they can."""

    def __init__(self, bytes_per_s: int) -> None:
        assert bytes_per_s >= 0, bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0  # when the next read may be answered
        self._sample = (0.0, 0)  # time and end of the log
        self._incoming_bytes_per_s = 0.0

    def delay_s(self, read_at: int, size_bytes: int, log_end: int, now_s: float) -> float:
        """How long the answer to a read of ``size_bytes`` at log offset ``read_at`` has to wait."""
        if not self._bytes_per_s or log_end - read_at < BEHIND_BYTES_MIN:
            return 0.0
        self._measure(log_end, now_s)
        if self._incoming_bytes_per_s < INCOMING_BYTES_PER_S_MIN:
            return 0.0
        rate = max(self._bytes_per_s, ADVANTAGE * self._incoming_bytes_per_s)
        assert rate > 0, rate
        start_s = max(self._free_at_s, now_s)
        self._free_at_s = start_s + size_bytes / rate
        return start_s - now_s

    def _measure(self, log_end: int, now_s: float) -> None:
        then_s, end = self._sample
        assert log_end >= end, "a log that is read only grows"
        passed_s = now_s - then_s
        if passed_s >= SAMPLE_S:
            # After a pause the sample is old, and what came in since spreads over all of it.
            self._incoming_bytes_per_s = (log_end - end) / passed_s if then_s else 0.0
            self._sample = (now_s, log_end)

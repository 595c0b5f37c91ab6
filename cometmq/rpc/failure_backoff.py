"""Peers that failed are passed over for a while. Pure: time is passed in, the random source too.

Who fails again is passed over longer; who answers is as good as new.
"""

from __future__ import annotations

import random

from cometmq.rpc.retry import BackoffPolicy


class FailureBackoff:
    """Peers that failed, by whatever names them."""

    def __init__(self, policy: BackoffPolicy, source: random.Random) -> None:
        self._policy = policy
        self._source = source
        self._failed: dict[str, tuple[int, float]] = {}  # failures in a row, until when

    def failed(self, peer: str, now_s: float) -> None:
        """Pass it over from now on. Calls that fail together are one failure."""
        if self.is_aside(peer, now_s):
            return
        failures, _ = self._failed.get(peer, (0, 0.0))
        self._forget_long_ago(now_s)
        until_s = now_s + self._policy.delay_s(failures, self._source)
        self._failed[peer] = (failures + 1, until_s)

    def _forget_long_ago(self, now_s: float) -> None:
        since_s = now_s - self._policy.max_s
        self._failed = {p: entry for p, entry in self._failed.items() if entry[1] >= since_s}

    def answered(self, peer: str) -> None:
        """It lives."""
        if self._failed:
            self._failed.pop(peer, None)

    def is_aside(self, peer: str, now_s: float) -> bool:
        """Whether it is passed over."""
        return bool(self._failed) and now_s < self._failed.get(peer, (0, 0.0))[1]

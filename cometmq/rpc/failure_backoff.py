"""Peers that failed are passed over for a while. Pure: time is passed in, the random source too.

A member that fails again is passed over longer; one that answers is no longer passed over.
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
        since_s = now_s - self._policy.max_s  # what is older is forgotten
        self._failed = {p: entry for p, entry in self._failed.items() if entry[1] >= since_s}
        until_s = now_s + self._policy.delay_s(failures, self._source)
        self._failed[peer] = (failures + 1, until_s)

    def answered(self, peer: str) -> None:
        """The peer has answered: it is no longer passed over."""
        if self._failed:
            self._failed.pop(peer, None)

    def is_aside(self, peer: str, now_s: float) -> bool:
        """Whether it is passed over."""
        return bool(self._failed) and now_s < self._failed.get(peer, (0, 0.0))[1]

"""Back-off between attempts: exponential with full jitter.

Pure: the random source is handed in, waiting is the caller's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_DOUBLINGS_MAX = 62  # 2.0 ** 62 is exact, and far above any delay_max


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """Attempt n (from 0) waits at most ``first_s`` · 2ⁿ, never more than ``max_s``."""

    first_s: float = 0.1
    max_s: float = 5.0

    def __post_init__(self) -> None:
        assert 0 < self.first_s <= self.max_s

    def at_most(self, limit_s: float) -> BackoffPolicy:
        """The same, with no wait longer than ``limit_s``."""
        return BackoffPolicy(min(self.first_s, limit_s), min(self.max_s, limit_s))

    def ceiling_s(self, attempt: int) -> float:
        """The longest wait before the next try after ``attempt`` failures in a row (from 0)."""
        return min(self.max_s, self.first_s * 2.0 ** min(attempt, _DOUBLINGS_MAX))

    def delay_s(self, attempt: int, source: random.Random) -> float:
        """Anything from 0 to the ceiling: calls that failed together are not retried together."""
        return source.uniform(0.0, self.ceiling_s(attempt))


class Backoff:
    """Counts failures in a row for one peer."""

    __slots__ = ("_attempt", "_policy", "_source")

    def __init__(self, policy: BackoffPolicy, source: random.Random) -> None:
        self._policy = policy
        self._source = source
        self._attempt = 0

    def next_s(self) -> float:
        """How long to wait after one more failure."""
        delay_s = self._policy.delay_s(self._attempt, self._source)
        self._attempt += 1
        return delay_s

    def reset(self) -> None:
        """The peer answered."""
        self._attempt = 0

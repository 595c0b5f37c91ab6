"""Back-off: bounds, growth, jitter."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.rpc.retry import Backoff, BackoffPolicy

POLICY = BackoffPolicy(first_s=0.1, max_s=5.0)


def test_the_ceiling_doubles_up_to_the_maximum() -> None:
    ceilings = [POLICY.ceiling_s(attempt) for attempt in range(8)]
    assert ceilings == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


@given(st.integers(0, 10**6), st.randoms(use_true_random=False))
def test_a_delay_is_between_zero_and_the_ceiling(attempt: int, source: random.Random) -> None:
    assert 0 <= POLICY.delay_s(attempt, source) <= POLICY.ceiling_s(attempt) <= POLICY.max_s


def test_delays_are_spread_over_the_whole_range(rng: random.Random) -> None:
    delays = [POLICY.delay_s(6, rng) for _ in range(1_000)]
    assert min(delays) < 0.5
    assert max(delays) > 4.5


def test_a_success_starts_over() -> None:
    backoff = Backoff(POLICY, random.Random(1))
    for _ in range(10):
        backoff.next_s()
    backoff.reset()
    assert backoff.next_s() <= POLICY.first_s

"""Who failed is passed over for a while."""

from __future__ import annotations

import random

from cometmq.rpc.failure_backoff import FailureBackoff
from cometmq.rpc.retry import BackoffPolicy


class Longest(random.Random):
    """Delays are as long as they may be."""

    def uniform(self, a: float, b: float) -> float:
        return b


def set_aside() -> FailureBackoff:
    return FailureBackoff(BackoffPolicy(first_s=1.0, max_s=4.0), Longest())


def test_who_fails_again_is_passed_over_longer() -> None:
    peers = set_aside()
    assert not peers.is_aside("a", 0.0)
    now_s = 0.0
    for delay_s in (1.0, 2.0, 4.0, 4.0):
        peers.failed("a", now_s)
        assert peers.is_aside("a", now_s + delay_s - 0.1)
        now_s += delay_s
        assert not peers.is_aside("a", now_s)


def test_who_answers_is_as_good_as_new() -> None:
    peers = set_aside()
    peers.failed("a", 0.0)
    peers.failed("a", 1.0)
    peers.answered("a")
    assert not peers.is_aside("a", 1.0)
    peers.failed("a", 1.0)
    assert not peers.is_aside("a", 2.0)


def test_calls_that_fail_together_are_one_failure() -> None:
    peers = set_aside()
    for _ in range(10):
        peers.failed("a", 0.0)
    assert not peers.is_aside("a", 1.0)


def test_each_peer_stands_for_itself_and_old_failures_are_forgotten() -> None:
    peers = set_aside()
    peers.failed("a", 0.0)
    assert not peers.is_aside("b", 0.0)
    peers.failed("b", 5.1)
    assert list(peers._failed) == ["b"]

"""When messages come back: each is told, and what is kept for it is bounded."""

from __future__ import annotations

import itertools

from cometmq.member.storage.arrivals import Arrivals
from cometmq.messaging.pop.leases import Given
from cometmq.messaging.pop.table import PopTable
from services.broker.pop.returns import PopReturns

KEY = ("T", 0)


async def test_a_lease_that_is_made_shorter_again_and_again_is_told_once_in_time() -> None:
    now_ms, numbers = 0, itertools.count(1)
    arrivals, pops = Arrivals(), PopTable()
    returns = PopReturns(arrivals, pops, lambda: next(numbers), lambda: now_ms)
    queue = pops.open("G", KEY, 0)
    lease = pops.give("G", KEY, Given(1, 0, 0, 1, 50_000, 1))
    for number, ms in enumerate(range(49_999, 20_000, -1), 2):
        lease = pops.give("G", KEY, Given(number, lease.number, 0, 1, ms, 1))
        returns.expect("G", KEY, ms)
    assert len(returns._times) < 1_000
    now_ms = 20_000
    returns.tell_due()
    assert returns.number("G", KEY) == 0
    now_ms = lease.visible_ms
    returns.tell_due()
    assert returns.number("G", KEY) == 1
    assert queue.oldest_visible(now_ms) is lease

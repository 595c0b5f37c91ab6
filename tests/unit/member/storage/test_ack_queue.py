from __future__ import annotations

import asyncio

import pytest

from cometmq.errors import StoreFailed
from cometmq.member.storage.ack_queue import AckQueue


async def test_releases_exactly_what_the_position_covers() -> None:
    acks = AckQueue()
    first, second, third = acks.wait(10), acks.wait(20), acks.wait(20)
    acks.release(19)
    assert first.done()
    assert not second.done()
    acks.release(20)
    assert second.done()
    assert third.done()
    assert len(acks) == 0


async def test_a_cancelled_waiter_does_not_hold_up_the_others() -> None:
    acks = AckQueue()
    gone, kept = acks.wait(10), acks.wait(20)
    gone.cancel()
    acks.release(20)
    await asyncio.wait_for(kept, 1)


async def test_failing_reaches_every_waiter() -> None:
    acks = AckQueue()
    waiting = [acks.wait(10), acks.wait(20)]
    acks.fail(StoreFailed("fdatasync: input/output error"))
    for future in waiting:
        with pytest.raises(StoreFailed):
            await future


async def test_ends_may_not_go_back() -> None:
    acks = AckQueue()
    acks.wait(20)
    with pytest.raises(AssertionError):
        acks.wait(10)

"""Reading a queue of a broker that answers at once and never gets the reader on."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest

from cometmq.client.consuming.polled import PolledQueues
from cometmq.client.messages import PullBatch, PullOutcome
from cometmq.client.options import PullConsumerOptions
from cometmq.client.reading.fetcher import Fetcher
from cometmq.client.reading.memory import Memory
from cometmq.errors import InternalError
from cometmq.model import Position, QueueRef
from cometmq.turns import TURNS_MAX

QUEUE = QueueRef("T", 0, "g1")


def fetcher(monkeypatch: pytest.MonkeyPatch, outcome: PullOutcome, step: int) -> Fetcher:
    """Each answer moves it so far."""

    async def look(_fetcher: Fetcher, position: Position) -> PullBatch:
        return PullBatch(outcome, [], Position(1, position.offset + step), 0, 1 << 40, 0)

    async def begin(_queue: QueueRef) -> Position:
        return Position(1, 0)

    monkeypatch.setattr(Fetcher, "_look", look)
    calls: Any = MagicMock()
    wanted: Any = MagicMock()
    budget: Any = MagicMock()
    memory = Memory(1 << 20).share()
    return Fetcher(calls, QUEUE, wanted, PullConsumerOptions(), begin, budget, memory)


async def test_moves_without_an_end_are_a_fault_of_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = fetcher(monkeypatch, PullOutcome.OFFSET_MOVED, 0)
    for _ in range(TURNS_MAX):
        await reader.fetch()
    with pytest.raises(InternalError, match="goes on elsewhere"):
        await reader.fetch()


async def test_a_poll_ends_in_time_though_a_filter_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = fetcher(monkeypatch, PullOutcome.NO_MATCH, 1)
    polled = PolledQueues()
    polled.add(reader)
    async with asyncio.timeout(10):
        assert await polled.next(0.01) == []
    assert polled.polled[QUEUE].offset > 0
    await polled.remove([QUEUE])

from __future__ import annotations

from collections.abc import Mapping, Sequence
from unittest.mock import MagicMock

from cometmq.client import PullConsumerOptions
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.reading.positions import OwnPositions
from cometmq.model import Position, QueueRef

QUEUE = QueueRef("T", 0, "a")


class Store:
    def __init__(self) -> None:
        self.stored: list[Position] = []

    async def load(self, queues: Sequence[QueueRef]) -> Mapping[QueueRef, Position]:
        return {}

    async def store(self, positions: Mapping[QueueRef, Position]) -> None:
        self.stored.append(positions[QUEUE])


async def test_an_offset_goes_back_in_a_new_generation_of_its_queue_only() -> None:
    store = Store()
    positions = OwnPositions(store, MagicMock(spec=BrokerCalls), PullConsumerOptions())
    newest, older = Position(1, 20), Position(1, 10)
    assert await positions.commit({QUEUE: newest}) == {QUEUE: newest}
    assert await positions.commit({QUEUE: older}) == {QUEUE: newest}
    again = Position(2, 5)
    assert await positions.commit({QUEUE: again}) == {QUEUE: again}
    assert store.stored == [newest, again]

from __future__ import annotations

import asyncio

import pytest

from cometmq.client.options import ProducerOptions
from cometmq.client.producer import Producer
from cometmq.client.requests.late_producer import LateProducer
from cometmq.errors import ClientClosed


async def test_none_stays_open_whose_owner_closes_while_it_opens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening, go_on = asyncio.Event(), asyncio.Event()
    enter = Producer._enter
    made: list[Producer] = []

    async def slowly(self: Producer) -> None:
        made.append(self)
        opening.set()
        await go_on.wait()
        await enter(self)

    monkeypatch.setattr(Producer, "_enter", slowly)
    late = LateProducer("127.0.0.1:1", ProducerOptions())
    opened = asyncio.create_task(late.opened())
    await opening.wait()
    closing = asyncio.create_task(late.close())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.gather(opened, closing)
    [producer] = made
    assert not producer._open
    with pytest.raises(ClientClosed):
        await late.opened()


async def test_none_is_opened_after_its_owner() -> None:
    late = LateProducer("127.0.0.1:1", ProducerOptions())
    await late.close()
    with pytest.raises(ClientClosed):
        await late.opened()
    assert late.now is None

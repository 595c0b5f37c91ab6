"""The gate: closed, open, closed for good."""

from __future__ import annotations

import asyncio

import pytest

from cometmq.errors import BrokerDraining, BrokerStarting
from cometmq.rpc.gate import Gate


def test_it_starts_closed() -> None:
    gate = Gate()
    with pytest.raises(BrokerStarting):
        gate.check()


def test_it_opens() -> None:
    gate = Gate()
    gate.open()
    gate.check()
    assert gate.refusal is None


def test_a_draining_gate_never_opens_again() -> None:
    gate = Gate()
    gate.open()
    gate.drain()
    gate.open()
    with pytest.raises(BrokerDraining):
        gate.check()


async def test_a_stream_is_ended_when_the_process_drains() -> None:
    gate = Gate()
    ended = asyncio.Event()
    waiting = asyncio.create_task(gate.when_draining(ended.set))
    await asyncio.sleep(0)
    assert not ended.is_set()
    gate.drain()
    await waiting
    assert ended.is_set()

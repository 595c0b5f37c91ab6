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


async def test_who_waits_for_draining_is_woken() -> None:
    gate = Gate()
    waiting = asyncio.create_task(gate.wait_draining())
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.drain()
    await waiting

"""What comes again and again comes together."""

from __future__ import annotations

import asyncio

import pytest

from cometmq.rpc.ticks import tick, until_tick_s


@pytest.mark.parametrize(
    ("now_s", "every_s", "wait_s"), [(12.25, 1.0, 0.75), (12.0, 1.0, 1.0), (12.75, 0.5, 0.25)]
)
async def test_a_tick_is_a_multiple_of_the_interval(
    monkeypatch: pytest.MonkeyPatch, now_s: float, every_s: float, wait_s: float
) -> None:
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s, raising=False)
    assert until_tick_s(every_s) == wait_s


async def test_a_tick_is_waited_for() -> None:
    loop, every_s = asyncio.get_running_loop(), 0.01
    before = loop.time() // every_s
    await tick(every_s)
    assert round(loop.time() / every_s, 3) >= before + 1

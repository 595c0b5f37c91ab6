"""Wait for a condition, with a deadline: every test that waits does it with one of these."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

DEADLINE_S = 20.0
PROCESSES_S = 40.0  # for what processes do, on a busy machine


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Wait until ``condition()`` holds."""
    async with asyncio.timeout(deadline_s):
        while not condition():  # noqa: ASYNC110 - tests look at many kinds of things
            await asyncio.sleep(0.002)


async def until_async(
    condition: Callable[[], Awaitable[object]],
    deadline_s: float = DEADLINE_S,
    poll_s: float = 0.002,
) -> None:
    """Wait until ``await condition()`` holds."""
    async with asyncio.timeout(deadline_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(poll_s)


def wait_until(what: str, condition: Callable[[], object], deadline_s: float = PROCESSES_S) -> None:
    """Wait until ``condition()`` holds; fails with ``what``. For tests without a loop."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.02)

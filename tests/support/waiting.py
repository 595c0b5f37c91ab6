"""Wait for a condition, with a deadline: every test that waits does it with one of these."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator

# Many a mutant is noticed because something never comes.
PATIENCE = 0.5 if os.environ.get("TEST_PROFILE") == "mutants" else 1.0
DEADLINE_S = 20.0 * PATIENCE
PROCESSES_S = 40.0 * PATIENCE  # for what processes do, on a busy machine
PAUSE_S_MAX = 0.02


def _pauses_s(longest_s: float) -> Iterator[float]:
    """Between two looks: ever longer ones, because each look costs CPU."""
    pause_s = 0.002
    while True:
        yield pause_s
        pause_s = min(1.1 * pause_s, longest_s)


async def until(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Wait until ``condition()`` holds."""
    async with asyncio.timeout(deadline_s):
        for pause_s in _pauses_s(PAUSE_S_MAX):
            if condition():
                return
            await asyncio.sleep(pause_s)


async def until_async(
    condition: Callable[[], Awaitable[object]],
    deadline_s: float = DEADLINE_S,
    pause_s_max: float = PAUSE_S_MAX,
) -> None:
    """Wait until ``await condition()`` holds."""
    async with asyncio.timeout(deadline_s):
        for pause_s in _pauses_s(pause_s_max):
            if await condition():
                return
            await asyncio.sleep(pause_s)


def wait_until(what: str, condition: Callable[[], object], deadline_s: float = PROCESSES_S) -> None:
    """Wait until ``condition()`` holds; fails with ``what``. For tests without a loop."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, f"{what}: not within {deadline_s:g} s"
        time.sleep(0.02)

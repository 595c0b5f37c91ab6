"""Periodic work runs at whole multiples of its interval: an idle process does all of it in one
turn of its loop, and the processor sleeps in between.
"""

from __future__ import annotations

import asyncio

TIMER_STEP_S = 0.001  # of the loop's timers: only this much later has a time surely passed


def until_tick_s(every_s: float) -> float:
    """Seconds of the running loop's clock until its next multiple of ``every_s``; above 0."""
    now_s = asyncio.get_running_loop().time()
    return every_s - now_s % every_s


async def tick(every_s: float) -> None:
    """Waits until the loop's clock reaches the next multiple of ``every_s``."""
    await asyncio.sleep(until_tick_s(every_s))

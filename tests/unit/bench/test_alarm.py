from __future__ import annotations

import asyncio
import time

from bench.alarm import Alarm


async def test_an_alarm_never_rings_early() -> None:
    with Alarm() as alarm:
        for wait_ns in (300_000, 1_700_000, 100):
            when_ns = time.monotonic_ns() + wait_ns
            async with asyncio.timeout(5):
                await alarm.until(when_ns)
            assert time.monotonic_ns() >= when_ns


async def test_what_is_past_rings_at_once() -> None:
    with Alarm() as alarm:
        async with asyncio.timeout(5):
            await alarm.until(1)


async def test_a_wait_that_was_given_up_does_not_end_the_next_one() -> None:
    with Alarm() as alarm:
        waiting = asyncio.create_task(alarm.until(time.monotonic_ns() + 1_000_000))
        await asyncio.sleep(0)
        waiting.cancel()
        when_ns = time.monotonic_ns() + 5_000_000
        async with asyncio.timeout(5):
            await alarm.until(when_ns)
        assert time.monotonic_ns() >= when_ns

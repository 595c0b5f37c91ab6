"""What the safety check of a link takes for a lost arrival."""

from __future__ import annotations

import asyncio
from unittest.mock import MagicMock

import pytest

from services.pullhold import broker_link
from services.pullhold.broker_link import STALL_S, SUSPICION_S, Link


async def test_arrivals_have_their_time_also_on_a_loop_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two sleeps end late, as on a machine without CPU: only the third one counts."""
    late_s = iter((1.5, STALL_S, 0.0))
    clock, slept = MagicMock(), []
    clock.monotonic_s.return_value = 0.0

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.monotonic_s.return_value += seconds + next(late_s)

    holds, answers, directory, policy, metrics, log = (MagicMock() for _ in range(6))
    link = Link("g", holds, answers, directory, policy, clock, metrics, log)
    monkeypatch.setattr(broker_link, "asyncio", MagicMock(wraps=asyncio, sleep=sleep))
    await link._give_arrivals_time()
    assert slept == [SUSPICION_S] * 3

"""What a steady producer counts, and when it tells it."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from bench.steady import Outcomes, Receipt
from cometmq.client import SendStatus
from cometmq.errors import SendTimeout


async def receipt(outcome: SendStatus | Exception) -> Receipt:
    future: Receipt = asyncio.get_running_loop().create_future()
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(SimpleNamespace(status=outcome))  # type: ignore[arg-type]
    return future


async def test_only_what_is_certain_is_acknowledged() -> None:
    outcomes = Outcomes()
    assert outcomes.note(await receipt(SendStatus.SEND_OK))
    assert not outcomes.note(await receipt(SendStatus.FLUSH_SLAVE_TIMEOUT))
    assert not outcomes.note(await receipt(SendTimeout("late")))
    assert outcomes.summary(0) == {"stored": 1, "unsure": 1, "failed": 1}


async def test_latencies_count_from_when_messages_were_due() -> None:
    outcomes = Outcomes()
    for _ in range(4):
        outcomes.noting(time.monotonic_ns() - 50_000_000)(await receipt(SendStatus.SEND_OK))
    outcomes.noting(0)(await receipt(SendTimeout("late")))
    line = outcomes.summary(warm_up=1)
    assert line["count"] == 3
    assert float(line["p50_ms"]) >= 50


async def test_a_line_has_the_times_of_what_is_new(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = Outcomes()
    outcomes.tell()
    for _ in range(2):
        outcomes.note(await receipt(SendStatus.SEND_OK))
    outcomes.tell()
    outcomes.tell()
    outcomes.note(await receipt(SendStatus.SEND_OK))
    outcomes.tell()
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (first["acked"], second["acked"]) == (2, 3)
    assert first["first_s"] <= first["last_s"] <= second["first_s"] == second["last_s"]

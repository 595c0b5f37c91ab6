"""Background work that fails begins again, or ends its process by name."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from cometmq.rpc.background import Restarts, failures_of
from tests.support.stores.small_stores import WallClock


async def test_work_begins_again_with_a_growing_pause_and_names_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, registry, pauses_s = WallClock(), CollectorRegistry(), list[float]()
    runs_s = iter([0, 0, 0, 0, 0, 0, 0, 61, 0])

    async def sleep(seconds: float) -> None:
        pauses_s.append(seconds)

    async def work() -> None:
        try:
            clock.now_ms += 1_000 * next(runs_s)
        except StopIteration:
            return
        raise AssertionError("a fault")

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await Restarts(failures_of(registry), clock, broker_group="g1").keep("retention", work)
    assert pauses_s == [1, 2, 4, 8, 16, 32, 60, 1, 2]
    assert (
        registry.get_sample_value("cometmq_background_failures_total", {"task": "retention"}) == 9
    )
    told = vars(caplog.records[0])
    assert told["fields"] == {"task": "retention", "broker_group": "g1", "again_s": 1}
    assert "a fault" in caplog.text


async def test_work_that_ends_the_process_names_itself(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise AssertionError("a fault")

    with pytest.raises(AssertionError):
        await Restarts(broker_group="g1").name("registration", work())
    [told] = caplog.records
    assert vars(told)["fields"] == {"task": "registration", "broker_group": "g1"}
    assert "a fault" in caplog.text

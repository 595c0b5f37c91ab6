"""Background work that fails begins again, unless the role ends with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter

from cometmq.errors import StoreFailed
from cometmq.member import background
from cometmq.member.background import Restarts, ends_the_role
from cometmq.member.lease.lease_holder import Deposed
from cometmq.member.state.retention import Retention
from tests.support.cluster.broker import running_broker
from tests.support.stores.small_stores import WallClock
from tests.support.waiting import until


def restarts(registry: CollectorRegistry, clock: WallClock) -> Restarts:
    return Restarts("g1", Counter("failures", "-", ["task"], registry=registry), clock)


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
    await restarts(registry, clock).keep("retention", work)
    assert pauses_s == [1, 2, 4, 8, 16, 32, 60, 1, 2]
    assert registry.get_sample_value("failures_total", {"task": "retention"}) == 9
    told = vars(caplog.records[0])
    assert told["fields"] == {"task": "retention", "broker_group": "g1", "again_s": 1}
    assert "a fault" in caplog.text


@pytest.mark.parametrize("error", [StoreFailed("disk"), Deposed("other")])
async def test_what_ends_the_role_ends_the_work(error: Exception) -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())

    async def fails() -> None:
        raise error

    with pytest.raises(ExceptionGroup) as caught:
        await restarts(CollectorRegistry(), WallClock()).keep("levels", work)
    assert ends_the_role(caught.value)


async def test_a_failure_in_background_work_stops_no_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a broker: it goes on to store messages, and the work begins again."""
    run, failed = Retention.run, list[int]()

    async def fails_first(retention: Retention) -> None:
        if not failed:
            failed.append(1)
            raise AssertionError("a fault of retention")
        failed.append(2)
        await run(retention)

    monkeypatch.setattr(background, "AGAIN_S_MIN", 0.001)
    monkeypatch.setattr(Retention, "run", fails_first)
    async with running_broker(tmp_path) as broker:
        await until(lambda: failed == [1, 2])
        await broker.put_topic("T", 1)
        await broker.send("T", 0, b"x")
        assert await broker.bodies("T", 0) == [b"x"]
    assert "background work failed and begins again" in caplog.text
    assert "a fault of retention" in caplog.text

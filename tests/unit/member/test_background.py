"""Background work that fails begins again, unless the role ends with it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cometmq.errors import StoreFailed
from cometmq.member.background import ends_the_role
from cometmq.member.lease.lease_holder import Deposed
from cometmq.member.state.retention import Retention
from cometmq.rpc import background
from cometmq.rpc.background import Restarts
from tests.support.cluster.broker import running_broker
from tests.support.waiting import until


@pytest.mark.parametrize("error", [StoreFailed("disk"), Deposed("other")])
async def test_what_ends_the_role_ends_the_work(error: Exception) -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())

    async def fails() -> None:
        raise error

    with pytest.raises(ExceptionGroup) as caught:
        await Restarts(ends=ends_the_role).keep("levels", work)
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

"""The task that writes the state of a writer now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import DiskFull
from cometmq.member.state.keeper import StateKeeper
from services.broker import statewriter
from tests.support.cluster.broker import running_broker
from tests.support.waiting import until

BODY = bytes(3_000)


async def test_a_full_disk_that_takes_no_progress_leaves_the_loop_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Much has been appended since progress was written; the writer tries, and waits."""
    tries = 0

    def refuse(_: StateKeeper) -> None:
        nonlocal tries
        tries += 1
        raise DiskFull("no room")

    monkeypatch.setattr(statewriter, "PROGRESS_BYTES_MAX", 1_000)
    monkeypatch.setattr(StateKeeper, "_write_progress", refuse)
    async with running_broker(tmp_path) as broker:
        await broker.put_topic("T", 1)
        await broker.send("T", 0, BODY)
        await until(lambda: tries > 0)
        assert await broker.bodies("T", 0) == [BODY]
        monkeypatch.undo()

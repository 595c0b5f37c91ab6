"""A signal to stop comes while a member recovers its store."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from cometmq.member.app import MemberApp
from cometmq.member.listen import new_ports
from cometmq.member.recovery import RecoveryProgress
from cometmq.rpc.process import StopSignal
from services.broker import app as broker_app
from services.haslave import app as haslave_app
from tests.support.cluster.broker import config_for
from tests.support.cluster.members import living_member, opened

MESSAGES = 20


class Told(StopSignal):
    """It is set by hand: the handlers of the process that tests are left alone."""

    def _listen(self) -> None:
        """Nothing."""


def clean_mark(directory: Path) -> Any:
    """None: it is still to be recovered."""
    return json.loads((directory / "store/cometmq.json").read_text())["clean"]


@pytest.mark.parametrize("app_class", [broker_app.App, haslave_app.App])
async def test_it_ends_at_once_and_the_next_start_recovers(
    tmp_path: Path, app_class: type[MemberApp]
) -> None:
    async with living_member(tmp_path, clean=False) as member:
        await member.put("A")
        for number in range(MESSAGES):
            member.append("A", 0, b"%d" % number)
    stop = Told()

    class Stopped(RecoveryProgress):
        def __call__(self, done_bytes: int, total_bytes: int) -> None:
            stop.set()
            super().__call__(done_bytes, total_bytes)

    lease = {} if app_class is broker_app.App else {"lease": (tmp_path / "lease").as_uri()}
    config = config_for(tmp_path, **lease)
    ports = new_ports(config)
    await ports.start()
    try:
        with mock.patch("cometmq.member.app.RecoveryProgress", Stopped):
            async with app_class(config, ports, stop=stop) as app:
                async with asyncio.timeout(10):
                    await app.until(stop)
            assert app.change is None, "the process ends, in no other role"
    finally:
        await ports.stop(0)
    assert clean_mark(tmp_path) is None
    found = opened(tmp_path)
    assert not found.store.clean_start
    assert found.store.queue_bounds("A", 0) == (0, MESSAGES)
    found.store.close()
    assert clean_mark(tmp_path) is not None

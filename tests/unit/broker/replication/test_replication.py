from __future__ import annotations

import logging
from unittest import mock

import pytest

from cometmq.errors import StaleEpoch
from cometmq.member.lease.lease_holder import Deposed
from cometmq.model import EPOCH_LEAP_MAX
from cometmq.telemetry import ThrottledLog
from services.broker.replication.replication import Replication
from tests.support.stores.small_stores import WallClock


class Told:
    """A writer to which a name server has told an epoch."""

    def __init__(self, *, passes: bool = True, only_writer: bool = True) -> None:
        self.ended: list[str] = []
        self.copies = Replication.__new__(Replication)
        self.copies._ended = self.ended.append
        self.copies._storage = mock.Mock()
        self.copies._storage.authority.may_acknowledge.return_value = only_writer
        self.copies._storage.store.epoch = 5
        self.copies._holder = mock.Mock(pass_over=mock.AsyncMock(return_value=passes))

    async def epoch(self, epoch: int | None) -> list[str]:
        """For what it is the writer no longer."""
        await self.copies.overtaken(StaleEpoch("the group is further", epoch=epoch))
        return self.ended


async def test_whose_lease_it_is_begins_again_above() -> None:
    assert await Told().epoch(13) == ["epoch"]
    assert await Told(only_writer=False).epoch(5 + EPOCH_LEAP_MAX) == ["epoch"]


async def test_who_cannot_reach_the_lease_goes_on_only_while_nobody_else_may_write() -> None:
    assert await Told(passes=False).epoch(13) == []
    with pytest.raises(Deposed):
        await Told(passes=False, only_writer=False).epoch(13)


async def test_what_is_no_epoch_is_not_followed() -> None:
    assert await Told().epoch(6 + EPOCH_LEAP_MAX) == []


async def test_who_stands_alone_goes_on_and_says_so_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()
    told.copies._holder = None
    told.copies._unregistered = ThrottledLog(logging.getLogger("x"), logging.ERROR, WallClock())
    for _ in range(3):
        assert await told.epoch(13) == []
    (line,) = caplog.records
    assert "internal_secret_file" in f"{vars(line)}"


async def test_a_name_server_that_tells_no_epoch_deposes_as_it_did() -> None:
    with pytest.raises(Deposed):
        await Told().epoch(None)

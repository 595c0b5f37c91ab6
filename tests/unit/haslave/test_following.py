from __future__ import annotations

from unittest import mock

import pytest

from cometmq.errors import CometError, PeerUnavailable, ReplicationBroken
from services.haslave.following import Follower, Following
from tests.support.stores import WallClock


def told(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message == "stream ended" for record in caplog.records)


def test_while_nobody_writes_one_line_tells_of_it(caplog: pytest.LogCaptureFixture) -> None:
    following = Following(mock.Mock(), Follower("c", "g1", 1, 4096), lambda ms: ms, WallClock())
    following.follow("host:1")
    gone, broken = PeerUnavailable("refused"), ReplicationBroken("a chunk of another epoch")
    ends: list[tuple[CometError, int]] = [(gone, 1), (gone, 1), (broken, 2), (broken, 2), (gone, 3)]
    with caplog.at_level("INFO", logger="services.haslave.following"):
        for error, lines in ends:
            following._tell_end(error)
            assert told(caplog) == lines
        following.follow("host:2")
        following._tell_end(gone)
    assert told(caplog) == 4

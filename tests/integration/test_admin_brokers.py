"""``cometmq broker`` over a live group."""

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.admin import brokers
from cometmq.admin.connection import Connection
from cometmq.errors import GroupNotFound, NoFollower
from tests.support.broker import SYNC, running_namesrv, until_async
from tests.support.live_group import live_group


async def test_status_hand_over_checksum(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,)) as group,
        Connection(namesrv) as connection,
    ):
        await group[0].client.put_topic("T", 1, SYNC)
        await group[0].client.send("T", 0, b"x" * 1000)

        async def in_step() -> bool:
            views = await brokers.describe(connection)
            return [view.behind_bytes for view in views] == [0, 0]

        await until_async(in_step)
        views = await brokers.describe(connection)
        assert [(v.member_id, v.role, v.epoch) for v in views] == [
            (0, "writer", 1),
            (1, "follower", 1),
        ]
        with pytest.raises(NoFollower, match="member 9"):
            await brokers.step_down(connection, "g1", 9)
        with pytest.raises(GroupNotFound):
            await brokers.step_down(connection, "g2")
        end = views[0].log_appended_offset
        done = await brokers.step_down(connection, "g1", 1)
        assert (done.from_member, done.to_member, done.epoch) == (0, 1, 2)
        assert done.log_end_offset >= (end or 0) > 1000
        await group[0].until_role("follower")

        async def both_there() -> bool:
            return len(await brokers.describe(connection)) == 2

        await until_async(both_there)
        sums = await brokers.compare_logs(connection, ("g1",))
        assert [(view.member_id, view.role) for view in sums] == [(0, "follower"), (1, "writer")]
        assert all(view.equal and view.to_offset > done.log_end_offset - 1 for view in sums)
        with pytest.raises(GroupNotFound, match="g7"):
            await brokers.compare_logs(connection, ("g7",))

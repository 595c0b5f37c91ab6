"""Members of two releases in one broker group: whatever does not fit waits, says why, and ends
nothing.
"""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cometmq.errors import VersionUnsupported
from cometmq.replication.versions import Release
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import error_from
from cometmq.rpc.server import READY
from cometmq.v1 import member_pb2
from services.broker.replication import servicer
from tests.support.cluster.broker import SYNC
from tests.support.cluster.live_group import LiveGroup, LiveMember, live_group
from tests.support.cluster.next_release import KIND, followers_of_before, next_release
from tests.support.cluster.pullhold import sample
from tests.support.waiting import until_async

LATER = Release(8, 9, 1, frozenset(), frozenset())


async def cannot_follow(member: LiveMember) -> str:
    status = await member.members.DescribeReplica(member_pb2.DescribeReplicaRequest())
    return str(status.cannot_follow)


async def is_serving(member: LiveMember, service: str) -> bool:
    async with open_channel(member.internal_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def refused(member: LiveMember, reason: str) -> int:
    name = "cometmq_replication_refused_total"
    return int(await sample(member.metrics_address, name, f'reason="{reason}"'))


async def takes_new_state(group: LiveGroup) -> bool:
    try:
        await group[0].client.put_topic("noted", 1, SYNC)
    except grpc.aio.AioRpcError as refusal:
        if isinstance(error_from(refusal), VersionUnsupported):
            return False
        raise
    return True


async def is_out_of_step(group: LiveGroup, says: str) -> bool:
    return says in await cannot_follow(group[1]) and not await is_serving(group[1], READY)


async def test_a_follower_without_a_common_version_waits_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    says = "the follower speaks replication protocols 3 to 4, the writer protocols 8 to 9"
    async with live_group(tmp_path) as group:
        await group[0].client.put_topic("T", 1, SYNC)
        await group.all_in_sync(0, 1)
        await group[1].stop()
        await group[0].stop()
        with mock.patch.object(servicer, "own_release", return_value=LATER):
            await group[0].start("writer")
            await group[1].start("follower")
            await until_async(lambda: is_out_of_step(group, says))
            count = await refused(group[0], "version")
            await until_async(lambda: has_tried_again(group, count))
            assert group[1].changes == []
            lines = [line for line in caplog.records if line.message.startswith("cannot follow")]
            assert len(lines) == 1, "the same reason is logged once"
            assert await cannot_follow(group[1]) == (
                "VERSION_UNSUPPORTED the writer refuses this follower, which speaks replication "
                f"protocols 3 to 4, and says: {says}"
            )
            await group[0].client.send("T", 0, b"x")
            await group[0].stop()
        await group[0].start("writer")
        await group.all_in_sync(0, 1)
        await group.in_step()
        await until_async(lambda: is_serving(group[1], READY))
        assert await cannot_follow(group[1]) == ""


async def has_tried_again(group: LiveGroup, count: int) -> bool:
    return await refused(group[0], "version") > count


async def test_a_log_file_size_that_differs_is_no_reason_to_end(tmp_path: Path) -> None:
    async with live_group(tmp_path, members=1) as group:
        await group[0].client.put_topic("T", 1, SYNC)
        right = group[1].config.mapped_file_size_commit_log
        group[1].reconfigure(mapped_file_size_commit_log=2 * right)
        await group[1].start("follower")
        await until_async(lambda: is_out_of_step(group, "mapped_file_size_commit_log"))
        assert group[1].changes == []


async def test_new_state_waits_for_all_members_and_then_shuts_out_who_cannot_read_it(
    tmp_path: Path,
) -> None:
    with next_release():
        async with live_group(tmp_path, members=1) as group:
            with followers_of_before():
                await group[1].start("follower")
            await group.all_in_sync(0, 1)
            with pytest.raises(grpc.aio.AioRpcError, match=f"member 1 .* read .*{KIND}") as refusal:
                await group[0].client.put_topic("noted", 1, SYNC)
            assert isinstance(error_from(refusal.value), VersionUnsupported)
            await group[0].client.put_topic("T", 1, SYNC)
            await group.in_step()

            await group[1].stop()
            await group[1].start("follower")
            await until_async(lambda: takes_new_state(group))
            await group.in_step()

            await group[1].stop()  # rolled back, with a store of before
            with followers_of_before():
                await group[1].start("follower")
            says = "STATE_TOO_NEW the state of this broker group has changes of kinds that the"
            await until_async(lambda: is_out_of_step(group, says))
            assert KIND in await cannot_follow(group[1])
            assert await refused(group[0], "state") > 0
            assert await refused(group[1], "state") == 0
            assert group[1].changes == []
            await group[0].client.send("noted", 0, b"x")

            await group[1].stop()
            await group[1].start("follower")
            await group.all_in_sync(0, 1)
            await group.in_step()


async def test_a_member_that_cannot_read_its_state_waits_and_takes_no_role(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_group(tmp_path, members=1) as group:
        with next_release():
            await group[0].client.put_topic("noted", 1, SYNC)
            await group[0].client.send("noted", 0, b"x")
            await group[0].stop()
        lease = group.lease.read_text()
        await group[0].start("follower")
        assert (await is_serving(group[0], ""), await is_serving(group[0], READY)) == (True, False)
        [line] = [one for one in caplog.records if one.message.startswith("waits for a release")]
        assert line.levelname == "ERROR"
        assert repr(KIND) in str(line.__dict__)
        assert group.lease.read_text() == lease
        await group[0].stop()
        with next_release():
            await group[0].start("writer")
            assert await group[0].client.bodies("noted", 0) == [b"x"]

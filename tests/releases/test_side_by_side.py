"""This release and the one before in one broker group, as processes: each copies from the other,
takes over from it, and goes on with what clients had begun.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from cometmq.client import Message, Producer, ProducerOptions
from cometmq.errors import VersionUnsupported
from cometmq.v1 import broker_pb2 as pb
from scripts.releases import THIS, Program
from tests.releases import next_release
from tests.releases.mixed_group import MixedGroup, Pending, mixed_group
from tests.support.cluster.broker import SYNC, BrokerClient, refusal
from tests.support.waiting import PROCESSES_S, until_async

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]


@pytest.mark.parametrize("begins", ["before", "this"])
async def test_fail_over_and_hand_over_between_two_releases(
    tmp_path: Path, release_before: Program, begins: str
) -> None:
    """The writer of one release dies, the follower of the other takes over; then the other way,
    by a hand-over.
    """
    first, second = (release_before, THIS) if begins == "before" else (THIS, release_before)
    async with mixed_group(tmp_path, name_server=first) as group:
        await group.start(0, first)
        await group.until_writer(0)
        await group.start(1, second)
        await group.in_sync(0, 1)
        one, two = Pending(1), Pending(2)
        await one.begin(group[0])
        if first is THIS:  # it has state that the other does not read
            assert isinstance(await refusal(put_quota(group[0], "T1")), VersionUnsupported)
        await group.kill(0)
        await one.end(await group.until_writer(1))
        await group.start(0, first)
        await group.in_sync(0, 1)
        await two.begin(group[1])
        await group.same_logs()
        await group.step_down(1)
        await two.end(await group.until_writer(0))
        await group.in_sync(0, 1)
        await group.same_logs()
        assert group.errors() == []


async def test_an_upgrade_one_member_at_a_time_and_back(
    tmp_path: Path, release_before: Program
) -> None:
    """As ``helm upgrade`` and ``helm rollback`` do it, while a producer sends."""
    async with mixed_group(tmp_path, name_server=release_before) as group:
        await group.start(0, release_before)
        await group.until_writer(0)
        await group.start(1, release_before)
        await group.in_sync(0, 1)
        work = Pending(1)
        await work.begin(group[0])
        await group[0].put_topic("S", 1)
        sending = asyncio.create_task(sent_meanwhile(group))
        for program in (THIS, release_before):
            for member_id in (1, 0):
                await replace(group, member_id, program)
        sending.cancel()
        sent = await sending
        writer = await group.until_writer(1)
        await work.end(writer)
        assert set(sent) <= set(await writer.bodies("S", 0))
        assert len(sent) > 10
        await group.same_logs()
        assert group.errors() == []


async def test_the_release_after_writes_new_state_when_all_members_read_it(tmp_path: Path) -> None:
    """And a member that is rolled back then names what it cannot read, and waits."""
    following = next_release.make(tmp_path / "next")
    async with mixed_group(tmp_path, name_server=THIS) as group:
        await group.start(0, THIS)
        await group.until_writer(0)
        await group.start(1, following)
        await group.in_sync(0, 1)
        work = Pending(1)
        await work.begin(group[0])
        await group.step_down(0)
        writer = await group.until_writer(1)
        await work.end(writer)
        await group.in_sync(0, 1)
        error = await refusal(writer.put_topic("noted", 1))
        assert isinstance(error, VersionUnsupported)
        assert "member 0 runs a release that does not read changes of kind note" in error.message
        await group.same_logs()

        await replace(group, 0, following)
        await writer.put_topic("noted", 1, SYNC)
        await writer.send("noted", 0, b"x")
        await group.same_logs()
        assert group.errors() == []

        await group.end(0)
        await group.start_in_vain(0, THIS, "waits for a release that reads this store")
        assert next_release.KIND in "".join(group.errors())
        await group.end(0)
        await group.start(0, following)
        await group.in_sync(0, 1)
        await group.kill(1)
        assert await (await group.until_writer(0)).bodies("noted", 0) == [b"x"]


async def test_members_without_a_common_protocol_go_in_one_go(
    tmp_path: Path, release_of_protocol_2: Program
) -> None:
    """A follower waits at such a writer and says so; when all members are of one release, nothing
    is missing.
    """
    async with mixed_group(tmp_path, name_server=release_of_protocol_2) as group:
        await group.start(0, release_of_protocol_2)
        await until_async(lambda: is_sent(group[0]), PROCESSES_S, pause_s_max=0.2)
        await group.start(1, THIS)
        says = "this follower, which speaks replication protocols 3 to 4, and says: "
        await until_async(lambda: cannot_follow(group, 1, says), PROCESSES_S)
        [line] = group.errors()
        assert "cannot follow this writer: the releases do not fit; tries again" in line
        await group.end(0)
        await group.end(1)
    async with mixed_group(tmp_path, name_server=THIS) as group:
        await group.start(0, THIS)
        writer = await group.until_writer(0)
        await group.start(1, THIS)
        await group.in_sync(0, 1)
        assert (await writer.bodies("T", 0))[-1] == b"sent"
        await put_quota(writer, "T")
        await group.same_logs()


async def put_quota(writer: BrokerClient, topic: str) -> None:
    """A kind of state that the release before does not know."""
    quota = pb.Quota(messages_per_s=1_000)
    request = pb.PutQuotaRequest(scope=pb.QUOTA_SCOPE_TOPIC, name=topic, send=quota)
    await writer.admin.PutQuota(request)


async def is_sent(writer: BrokerClient) -> bool:
    with suppress(grpc.aio.AioRpcError):
        await writer.put_topic("T", 1, SYNC)
        await writer.send("T", 0, b"sent")
        return True
    return False


async def cannot_follow(group: MixedGroup, member_id: int, says: str) -> bool:
    return says in (await group.describe(member_id)).cannot_follow


async def replace(group: MixedGroup, member_id: int, program: Program) -> None:
    """A pod ends, and the next one is ready when the member is in sync."""
    await group.end(member_id)
    await group.start(member_id, program)
    await group.in_sync(0, 1)


async def sent_meanwhile(group: MixedGroup) -> list[bytes]:
    """One message after the other until cancelled; those that were acknowledged."""
    sent: list[bytes] = []
    options = ProducerOptions(delivery_timeout_ms=60_000)
    async with Producer(group.namesrv, options=options) as producer:
        try:
            while True:
                body = b"%d" % len(sent)
                await producer.send_and_wait(Message("S", body))
                sent.append(body)
        except asyncio.CancelledError:
            return sent

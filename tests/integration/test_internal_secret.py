"""The internal ports of a cluster that has a secret: its own processes and operators come in."""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from cometmq.admin import brokers, offsets, ops
from cometmq.admin.connection import Connection
from cometmq.clock import SystemClock
from cometmq.errors import ConfigInvalid, PeerUnavailable, PeerUnproven, Unauthenticated
from cometmq.member.lease.peers import Peers
from cometmq.member.listen import new_ports
from cometmq.model import FlushMode
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import error_from
from cometmq.rpc.secret import SharedSecret
from cometmq.v1 import (
    auth_pb2,
    auth_pb2_grpc,
    common_pb2,
    member_pb2,
    member_pb2_grpc,
    namesrv_pb2,
    namesrv_pb2_grpc,
)
from tests.support.cluster.broker import config_for, refusal, running_namesrv
from tests.support.cluster.live_group import LiveMember, live_group
from tests.support.cluster.pullhold import running_pullhold, sample
from tests.support.faults.eavesdropping import CHALLENGE, eavesdropping, fake_member
from tests.support.waiting import until, until_async

SECRET, OTHER = "correct-horse-battery", "wrong-horse-battery-x"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


def known(file: Path, content: str = "") -> SharedSecret:
    if content:
        file = file.with_name(content)
        file.write_text(content)
    return SharedSecret(file, SystemClock())


async def refused_count(member: LiveMember, reason: str) -> int:
    name = "cometmq_internal_calls_refused_total"
    return int(await sample(member.metrics_address, name, f'reason="{reason}"'))


async def test_who_has_the_secret_operates_the_cluster(tmp_path: Path, file: Path) -> None:
    async with (
        running_namesrv(tmp_path, internal_secret_file=file) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,), internal_secret_file=file) as group,
        Connection(namesrv, known(file)) as connection,
    ):
        await ops.create_topic(connection, "T", read_queue_count=1, flush_mode=FlushMode.SYNC)
        await group[0].client.send("T", 0, b"copied all the same")
        await group.in_step()
        assert {view.equal for view in await brokers.compare_logs(connection)} == {True}
        snapshot = await offsets.export(connection, tmp_path / "snapshots", SystemClock())
        assert snapshot.completeness == 1
        assert await refused_count(group[0], "missing") == 0
        assert await refused_count(group[0], "wrong") == 0


async def test_who_has_it_not_is_told_what_to_do(tmp_path: Path, file: Path) -> None:
    async with (
        running_namesrv(tmp_path, internal_secret_file=file) as namesrv,
        live_group(tmp_path, namesrv=(namesrv,), internal_secret_file=file) as group,
        Connection(namesrv) as stranger,
        Connection(namesrv, known(file, OTHER)) as impostor,
    ):
        for connection, kind in ((stranger, Unauthenticated), (impostor, PeerUnproven)):
            with pytest.raises(kind) as refused:
                await ops.create_topic(connection, "T")
            assert "internal_secret_file" in refused.value.advice
            assert SECRET not in str(refused.value)
            assert OTHER not in str(refused.value)
        for member in (group[0], group[1]):
            request = member_pb2.ChecksumLogRequest()
            assert isinstance(await refusal(member.members.ChecksumLog(request)), Unauthenticated)
            call = member.members.Replicate()
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            assert ended.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert isinstance(error_from(ended.value), Unauthenticated)
            assert await refused_count(member, "missing") >= 2
        channel = group[0]._channel
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="ready"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, "health stays open"


async def test_a_follower_without_it_copies_nothing(tmp_path: Path, file: Path) -> None:
    async with live_group(tmp_path, members=1, internal_secret_file=file) as group:
        group[1].config = config_for(
            tmp_path / "1",
            member_id=1,
            lease=group.lease.as_uri(),
            lease_poll_s=0.05,
            internal_secret_file=None,
        )
        await group[1].start("follower")
        await until_async(lambda: _is_positive(group[0], "missing"))
        assert group[1].store is not None
        assert group[1].store.appended_offset == 0


async def _is_positive(member: LiveMember, reason: str) -> bool:
    return await refused_count(member, reason) > 0


async def test_a_pullhold_brings_it(tmp_path: Path, file: Path) -> None:
    async with (
        running_namesrv(tmp_path, internal_secret_file=file) as namesrv,
        live_group(tmp_path, members=1, namesrv=(namesrv,), internal_secret_file=file) as group,
        Connection(namesrv, known(file)) as connection,
        running_pullhold(namesrv, internal_secret_file=file) as pullhold,
        running_pullhold(namesrv, unreachable_grace_s=0.05) as another,
    ):
        await ops.create_topic(connection, "T", read_queue_count=1, flush_mode=FlushMode.SYNC)
        lane = pullhold.lane()
        await lane.hold(1, "T", 0, 0)
        await until(lambda: pullhold.waiting == 1 and pullhold.all_known)
        await group[0].client.send("T", 0, b"x")
        assert not (await lane.answer()).HasField("error")

        refused = another.lane()
        await refused.hold(1, "T", 0, 5)
        answer = await refused.answer()
        assert answer.error.code == PeerUnavailable.code, "consumers have no secret to mend"


@pytest.mark.parametrize("answers", [False, True])
async def test_a_fake_member_hears_no_secret(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture, answers: bool
) -> None:
    """Somebody has registered it; everybody that calls it wants to see a proof first."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        fake_member(answers) as fake,
        open_channel(namesrv) as plain,
        Connection(namesrv, known(file)) as operator,
        running_pullhold(namesrv, internal_secret_file=file, unreachable_grace_s=0.05) as pullhold,
        open_channel(fake.address, known(file)) as channel,
    ):
        member = namesrv_pb2.Member(
            cluster="DefaultCluster",
            broker_group="g1",
            role=common_pb2.MEMBER_ROLE_WRITER,
            address="127.0.0.1:9",
            internal_address=fake.address,
            epoch=1_000,
        )
        request = namesrv_pb2.RegisterMemberRequest(member=member)
        await namesrv_pb2_grpc.NameServiceStub(plain).RegisterMember(request)
        with pytest.raises(PeerUnproven):
            await ops.create_topic(operator, "T")
        lane = pullhold.lane()
        await lane.hold(1, "T", 0, 5)
        assert (await lane.answer()).error.code == PeerUnavailable.code
        assert await Peers("g1", {1: fake.address}, known(file)).ask([1]) == {}
        stream = member_pb2_grpc.MemberServiceStub(channel).Replicate()
        with pytest.raises(PeerUnproven):
            await stream.write(member_pb2.ReplicateRequest())
        with pytest.raises(PeerUnproven):
            await stream.read()
        stream.cancel()
        assert fake.methods == {CHALLENGE}
        assert len(fake.heard) > 100
        for words in (SECRET.encode(), b64encode(SECRET.encode()).rstrip(b"=")):
            assert words not in fake.heard
            assert words.decode() not in f"{fake.calls}"
        told = [line for line in caplog.records if "did not prove itself" in line.getMessage()]
        assert 1 <= len(told) <= 6, "one line a minute of each process and peer"


async def test_what_is_said_between_those_who_know_it_is_no_secret(
    tmp_path: Path, file: Path
) -> None:
    """Calls and streams; what was heard is good for no other call."""
    async with live_group(tmp_path, members=1, internal_secret_file=file) as group:
        heard = bytearray()
        port = int(group[0].internal_address.rpartition(":")[2])
        async with (
            eavesdropping(port, heard) as address,
            open_channel(address, known(file)) as channel,
            open_channel(address) as plain,
        ):
            stub = member_pb2_grpc.MemberServiceStub(channel)
            status = await stub.DescribeReplica(member_pb2.DescribeReplicaRequest(), timeout=20)
            assert status.broker_group == "g1"
            watch = stub.WatchArrivals()
            queue = common_pb2.QueueRef(topic="none", queue_id=0)
            await watch.write(member_pb2.WatchArrivalsRequest(add=[queue]))
            told = await watch.read()
            assert isinstance(told, member_pb2.WatchArrivalsResponse)
            assert told.arrivals[0].HasField("error")
            watch.cancel()
            assert len(heard) > 1_000
            assert SECRET.encode() not in heard

            nonce = b"n" * 32
            asked = await auth_pb2_grpc.AuthServiceStub(plain).Challenge(
                auth_pb2.ChallengeRequest(nonce=nonce)
            )
            method = "/cometmq.v1.MemberService/DescribeReplica"
            proof = known(file).prove(address, method, nonce, asked.challenge, asked.proofs)
            bare = member_pb2_grpc.MemberServiceStub(plain)
            await bare.DescribeReplica(
                member_pb2.DescribeReplicaRequest(), metadata=proof, timeout=20
            )
            again = bare.DescribeReplica(
                member_pb2.DescribeReplicaRequest(), metadata=proof, timeout=20
            )
            assert isinstance(await refusal(again), Unauthenticated)
        assert await refused_count(group[0], "replayed") == 1


async def test_a_member_that_starts_anew_needs_nothing(tmp_path: Path, file: Path) -> None:
    """Nor does who has called it before."""
    async with (
        live_group(tmp_path, members=1, internal_secret_file=file) as group,
        open_channel(group[0].internal_address, known(file)) as channel,
    ):
        stub = member_pb2_grpc.MemberServiceStub(channel)

        async def answers() -> bool:
            with suppress(grpc.aio.AioRpcError):
                await stub.DescribeReplica(member_pb2.DescribeReplicaRequest(), timeout=5)
                return True
            return False

        for _ in range(3):
            await until_async(answers)
            await group[0].stop()
            await group[0].start("writer")


async def test_a_secret_that_cannot_be_read_keeps_a_member_from_starting(tmp_path: Path) -> None:
    config = config_for(tmp_path, internal_secret_file=tmp_path / "nothing")
    with pytest.raises(ConfigInvalid, match="internal_secret_file"):
        new_ports(config)

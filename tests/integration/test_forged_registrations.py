"""Who says to a name server what is not so: a stranger, a copy of what was said before, somebody
too late. What happens to those that it is about.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from cometmq.clock import SystemClock
from cometmq.errors import CometError, InvalidRequest, StaleEpoch, Unauthenticated
from cometmq.rpc.channels import open_channel
from cometmq.rpc.interceptors import wire_errors
from cometmq.rpc.secret import PROOF_METADATA, SharedSecret
from cometmq.v1 import auth_pb2, auth_pb2_grpc, common_pb2, namesrv_pb2
from cometmq.v1 import namesrv_pb2 as pb
from cometmq.v1.namesrv_pb2_grpc import NameServiceStub
from services.namesrv.listen import PROVEN, SERVICE
from tests.support.cluster.broker import BrokerProcess, refusal, running_broker, running_namesrv
from tests.support.cluster.pullhold import running_pullhold
from tests.support.waiting import PROCESSES_S, until, until_async

SECRET = "correct-horse-battery"
# Between two registrations in these tests there are minutes: what happens sooner has another cause.
PERIOD = {"register_namesrv_period": 60_000}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


class Stranger:
    """Calls a name server without knowing a secret."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub: Any = NameServiceStub(channel)

    async def members(self) -> list[tuple[int, int]]:
        """(member id, epoch) of all that are registered."""
        found = await self.stub.DescribeCluster(pb.DescribeClusterRequest())
        return [(one.member.member_id, one.member.epoch) for one in found.members]

    async def become(self, members: list[tuple[int, int]]) -> None:
        async def same() -> bool:
            return await self.members() == members

        await until_async(same)

    async def topics(self) -> list[str]:
        return list((await self.stub.ListTopics(pb.ListTopicsRequest())).topics)


@asynccontextmanager
async def stranger_at(namesrv: str) -> AsyncIterator[Stranger]:
    async with open_channel(namesrv) as channel:
        yield Stranger(channel)


def forged(epoch: int, **about: Any) -> pb.RegisterMemberRequest:
    topic = common_pb2.TopicConfig(
        name="orders",
        read_queue_count=8,
        write_queue_count=8,
        permission=6,
        flush_mode=common_pb2.FLUSH_MODE_SYNC,
        replication_mode=common_pb2.REPLICATION_MODE_ASYNC,
    )
    member = {
        "cluster": "DefaultCluster",
        "broker_group": "g1",
        "member_id": 5,
        "role": common_pb2.MEMBER_ROLE_WRITER,
        "address": "6.6.6.6:1",
        "internal_address": "6.6.6.6:2",
        "epoch": epoch,
        **about,
    }
    return pb.RegisterMemberRequest(
        member=pb.Member(**member),
        data_version=pb.DataVersion(epoch=epoch, counter=1),
        topics=[topic],
    )


def unregistration(member_id: int, epoch: int, store_id: str = "") -> pb.UnregisterMemberRequest:
    return pb.UnregisterMemberRequest(
        cluster="DefaultCluster",
        broker_group="g1",
        member_id=member_id,
        epoch=epoch,
        store_id=store_id,
    )


# --- a name server without a secret ---------------------------------------------------------------


async def test_a_lone_broker_serves_on_whatever_a_name_server_says(tmp_path: Path) -> None:
    """In its life, and before its start; as a process, which would exit."""
    async with running_namesrv(tmp_path) as namesrv, stranger_at(namesrv) as stranger:
        flags = ("--namesrv", namesrv, "--register_namesrv_period", "1000")
        async with BrokerProcess(tmp_path, *flags) as broker:
            await broker.client.put_topic("orders", 1)
            await stranger.become([(0, 1)])
            await stranger.stub.RegisterMember(forged(50))
            await until(lambda: "serves on" in broker.output(), PROCESSES_S)
            await broker.client.send("orders", 0, b"x")
            assert await broker.stop() == 0
            assert await stranger.members() == [(5, 50)]
            said = broker.output().count("serves on")
            await broker.start()
            await until(lambda: broker.output().count("serves on") > said, PROCESSES_S)
            await broker.client.send("orders", 0, b"x")
            assert await stranger.members() == [(5, 50)]
            assert "internal_secret_file" in broker.output()
            await stranger.stub.UnregisterMember(unregistration(5, 50))
            await stranger.become([(0, 2)])
            await broker.client.send("orders", 0, b"x")


async def test_an_epoch_that_no_group_has_is_refused(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        stranger_at(namesrv) as stranger,
        running_broker(tmp_path, namesrv=(namesrv,), **PERIOD) as broker,
    ):
        await stranger.become([(0, 1)])
        for epoch in (1_002, 1 << 30, (1 << 30) + 1, 2**62, 2**63 - 1, 2**64 - 1):
            refused = await refusal(stranger.stub.RegisterMember(forged(epoch)))
            assert isinstance(refused, InvalidRequest), epoch
            refused = await refusal(stranger.stub.UnregisterMember(unregistration(0, epoch)))
            assert isinstance(refused, InvalidRequest | StaleEpoch), epoch
            assert await stranger.members() == [(0, 1)], epoch
        await broker.put_topic("T", 1)


async def test_who_does_not_name_the_store_takes_nobody_out(tmp_path: Path) -> None:
    """Nor stands in the writer's place in its epoch, as a writer or as a follower."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        stranger_at(namesrv) as stranger,
        running_broker(tmp_path, namesrv=(namesrv,), **PERIOD) as broker,
    ):
        await stranger.become([(0, 1)])
        follower = common_pb2.MEMBER_ROLE_FOLLOWER
        for request in (
            forged(1),
            forged(1, member_id=0),
            forged(1, member_id=0, address=broker.address),
            forged(1, member_id=0, role=follower),
            forged(1, address=broker.address, role=follower),
        ):
            refused = await refusal(stranger.stub.RegisterMember(request))
            assert isinstance(refused, StaleEpoch)
        for epoch in (1, 2, 1 << 30):
            for store_id in ("", "x"):
                out = unregistration(0, epoch, store_id)
                assert isinstance(await refusal(stranger.stub.UnregisterMember(out)), StaleEpoch)
        assert await stranger.members() == [(0, 1)]


async def test_a_writer_that_was_taken_out_is_back_at_once(tmp_path: Path) -> None:
    """By a word too late of its own, or by one with a newer epoch that goes again."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        stranger_at(namesrv) as stranger,
        running_broker(tmp_path, namesrv=(namesrv,), **PERIOD) as broker,
    ):
        await broker.put_topic("T", 1)
        await stranger.become([(0, 1)])
        for _ in range(5):
            out = unregistration(0, 1, broker.store.store_id)
            await stranger.stub.UnregisterMember(out)
            await stranger.become([(0, 1)])
            assert await stranger.topics() == ["T"]
        await stranger.stub.RegisterMember(forged(2))
        await stranger.stub.UnregisterMember(unregistration(5, 2))
        await stranger.become([(0, 1)])


async def test_a_pullhold_that_was_taken_out_is_back_at_once(tmp_path: Path) -> None:
    async with (
        running_namesrv(tmp_path) as namesrv,
        stranger_at(namesrv) as stranger,
        running_pullhold(namesrv, **PERIOD) as pullhold,
    ):
        request = pb.UnregisterPullholdRequest(cluster="DefaultCluster", address=pullhold.address)

        async def there() -> bool:
            answer = await stranger.stub.ListPullholds(pb.ListPullholdsRequest())
            return list(answer.addresses) == [pullhold.address]

        for _ in range(3):
            await until_async(there)
            await stranger.stub.UnregisterPullhold(request)
        await until_async(there)


async def test_a_name_server_without_a_secret_says_what_that_means(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_namesrv(tmp_path, internal_secret_file=file):
        assert "internal_secret_file" not in caplog.text
    async with running_namesrv(tmp_path):
        assert "without internal_secret_file" in caplog.text


# --- a name server with a secret ------------------------------------------------------------------

CHANGES: dict[str, Callable[[], Any]] = {
    "RegisterMember": lambda: forged(50),
    "UnregisterMember": lambda: unregistration(0, 1),
    "WatchRegistration": pb.WatchRegistrationRequest,
    "SetWritePermission": lambda: pb.SetWritePermissionRequest(broker_group="g1"),
    "PutValue": lambda: pb.PutValueRequest(namespace="n", key="k", value="v"),
    "DeleteValue": lambda: pb.DeleteValueRequest(namespace="n", key="k"),
    "RegisterPullhold": lambda: pb.RegisterPullholdRequest(cluster="c", address="6.6.6.6:3"),
    "UnregisterPullhold": lambda: pb.UnregisterPullholdRequest(cluster="c", address="6.6.6.6:3"),
}
READS = {
    "QueryRoute",
    "WatchRoutes",
    "DescribeCluster",
    "ListTopics",
    "ListValues",
    "ListPullholds",
}


def test_each_method_is_for_all_or_wants_the_proof() -> None:
    methods = set(namesrv_pb2.DESCRIPTOR.services_by_name["NameService"].methods_by_name)
    assert methods == CHANGES.keys() | READS
    assert {f"/{SERVICE}/{name}" for name in CHANGES} == PROVEN


async def ask(stub: Any, method: str, **options: Any) -> CometError | None:
    call = getattr(stub, method)(CHANGES[method](), timeout=20, **options)
    try:
        with wire_errors():
            await (call.read() if method == "WatchRegistration" else call)
    except CometError as error:
        return error
    return None


async def test_who_does_not_know_the_secret_changes_nothing(tmp_path: Path, file: Path) -> None:
    options = {"internal_secret_file": file, "auto_create_topic_enable": True, **PERIOD}
    async with (
        running_namesrv(tmp_path, internal_secret_file=file) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), **options),
        running_pullhold(namesrv, internal_secret_file=file, **PERIOD) as pullhold,
        stranger_at(namesrv) as stranger,
    ):
        await stranger.become([(0, 1)])
        bearer = (("authorization", f"Bearer {SECRET}"),)
        for method in CHANGES:
            for metadata in ((), bearer, ((PROOF_METADATA, os.urandom(112)),)):
                refused = await ask(stranger.stub, method, metadata=metadata)
                assert isinstance(refused, Unauthenticated), method
        assert await stranger.members() == [(0, 1)]
        assert await stranger.topics() == ["TBW102"]
        holds = await stranger.stub.ListPullholds(pb.ListPullholdsRequest())
        assert list(holds.addresses) == [pullhold.address]


async def proof_of(
    secret: SharedSecret, channel: grpc.aio.Channel, method: str
) -> tuple[tuple[str, bytes], ...]:
    nonce = os.urandom(32)
    request = auth_pb2.ChallengeRequest(nonce=nonce)
    asked = await auth_pb2_grpc.AuthServiceStub(channel).Challenge(request)
    name = f"/{SERVICE}/{method}"
    return secret.prove("there", name, nonce, asked.challenge, asked.proofs)


async def test_what_was_said_before_counts_once(tmp_path: Path, file: Path) -> None:
    """Whoever has recorded a registration cannot make it again, here or at another process."""
    secret = SharedSecret(file, SystemClock())
    (tmp_path / "b").mkdir()
    async with (
        running_namesrv(tmp_path, internal_secret_file=file) as namesrv,
        running_namesrv(tmp_path / "b", internal_secret_file=file) as other,
        stranger_at(namesrv) as here,
        stranger_at(other) as there,
    ):
        for method in CHANGES:
            metadata = await proof_of(secret, here.channel, method)
            assert not isinstance(await ask(here.stub, method, metadata=metadata), Unauthenticated)
            for server in (here, there):
                refused = await ask(server.stub, method, metadata=metadata)
                assert isinstance(refused, Unauthenticated), method
        recorded = await proof_of(secret, here.channel, "RegisterMember")
        for method in CHANGES.keys() - {"RegisterMember"}:
            refused = await ask(here.stub, method, metadata=recorded)
            assert isinstance(refused, Unauthenticated), "of another method"
        assert isinstance(await ask(there.stub, "RegisterMember", metadata=recorded), CometError)


async def test_members_tell_a_name_server_without_the_secret_but_do_not_believe_it(
    tmp_path: Path, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So a cluster is given a secret while it runs: members first, then name servers."""
    async with running_namesrv(tmp_path) as namesrv, stranger_at(namesrv) as stranger:
        options = {"internal_secret_file": file, "auto_create_topic_enable": True, **PERIOD}
        async with running_broker(tmp_path, namesrv=(namesrv,), **options) as broker:
            await stranger.become([(0, 1)])
            await stranger.stub.RegisterMember(forged(50))
            assert await stranger.members() == [(5, 50)]
            await broker.send("T", 0, b"x")
            await until(lambda: "did not prove itself" in caplog.text)
            assert "serves on" not in caplog.text, "its word is none"

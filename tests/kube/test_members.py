"""Real members whose lease is a Lease of a real API server, and what happens to that server.

The group's topic waits for copies, so that whoever writes has whatever was acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import grpc
import pytest

from cometmq.v1 import broker_pb2 as pb
from tests.kube.rights import Rights
from tests.support.cluster.broker import SYNC
from tests.support.cluster.groups import LocalGroup, local_group
from tests.support.kube.api_server import Body, KubeServer
from tests.support.waiting import until_async

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

DURATION_S, RENEW_S = 3.0, 0.5
TOPIC = "S"


class Members:
    """A group under load, and its Lease. ``acknowledged``: bodies, in order."""

    def __init__(self, group: LocalGroup, rights: Rights) -> None:
        self.group = group
        self.rights = rights
        self.sent = 0
        self.acknowledged: list[bytes] = []

    def lease(self) -> Body:
        return self.rights.lease()

    def holder(self) -> tuple[str, int]:
        """Who it is, and how often it was another."""
        spec = self.lease()["spec"]
        return spec["holderIdentity"], spec["leaseTransitions"]

    async def send(self, writer: int) -> bool:
        """One message; whether that member has acknowledged it."""
        self.sent += 1
        body = b"%d by %d" % (self.sent, writer)
        answer = await self.group.client(writer).send(TOPIC, 0, body)
        acknowledged: bool = answer.status == pb.SEND_STATUS_SEND_OK
        if acknowledged:
            self.acknowledged.append(body)
        return acknowledged

    async def serves(self, writer: int) -> None:
        """Wait until it takes messages."""

        async def taken() -> bool:
            try:
                return await self.send(writer)
            except grpc.aio.AioRpcError:
                return False

        await until_async(taken, 60.0)

    async def renewed(self) -> None:
        """Wait until the Lease is renewed once more."""
        before: str = self.lease()["spec"]["renewTime"]

        async def later() -> bool:
            found = await asyncio.to_thread(self.lease)
            return str(found["spec"]["renewTime"]) > before

        await until_async(later, 30.0)

    async def complete(self) -> None:
        """Wait until the Lease says that every member may take over."""
        ids = sorted(process.member_id for process in self.group.cluster.brokers)

        async def all_there() -> bool:
            found = await asyncio.to_thread(self.lease)
            replica_ids = json.loads(found["metadata"]["annotations"]["cometmq.io/in_sync"])
            return ids == [number for number, _ in replica_ids]

        await until_async(all_there, 60.0)

    async def check(self, writer: int) -> None:
        """It has whatever was acknowledged, once, in order; and everybody has the same log."""
        await self.group.in_step()
        bodies = await self.group.client(writer).bodies(TOPIC, 0)
        kept = [body for body in bodies if body in set(self.acknowledged)]
        assert kept == self.acknowledged
        await self.group.assert_logs_equal()


@asynccontextmanager
async def living(rights: Rights, directory: Path, slaves: int = 1) -> AsyncIterator[Members]:
    """Members in step; 0 writes."""
    options = {
        "lease": rights.url,
        "lease_duration_s": str(DURATION_S),
        "lease_renew_s": str(RENEW_S),
        "replication_mode": "APPENDED",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(rights.kubeconfig()))
        async with local_group(directory / "cluster", slaves, **options) as group:
            members = Members(group, rights)
            assert await group.writer() == 0
            await group.client(0).put_topic(TOPIC, 1, SYNC)
            await members.serves(0)
            yield members
            await members.check(await group.writer())


async def test_hand_overs_and_a_restart(rights: Rights, tmp_path: Path) -> None:
    async with living(rights, tmp_path) as members:
        group = members.group
        assert members.holder() == ("g1-0", 0)
        done = await group.step_down()
        assert (done.from_member, done.to_member) == (0, 1)
        assert await group.writer() == 1
        assert members.holder() == ("g1-1", 1)
        assert await members.send(1)
        await group.kill(1)
        await group.start()
        await members.serves(1)
        assert members.holder() == ("g1-1", 1)
        assert "reason=restart" in group.log(1)
        await group.in_step()
        assert (await group.step_down()).to_member == 0
        await members.serves(0)
        assert members.holder() == ("g1-0", 2)


@contextmanager
def outage(server: KubeServer, kind: str) -> Iterator[None]:
    kinds: dict[str, AbstractContextManager[None]] = {
        "gone": server.gone(),
        "paused": server.paused(),
        "without etcd": server.without_etcd(),
    }
    with kinds[kind]:
        yield


@pytest.mark.parametrize("kind", ["gone", "paused", "without etcd"])
async def test_an_api_that_is_away_stops_nobody(rights: Rights, tmp_path: Path, kind: str) -> None:
    """Longer than the lease lasts: the writer goes on, by its follower's promises, and nobody else
    takes the lease.
    """
    async with living(rights, tmp_path) as members:
        await members.complete()
        before = members.holder()
        with outage(rights.server, kind):
            end_s = time.monotonic() + 3 * DURATION_S
            while time.monotonic() < end_s:
                assert await members.send(0)
                await asyncio.sleep(0.05)
        await members.renewed()
        assert await members.send(0)
        assert members.holder() == before
        assert await members.group.writer() == 0
        assert "deposed" not in members.group.log(0)
        print(f"API {kind} for {3 * DURATION_S:g} s: {len(members.acknowledged)} acknowledged")


async def test_a_lease_that_somebody_deletes_is_written_anew(
    rights: Rights, tmp_path: Path
) -> None:
    async with living(rights, tmp_path) as members:
        for _ in range(5):
            uid = members.lease()["metadata"]["uid"]
            epoch = members.lease()["metadata"]["annotations"]["cometmq.io/epoch"]
            members.rights.delete()

            async def there() -> bool:
                status, _ = await asyncio.to_thread(
                    rights.server.ask, "GET", f"{rights.path}/prod-broker-a"
                )
                return status == 200

            await until_async(there, 30.0)
            assert await members.send(0)
            found = members.lease()
            assert found["metadata"]["uid"] != uid
            assert found["metadata"]["annotations"]["cometmq.io/epoch"] == epoch
            assert members.holder() == ("g1-0", 0)
        assert await members.group.writer() == 0


async def test_rights_that_are_taken_away_and_given_back(rights: Rights, tmp_path: Path) -> None:
    """The writer goes on, by its follower's promises."""
    async with living(rights, tmp_path) as members:
        await members.complete()
        with rights.revoked():
            for _ in range(20):
                assert await members.send(0)
                await asyncio.sleep(0.1)
        await members.renewed()
        assert await members.send(0)
        assert await members.group.writer() == 0


@pytest.mark.parametrize("kills", [3])
async def test_kill_9_of_the_writer(rights: Rights, tmp_path: Path, kills: int) -> None:
    """The follower takes over, each time; it has everything, and the old writer follows it."""
    async with living(rights, tmp_path) as members:
        group = members.group
        for number in range(kills):
            old = await group.writer()
            await members.serves(old)
            await members.complete()
            killed_s = time.monotonic()
            await group.kill(old)
            await members.serves(1 - old)
            took_s = time.monotonic() - killed_s
            assert members.holder() == (f"g1-{1 - old}", number + 1)
            assert "reason=failover" in group.log(1 - old)
            print(f"take-over {old} -> {1 - old}: {took_s:.1f} s (lease {DURATION_S:g} s)")
            await group.start()


async def test_nobody_takes_over_while_the_api_is_away(rights: Rights, tmp_path: Path) -> None:
    async with living(rights, tmp_path) as members:
        group = members.group
        await members.complete()
        with rights.server.gone():
            await group.kill(0)
            await asyncio.sleep(2 * DURATION_S)
            views = await group.members()
            assert views[1].role == "follower"
        await members.serves(1)
        assert members.holder() == ("g1-1", 1)
        await group.start()

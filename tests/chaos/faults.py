"""What can befall a cluster. A fault is a block: what it does at the beginning, it undoes at the
end. Who is hit is decided when it begins.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import dataclass

from cometmq.admin import brokers
from cometmq.errors import CometError
from tests.chaos import damage, slowness
from tests.chaos.cluster import CLIENTS, LEASE, Cluster
from tests.chaos.machines import Machine, Member, Service
from tests.chaos.workload import GROUP
from tests.support import loop_disk, network
from tests.support.small_disk import fill

HAND_OVER_TRIES = 20

Inject = Callable[[Cluster, random.Random], AbstractAsyncContextManager[None]]
Steps = Callable[[Cluster, random.Random], AsyncIterator[None]]


@dataclass(frozen=True)
class Fault:
    """``disk``: it needs a disk of the member's own. ``missing``: why it cannot be done here, empty
    when it can. ``powerless``: members that lose what they had not synced.
    """

    name: str
    inject: Inject
    disk: bool = False
    missing: Callable[[], str] = str
    powerless: int = 0

    def left_out(self) -> str:
        """Why it is left out here; empty when it is not."""
        disk = (network.why_not() or loop_disk.missing("ext4")) if self.disk else ""
        return disk or self.missing()


FAULTS: dict[str, Fault] = {}


def _fault(
    name: str, *, disk: bool = False, missing: Callable[[], str] = str, powerless: int = 0
) -> Callable[[Steps], Steps]:
    """Lists a fault."""

    def listed(steps: Steps) -> Steps:
        inject = asynccontextmanager(steps)
        FAULTS[name] = Fault(name, inject, disk, missing, powerless)
        return steps

    return listed


def _follower(cluster: Cluster, rng: random.Random) -> Member:
    return rng.choice(cluster.followers())


# --- processes ------------------------------------------------------------------------------------


@contextmanager
def _dead(*machines: Service) -> Iterator[None]:
    for machine in machines:
        machine.kill()
    try:
        yield
    finally:
        for machine in machines:
            machine.revive()


@contextmanager
def _paused(machine: Machine) -> Iterator[None]:
    machine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        machine.signal(signal.SIGCONT)


@_fault("kill -9 of a follower")
async def follower_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _dead(_follower(cluster, rng)):
        yield


@_fault("kill -9 of the writer")
async def writer_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _dead(cluster.writer()):
        yield


@_fault("kill -9 of all members")
async def all_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _dead(*rng.sample(cluster.members, len(cluster.members))):
        yield


@_fault("pause of a follower")
async def follower_paused(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _paused(_follower(cluster, rng)):
        yield


@_fault("pause of the writer")
async def writer_paused(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _paused(cluster.writer()):
        yield


@_fault("kill -9 of a name server")
async def namesrv_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _dead(rng.choice(cluster.namesrvs)):
        yield


@_fault("kill -9 of all name servers")
async def namesrvs_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _dead(*cluster.namesrvs):
        yield


@_fault("kill -9 of the pullhold")
async def pullhold_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _dead(cluster.pullhold):
        yield


@_fault("planned hand-over")
async def handed_over(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    """Tried for a while: beside another fault there may be nobody to hand over to."""
    for _ in range(HAND_OVER_TRIES):
        with suppress(CometError):
            await brokers.step_down(cluster.connection, GROUP)
            break
        await asyncio.sleep(0.5)
    yield


# --- the network ----------------------------------------------------------------------------------


@_fault("a follower cut off")
async def follower_cut(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    follower = _follower(cluster, rng)
    with cluster.network.parted([follower.name], cluster.others(follower)):
        yield


@_fault("the writer cut off")
async def writer_cut(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer = cluster.writer()
    with cluster.network.parted([writer.name], cluster.others(writer)):
        yield


@_fault("the writer cut off from its followers")
async def writer_alone(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer, followers = cluster.writer(), cluster.followers()
    with cluster.network.parted([writer.name], cluster.names(*followers)):
        yield


@_fault("the writer cut off from the lease")
async def writer_unleased(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer = cluster.writer()
    with cluster.network.parted([writer.name], [LEASE]):
        yield


@_fault("the lease away from everybody")
async def lease_away(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with cluster.network.parted(cluster.names(*cluster.members), [LEASE]):
        yield


@_fault("the lease deleted")
async def lease_deleted(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    cluster.leases.leases.clear()
    yield


@_fault("the API of the lease answers 503")
async def lease_failing(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    cluster.leases.failing = 503
    try:
        yield
    finally:
        cluster.leases.failing = 0


@_fault("the writer cut off from clients")
async def clients_cut(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer = cluster.writer()
    with cluster.network.parted([writer.name], [CLIENTS, cluster.pullhold.name]):
        yield


@_fault("one way: nothing from the writer to its followers")
async def writer_mute(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer, followers = cluster.writer(), cluster.followers()
    with cluster.network.cut([writer.name], cluster.names(*followers)):
        yield


@_fault("one way: nothing from a follower to the writer")
async def follower_mute(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer, follower = cluster.writer(), _follower(cluster, rng)
    with cluster.network.cut([follower.name], [writer.name]):
        yield


@_fault("one way: the writer hears nothing")
async def writer_deaf(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer = cluster.writer()
    with cluster.network.cut(cluster.others(writer), [writer.name]):
        yield


@_fault("30 % of the writer's packets lost", missing=network.why_no_loss)
async def writer_losing(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with cluster.network.losing(cluster.writer().name, 30):
        yield


@_fault("30 % of a follower's packets lost", missing=network.why_no_loss)
async def follower_losing(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with cluster.network.losing(_follower(cluster, rng).name, 30):
        yield


# --- disks ----------------------------------------------------------------------------------------


@_fault("slow disk of the writer", disk=True, missing=slowness.why_not)
async def writer_slow(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with slowness.slow_disk(cluster.writer()):
        yield


@_fault("slow disk of a follower", disk=True, missing=slowness.why_not)
async def follower_slow(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with slowness.slow_disk(_follower(cluster, rng)):
        yield


async def _full(member: Member) -> AsyncIterator[None]:
    assert member.disk is not None
    filler = fill(member.disk.mount_point)
    try:
        yield
    finally:
        filler.unlink()
        member.revive()


@_fault("full disk of the writer", disk=True)
async def writer_full(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with asynccontextmanager(_full)(cluster.writer()):
        yield


@_fault("full disk of a follower", disk=True)
async def follower_full(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with asynccontextmanager(_full)(_follower(cluster, rng)):
        yield


@contextmanager
def _failing(member: Member) -> Iterator[None]:
    """Writes fail; then somebody starts the machine anew."""
    assert member.disk is not None
    with member.disk.failing():
        yield
    member.lose_power()
    member.revive()


@_fault("EIO from the writer's disk", disk=True, powerless=1)
async def writer_eio(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _failing(cluster.writer()):
        yield


@_fault("EIO from a follower's disk", disk=True, powerless=1)
async def follower_eio(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _failing(_follower(cluster, rng)):
        yield


@_fault("a bit flipped at a follower")
async def bit_flipped(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    follower = _follower(cluster, rng)
    follower.kill()
    flip = damage.flip_a_bit(follower.store, rng)
    follower.revive()
    try:
        yield
    finally:
        follower.kill()
        sizes = follower.options["max_hash_slot_num"], follower.options["max_index_num"]
        damage.find_and_replace(follower.store, flip, *sizes)
        follower.revive()


# --- power ----------------------------------------------------------------------------------------


@asynccontextmanager
async def _dark(members: list[Member]) -> AsyncIterator[None]:
    for member in members:
        member.lose_power()
    try:
        yield
    finally:
        for member in members:
            member.revive()


@_fault("power cut of the writer", disk=True, powerless=1)
async def writer_dark(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _dark([cluster.writer()]):
        yield


@_fault("power cut of a follower", disk=True, powerless=1)
async def follower_dark(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _dark([_follower(cluster, rng)]):
        yield


@_fault("power cut of all members", disk=True, powerless=3)
async def all_dark(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _dark(rng.sample(cluster.members, len(cluster.members))):
        yield

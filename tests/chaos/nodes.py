"""Faults of processes and of the network."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

from cometmq.admin import brokers
from cometmq.errors import CometError
from tests.chaos.cluster import BRIEF, CLIENTS, LEASE, Cluster
from tests.chaos.listing import fault, follower_of
from tests.chaos.machines import Machine, Service
from tests.chaos.topics import GROUP
from tests.support.cluster import network

HAND_OVER_TRIES = 20

# --- processes ------------------------------------------------------------------------------------


@contextmanager
def dead(*machines: Service) -> Iterator[None]:
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


@fault("kill -9 of a follower")
async def follower_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with dead(follower_of(cluster, rng)):
        yield


@fault("kill -9 of the writer")
async def writer_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with dead(cluster.writer()):
        yield


@fault("kill -9 of all members")
async def all_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with dead(*rng.sample(cluster.members, len(cluster.members))):
        yield


@fault("pause of a follower")
async def follower_paused(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _paused(follower_of(cluster, rng)):
        yield


@fault("pause of the writer")
async def writer_paused(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _paused(cluster.writer()):
        yield


@fault("kill -9 of a name server")
async def namesrv_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with dead(rng.choice(cluster.namesrvs)):
        yield


@fault("kill -9 of all name servers")
async def namesrvs_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with dead(*cluster.namesrvs):
        yield


@fault("kill -9 of the pullhold")
async def pullhold_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with dead(cluster.pullhold):
        yield


@fault("kill -9 of clients")
async def clients_killed(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    """A producer and a consumer in the middle of everything; another of the consumer's group goes
    on for it.
    """
    with dead(cluster.brief):
        yield


@fault("planned hand-over")
async def handed_over(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    """Tried for a while: beside another fault there may be nobody to hand over to."""
    for _ in range(HAND_OVER_TRIES):
        with suppress(CometError):
            await brokers.step_down(cluster.connection, GROUP)
            break
        await asyncio.sleep(0.5)
    yield


# --- the network ----------------------------------------------------------------------------------


@fault("a follower cut off")
async def follower_cut(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    follower = follower_of(cluster, rng)
    with cluster.network.parted([follower.name], cluster.others(follower)):
        yield


@fault("the writer cut off")
async def writer_cut(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer = cluster.writer()
    with cluster.network.parted([writer.name], cluster.others(writer)):
        yield


@fault("the writer cut off from its followers")
async def writer_alone(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer, followers = cluster.writer(), cluster.followers()
    with cluster.network.parted([writer.name], cluster.names(*followers)):
        yield


@fault("the writer cut off from the lease")
async def writer_unleased(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer = cluster.writer()
    with cluster.network.parted([writer.name], [LEASE]):
        yield


@fault("the lease away from everybody")
async def lease_away(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with cluster.network.parted(cluster.names(*cluster.members), [LEASE]):
        yield


@fault("the lease deleted")
async def lease_deleted(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    cluster.leases.leases.clear()
    yield


@fault("the API of the lease answers 503")
async def lease_failing(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    cluster.leases.failing = 503
    try:
        yield
    finally:
        cluster.leases.failing = 0


@fault("the writer cut off from clients")
async def clients_cut(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer = cluster.writer()
    with cluster.network.parted([writer.name], [CLIENTS, BRIEF, cluster.pullhold.name]):
        yield


@fault("one way: nothing from the writer to its followers")
async def writer_mute(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer, followers = cluster.writer(), cluster.followers()
    with cluster.network.cut([writer.name], cluster.names(*followers)):
        yield


@fault("one way: nothing from a follower to the writer")
async def follower_mute(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer, follower = cluster.writer(), follower_of(cluster, rng)
    with cluster.network.cut([follower.name], [writer.name]):
        yield


@fault("one way: the writer hears nothing")
async def writer_deaf(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    writer = cluster.writer()
    with cluster.network.cut(cluster.others(writer), [writer.name]):
        yield


@fault("30 % of the writer's packets lost", missing=network.why_no_loss)
async def writer_losing(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with cluster.network.losing(cluster.writer().name, 30):
        yield


@fault("30 % of a follower's packets lost", missing=network.why_no_loss)
async def follower_losing(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with cluster.network.losing(follower_of(cluster, rng).name, 30):
        yield

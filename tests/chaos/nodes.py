"""Faults of processes and of the network."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress

from cometmq.admin import brokers
from cometmq.errors import CometError
from tests.chaos.cluster import LEASE, Cluster
from tests.chaos.listing import Who, everybody, fault, follower, nobody, writer
from tests.chaos.machines import Clients, Machine, Member, Service
from tests.chaos.topics import GROUP
from tests.support.cluster import network

HAND_OVER_TRIES = 20
Cut = AbstractContextManager[None]


@contextmanager
def dead(cluster: Cluster, *machines: Service) -> Iterator[None]:
    for machine in machines:
        machine.kill()
    try:
        yield
    finally:
        for machine in machines:
            machine.revive()


@contextmanager
def paused(cluster: Cluster, machine: Machine) -> Iterator[None]:
    machine.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        machine.signal(signal.SIGCONT)


@asynccontextmanager
async def handed_over(cluster: Cluster) -> AsyncIterator[None]:
    """Tried for a while: beside another fault there may be nobody to hand over to."""
    for _ in range(HAND_OVER_TRIES):
        with suppress(CometError):
            await brokers.step_down(cluster.connection, GROUP)
            break
        await asyncio.sleep(0.5)
    yield


@contextmanager
def lease_deleted(cluster: Cluster) -> Iterator[None]:
    cluster.leases.leases.clear()
    yield


@contextmanager
def lease_failing(cluster: Cluster) -> Iterator[None]:
    cluster.leases.failing = 503
    try:
        yield
    finally:
        cluster.leases.failing = 0


def cut_off(cluster: Cluster, machine: Machine) -> Cut:
    return cluster.network.parted([machine.name], cluster.others(machine))


def cut_off_from_followers(cluster: Cluster, machine: Machine) -> Cut:
    return cluster.network.parted([machine.name], cluster.names(*cluster.followers()))


def cut_off_from_clients(cluster: Cluster, machine: Machine) -> Cut:
    servers = cluster.names(*cluster.namesrvs, *cluster.members)
    clients = [name for name in cluster.names(*cluster.machines()) if name not in servers]
    return cluster.network.parted([machine.name], clients)


def alone_with_clients(cluster: Cluster, machine: Machine) -> Cut:
    """It can renew nothing at the lease, and no member copies from it."""
    away = [LEASE, *cluster.names(*cluster.followers())]
    return cluster.network.parted([machine.name], away)


@asynccontextmanager
async def joined(cluster: Cluster) -> AsyncIterator[None]:
    """Another member of each group, which leaves in order."""
    newcomer = cluster.consumers[-1]
    newcomer.start()
    yield
    await cluster.finish(newcomer)


@asynccontextmanager
async def left(cluster: Cluster, consumer: Service) -> AsyncIterator[None]:
    """A member that leaves in order, and comes back."""
    await cluster.finish(consumer)
    yield
    consumer.revive()


@contextmanager
def clock_off(cluster: Cluster, member: Member, ahead_s: int) -> Iterator[None]:
    """Until the block is over."""
    assert member.clock is not None
    member.clock.set(ahead_s)
    try:
        yield
    finally:
        member.clock.set(0)


def off(who: Who, ahead_s: int) -> Who:
    return lambda cluster, rng: [*who(cluster, rng), ahead_s]


def consumer(cluster: Cluster, rng: random.Random) -> list[Clients]:
    return [rng.choice(cluster.consuming())]


def decider(cluster: Cluster, rng: random.Random) -> list[Clients]:
    assert cluster.later is not None
    return [rng.choice(cluster.later.deciders)]


def receiver(cluster: Cluster, rng: random.Random) -> list[Clients]:
    assert cluster.later is not None
    return [rng.choice(cluster.later.receivers)]


def cut_off_from_lease(cluster: Cluster, *machines: Machine) -> Cut:
    return cluster.network.parted(cluster.names(*machines), [LEASE])


def mute_to_followers(cluster: Cluster, machine: Machine) -> Cut:
    return cluster.network.cut([machine.name], cluster.names(*cluster.followers()))


def mute_to_writer(cluster: Cluster, machine: Machine) -> Cut:
    return cluster.network.cut([machine.name], [cluster.writer().name])


def deaf(cluster: Cluster, machine: Machine) -> Cut:
    return cluster.network.cut(cluster.others(machine), [machine.name])


def losing(cluster: Cluster, machine: Machine) -> Cut:
    return cluster.network.losing(machine.name, 30)


fault("kill -9 of a follower", dead, follower)
fault("kill -9 of the writer", dead, writer)
fault("kill -9 of all members", dead, everybody)
fault("kill -9 of a name server", dead, lambda cluster, rng: [rng.choice(cluster.namesrvs)])
fault("kill -9 of all name servers", dead, lambda cluster, _: cluster.namesrvs)
fault("kill -9 of the pullhold", dead, lambda cluster, _: [cluster.pullhold])
# A producer and a consumer in the middle of everything; another of its group goes on for it.
fault("kill -9 of clients", dead, lambda cluster, _: [cluster.brief])
fault("kill -9 of a consumer", dead, consumer, groups=True)
fault("pause of a consumer", paused, consumer, groups=True)
fault("a consumer cut off", cut_off, consumer, groups=True)
fault("a consumer joins and leaves", joined, nobody, groups=True, peaceful=True)
fault("a consumer leaves and comes back", left, consumer, groups=True, peaceful=True)
# Its open transactions are for the other members of its group.
fault("kill -9 of a producer of transactions", dead, decider, later=True)
fault("kill -9 of a receiver", dead, receiver, later=True)
fault("pause of a receiver", paused, receiver, later=True)
fault("pause of all producers", paused, lambda cluster, _: [cluster.clients])
fault("producers cut off", cut_off, lambda cluster, _: [cluster.clients])
fault("the writer alone with clients", alone_with_clients, writer)
fault("pause of a follower", paused, follower)
fault("pause of the writer", paused, writer)
fault("planned hand-over", handed_over, nobody)
fault("a follower cut off", cut_off, follower)
fault("the writer cut off", cut_off, writer)
fault("the writer cut off from its followers", cut_off_from_followers, writer)
fault("the writer cut off from clients", cut_off_from_clients, writer)
fault("the writer cut off from the lease", cut_off_from_lease, writer)
fault("the lease away from everybody", cut_off_from_lease, everybody)
fault("the lease deleted", lease_deleted, nobody)
fault("the API of the lease answers 503", lease_failing, nobody)
fault("one way: nothing from the writer to its followers", mute_to_followers, writer)
fault("one way: nothing from a follower to the writer", mute_to_writer, follower)
fault("one way: the writer hears nothing", deaf, writer)
fault("30 % of the writer's packets lost", losing, writer, missing=network.why_no_loss)
fault("30 % of a follower's packets lost", losing, follower, missing=network.why_no_loss)
# The clocks of the others and of the name servers tell which one is wrong: nothing has an excuse.
WRONG_S = 600
ahead, behind = off(writer, WRONG_S), off(writer, -WRONG_S)
fault("the writer's clock 600 s ahead", clock_off, ahead, clock=True, peaceful=True)
fault("the writer's clock 600 s behind", clock_off, behind, clock=True, peaceful=True)
ahead, behind = off(follower, WRONG_S), off(follower, -WRONG_S)
fault("a follower's clock 600 s ahead", clock_off, ahead, clock=True, peaceful=True)
fault("a follower's clock 600 s behind", clock_off, behind, clock=True, peaceful=True)

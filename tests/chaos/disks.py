"""Faults of disks, of the power, and of whole machines."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

from tests.chaos import damage, slowness
from tests.chaos.cluster import Cluster
from tests.chaos.listing import fault, follower_of
from tests.chaos.machines import Member
from tests.support.stores.small_disk import fill

# --- disks ----------------------------------------------------------------------------------------


@fault("slow disk of the writer", disk=True, missing=slowness.why_not)
async def writer_slow(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with slowness.slow_disk(cluster.writer()):
        yield


@fault("slow disk of a follower", disk=True, missing=slowness.why_not)
async def follower_slow(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with slowness.slow_disk(follower_of(cluster, rng)):
        yield


@fault("slow disks of all members", disk=True, missing=slowness.why_not)
async def all_slow(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with ExitStack() as stack:
        for member in cluster.members:
            stack.enter_context(slowness.slow_disk(member))
        yield


@asynccontextmanager
async def _full(cluster: Cluster, member: Member, bites: Callable[[], bool]) -> AsyncIterator[None]:
    """Until it bites, and then as long as the block lasts. Nobody helps afterwards."""
    assert member.disk is not None

    async def does_bite() -> bool:
        return bites()

    filler = fill(member.disk.mount_point)
    try:
        await cluster.until("the full disk is felt", does_bite)
        yield
    finally:
        filler.unlink()


@fault("full disk of the writer", disk=True, fills=True)
async def writer_full(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    before = cluster.refusals("DISK_FULL")
    async with _full(cluster, cluster.writer(), lambda: cluster.refusals("DISK_FULL") > before):
        yield


@fault("full disk of a follower", disk=True, fills=True)
async def follower_full(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    follower = follower_of(cluster, rng)
    async with _full(cluster, follower, lambda: follower.member_id not in cluster.in_sync()):
        yield


@contextmanager
def _failing(member: Member) -> Iterator[None]:
    """Writes fail; then somebody starts the machine anew."""
    assert member.disk is not None
    with member.disk.failing():
        yield
    member.darken()
    member.reboot()
    member.revive()


@fault("EIO from the writer's disk", disk=True, powerless=1)
async def writer_eio(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _failing(cluster.writer()):
        yield


@fault("EIO from a follower's disk", disk=True, powerless=1)
async def follower_eio(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    with _failing(follower_of(cluster, rng)):
        yield


@fault("a bit flipped at a follower")
async def bit_flipped(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    follower = follower_of(cluster, rng)
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
async def _dark(cluster: Cluster, *members: Member) -> AsyncIterator[None]:
    await cluster.note_darkness(members)
    for member in members:
        member.darken()
    async with _anew(*members):
        yield


@fault("power cut of the writer", disk=True, powerless=1)
async def writer_dark(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _dark(cluster, cluster.writer()):
        yield


@fault("power cut of a follower", disk=True, powerless=1)
async def follower_dark(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _dark(cluster, follower_of(cluster, rng)):
        yield


@fault("power cut of the writer and a follower", disk=True, powerless=2)
async def two_dark(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _dark(cluster, cluster.writer(), follower_of(cluster, rng)):
        yield


@fault("power cut of all members", disk=True, powerless=3)
async def all_dark(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _dark(cluster, *rng.sample(cluster.members, len(cluster.members))):
        yield


# --- restarts of machines that lose nothing -------------------------------------------------------


@asynccontextmanager
async def _anew(*members: Member) -> AsyncIterator[None]:
    """Without a warning, and on another boot: whether anything is lost they cannot know."""
    for member in members:
        member.reboot()
    try:
        yield
    finally:
        for member in members:
            member.revive()


@fault("unclean restart of the writer's machine", disk=True)
async def writer_anew(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _anew(cluster.writer()):
        yield


@fault("unclean restart of a follower's machine", disk=True)
async def follower_anew(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _anew(follower_of(cluster, rng)):
        yield


@fault("unclean restart of all members' machines", disk=True)
async def all_anew(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    async with _anew(*rng.sample(cluster.members, len(cluster.members))):
        yield

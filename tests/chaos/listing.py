"""The list of what can befall a cluster. A fault is a block: what it does at the beginning, it
undoes at the end. Who is hit is decided when it begins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass

from tests.chaos.cluster import Cluster
from tests.chaos.machines import Member
from tests.support.cluster import network
from tests.support.faults import wrong_clock
from tests.support.stores import loop_disk

Block = AbstractContextManager[None] | AbstractAsyncContextManager[None]
Inject = Callable[[Cluster, random.Random], Block]
Who = Callable[[Cluster, random.Random], Sequence[object]]  # what a block gets beside


@dataclass(frozen=True)
class Fault:
    """``disk``: it needs a disk of the member's own. ``missing``: why it cannot be done here, empty
    when it can. ``powerless``: members that lose what they had not synced. ``fills``: there is so
    little room that old messages have to go. ``waits``: until the cluster has done something, so it
    must not begin while anything is wrong that only ends after it. ``groups``: it hits a member of
    a consumer group, ``later``: a client of messages that come later. ``clock``: members need
    clocks of their own. ``peaceful``: it is no excuse for anything.
    """

    name: str
    inject: Inject
    disk: bool = False
    missing: Callable[[], str] = str
    powerless: int = 0
    fills: bool = False
    waits: bool = False
    groups: bool = False
    later: bool = False
    peaceful: bool = False
    clock: bool = False

    def left_out(self) -> str:
        """Why it is left out here; empty when it is not."""
        disk = (network.why_not() or loop_disk.missing("ext4")) if self.disk else ""
        clock = wrong_clock.why_not() if self.clock else ""
        return disk or clock or self.missing()


FAULTS: dict[str, Fault] = {}


def fault(
    name: str,
    block: Callable[..., Block],
    who: Who,
    *,
    disk: bool = False,
    missing: Callable[[], str] = str,
    powerless: int = 0,
    fills: bool = False,
    waits: bool = False,
    groups: bool = False,
    later: bool = False,
    peaceful: bool = False,
    clock: bool = False,
) -> None:
    """Lists a fault: ``block`` gets the cluster, and the machines that are hit from ``who``."""

    def inject(cluster: Cluster, rng: random.Random) -> Block:
        return block(cluster, *who(cluster, rng))

    FAULTS[name] = Fault(
        name,
        inject,
        disk=disk,
        missing=missing,
        powerless=powerless,
        fills=fills,
        waits=waits,
        groups=groups,
        later=later,
        peaceful=peaceful,
        clock=clock,
    )


def nobody(cluster: Cluster, rng: random.Random) -> list[Member]:
    return []


def writer(cluster: Cluster, rng: random.Random) -> list[Member]:
    return [cluster.writer()]


def follower(cluster: Cluster, rng: random.Random) -> list[Member]:
    return [rng.choice(cluster.followers())]


def writer_and_follower(cluster: Cluster, rng: random.Random) -> list[Member]:
    return [cluster.writer(), rng.choice(cluster.followers())]


def everybody(cluster: Cluster, rng: random.Random) -> list[Member]:
    """All members, in any order."""
    return rng.sample(cluster.members, len(cluster.members))

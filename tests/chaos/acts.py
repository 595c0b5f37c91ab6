"""What is played: the fixed acts of ``make test-chaos``, and acts at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.chaos import disks, nodes, orders  # noqa: F401 - they list their faults
from tests.chaos.cluster import Size
from tests.chaos.listing import FAULTS, Fault
from tests.chaos.performance import Step

# A fault by name, how long it is held, and what happens then, before it ends.
Scene = tuple[str, float] | tuple[str, float, tuple[str, float]]


USUAL = Size(members=3, in_sync_min=1)


@dataclass(frozen=True)
class Act:
    """``shows``: what has to happen in it, as it is counted; else it does not do what it is for.
    ``groups``: consumer groups take part whose listeners fail. ``later``: clients of messages that
    come later.
    """

    scenes: tuple[Scene, ...]
    size: Size = USUAL
    shows: tuple[str, ...] = ()
    groups: bool = False
    later: bool = False


ACTS = {
    "network": Act(
        (
            ("a follower cut off", 5.0),
            ("one way: nothing from a follower to the writer", 5.0),
            ("30 % of a follower's packets lost", 4.0),
            ("30 % of the writer's packets lost", 4.0),
            ("the writer cut off from clients", 3.0),
            ("one way: nothing from the writer to its followers", 5.0),
            ("the writer cut off from the lease", 7.0),
            ("the lease away from everybody", 7.0),
            ("the API of the lease answers 503", 3.0),
            ("the lease deleted", 1.0),
            ("one way: the writer hears nothing", 5.0),
            ("the writer cut off from its followers", 6.0),
        ),
    ),
    "orders": Act(
        (
            ("all members stopped at once", 1.0),
            ("all members killed, the followers back before the writer", 3.0),
            ("unclean restart of a follower's machine", 1.0),
            ("unclean restart of all members' machines", 1.0),
            ("the writer back with an older view of the lease", 8.0),
            ("kill -9 of everything", 1.0),
            ("unclean restart of the writer's machine", 1.0),
        ),
    ),
    "lives": Act(
        (
            ("a topic deleted and made anew", 0.5),
            ("a topic deleted and made anew", 0.1, ("kill -9 of the writer", 8.0)),
            ("kill -9 of the writer", 0.1, ("a topic deleted and made anew", 0.1)),
            ("planned hand-over", 0.0, ("a topic deleted and made anew", 0.3)),
        ),
        shows=("acknowledged messages of deleted topics", "unplanned take-overs"),
    ),
    "pair": Act(
        (
            ("kill -9 of a follower", 6.0),
            ("power cut of a follower", 5.0),
            ("power cut of the writer", 9.0),
            ("power cut of all members", 1.0),
        ),
        size=Size(members=2, in_sync_min=2),
        shows=("refused: SLAVE_NOT_AVAILABLE",),
    ),
    "processes": Act(
        (
            ("kill -9 of a follower", 5.0),
            ("kill -9 of clients", 2.0),
            ("planned hand-over", 1.0),
            ("kill -9 of the writer", 3.0, ("kill -9 of clients", 1.0)),
            ("pause of a follower", 5.0),
            ("kill -9 of a name server", 2.0),
            ("kill -9 of the pullhold", 2.0),
            ("kill -9 of all name servers", 3.0),
            ("kill -9 of all members", 1.0),
        ),
        shows=("deliveries repeated",),
    ),
    "groups": Act(
        (
            ("kill -9 of a consumer", 3.0),
            ("a consumer cut off", 17.0),
            ("pause of a consumer", 17.0, ("kill -9 of the writer", 6.0)),
            ("planned hand-over", 1.0, ("kill -9 of a consumer", 0.5)),
            ("producers cut off", 5.0),
            ("pause of all producers", 3.0),
            ("the writer alone with clients", 12.0),
        ),
        shows=("ordered: dead letters", "retried: dead letters", "retried: duplicates"),
        groups=True,
    ),
    "later": Act(
        (
            ("kill -9 of a producer of transactions", 2.0),
            ("pause of a receiver", 12.0, ("kill -9 of the writer", 6.0)),
            ("the writer cut off", 12.0, ("kill -9 of a producer of transactions", 1.0)),
            ("kill -9 of a receiver", 3.0),
            ("pause of the writer", 10.0),
            ("planned hand-over", 1.0, ("kill -9 of a receiver", 0.5)),
            ("power cut of the writer", 9.0),
        ),
        shows=(
            "timed: recalled in time",
            "timed: recalled too late",
            "halves: left by their producers",
            "received: again",
            "questions: answered",
            "questions: messages consumed",
            "questions: QUESTION_TIMEOUT",
            "unplanned take-overs",
        ),
        later=True,
    ),
    "clocks": Act(
        (
            ("a follower's clock 600 s ahead", 4.0, ("kill -9 of the writer", 9.0)),
            ("the writer's clock 600 s ahead", 40.0),
            ("a follower's clock 600 s behind", 4.0, ("planned hand-over", 3.0)),
            ("the writer's clock 600 s behind", 10.0, ("kill -9 of the writer", 0.1)),
        ),
        size=Size(members=2, in_sync_min=1),
        shows=("timed: delivered", "unplanned take-overs", "planned hand-overs"),
        later=True,
    ),
    "joining": Act(
        (
            ("a consumer joins and leaves", 3.0),
            ("a consumer leaves and comes back", 1.0),
            ("a consumer joins and leaves", 1.0, ("a consumer leaves and comes back", 1.0)),
        ),
        shows=("ordered: dead letters", "retried: dead letters"),
        groups=True,
    ),
    "disks": Act(
        (
            ("slow disk of a follower", 4.0),
            ("full disk of a follower", 3.0),
            ("a bit flipped at a follower", 2.0),
            ("a page that a follower cannot read", 3.0),
            ("slow disk of the writer", 4.0),
            ("full disk of the writer", 3.0),
            ("EIO from a follower's disk", 2.0),
            ("EIO from the writer's disk", 2.0),
        ),
        shows=("refused: DISK_FULL", "damaged places found by verify"),
    ),
    "power": Act(
        (
            ("power cut of a follower", 2.0),
            ("power cut of the writer", 0.5),
            ("power cut of the writer", 9.0),
            # The followers still count, and have not got what came last.
            ("the writer cut off from its followers", 1.5, ("kill -9 of the writer", 9.0)),
            ("the writer cut off from its followers", 1.5, ("power cut of the writer", 9.0)),
            ("power cut of the writer and a follower", 9.0),
        ),
        size=Size(members=3, in_sync_min=2),
    ),
    "blackout": Act(
        (
            ("power cut of all members", 2.0),
            # Much has been copied then, and is on no disk.
            ("slow disks of all members", 2.0, ("power cut of all members", 2.0)),
        ),
    ),
}

RANDOM_SIZES = (Size(3, 1), Size(3, 2), Size(2, 1), Size(2, 2))
RANDOM_STEPS = 8
HOLD_S = (0.3, 12.0)
BESIDE_SHARE = 0.3  # of the steps get another fault while they last


def steps_of(act: str) -> list[Step]:
    return [_step(*scene) for scene in ACTS[act].scenes]


def _step(name: str, hold_s: float, *beside: tuple[str, float]) -> Step:
    return Step(FAULTS[name], hold_s, tuple(_step(*scene) for scene in beside))


def at_random(rng: random.Random, faults: Sequence[Fault]) -> list[Step]:
    """A run of steps. Never two at a time of those that take away what was not synced: what is
    promised then is another matter. Clocks are right: with name servers and members away nobody
    could tell which one is.
    """
    faults = [fault for fault in faults if not fault.clock]
    steps = []
    for _ in range(RANDOM_STEPS):
        fault = rng.choice([fault for fault in faults if fault.powerless <= 1])
        beside: tuple[Step, ...] = ()
        if rng.random() < BESIDE_SHARE:
            other = rng.choice([other for other in faults if not (other.disk or other.waits)])
            beside = (Step(other, rng.uniform(*HOLD_S)),)
        steps.append(Step(fault, rng.uniform(*HOLD_S), beside))
    return steps

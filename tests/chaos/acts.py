"""What is played: the fixed acts of ``make test-chaos``, and acts at random."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.chaos.faults import FAULTS, Fault
from tests.chaos.performance import Step

# A fault by name, how long it is held, and what happens then, before it ends.
Scene = tuple[str, float] | tuple[str, float, tuple[str, float]]

ACTS: dict[str, tuple[Scene, ...]] = {
    "processes": (
        ("kill -9 of a follower", 5.0),
        ("planned hand-over", 1.0),
        ("kill -9 of the writer", 3.0),
        ("pause of a follower", 5.0),
        ("kill -9 of a name server", 2.0),
        ("kill -9 of the pullhold", 2.0),
        ("kill -9 of all name servers", 3.0),
        ("pause of the writer", 10.0),
        ("kill -9 of all members", 1.0),
    ),
    "network": (
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
        ("the writer cut off", 12.0),
    ),
    "disks": (
        ("slow disk of a follower", 4.0),
        ("full disk of a follower", 3.0),
        ("a bit flipped at a follower", 2.0),
        ("slow disk of the writer", 4.0),
        ("full disk of the writer", 3.0),
        ("EIO from a follower's disk", 2.0),
        ("EIO from the writer's disk", 2.0),
    ),
    "power": (
        ("power cut of a follower", 2.0),
        ("power cut of the writer", 0.5),
        ("power cut of the writer", 9.0),
        # The followers still count, and have not got what came last.
        ("the writer cut off from its followers", 1.5, ("kill -9 of the writer", 9.0)),
        ("the writer cut off from its followers", 1.5, ("power cut of the writer", 9.0)),
    ),
    "blackout": (("power cut of all members", 2.0),),
}

RANDOM_STEPS = 8
HOLD_S = (0.3, 12.0)
BESIDE_SHARE = 0.3  # of the steps get another fault while they last


def steps_of(act: str) -> list[Step]:
    return [_step(*scene) for scene in ACTS[act]]


def _step(name: str, hold_s: float, *beside: tuple[str, float]) -> Step:
    return Step(FAULTS[name], hold_s, tuple(_step(*scene) for scene in beside))


def at_random(rng: random.Random, faults: Sequence[Fault]) -> list[Step]:
    """A run of steps. Never two at a time of those that take away what was not synced: what is
    promised then is another matter.
    """
    return [_random_step(rng, faults) for _ in range(RANDOM_STEPS)]


def _random_step(rng: random.Random, faults: Sequence[Fault]) -> Step:
    fault = rng.choice([fault for fault in faults if fault.powerless <= 1])
    beside: tuple[Step, ...] = ()
    if rng.random() < BESIDE_SHARE:
        other = rng.choice([other for other in faults if not other.disk])
        beside = (Step(other, rng.uniform(*HOLD_S)),)
    return Step(fault, rng.uniform(*HOLD_S), beside)

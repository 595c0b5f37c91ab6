from __future__ import annotations

import random

from tests.chaos.acts import ACTS, at_random, steps_of
from tests.chaos.listing import FAULTS

EVERY = list(FAULTS.values())


def test_the_acts_play_every_fault() -> None:
    assert {step.fault.name for act in ACTS for step in steps_of(act)} == FAULTS.keys()


def test_a_seed_gives_the_same_run() -> None:
    first, again, other = (at_random(random.Random(seed), EVERY) for seed in (1, 1, 2))
    assert first == again != other


def test_random_runs_play_every_fault_but_wrong_clocks_and_the_end_of_all_power() -> None:
    steps = [step for seed in range(100) for step in at_random(random.Random(seed), EVERY)]
    played = {fault.name for step in steps for fault in step.every()}
    assert played == {fault.name for fault in EVERY if fault.powerless <= 1 and not fault.clock}
    assert any(step.beside for step in steps)


def test_what_needs_a_disk_or_waits_is_never_beside_something_else() -> None:
    steps = [step for seed in range(100) for step in at_random(random.Random(seed), EVERY)]
    beside = [other.fault for step in steps for other in step.beside]
    assert not any(fault.disk or fault.waits for fault in beside)

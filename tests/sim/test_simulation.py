"""A share of the seeds of ``make test-sim``."""

from __future__ import annotations

import logging
from collections import Counter

import pytest

from cometmq.telemetry import fields
from tests.sim import many
from tests.sim.coverage import WANTED, missing
from tests.sim.many import SAID_MAX, outcome_of, outcomes
from tests.sim.run import play
from tests.sim.world import Machine, Notifier, Process, Violation, World

SEEDS = 60


@pytest.mark.timeout(480)
def test_nothing_is_lost_and_nobody_is_misled() -> None:
    counts: Counter[str] = Counter()
    broken = []
    for outcome in outcomes(range(SEEDS)):
        counts += outcome.counts
        if outcome.broken:
            broken.append(f"make test-sim SEED={outcome.seed}: {outcome.broken}")
    assert not broken
    assert not [what for what in WANTED if not counts[what]]
    assert not missing(counts, SEEDS)


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_a_single_run_breaks_no_promise(seed: int) -> None:
    """Runs that find a broken rule within seconds: `make mutants` plays each of them alone."""
    play(seed)


def test_a_seed_is_the_same_run_again() -> None:
    first: list[str] = []
    second: list[str] = []
    assert play(3, first.append) == play(3, second.append)
    assert first == second
    assert len(first) > 20


def test_too_little_of_something_is_told() -> None:
    counts = Counter(dict.fromkeys(WANTED, 100))
    assert not missing(counts, 2000)
    counts["truncations"] = 99
    assert missing(counts, 2000) == ["truncations: 99, not 100"]


def test_what_the_product_logged_is_told_with_a_broken_seed_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def played(seed: int) -> Counter[str]:
        for number in range(SAID_MAX + 1):
            logging.getLogger("broker").warning("locks lost", extra=fields(number=number))
        if seed:
            raise Violation("a timer came early")
        return Counter()

    monkeypatch.setattr(many, "play", played)
    good, bad = outcome_of(0), outcome_of(1)
    assert (good.broken, good.counts) == ("", {"warnings logged": SAID_MAX + 1})
    first, *said = bad.broken.splitlines()
    assert first == "Violation: a timer came early"
    assert len(said) == SAID_MAX
    assert said[-1].strip() == f"WARNING broker: locks lost {{'number': {SAID_MAX}}}"
    assert not any(isinstance(one, many.Said) for one in logging.getLogger().handlers)


def test_a_stopped_machine_does_later_what_came_meanwhile() -> None:
    world = World(1)
    machine = Machine(world)
    process = Process(machine)
    done: list[float] = []
    process.after(1.0, lambda: done.append(world.now))
    machine.stop()
    world.run(5.0)
    assert not done
    machine.go_on()
    assert done == [5.0]


def test_a_dead_process_does_nothing() -> None:
    world = World(1)
    process = Process(Machine(world))
    done: list[float] = []
    notifier = Notifier(process)

    async def wait() -> None:
        await notifier.heard(None)
        done.append(world.now)

    process.spawn(wait())
    process.alive = False
    notifier.notify()
    world.run(5.0)
    assert not done

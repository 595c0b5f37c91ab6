"""Thousands of stores whose processes die, and whose machines lose their power, at any call."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest

from tests.support.faults.trials import OPTIONS, Trial
from tests.support.stores.simulated_files import Fault, Gone, Kind


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Recovery speaks of each of thousands of crashes."""
    caplog.set_level(logging.CRITICAL)


def crash(root: Path, seed: int) -> None:
    """Three lives that end at any call, be it of the next one's recovery; after each a look at what
    is left, and a short life that ends between two calls.
    """
    trial = Trial(root, seed, OPTIONS[seed % len(OPTIONS)])
    for _ in range(3):
        kind = trial.rng.choice([Kind.DEATH, Kind.POWER_CUT])
        trial.fault = Fault(kind, trial.rng.randint(1, 400))
        try:
            trial.open()
            trial.live(trial.rng.randint(1, 40))
        except Gone:
            pass
        trial.stop(kind)
        trial.recover(power_cut=kind is Kind.POWER_CUT)
        trial.live(5)
        trial.stop(kind)
        trial.recover(power_cut=kind is Kind.POWER_CUT)
        trial.stop(kind)


def crash_often(root: Path, rng: random.Random, times: int) -> None:
    for _ in range(times):
        seed = rng.getrandbits(32)
        try:
            crash(root, seed)
        except BaseException as error:
            error.add_note(f"crash(root, {seed})")
            raise


@pytest.mark.parametrize("part", range(4))
def test_crashes_at_any_call(tmp_path: Path, rng: random.Random, part: int) -> None:
    crash_often(tmp_path, rng, 50)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(4))
def test_more_crashes_at_any_call(tmp_path: Path, rng: random.Random, part: int) -> None:
    crash_often(tmp_path, rng, 500)

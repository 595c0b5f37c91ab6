"""Many seeds, in as many processes as there are processors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from typing import NamedTuple

from tests.sim.run import play

SEEDS_AT_ONCE = 5  # given to a process


class Outcome(NamedTuple):
    """Of one seed. ``broken`` is empty when everything held."""

    seed: int
    counts: Counter[str]
    broken: str


def outcome_of(seed: int) -> Outcome:
    try:
        return Outcome(seed, play(seed), "")
    except Exception as error:  # a machine's own assertion is a broken promise too
        return Outcome(seed, Counter(), f"{type(error).__name__}: {error}")


def outcomes(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Of all of them, as they come."""
    with get_context("spawn").Pool(os.cpu_count()) as pool:
        yield from pool.imap_unordered(outcome_of, seeds, SEEDS_AT_ONCE)

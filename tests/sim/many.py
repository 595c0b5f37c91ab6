"""Many seeds, in as many processes as there are processors."""

from __future__ import annotations

import logging
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple

from tests.sim.run import play

SEEDS_AT_ONCE = 5  # given to a process
SAID_MAX = 30  # of the last lines of the product's log


class Outcome(NamedTuple):
    """Of one seed. ``broken`` is empty when everything held; else it ends with what the product's
    log said last.
    """

    seed: int
    counts: Counter[str]
    broken: str


class Said(logging.Handler):
    """Keeps what the product logs: warnings of faults that were meant are no news."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.count = 0
        self.last: deque[str] = deque(maxlen=SAID_MAX)

    def emit(self, record: logging.LogRecord) -> None:
        # What the event does not tell itself.
        values = "" if hasattr(record, "event") else getattr(record, "fields", "")
        self.count += 1
        self.last.append(f"{record.levelname} {record.name}: {record.getMessage()} {values}")


@contextmanager
def kept() -> Iterator[Said]:
    """What is logged goes here as long as the block lasts."""
    said = Said()
    logging.getLogger().addHandler(said)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(said)


def _pass_over_elections() -> None:
    """In a process of the pool: warnings of elections would be most of what is kept."""
    logging.getLogger("services.haslave.elector").setLevel(logging.ERROR)


def outcome_of(seed: int) -> Outcome:
    with kept() as said:
        try:
            counts = play(seed)
        except Exception as error:  # a machine's own assertion is a broken promise too
            broken = "\n  ".join([f"{type(error).__name__}: {error}", *said.last])
            return Outcome(seed, Counter(), broken)
        counts["warnings logged"] += said.count
        return Outcome(seed, counts, "")


def outcomes(seeds: Iterable[int]) -> Iterator[Outcome]:
    """Of all of them, as they come."""
    with get_context("spawn").Pool(os.cpu_count(), _pass_over_elections) as pool:
        yield from pool.imap_unordered(outcome_of, seeds, SEEDS_AT_ONCE)

"""What the tests of faults have done to stores, for the sum at the end of a run."""

from __future__ import annotations

from collections import Counter

TALLY: Counter[str] = Counter()


def count(what: str, number: int = 1) -> None:
    TALLY[what] += number


def lines() -> list[str]:
    """One line for each thing that was counted; none when nothing was."""
    width = max((len(f"{number:,}") for number in TALLY.values()), default=0)
    return [f"{number:>{width},} {what}" for what, number in TALLY.items()]

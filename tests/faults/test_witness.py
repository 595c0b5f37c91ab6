"""Random lives of stores, random damage, and what the store says of it obeyed word by word: nothing
that was synced is lost without being named, every refusal leaves the folder as it was and leads on.

``python -m tests.support.faults.witness SEED`` tells one life.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.faults import tally
from tests.support.faults.witness import PROBLEMS, play

LIVES = 2000
AT_ONCE = 125


def must_keep_their_word(seeds: range) -> None:
    failed: list[str] = []
    kinds: set[str] = set()
    counted: Counter[str] = Counter()
    for seed in seeds:
        story = play(seed)
        counted.update(story.counts())
        kinds.update(story.kinds)
        failed += [f"{seed} ({', '.join(story.kinds)}): {k}: {w}" for k, w in story.problems]
    for what, number in counted.items():
        tally.count(f"witness: {what}", number)
    assert not failed, "\n".join(failed)
    assert counted["lives"] < 50 or len(kinds) >= 40, kinds
    assert not any(counted[problem] for problem in PROBLEMS)


def test_what_was_promised_is_there_or_named() -> None:
    must_keep_their_word(range(1, 41))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, LIVES, AT_ONCE))
def test_many_lives(first: int) -> None:
    must_keep_their_word(range(first, first + AT_ONCE))


@pytest.mark.slow
def test_the_life_of_the_seed(request: pytest.FixtureRequest) -> None:
    """``make test-faults SEED=n`` plays life n, too."""
    seed: int = request.config.getoption("--seed")
    must_keep_their_word(range(seed, seed + 1))


def test_a_message_that_damage_put_into_another_topic_costs_no_other_one() -> None:
    """Repair gave up good records, one after the other, and then found no way on."""
    must_keep_their_word(range(1521, 1522))

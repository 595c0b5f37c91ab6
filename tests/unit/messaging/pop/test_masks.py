"""Sets of messages as bits, and as lengths."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.messaging.pop.masks import (
    dense,
    lowest,
    mask_of,
    mask_of_offsets,
    offsets_of,
    runs_of,
    shifted,
    spans_of,
)

SETS = st.sets(st.integers(0, 300), min_size=1)


def mask(numbers: set[int]) -> int:
    return sum(1 << number for number in numbers)


@given(SETS, st.integers(0, 400))
def test_a_mask_is_its_set(numbers: set[int], count: int) -> None:
    assert list(offsets_of(mask(numbers), 7)) == [7 + n for n in sorted(numbers)]
    assert list(offsets_of(lowest(mask(numbers), count), 0)) == sorted(numbers)[:count]
    from_first = mask({n - min(numbers) for n in numbers})
    assert mask_of_offsets([7 + n for n in sorted(numbers)]) == (7 + min(numbers), from_first)
    assert mask_of(runs_of(from_first)) == from_first
    spans = list(spans_of(from_first, 0))
    assert len(runs_of(from_first)) == 2 * len(spans) - 1
    assert shifted(from_first, 9, 4) == from_first << 5
    assert shifted(from_first, 4, 9) == mask({n - min(numbers) - 5 for n in numbers} - below(5))


def below(count: int) -> set[int]:
    return set(range(-count, 0))


def test_a_dense_set_is_one_number() -> None:
    assert runs_of(dense(32)) == [32]
    assert runs_of(0b1011) == [2, 1, 1]


@pytest.mark.parametrize("runs", [[], [1, 1], [0], [1, 0, 1]])
def test_lengths_that_describe_no_set_are_refused(runs: list[int]) -> None:
    with pytest.raises(ValueError, match=r"lengths|empty"):
        mask_of(runs)

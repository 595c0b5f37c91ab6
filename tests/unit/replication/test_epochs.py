"""Lists of epochs: numbers are used once, cuts take the later ones away."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.replication.epochs import epoch_at, next_epoch, opened, trimmed

EPOCHS = [(1, 0), (2, 500), (5, 500), (6, 900)]


def test_the_next_epoch_is_above_everything_seen() -> None:
    assert next_epoch([]) == 1
    assert next_epoch(EPOCHS) == 7
    assert next_epoch(EPOCHS, floor=9) == 10
    assert next_epoch(EPOCHS, floor=3) == 7


@pytest.mark.parametrize(("epoch", "start"), [(6, 900), (5, 1000), (7, 899)])
def test_an_epoch_is_used_once_and_begins_at_the_end(epoch: int, start: int) -> None:
    with pytest.raises(AssertionError):
        opened(EPOCHS, epoch, start)


def test_an_epoch_without_bytes_is_kept() -> None:
    assert opened(EPOCHS, 7, 900)[-2:] == [(6, 900), (7, 900)]


def test_a_cut_takes_the_epochs_that_began_above_it() -> None:
    assert trimmed(EPOCHS, 899) == EPOCHS[:3]
    assert trimmed(EPOCHS, 900) == EPOCHS
    assert trimmed(EPOCHS, 0) == EPOCHS[:1]


@given(st.lists(st.integers(0, 5), max_size=6), st.integers(0, 40))
def test_each_byte_belongs_to_the_epoch_that_wrote_it(lengths: list[int], offset: int) -> None:
    writers: list[int] = []
    epochs: list[tuple[int, int]] = []
    for length in lengths:
        epoch = next_epoch(epochs)
        epochs = opened(epochs, epoch, len(writers))
        writers += [epoch] * length
    if offset < len(writers):
        assert epoch_at(epochs, offset) == writers[offset]


def test_bytes_older_than_the_list_have_no_epoch() -> None:
    assert epoch_at([], 0) == 0
    assert epoch_at([(3, 100)], 99) == 0

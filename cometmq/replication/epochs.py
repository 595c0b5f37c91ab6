"""The writer's incarnations: which epoch wrote which bytes of the log.

A list of (epoch, start offset), oldest first; the bytes from one start to the next belong to that
epoch. Both numbers grow: an epoch is one more at every opening for writing, a start is the end of
the log then. Pure; the file that holds the list is the store's (``docs/format/epochs.md``).
"""

from __future__ import annotations

from collections.abc import Sequence

Epoch = tuple[int, int]  # epoch, start offset


def next_epoch(epochs: Sequence[Epoch], floor: int = 0) -> int:
    """The epoch of the next opening: above all seen here and above ``floor``, seen by others.

    Ask before trimming: a number whose bytes were cut off was used all the same and must not come
    back.
    """
    return max(epochs[-1][0] if epochs else 0, floor) + 1


def opened(epochs: Sequence[Epoch], epoch: int, start: int) -> list[Epoch]:
    """The list after ``epoch`` began to write at log offset ``start``."""
    if epochs:
        assert epoch > epochs[-1][0], "an epoch is used once"
        assert start >= epochs[-1][1], "an epoch begins where the log ends"
    return [*epochs, (epoch, start)]


def trimmed(epochs: Sequence[Epoch], end: int) -> list[Epoch]:
    """The list after the log was cut at ``end``: epochs that began above it are gone."""
    return [entry for entry in epochs if entry[1] <= end]


def epoch_at(epochs: Sequence[Epoch], offset: int) -> int:
    """The epoch that wrote the byte at ``offset``; 0 when it is older than the list."""
    for epoch, start in reversed(epochs):
        if start <= offset:
            return epoch
    return 0

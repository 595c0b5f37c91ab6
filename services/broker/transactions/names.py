"""Half messages and their ends, as producers name them."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from cometmq.errors import NoPermission, TransactionNotFound
from cometmq.format import halves
from cometmq.messaging.transactions import Resolution


class HalfName(NamedTuple):
    """A half as its producer names it."""

    half_offset: int
    log_offset: int
    transaction_id: str


class End(NamedTuple):
    """The end that a producer wants for a transaction."""

    half: HalfName
    resolution: Resolution


class EndRun(NamedTuple):
    """The same, for halves that follow each other in the half queue. Their ids count on from the
    first one's. ``log_offsets`` (int64): of all of them.
    """

    first: HalfName
    log_offsets: array[int]
    resolution: Resolution

    @property
    def offsets(self) -> range:
        """Of the halves."""
        first = self.first.half_offset
        return range(first, first + len(self.log_offsets))

    def name_of(self, index: int) -> HalfName:
        """One of the halves."""
        if not index:
            return self.first
        split = halves.split_id(self.first.transaction_id)
        assert split is not None, self.first
        stream, counter = split
        offset, place = self.first.half_offset + index, self.log_offsets[index]
        return HalfName(offset, place, f"{stream}{counter + index:08X}")

    def ends(self, skipped: int = 0) -> list[End]:
        """One for each half, but for so many of the first."""
        indexes = range(skipped, len(self.log_offsets))
        return [End(self.name_of(index), self.resolution) for index in indexes]


def check_owner(group: str, owner: str) -> None:
    """NoPermission unless the half belongs to the producer group."""
    if group != owner:
        raise NoPermission(f"the half message belongs to another producer group than {group}")


def not_found(name: HalfName) -> TransactionNotFound:
    """No such half is here."""
    return TransactionNotFound(
        f"there is no half message {name.half_offset} at {name.log_offset} with the id "
        f"{name.transaction_id[:100]!r} here"
    )

"""Half messages that were stored together, and what became of halves: columns for many of them, a
tuple for one. Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from cometmq.format.halves import GIVEN_UP_TOPIC

# Log offset and size of its record, producer group. No class of its own: the collector of garbage
# leaves such a tuple alone.
OpenHalf = tuple[int, int, str]


class HalfRun:
    """Halves of one producer group that follow each other in the half queue, from offset ``first``
    on, and end to end in the log, as they were sent. ``places``: the log offsets of their records
    (int64); ``end_place``: behind the last record.
    """

    __slots__ = ("end", "end_place", "first", "group", "open_count", "places", "stored_ms")

    def __init__(
        self, first: int, places: array[int], end_place: int, group: str, stored_ms: int = 0
    ) -> None:
        self.first = first
        self.end = first + len(places)
        self.places = places
        self.end_place = end_place
        self.group = group
        self.stored_ms = stored_ms
        self.open_count = len(places)  # its table counts

    def at(self, offset: int) -> OpenHalf:
        """One of the halves."""
        place = self.places[offset - self.first]
        return place, self.end_of(offset) - place, self.group

    def end_of(self, offset: int) -> int:
        """Where the record of a half ends in the log."""
        behind = offset + 1 - self.first
        return self.places[behind] if behind < len(self.places) else self.end_place

    def pieces(self, offsets: range, bytes_max: int) -> Iterator[range]:
        """Pieces of ``offsets`` in their order: their records have so many bytes at most, or are
        one.
        """
        first = offsets.start
        while first < offsets.stop:
            at = first - self.first
            limit = self.places[at] + bytes_max
            # Behind all records that begin below the limit; the last of them may end beyond it.
            behind = self.first + bisect_right(self.places, limit, at + 1)
            if self.end_of(behind - 1) > limit:
                behind -= 1
            end = min(max(behind, first + 1), offsets.stop)
            yield range(first, end)
            first = end


class EndedHalf(NamedTuple):
    """The outcome of a half whose record is at ``half_log_offset``: the record that was made of
    it. ``queue_offset`` -1: none was, it is rolled back.
    """

    half_log_offset: int
    group: str
    topic: str = ""
    queue_id: int = 0
    queue_offset: int = -1
    log_offset: int = 0

    @property
    def is_given_up(self) -> bool:
        return self.topic == GIVEN_UP_TOPIC

    @property
    def is_committed(self) -> bool:
        return self.queue_offset >= 0 and not self.is_given_up


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The outcome of halves that follow each other from offset ``first`` on, as :class:`EndedHalf`
    has it for one. What was made of them lies one behind the other in a queue: ``queue_offset`` is
    that of the first, ``log_offsets`` (int64) has one for each; empty: they are rolled back.
    """

    first: int
    half_log_offsets: array[int]
    group: str
    topic: str = ""
    queue_id: int = 0
    queue_offset: int = -1
    log_offsets: array[int] = field(default_factory=partial(array, "q"))

    @property
    def offsets(self) -> range:
        """Of the halves."""
        return range(self.first, self.first + len(self.half_log_offsets))

    def at(self, offset: int) -> EndedHalf:
        """The outcome of one of them."""
        index = offset - self.first
        place = self.half_log_offsets[index]
        if not self.log_offsets:
            return EndedHalf(place, self.group)
        made = self.queue_offset + index, self.log_offsets[index]
        return EndedHalf(place, self.group, self.topic, self.queue_id, *made)

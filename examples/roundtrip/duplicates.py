"""Lines that came more than once, and why. Pure.

A line that came twice from the same place of a queue was *delivered again*: the group had not
committed it. From another place it was *sent again*: its producer did not learn that it was stored.
When the writer is killed both may happen, and neither may happen at any other time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from examples.roundtrip.sources import SourceFile
from examples.roundtrip.spool import Arrival

QUEUE_BITS, OFFSET_BITS = 16, 40  # of a place; above them the number of the broker group


class Stored(NamedTuple):
    """Where and when a message was stored."""

    place: int  # see Sightings
    stored_ms: int


class Duplicate(NamedTuple):
    """A line's later arrival beside its first."""

    first: Stored
    later: Stored
    received_ms: int


class Why(Enum):
    """Why a line came more than once."""

    SENT_AGAIN = 1  # stored before the kill without an acknowledgement, and once more after it
    DELIVERED_AGAIN = 2  # received once more after the kill
    UNKNOWN = 3


_NOWHERE = (array("Q"), array("Q"))


class Sightings:
    """Where each line was seen first: two numbers a line, whatever it holds."""

    def __init__(self, files: Iterable[SourceFile]) -> None:
        self.duplicates: list[Duplicate] = []
        self._groups: dict[str, int] = {}  # numbers from 1
        self._first = {
            file.name: (array("Q", bytes(8 * size)), array("Q", bytes(8 * size)))
            for file in files
            for size in (file.messages + 1,)  # lines count from 1
        }

    def note(self, arrival: Arrival) -> None:
        """A line has come; one that belongs to no file is not looked at."""
        line = arrival.line_number
        places, times = self._first.get(arrival.name, _NOWHERE)
        if line >= len(places):
            return
        place = self.place_of(arrival)
        if places[line]:
            before = Stored(places[line], times[line])
            now = Stored(place, arrival.stored_ms)
            self.duplicates.append(Duplicate(before, now, arrival.received_ms))
        else:
            places[line], times[line] = place, arrival.stored_ms

    def place_of(self, arrival: Arrival) -> int:
        """A place in one of all queues as a number above 0."""
        group = self._groups.get(arrival.broker_group)
        if group is None:
            group = self._groups[arrival.broker_group] = len(self._groups) + 1
        return ((group << QUEUE_BITS) + arrival.queue_id << OFFSET_BITS) + arrival.queue_offset

    def group_of(self, place: int) -> str:
        """The broker group of :meth:`place_of`."""
        return list(self._groups)[(place >> QUEUE_BITS + OFFSET_BITS) - 1]

    def explained(self, broker_group: str, killed_ms: int) -> Explained:
        """The duplicates, by what the death of that group's writer explains."""
        found = Counter(self._why(one, broker_group, killed_ms) for one in self.duplicates)
        return Explained(found[Why.SENT_AGAIN], found[Why.DELIVERED_AGAIN], found[Why.UNKNOWN])

    def _why(self, duplicate: Duplicate, broker_group: str, killed_ms: int) -> Why:
        older, newer = sorted((duplicate.first, duplicate.later), key=lambda one: one.stored_ms)
        if self.group_of(older.place) != broker_group:
            return Why.UNKNOWN
        if duplicate.first.place == duplicate.later.place:
            return Why.DELIVERED_AGAIN if duplicate.received_ms >= killed_ms else Why.UNKNOWN
        return Why.SENT_AGAIN if older.stored_ms <= killed_ms <= newer.stored_ms else Why.UNKNOWN


@dataclass(frozen=True, slots=True)
class Explained:
    """How many lines came more than once, and why."""

    sent_again: int = 0
    delivered_again: int = 0
    unexplained: int = 0

    @property
    def count(self) -> int:
        return self.sent_again + self.delivered_again + self.unexplained

    def sentences(self) -> list[str]:
        """For a person; none when no line came twice."""
        found = []
        if self.sent_again:
            found.append(
                f"Sent again: {self.sent_again:,} lie twice in the log. The "
                "killed writer had stored them, and copied them to its slave, but its producers "
                "had no answer yet and sent them again. Their unique ids are the same."
            )
        if self.delivered_again:
            found.append(
                f"Delivered again: {self.delivered_again:,} came twice because the group's commit "
                "had not reached the slave when the writer was killed."
            )
        return found

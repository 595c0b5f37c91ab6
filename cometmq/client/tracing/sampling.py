"""Sampling of traced messages by their ids: producers and consumers choose the same ones without a
mark in the message. Pure.
"""

from __future__ import annotations

from zlib import crc32

COUNTER_DIGITS = 8  # at the end of an id of ours
ID_DIGITS = 34


class Sampling:
    """One message of ``period``; 0 = none, 1 = each."""

    def __init__(self, period: int) -> None:
        self.period = period

    def indexes(self, stream: str, first_counter: int, count: int) -> range:
        """Of ``count`` messages whose ids follow each other, those that are chosen: their places.
        ``stream`` is what their ids begin with.
        """
        if not self.period:
            return range(0)
        first = -(first_counter + crc32(stream.encode())) % self.period
        return range(first, count, self.period)

    def chooses(self, unique_id: str) -> bool:
        """Whether the message is chosen. Ids of other clients are chosen by all of their text."""
        if self.period < 2:
            return bool(self.period)
        stream, counter = unique_id[:-COUNTER_DIGITS], unique_id[-COUNTER_DIGITS:]
        number = 0
        if len(unique_id) == ID_DIGITS:
            try:
                number = int(counter, 16)
            except ValueError:
                stream = unique_id
        else:
            stream = unique_id
        return (number + crc32(stream.encode())) % self.period == 0


def is_wanted(mark: str, is_sampled: bool) -> bool:
    """Whether a message is traced; ``mark``: its property TRACE_ON, else empty."""
    return mark == "true" or (is_sampled and mark != "false")

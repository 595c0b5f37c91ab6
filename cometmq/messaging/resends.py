"""Which stored messages were sent again, and to whom: none is sent twice unnoticed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cometmq.errors import LimitExceeded
from cometmq.format import properties, timers
from cometmq.format.halves import GIVEN_UP_TOPIC
from cometmq.format.properties import ORIGIN_MESSAGE_ID
from cometmq.format.record import Record
from cometmq.format.relay import with_properties
from cometmq.messaging.intervals import Interval, add_interval, holds_any
from cometmq.model import DLQ_PREFIX

INTERVALS_MAX = 1_000  # of one queue and target
INTERVALS_IN_ALL_MAX = 100_000


class ResentKey(NamedTuple):
    """A queue whose messages were sent again, and the group that got them; no group: its topic."""

    topic: str
    queue_id: int
    group: str


class ResentTable:
    """The marks of a broker group: offsets of messages sent again, by queue and target."""

    def __init__(self) -> None:
        self._marks: dict[ResentKey, tuple[Interval, ...]] = {}
        self.interval_count = 0

    def __iter__(self) -> Iterator[tuple[ResentKey, tuple[Interval, ...]]]:
        """All marks, in order of their keys."""
        return iter([(key, self._marks[key]) for key in sorted(self._marks)])

    def of(self, key: ResentKey) -> tuple[Interval, ...]:
        """What was sent again."""
        return self._marks.get(key, ())

    def holds(self, key: ResentKey, offset: int) -> bool:
        """Whether a message was sent again."""
        return holds_any(self.of(key), offset, offset + 1)

    def plan(self, key: ResentKey, offsets: Sequence[int], low: int) -> tuple[Interval, ...]:
        """What is to be put so that these messages count as sent again, too. Marks of messages
        below ``low``, which are gone, go. Above ``INTERVALS_MAX`` the messages of the lowest gap
        count as sent again; but halves that were given up can be resumed in no other way, so for
        these LimitExceeded is raised.
        """
        is_exact = key.topic == GIVEN_UP_TOPIC
        most = INTERVALS_MAX + len(offsets) * is_exact
        planned = [Interval(*one) for one in self.of(key) if one.end > low]
        for offset in sorted(offsets):
            planned = add_interval(planned, offset, offset + 1, most)
        if len(planned) > INTERVALS_MAX:
            raise LimitExceeded(
                f"half messages that were resumed already lie in {INTERVALS_MAX} separate runs: "
                "resume those between two of them too, or all"
            )
        more = len(planned) - len(self.of(key))
        if more > 0 and self.interval_count + more > INTERVALS_IN_ALL_MAX:
            raise LimitExceeded(
                f"this broker group knows {self.interval_count} runs of messages that were sent "
                f"again, {INTERVALS_IN_ALL_MAX} are allowed; they go with their messages"
            )
        return tuple(planned)

    def put(self, key: ResentKey, intervals: tuple[Interval, ...]) -> None:
        """Replace the marks of a queue and target; none: forget them."""
        self.interval_count += len(intervals) - len(self._marks.pop(key, ()))
        if intervals:
            self._marks[key] = intervals

    def forget_topic(self, topic: str) -> None:
        """A topic is gone, with its messages."""
        for key in [key for key in self._marks if key.topic == topic]:
            self.put(key, ())

    def forget(self, group: str, topic: str) -> None:
        """A group has left a topic."""
        for key in [key for key in self._marks if (key.topic, key.group) == (topic, group)]:
            self.put(key, ())

    def forget_group(self, group: str) -> None:
        """A group is gone. Its dead letters stay, and so do their marks."""
        for key in [key for key in self._marks if key.group == group]:
            if not key.topic.startswith(DLQ_PREFIX):
                self.put(key, ())


def is_copy(found: Record) -> bool:
    """Whether a message of a user's topic is one that was sent again."""
    return ORIGIN_MESSAGE_ID in found.properties


def copy_properties(source: Record, origin: str) -> bytes:
    """Of a message that its topic gets again, without what named its delay. ``origin``: the id of
    the source; that of the first one stays.
    """
    if is_copy(source):
        return source.raw_properties
    first = properties.encode({ORIGIN_MESSAGE_ID: origin})
    return with_properties(source.raw_properties, first, timers.PROPERTIES)

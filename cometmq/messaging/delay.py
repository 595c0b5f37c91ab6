"""Delayed messages: which are due, and how far each level was delivered.

A message of a delay level lies in the level's queue of the schedule topic until it is due, in the
order of its due time; then the broker appends it to its own topic. RocketMQ's rules and
levels (``cometmq/format/delayed.py``). Pure: clocks are parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from cometmq.format import delayed, queueunit
from cometmq.model import DELAY_LEVEL_MAX


class Now(NamedTuple):
    """One look at both clocks."""

    wall_ms: int
    monotonic_s: float


class LevelProgress:
    """How far one level was delivered, and what of the rest is due.

    A unit is due when the wall clock has reached the time that it names. If that clock went back,
    a message waits as long as its level says from when it was first seen, and is late, not lost.
    Invariant: ``offset`` never goes back.
    """

    def __init__(self, level: int, offset: int) -> None:
        self.offset = offset  # of the first message that is not delivered
        self._delay_s = delayed.delay_ms(level) / 1000
        # All messages before this queue offset had been stored at this time.
        self._seen_offset = offset
        self._seen_s = 0.0

    def due_count(self, units: bytes, end: int, now: Now) -> tuple[int, float]:
        """How many of ``units``, which begin at :attr:`offset`, are due, and how many seconds to
        wait until the next is; 0 while there may be more. ``end``: the end of the queue.
        """
        if self._seen_offset <= self.offset:
            self._seen_offset, self._seen_s = end, now.monotonic_s
        waited = self._seen_offset if now.monotonic_s - self._seen_s >= self._delay_s else 0
        count = 0
        for _, _, due_ms in queueunit.iterate(units):
            if due_ms > now.wall_ms and self.offset + count >= waited:
                rest_s = self._seen_s + self._delay_s - now.monotonic_s
                wait_s = (due_ms - now.wall_ms) / 1000
                return count, min(wait_s, rest_s) if rest_s > 0 else wait_s
            count += 1
        return count, 0.0

    def delivered(self, count: int) -> None:
        """The next ``count`` messages are done."""
        assert count >= 0
        self.offset += count


class LevelDrops:
    """Messages of delay levels that are not delivered: their topic was deleted since they were
    stored, and created again. Never more topics than there are.
    """

    def __init__(self) -> None:
        self.skips: Mapping[int, int] = {}  # no message of a level is recalled
        # By the topic, then by the level: messages of before, which lie below this offset.
        self.dropped: dict[str, dict[int, int]] = {}

    def drop_older(self, topic: str, ends: Mapping[int, int]) -> None:
        """A topic is created: its messages before the end of their level are dropped."""
        self.dropped[topic] = dict(ends)

    def forget_topic(self, topic: str) -> None:
        """A topic is deleted: nothing is delivered to it."""
        self.dropped.pop(topic, None)

    def is_dropped(self, topic: str, queue_id: int, offset: int) -> bool:
        """Whether the message for the topic at this offset of a level's queue is dropped."""
        return offset < self.dropped.get(topic, {}).get(delayed.level_of(queue_id), 0)

    def reached(self, offsets: Mapping[int, int]) -> None:
        """The levels are delivered up to these offsets."""
        self._keep(lambda level, end: end if end > offsets.get(level, 0) else 0)

    def limit(self, end_of: Callable[[int], int]) -> None:
        """The queues of the levels end there: after damage an end may be lost, and others get these
        offsets.
        """
        self._keep(lambda level, end: min(end, end_of(level)))

    def _keep(self, end_now: Callable[[int, int], int]) -> None:
        kept: dict[str, dict[int, int]] = {}
        for topic, ends in self.dropped.items():
            for level, end in ends.items():
                if now := end_now(level, end):
                    kept.setdefault(topic, {})[level] = now
        self.dropped = kept


class DelayProgress:
    """All levels. ``written`` is what the state in the log knows. Levels that the list has no more
    keep their place: it may get them back.
    """

    def __init__(self, offsets: Mapping[int, int], end_of: Callable[[int], int]) -> None:
        """``end_of``: level → end of its queue. A progress beyond the end begins there: RocketMQ
        waits for ever then (#1472).
        """
        level_count = delayed.level_count()
        self.levels = {
            level: LevelProgress(level, min(offsets.get(level, 0), end_of(level)))
            for level in range(1, level_count + 1)
        }
        self._gone = {
            level: min(offset, end_of(level))
            for level, offset in offsets.items()
            if level_count < level <= DELAY_LEVEL_MAX
        }
        self.written = dict(offsets)

    def reached(self, queue_id: int, queue_offset: int) -> None:
        """The log has the delivered form of this message of a schedule queue."""
        level = self.levels.get(delayed.level_of(queue_id))
        if level is not None and level.offset <= queue_offset:
            level.delivered(queue_offset + 1 - level.offset)

    @property
    def offsets(self) -> dict[int, int]:
        """The levels that have delivered something."""
        now = {number: level.offset for number, level in self.levels.items() if level.offset}
        return now | self._gone

    def waiting_ends(self, end_of: Callable[[int], int]) -> dict[int, int]:
        """The ends of the queues of those levels in which messages wait, by what the log knows."""
        ends = {number: end_of(number) for number in self.levels}
        return {number: end for number, end in ends.items() if self.written.get(number, 0) < end}

    def __iter__(self) -> Iterator[tuple[int, LevelProgress]]:
        return iter(self.levels.items())

"""When a batch is acknowledged and when consumers see it.

A topic's durability class is the set of conditions that its messages ask for. Positions are log
offsets: all bytes below them fulfil the condition (``docs/concepts.md``). Asynchronous
topics are acknowledged when appended and seen when flushed; every other class is acknowledged and
seen at the minimum of all that it demands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import IntFlag
from typing import NamedTuple, Protocol

from cometmq.model import FlushMode, QueueKey, ReplicationMode, TopicConfig


class DurabilityClass(IntFlag):
    """Conditions as bits, so that a union of demands is ``|``. Zero: asynchronous."""

    ASYNC = 0
    FLUSHED = 1  # on the writer's disk
    REPLICATED = 2  # in the page cache of every in-sync member
    REPLICATED_FLUSHED = 4  # on the disk of every in-sync member

    @classmethod
    def of(cls, flush: FlushMode, replication: ReplicationMode) -> DurabilityClass:
        """The class of a topic with these settings."""
        return _OF[flush, replication]

    @classmethod
    def of_topic(cls, config: TopicConfig) -> DurabilityClass:
        """What the topic's own messages ask for."""
        return cls.of(config.flush_mode, config.replication_mode)


_OF_FLUSH = {FlushMode.ASYNC: DurabilityClass.ASYNC, FlushMode.SYNC: DurabilityClass.FLUSHED}
_OF_REPLICATION = {
    ReplicationMode.ASYNC: DurabilityClass.ASYNC,
    ReplicationMode.APPENDED: DurabilityClass.REPLICATED,
    ReplicationMode.FLUSHED: DurabilityClass.REPLICATED_FLUSHED,
}
_OF = {
    (flush, replication): _OF_FLUSH[flush] | _OF_REPLICATION[replication]
    for flush in FlushMode
    for replication in ReplicationMode
}
REPLICATED = DurabilityClass.REPLICATED | DurabilityClass.REPLICATED_FLUSHED
STRICTEST = DurabilityClass.FLUSHED | REPLICATED


def union(demands: Iterable[DurabilityClass]) -> DurabilityClass:
    """The class of a whole batch: all that any of its segments demands."""
    result = DurabilityClass.ASYNC
    for demand in demands:
        if demand is not result:  # flags cost more than all that a small batch asks of them
            result |= demand
    return result


class HighWatermarks(NamedTuple):
    """Positions that conditions are measured by: what consumers may see of each class follows."""

    flushed: int = 0  # on the writer's disk
    replicated: int = 0  # in the page cache of every in-sync member
    replicated_flushed: int = 0  # on the disk of every in-sync member

    def visible(self, demands: DurabilityClass) -> int:
        """A record that ends at or below this position is seen by consumers. Even an asynchronous
        topic's are seen only when a crash of the process can no longer take them back.
        """
        return self.flushed if not demands else self.least(demands)

    def least(self, demands: DurabilityClass) -> int:
        """The lowest of the positions that are demanded, at least one."""
        return min([self[place] for place in _PLACES[demands]])

    def raised(self, other: HighWatermarks) -> HighWatermarks:
        """Each position at its highest."""
        return HighWatermarks(*map(max, self, other))

    def within(self, end: int) -> HighWatermarks:
        """The same marks, none above ``end``."""
        return HighWatermarks(*(min(mark, end) for mark in self))


NO_WATERMARKS = HighWatermarks()
_CONDITIONS = (
    DurabilityClass.FLUSHED,
    DurabilityClass.REPLICATED,
    DurabilityClass.REPLICATED_FLUSHED,
)
# By class, the places in HighWatermarks of what it demands: asked for every
# batch and every answer of a follower, when flags would cost more than all the rest.
_PLACES = tuple(
    tuple(place for place, condition in enumerate(_CONDITIONS) if condition & demands)
    for demands in range(max(DurabilityClass) * 2)
)


class Watermarks:
    """How far the log has come.

    Invariants: flushed ≤ appended, replicated_flushed ≤ replicated ≤ appended, replicated_flushed ≤
    flushed, and none ever goes back.
    """

    __slots__ = ("appended", "marks")

    def __init__(self, appended: int = 0, flushed: int = 0) -> None:
        """Nothing is known of followers at first."""
        assert 0 <= flushed <= appended
        self.appended = appended  # end of the log
        self.marks = HighWatermarks(flushed)

    @property
    def flushed(self) -> int:
        """Log offset up to which the log is on the writer's disk."""
        return self.marks.flushed

    def append_to(self, position: int) -> None:
        """The log now ends at ``position``."""
        assert position >= self.appended, "the log never shrinks within an epoch"
        self.appended = position

    def flush_to(self, position: int) -> None:
        """The log is on disk up to ``position``."""
        assert self.flushed <= position <= self.appended, (
            "only what was appended can be flushed, and it stays flushed"
        )
        self.marks = self.marks._replace(flushed=position)

    def advance_replicated(self, replicated: int, replicated_flushed: int) -> None:
        """Every in-sync member has the log up to there, in its page cache and on its disk. A member
        that has just joined them may have less than what is copied already: nothing goes back.
        """
        assert replicated_flushed <= replicated <= self.appended, (
            replicated,
            replicated_flushed,
            self.appended,
        )
        assert replicated_flushed <= self.flushed, (replicated_flushed, self.flushed)
        self.marks = self.marks.raised(HighWatermarks(0, replicated, replicated_flushed))

    def validate(self) -> None:
        """Assert the invariants of the class, but that nothing goes back."""
        flushed, replicated, replicated_flushed = self.marks
        assert 0 <= flushed <= self.appended, self
        assert 0 <= replicated_flushed <= replicated <= self.appended, self
        assert replicated_flushed <= flushed, self

    def ack(self, demands: DurabilityClass) -> int:
        """A batch that ends at or below this position is acknowledged."""
        return self.marks.least(demands) if demands else self.appended

    def visible(self, demands: DurabilityClass) -> int:
        """A record that ends at or below this position is seen by consumers."""
        return self.marks.visible(demands)


class FollowerWatermarks:
    """How far a follower's copy has come, and what its writer lets consumers see.

    Invariants: flushed ≤ appended; nothing here ever goes back.
    """

    __slots__ = ("_announced", "appended", "flushed")

    def __init__(self, appended: int, flushed: int) -> None:
        assert 0 <= flushed <= appended
        self.appended = appended
        self.flushed = flushed
        self._announced = HighWatermarks()  # as the writer has sent them; at first 0

    def append_to(self, position: int) -> None:
        """The copy now ends at ``position``."""
        assert position >= self.appended, "a copy that is used never shrinks"
        self.appended = position

    def flush_to(self, position: int) -> None:
        """The copy is on disk up to ``position``."""
        assert self.flushed <= position <= self.appended
        self.flushed = position

    def agreed(self) -> None:
        """Another stream begins, maybe of another writer. What the old stream said of bytes that
        are not here yet was said of other bytes.
        """
        self._announced = self.shown

    def raise_to(self, marks: HighWatermarks) -> None:
        """The writer has sent by what marks consumers may see messages."""
        self._announced = self._announced.raised(marks)

    @property
    def shown(self) -> HighWatermarks:
        """The marks by which a writer has shown consumers what this copy has."""
        return self._announced.within(self.appended)

    @property
    def announced_position(self) -> int:
        """Up to here the writer shows messages, of whichever class."""
        return max(self._announced)

    @property
    def announced_on_disk(self) -> int:
        """Up to here the writer has it on its disk, for others to see."""
        return max(self._announced.flushed, self._announced.replicated_flushed)

    @property
    def most_visible(self) -> int:
        """No consumer sees anything behind it, whatever its topic demands."""
        return min(self.flushed, self.announced_position)

    def visible(self, demands: DurabilityClass) -> int:
        """A record that ends at or below this position is seen by consumers: a crash of the writer
        cannot take it back, and one of ours cannot either.
        """
        return min(self.flushed, self._announced.visible(demands))


def _shown_by(demands: DurabilityClass) -> DurabilityClass:
    """The conditions that :meth:`HighWatermarks.visible` looks at."""
    return demands or DurabilityClass.FLUSHED


class Visible(Protocol):
    """What :class:`ReadableMaxima` advances by."""

    def visible(self, demands: DurabilityClass) -> int: ...


class ReadableMaxima:
    """Every queue's readable maximum: one more than the offset of its last visible record.

    What has been appended waits in one FIFO per class as (end of the records in the log, queue,
    maximum), so that an advance costs what becomes visible and nothing for what does not.

    Invariants: a queue's readable maximum never goes back while the queue lives, and never covers a
    record whose own class does not yet show it. The second is why a queue whose topic changed its
    class stays in the union of both classes while something older of it waits.
    """

    def __init__(self, maxima: Mapping[QueueKey, int] | None = None) -> None:
        """``maxima``: what is readable from the start; after recovery all that was recovered is."""
        self._readable = dict(maxima or {})
        self._waiting: dict[DurabilityClass, deque[tuple[int, QueueKey, int]]] = {}
        self._last: dict[
            QueueKey, tuple[DurabilityClass, int]
        ] = {}  # newest waiting entry: its class and maximum

    def readable(self, key: QueueKey) -> int:
        """The queue's readable maximum; 0 for a queue that nothing was ever written to."""
        return self._readable.get(key, 0)

    def push(self, demands: DurabilityClass, end: int, key: QueueKey, maximum: int) -> None:
        """Records of one queue were appended.

        They end at ``end`` in the log; the queue's appended maximum is now ``maximum``.
        """
        before = self._last.get(key)
        if before is not None:
            assert maximum > before[1], "a queue only grows"
            if before[0] is not demands:
                demands = _shown_by(before[0]) | _shown_by(demands)
        waiting = self._waiting.get(demands)
        if waiting is None:
            waiting = self._waiting[demands] = deque()
        assert not waiting or end >= waiting[-1][0], "entries come in log order"
        waiting.append((end, key, maximum))
        self._last[key] = (demands, maximum)

    def advance(self, watermarks: Visible) -> list[tuple[QueueKey, int]]:
        """Makes readable what has become visible; answers each queue that moved, once."""
        moved: dict[QueueKey, int] = {}
        for demands, waiting in self._waiting.items():
            visible = watermarks.visible(demands)
            while waiting and waiting[0][0] <= visible:
                _, key, maximum = waiting.popleft()
                if maximum > moved.get(
                    key, -1
                ):  # the classes' FIFOs are emptied one after the other, not in log order
                    moved[key] = maximum
        for key, maximum in moved.items():
            assert maximum > self._readable.get(key, -1), "a readable maximum never goes back"
            self._readable[key] = maximum
            if self._last[key][1] == maximum:
                del self._last[key]
        return list(moved.items())

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted: what waits must not raise a later topic of the same name."""
        self._readable = {
            key: maximum for key, maximum in self._readable.items() if key[0] != topic
        }
        self._last = {key: entry for key, entry in self._last.items() if key[0] != topic}
        for demands, waiting in self._waiting.items():
            self._waiting[demands] = deque(entry for entry in waiting if entry[1][0] != topic)

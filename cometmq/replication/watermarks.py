"""When a batch is acknowledged and when consumers see it.

A topic's durability class is the set of conditions that its messages ask for. Positions are log
offsets: all bytes below them fulfil the condition. From ``docs/ARCHITECTURE.md``: asynchronous
topics are acknowledged when appended and seen when flushed; every other class is acknowledged and
seen at the minimum of all that it demands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from enum import IntFlag
from typing import Protocol

from cometmq.model import FlushMode

QueueKey = tuple[str, int]  # topic, queue id


class DurabilityClass(IntFlag):
    """Conditions as bits, so that a union of demands is ``|``. Zero: asynchronous."""

    ASYNC = 0
    FLUSHED = 1  # on the writer's disk

    @classmethod
    def of(cls, flush_mode: FlushMode) -> DurabilityClass:
        """The class of a topic with these settings."""
        return cls.FLUSHED if flush_mode is FlushMode.SYNC else cls.ASYNC


def union(demands: Iterable[DurabilityClass]) -> DurabilityClass:
    """The class of a whole batch: all that any of its segments demands."""
    result = DurabilityClass.ASYNC
    for demand in demands:
        result |= demand
    return result


class Watermarks:
    """How far the log has come. Invariant: flushed ≤ appended, and neither ever goes back."""

    __slots__ = ("appended", "flushed")

    def __init__(self, appended: int = 0, flushed: int = 0) -> None:
        assert 0 <= flushed <= appended
        self.appended = appended  # end of the log
        self.flushed = flushed  # on the writer's disk up to here

    def append_to(self, position: int) -> None:
        """The log now ends at ``position``."""
        assert position >= self.appended, "the log never shrinks within an epoch"
        self.appended = position

    def flush_to(self, position: int) -> None:
        """The log is on disk up to ``position``."""
        assert self.flushed <= position <= self.appended, (
            "only what was appended can be flushed, and it stays flushed"
        )
        self.flushed = position

    def ack(self, demands: DurabilityClass) -> int:
        """A batch that ends at or below this position is acknowledged."""
        return self.flushed if demands else self.appended

    def visible(self, demands: DurabilityClass) -> int:
        """A record that ends at or below this position is seen by consumers."""
        # The same for every class there is today: even an asynchronous topic's messages are seen
        # only when a crash can no longer take them back.
        return self.flushed


class CopyWatermarks:
    """How far a follower's copy has come, and what its writer lets consumers see.

    Invariants: flushed ≤ appended; nothing here ever goes back.
    """

    __slots__ = ("_writer_async", "_writer_others", "appended", "flushed")

    def __init__(self, appended: int, flushed: int) -> None:
        assert 0 <= flushed <= appended
        self.appended = appended
        self.flushed = flushed
        self._writer_async = 0  # visible at the writer: nothing is known until it tells
        self._writer_others = 0

    def append_to(self, position: int) -> None:
        """The copy now ends at ``position``."""
        assert position >= self.appended, "a copy that is used never shrinks"
        self.appended = position

    def flush_to(self, position: int) -> None:
        """The copy is on disk up to ``position``."""
        assert self.flushed <= position <= self.appended
        self.flushed = position

    def told(self, visible_async: int, visible_others: int) -> None:
        """The writer has told up to where consumers may see messages of asynchronous topics, and
        of all others.
        """
        self._writer_async = max(self._writer_async, visible_async)
        self._writer_others = max(self._writer_others, visible_others)

    @property
    def told_position(self) -> int:
        """Up to here the writer shows at least some messages, so it has them on its disk."""
        return max(self._writer_async, self._writer_others)

    def visible(self, demands: DurabilityClass) -> int:
        """A record that ends at or below this position is seen by consumers: a crash of the writer
        cannot take it back, and one of ours cannot either.
        """
        return min(self.flushed, self._writer_others if demands else self._writer_async)


class Visible(Protocol):
    """What :class:`ReadableMaxima` advances by."""

    def visible(self, demands: DurabilityClass) -> int: ...


class ReadableMaxima:
    """Every queue's readable maximum: one more than the offset of its last visible record.

    What has been appended waits in one FIFO per class as (end of the records in the log, queue,
    maximum), so that an advance costs what becomes visible and nothing for what does not.

    Invariants: a queue's readable maximum never goes back while the queue lives, and never covers a
    record whose own class does not yet show it. The second is why a queue whose topic changed its
    class goes on in the union of both classes while something older of it waits.
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
                demands |= before[0]
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

"""Who wants to hear of new messages in which queues: level-triggered, only the latest is told.

A watch remembers names of queues, not what arrived there: how a queue stands is read when its
stream can take it. So nothing is queued up for a slow stream, an arrival costs one look into a
dictionary for each queue that moved (none while nobody watches), and which tags came is read from
the queue's own units, once for all messages since the last telling.

A stream may want the messages themselves, where they are few: for as many arrivals as it was last
asked for, so that a queue nobody waits at any more soon sends none.

Invariants: a queue that a watch has not been told of as it stands now is pending there; messages
that are told begin where the last telling ended.

Pure: waking a stream is a function handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from cometmq.errors import CometError, LimitExceeded
from cometmq.messaging.inline_messages import WANTED_ARRIVALS, InlineMessages
from cometmq.model import QueueKey

QUEUES_PER_WATCH_MAX = 100_000
WATCHES_MAX = 1_024
# Above it the tags of what arrived are not looked at: a reader that far behind pulls anyway.
TAG_UNITS_MAX = 256
TAG_CODES_MAX = 16
SHARED_INLINE_MAX = 64  # kept at most, while more than one stream is to be told: 1 MiB

ANY_TAG: frozenset[int] = frozenset()


class QueueState(Protocol):
    """How a queue stands at one instant."""

    @property
    def generation(self) -> int: ...
    @property
    def max_offset(self) -> int: ...


class Queues(Protocol):
    """Where the queues are."""

    def queue(self, topic: str, queue_id: int) -> QueueState:
        """Raises TopicNotFound, QueueNotFound."""

    def tag_codes(self, topic: str, queue_id: int, first: int, end: int) -> frozenset[int]:
        """Low 32 bits of the tag hashes of these messages; empty = not known without waiting."""

    def inline_messages(
        self, topic: str, queue_id: int, first: int, end: int
    ) -> InlineMessages | None:
        """These messages; None: not few, not to be read, or not without waiting."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A queue as it stands now. ``codes``: low 32 bits of the tag hashes of what came since the
    watch was last told; empty = could be any. ``inline_messages``: all of these messages; None =
    pull them. With ``error`` the queue's watch is over.
    """

    key: QueueKey
    generation: int = 0
    max_offset: int = 0
    codes: frozenset[int] = ANY_TAG
    inline_messages: InlineMessages | None = None
    error: CometError | None = None


class Watch:
    """One stream: the queues that it watches, what it was told of each, and what is to be told."""

    __slots__ = ("_pending", "_wake", "_wanted", "told")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.told: dict[QueueKey, tuple[int, int] | None] = {}  # generation, maximum; None: nothing
        self._pending: dict[QueueKey, None] = {}  # in order of the first change
        self._wanted: dict[QueueKey, int] = {}  # arrivals that are to come with their messages
        self._wake = wake

    def note(self, key: QueueKey) -> None:
        """The queue may have changed."""
        self._pending[key] = None
        self._wake()

    def forget(self, key: QueueKey) -> None:
        del self.told[key]
        self._pending.pop(key, None)
        self._wanted.pop(key, None)

    def want(self, key: QueueKey) -> None:
        """Its next arrivals come with their messages."""
        self._wanted[key] = WANTED_ARRIVALS

    def spend(self, key: QueueKey) -> bool:
        """An arrival is told: whether it comes with its messages."""
        left = self._wanted.pop(key, 0)
        if left > 1:
            self._wanted[key] = left - 1
        return left > 0

    def take(self) -> QueueKey | None:
        """The next queue to look at; None: all is told."""
        if not self._pending:
            return None
        key = next(iter(self._pending))
        del self._pending[key]
        return key


class Arrivals:
    """All watches, found by queue. Belongs to the event loop."""

    def __init__(
        self, *, watches_max: int = WATCHES_MAX, queues_max: int = QUEUES_PER_WATCH_MAX
    ) -> None:
        self._watches_max = watches_max
        self._queues_max = queues_max  # of one watch
        self._watches: set[Watch] = set()
        self._by_queue: dict[QueueKey, set[Watch]] = {}
        # What was read for one stream and others are to be told too; by what it spans.
        self._shared: dict[tuple[QueueKey, int, int], InlineMessages | None] = {}

    def __len__(self) -> int:
        """Open watches."""
        return len(self._watches)

    def __contains__(self, key: object) -> bool:
        """Whether anybody watches the queue."""
        return key in self._by_queue

    @property
    def queue_count(self) -> int:
        """Queues that are watched."""
        return len(self._by_queue)

    # --- what streams say ---

    def open(self, wake: Callable[[], None]) -> Watch:
        """A new stream that watches nothing yet. LimitExceeded."""
        if len(self._watches) >= self._watches_max:
            raise LimitExceeded(f"{self._watches_max} arrival watches are open")
        watch = Watch(wake)
        self._watches.add(watch)
        return watch

    def close(self, watch: Watch) -> None:
        """Forget a stream."""
        self.remove(watch, list(watch.told))
        self._watches.discard(watch)

    def add(self, watch: Watch, keys: Iterable[QueueKey]) -> None:
        """Watch these queues too and tell them now, known ones again. LimitExceeded: then nothing
        has changed.
        """
        wanted = dict.fromkeys(keys)
        if len(watch.told) + len(wanted.keys() - watch.told.keys()) > self._queues_max:
            raise LimitExceeded(f"a stream watches {self._queues_max} queues")
        for key in wanted:
            watch.told[key] = None
            self._by_queue.setdefault(key, set()).add(watch)
            watch.note(key)

    def want(self, watch: Watch, keys: Iterable[QueueKey]) -> None:
        """Somebody waits at the end of these queues; those that are not watched do not matter."""
        for key in keys:
            if key in watch.told:
                watch.want(key)

    def remove(self, watch: Watch, keys: Iterable[QueueKey]) -> None:
        """Watch these queues no longer; those that are not watched do not matter."""
        for key in keys:
            if key in watch.told:
                watch.forget(key)
                watching = self._by_queue[key]
                watching.remove(watch)
                if not watching:
                    del self._by_queue[key]

    # --- what the member says ---

    def advanced(self, moved: Iterable[tuple[QueueKey, int]]) -> None:
        """Readable maxima have risen."""
        self._shared.clear()
        by_queue = self._by_queue
        for key, _ in moved:
            if key in by_queue:
                for watch in by_queue[key]:
                    watch.note(key)

    def topic_changed(self, topic: str) -> None:
        """The topic's queues may be others now: deleted, or of a new generation."""
        self._shared.clear()
        for key, watching in self._by_queue.items():
            if key[0] == topic:
                for watch in watching:
                    watch.note(key)

    def next_arrival(self, watch: Watch, queues: Queues) -> Arrival | None:
        """What to tell the stream next; None: it knows everything."""
        while (key := watch.take()) is not None:
            arrival = self._look(watch, key, queues)
            if arrival is not None:
                return arrival
        return None

    def _look(self, watch: Watch, key: QueueKey, queues: Queues) -> Arrival | None:
        try:
            state = queues.queue(*key)
        except CometError as error:
            self.remove(watch, [key])
            return Arrival(key, error=error)
        told = watch.told[key]
        now = (state.generation, state.max_offset)
        if now == told:
            return None
        watch.told[key] = now
        wanted = watch.spend(key)
        if told is None or told[0] != now[0]:
            return Arrival(key, *now)
        assert told[1] < now[1], "a maximum never goes back within a generation"
        span = (key, told[1], now[1])
        inline_messages = self._inline_messages(queues, *span) if wanted else None
        return Arrival(key, *now, _codes(queues, *span, inline_messages), inline_messages)

    def _inline_messages(
        self, queues: Queues, key: QueueKey, first: int, end: int
    ) -> InlineMessages | None:
        """Read once, however many streams are to be told."""
        if len(self._by_queue[key]) == 1:
            return queues.inline_messages(*key, first, end)
        span = (key, first, end)
        if span not in self._shared:
            if len(self._shared) >= SHARED_INLINE_MAX:
                self._shared.clear()
            self._shared[span] = queues.inline_messages(*key, first, end)
        return self._shared[span]


def _codes(
    queues: Queues, key: QueueKey, first: int, end: int, inline_messages: InlineMessages | None
) -> frozenset[int]:
    if end - first > TAG_UNITS_MAX:
        return ANY_TAG
    codes = (
        queues.tag_codes(*key, first, end)
        if inline_messages is None
        else frozenset(inline_messages.codes)
    )
    return codes if len(codes) <= TAG_CODES_MAX else ANY_TAG

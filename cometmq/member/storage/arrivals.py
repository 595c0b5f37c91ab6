"""Which streams watch which queues for new messages: level-triggered, only the latest is sent.

A watch remembers names of queues, not what arrived there: the state of a queue is read when its
stream has room for it. So a slow stream queues nothing up, and an arrival costs one look into a
dictionary for each queue that moved (none while there is no watch). Tags are read from the queue's
own units, once for all messages since the last arrival that was sent.

A stream may want the messages themselves, where they are few. It gets them with a few arrivals
after each wish, so that a queue without waiting holds soon sends none.

Groups that receive (POP) get messages of a queue back. Streams report that the same way: a watch
remembers the groups, and sends the number of the newest return of each.

Invariants: a queue whose state differs from what was sent is pending in its watch; inline messages
begin where the arrival sent before ended.

Pure: waking a stream is a function handed in.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from cometmq.errors import CometError, LimitExceeded
from cometmq.messaging.inline_messages import WANTED_ARRIVALS, InlineMessages
from cometmq.messaging.pop.returns import Return, Returns
from cometmq.model import QueueKey

QUEUES_PER_WATCH_MAX = 100_000
WATCHES_MAX = 1_024
# Above it the tags of what arrived are not looked at: a reader that far behind pulls anyway.
TAG_UNITS_MAX = 256
TAG_CODES_MAX = 16
RETURNS_PER_ARRIVAL_MAX = 1_024
SHARED_INLINE_MAX = 64  # kept at most, for queues with more than one stream: 1 MiB

ANY_TAG: frozenset[int] = frozenset()


class QueueState(Protocol):
    """A queue at one instant."""

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
    """A queue as it is now. ``codes``: low 32 bits of the tag hashes of what came since the arrival
    before; empty = could be any. ``inline_messages``: all of these messages; None = pull them.
    ``returns``: groups that got messages back. With ``error`` the queue's watch is over.
    """

    key: QueueKey
    generation: int = 0
    max_offset: int = 0
    codes: frozenset[int] = ANY_TAG
    inline_messages: InlineMessages | None = None
    returns: tuple[tuple[str, Return], ...] = ()
    error: CometError | None = None


class Watch:
    """One stream: the queues that it watches, what was sent of each, and which to look at."""

    __slots__ = ("_pending", "_returned", "_wake", "_wanted", "sent")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.sent: dict[QueueKey, tuple[int, int] | None] = {}  # generation, maximum; None: nothing
        self._pending: dict[QueueKey, None] = {}  # in order of the first change
        self._wanted: dict[QueueKey, int] = {}  # so many arrivals go with their messages
        # How many messages came back to groups since the arrival before.
        self._returned: dict[QueueKey, dict[str, int]] = {}
        self._wake = wake

    def note(self, key: QueueKey) -> None:
        """The queue may have changed."""
        self._pending[key] = None
        self._wake()

    def note_returns(self, key: QueueKey, counts: Iterable[tuple[str, int]]) -> None:
        """Add to each group how many messages of the queue it got back."""
        returned = self._returned.setdefault(key, {})
        for group, count in counts:
            returned[group] = returned.get(group, 0) + count
        self.note(key)

    def take_returned(self, key: QueueKey) -> list[tuple[str, int]]:
        """The groups that the queue's next arrival names, and how many messages came back."""
        counts = iter(self._returned.pop(key, {}).items())
        taken = list(itertools.islice(counts, RETURNS_PER_ARRIVAL_MAX))
        if left := dict(counts):
            self.note_returns(key, left.items())
        return taken

    def forget(self, key: QueueKey) -> None:
        """Watch the queue no longer."""
        del self.sent[key]
        self._pending.pop(key, None)
        self._returned.pop(key, None)
        self._wanted.pop(key, None)

    def want(self, key: QueueKey) -> None:
        """The queue's next arrivals go with their messages."""
        assert key in self.sent
        self._wanted[key] = WANTED_ARRIVALS

    def spend(self, key: QueueKey) -> bool:
        """An arrival of the queue is sent: whether it goes with its messages."""
        left = self._wanted.pop(key, 0)
        if left > 1:
            self._wanted[key] = left - 1
        return left > 0

    def wants(self, key: QueueKey) -> bool:
        """Whether the queue's next arrival goes with its messages."""
        return key in self._wanted

    @property
    def is_pending(self) -> bool:
        """Whether there are queues to look at."""
        return bool(self._pending)

    def take(self) -> QueueKey | None:
        """The next queue to look at; None: everything was sent."""
        if not self._pending:
            return None
        key = next(iter(self._pending))
        del self._pending[key]
        assert key in self.sent
        return key

    def validate(self) -> None:
        """Assert that the stream watches all queues that it would look at or wants messages of."""
        assert self._pending.keys() | self._wanted.keys() <= self.sent.keys()
        assert self._returned.keys() <= self._pending.keys()
        assert all(0 < left <= WANTED_ARRIVALS for left in self._wanted.values())


class Arrivals:
    """All watches, found by queue. Belongs to the event loop."""

    def __init__(
        self, *, watches_max: int = WATCHES_MAX, queues_max: int = QUEUES_PER_WATCH_MAX
    ) -> None:
        self._watches_max = watches_max
        self._queues_max = queues_max  # of one watch
        self._watches: set[Watch] = set()
        self._by_queue: dict[QueueKey, set[Watch]] = {}
        self.returns = Returns()
        # What was read for one stream and goes to others too; by what it spans.
        self._shared: dict[tuple[QueueKey, int, int], InlineMessages | None] = {}

    def __len__(self) -> int:
        """Open watches."""
        return len(self._watches)

    def __contains__(self, key: object) -> bool:
        """Whether a stream watches the queue."""
        return key in self._by_queue

    def carries_messages(self, key: QueueKey) -> bool:
        """Whether the queue's next arrival goes with its messages on some stream."""
        return any(watch.wants(key) for watch in self._by_queue.get(key, ()))

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
        assert watch in self._watches
        self.remove(watch, list(watch.sent))
        self._watches.discard(watch)

    def add(self, watch: Watch, keys: Iterable[QueueKey]) -> None:
        """Watch these queues too, and send the state of all of them now. LimitExceeded: nothing has
        changed.
        """
        assert watch in self._watches
        wanted = dict.fromkeys(keys)
        if len(watch.sent) + len(wanted.keys() - watch.sent.keys()) > self._queues_max:
            raise LimitExceeded(f"a stream watches {self._queues_max} queues")
        for key in wanted:
            watch.sent[key] = None
            self._by_queue.setdefault(key, set()).add(watch)
            watch.note(key)
            if groups := self.returns.of_queue(key):
                watch.note_returns(key, [(name, one.message_count) for name, one in groups.items()])

    def want(self, watch: Watch, keys: Iterable[QueueKey]) -> None:
        """Holds wait at the end of these queues; queues that are not watched do not matter."""
        for key in keys:
            if key in watch.sent:
                watch.want(key)

    def remove(self, watch: Watch, keys: Iterable[QueueKey]) -> None:
        """Watch these queues no longer; queues that are not watched do not matter."""
        for key in keys:
            if key in watch.sent:
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

    def came_back(self, key: QueueKey, group: str, number: int, count: int) -> None:
        """The group may receive so many messages of the queue again. ``number`` is above all
        before.
        """
        self.returns.note(key, group, number, count)
        for watch in self._by_queue.get(key, ()):
            watch.note_returns(key, [(group, count)])

    def topic_changed(self, topic: str) -> None:
        """The topic's queues may have changed: deleted, or of a new generation."""
        self._shared.clear()
        for key, watching in self._by_queue.items():
            if key[0] == topic:
                for watch in watching:
                    watch.note(key)

    def next_arrival(self, watch: Watch, queues: Queues) -> Arrival | None:
        """What to send to the stream next; None: it knows everything."""
        while (key := watch.take()) is not None:
            try:
                state = queues.queue(*key)
            except CometError as error:
                self.remove(watch, [key])
                return Arrival(key, error=error)
            before, now = watch.sent[key], (state.generation, state.max_offset)
            returns = self._returns(watch, key)
            if now == before:
                if not returns:
                    continue
                return Arrival(key, *now, returns=returns)
            watch.sent[key] = now
            with_messages = watch.spend(key)
            if before is None or before[0] != now[0]:
                return Arrival(key, *now, returns=returns)
            first, end = before[1], now[1]
            assert first < end, "a maximum never goes back within a generation"
            inline = self._inline_messages(queues, key, first, end) if with_messages else None
            codes = ANY_TAG
            if end - first <= TAG_UNITS_MAX:
                known = queues.tag_codes(*key, first, end) if inline is None else inline.codes
                codes = frozenset(known)
            codes = codes if len(codes) <= TAG_CODES_MAX else ANY_TAG
            return Arrival(key, *now, codes, inline, returns)
        return None

    def _returns(self, watch: Watch, key: QueueKey) -> tuple[tuple[str, Return], ...]:
        known = self.returns.of_queue(key)
        return tuple(
            (group, Return(known[group].number, count))
            for group, count in watch.take_returned(key)
            if group in known
        )

    def _inline_messages(
        self, queues: Queues, key: QueueKey, first: int, end: int
    ) -> InlineMessages | None:
        """Read once, however many streams watch the queue."""
        if len(self._by_queue[key]) == 1:
            return queues.inline_messages(*key, first, end)
        span = (key, first, end)
        if span not in self._shared:
            if len(self._shared) >= SHARED_INLINE_MAX:
                self._shared.clear()
            self._shared[span] = queues.inline_messages(*key, first, end)
        return self._shared[span]

    def validate(self) -> None:
        """Assert that queues and watches name each other, and the limits."""
        by_watch = {(key, watch) for watch in self._watches for key in watch.sent}
        assert by_watch == {(key, one) for key, found in self._by_queue.items() for one in found}
        assert len(self._watches) <= self._watches_max
        assert len(self._shared) <= SHARED_INLINE_MAX
        for watch in self._watches:
            watch.validate()

"""Generations: what keeps an offset from silently meaning another message after a crash.

A queue's history is a list of (generation, start). The start of a generation is the queue's maximum
when it began: below it, all generations have the same messages; from it on, what an older
generation had may have been lost and its offsets given to other messages. A topic's creation begins
a history with (generation, 0): of a deleted topic of the same name nothing is valid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from cometmq.errors import NotWriter, OffsetInvalid, PositionFenced, QueueNotFound, StoreDamaged
from cometmq.model import Position, QueueKey

HISTORY_PAIRS_MAX = 16

# Of a generation the low bits count, the rest is the epoch that began counting there. Two writers
# may go on from the same log, the later without having heard of the earlier, and must not give out
# the same generation; epochs are never used twice. An int64 has room for 2^31 epochs, and a number
# of JavaScript for 2^21.
EPOCH_SHIFT = 32


def is_history(pairs: Sequence[tuple[int, int]]) -> bool:
    """Whether (generation, start) pairs keep the invariants of :class:`History`."""
    return (
        1 <= len(pairs) <= HISTORY_PAIRS_MAX
        and pairs[0][0] > 0
        and pairs[0][1] == 0
        and all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(pairs))
    )


@dataclass(frozen=True, slots=True)
class History:
    """The generations of one queue as (generation, start), oldest first.

    Invariants: there is a first pair and it starts at 0; generations rise; starts never fall; at
    most ``HISTORY_PAIRS_MAX`` pairs. A pair with a start at or above a later one's says nothing
    that the later one does not, so :meth:`raised` leaves it out: a queue that does not grow needs
    no room, however often its broker crashes.
    """

    pairs: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        assert is_history(self.pairs)

    @property
    def current(self) -> int:
        """The generation that answers carry."""
        return self.pairs[-1][0]

    @property
    def born(self) -> int:
        """The generation of the queue's creation; anything older is a deleted topic's."""
        return self.pairs[0][0]

    def raised(self, generation: int, start: int) -> History:
        """The history after ``generation`` began while the queue's maximum was ``start``."""
        assert generation > self.current
        assert start >= 0
        pairs = list(self.pairs)
        while len(pairs) > 1 and pairs[-1][1] >= start:
            pairs.pop()
        pairs.append((generation, start))
        if len(pairs) > HISTORY_PAIRS_MAX:
            # The two oldest after the first become one: the older start, up to the younger
            # generation. A consumer with the older generation of the two is fenced lower
            # than need be, never higher.
            pairs[1:3] = [(pairs[2][0], pairs[1][1])]
        return History(tuple(pairs))

    def fence(self, position: Position) -> Position | None:
        """Where a holder of ``position`` has to go on; None when the position is good as it is."""
        if position.generation in (self.current, 0):
            return None
        if position.generation > self.current:
            # Not one of ours: given out by a branch of the log that was lost with its newest
            # state, so that nothing from the start of the current generation on is sure to be the
            # same.
            return Position(self.current, min(position.offset, self.pairs[-1][1]))
        # Starts never fall, so the first later one is the lowest.
        start = next(start for generation, start in self.pairs if generation > position.generation)
        return Position(self.current, start) if position.offset > start else None

    def validate(self, position: Position) -> Position:
        """The same place in the current generation. Generation 0 is never fenced.

        Raises ``PositionFenced`` with the place to go on at, ``OffsetInvalid`` for a negative
        offset.
        """
        current = self.pairs[-1][0]
        if position.offset < 0:
            raise OffsetInvalid(f"queue offset {position.offset} is negative")
        if position.generation == current:
            return position
        fence = self.fence(position)
        if fence is not None:
            raise PositionFenced(
                f"offset {position.offset} of generation {position.generation} is not valid "
                f"in generation {current}: go on at {fence.offset}",
                fence=(fence.generation, fence.offset),
            )
        return Position(current, position.offset)

    def validate_at_copy(self, position: Position) -> Position:
        """As :meth:`validate`, for a follower, which may not have heard of a generation yet: of one
        that it does not know only the writer can tell. Raises ``NotWriter``.
        """
        if position.generation > self.current:
            raise NotWriter(
                f"generation {position.generation} is newer than {self.current}, the newest that "
                "this follower has"
            )
        return self.validate(position)

    def settle(self, position: Position) -> Position:
        """As :meth:`validate`, but answers the fence: what of ``position`` still holds."""
        return self.fence(position) or Position(self.current, position.offset)


class GenerationTable:
    """The histories of all queues, and the one counter that all generations come from.

    Invariant: no generation is above ``last``, and a topic that is created again gets one above all
    it ever had.
    """

    def __init__(self) -> None:
        self.last = 0  # highest generation of any change applied
        # Highest generation handed out; above `last` while a change is on its way into the log.
        self._allocated = 0
        self._histories: dict[str, list[History]] = {}  # by topic, then queue id

    def allocate(self) -> int:
        """A generation for the next change.

        Changes must enter the log in the order of their allocations.
        """
        self._allocated = max(self._allocated, self.last) + 1
        return self._allocated

    def of(self, topic: str, queue_id: int) -> History:
        """The queue's history. Raises ``QueueNotFound``."""
        history = self.find(topic, queue_id)
        if history is None:
            raise QueueNotFound(f"topic {topic} has no queue {queue_id} here")
        return history

    def find(self, topic: str, queue_id: int) -> History | None:
        """The queue's history, or None."""
        histories = self._histories.get(topic, ())
        return histories[queue_id] if 0 <= queue_id < len(histories) else None

    @property
    def queue_count(self) -> int:
        return sum(map(len, self._histories.values()))

    def queues(self) -> Iterator[QueueKey]:
        """All queues that have a history, hidden ones included."""
        for topic, histories in self._histories.items():
            for queue_id in range(len(histories)):
                yield topic, queue_id

    def topic(self, topic: str) -> tuple[History, ...]:
        """The histories of a topic by queue id; empty when there is no such topic."""
        return tuple(self._histories.get(topic, ()))

    def extend(self, topic: str, queue_count: int, generation: int) -> None:
        """Begins a history with ``generation`` for each new queue below ``queue_count``."""
        histories = self._histories.setdefault(topic, [])
        if len(histories) < queue_count:
            self._check_rises(self.last, generation, topic)
            histories += [History(((generation, 0),))] * (queue_count - len(histories))
        self.last = max(self.last, generation)

    def raise_all(self, generation: int, starts: Mapping[str, Sequence[int]]) -> None:
        """Begins ``generation`` for all queues of the named topics at their maxima by queue id.

        Several changes may raise one broker's queues; they share the generation, each topic is in
        one of them.
        """
        for topic, maxima in starts.items():
            histories = self._histories.get(topic, [])
            if len(histories) != len(maxima):
                raise StoreDamaged(
                    f"{len(maxima)} queues of topic {topic} are raised, it has {len(histories)}"
                )
            self._histories[topic] = [
                self._raised(history, generation, start, topic)
                for history, start in zip(histories, maxima, strict=True)
            ]
        self.last = max(self.last, generation)

    def put(self, topic: str, histories: Sequence[History]) -> None:
        """Sets all histories of a topic, from a state snapshot."""
        self._histories[topic] = list(histories)
        self.last = max(self.last, *(h.current for h in histories))

    def count_in(self, epoch: int) -> None:
        """``epoch`` goes on from a log from which others may have gone on too: from here on no
        generation is one that any of them gave out.
        """
        assert 0 < epoch < 1 << (63 - EPOCH_SHIFT), epoch
        self.count_from(epoch << EPOCH_SHIFT)

    @property
    def last_fork(self) -> int:
        """The epoch of the newest :meth:`count_in`; 0: there was none."""
        return self.last >> EPOCH_SHIFT

    def count_from(self, last: int) -> None:
        """All generations up to ``last`` were given out before."""
        self.last = max(self.last, last)

    def drop(self, topic: str) -> None:
        """Forgets a topic; the counter stays, so that the next topic of the name begins above."""
        self._histories.pop(topic, None)

    def _raised(self, history: History, generation: int, start: int, topic: str) -> History:
        if history.pairs[-1] == (generation, start):  # the change was read before
            return history
        self._check_rises(history.current, generation, topic)
        return history.raised(generation, start)

    @staticmethod
    def _check_rises(last: int, generation: int, topic: str) -> None:
        if generation <= last:
            raise StoreDamaged(
                f"generation {generation} for topic {topic} does not rise: {last} was given before"
            )

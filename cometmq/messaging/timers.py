"""Messages that wait for a time of their own: which of them are done. Pure: clocks are parameters.

They lie in one queue, the timer queue, in the order in which they were sent. A message is named by
when it is due and by its offset in that queue (:class:`Timer`); timers are delivered in this order.
So two numbers say what is done: all timers up to the *watermark* that lie before the offset
*arrivals*. A message that comes when the watermark has passed its time is *late*: late messages are
delivered before anything else, and ``arrivals`` stays at the first of them. Late is not always due:
a clock that was ahead has left the watermark in the future.

What was done out of that order is *skipped*: recalled messages, and those that a writer had
delivered in its last moment, as the end of the log shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from cometmq.errors import LimitExceeded

RECALLED_MAX = 100_000  # that are not due yet
SKIPS_PER_CHANGE = 5_000
SKIPS_FEW = 1_000  # are looked through in a ms
TIME_MS_MAX = 2**63 - 1


class Timer(NamedTuple):
    """A message of the timer queue, in the order of delivery."""

    due_ms: int
    offset: int


BEFORE_ALL = Timer(0, 0)


@dataclass(frozen=True, slots=True)
class TimerMark:
    """The progress of delivery: done are all timers up to ``watermark`` that lie before
    ``arrivals``, and all that lie before ``rolled``. Those not due then were stored once more.
    """

    watermark: Timer = BEFORE_ALL
    arrivals: int = 0
    rolled: int = 0

    def covers(self, timer: Timer) -> bool:
        """Whether it needs no skip any more."""
        if timer.offset < self.rolled:
            return True
        return timer.offset < self.arrivals and timer <= self.watermark


class LateTimers:
    """Timers whose time the watermark had passed when they came, by their times and offsets."""

    def __init__(self) -> None:
        self._due_ms: dict[int, int] = {}  # by offset
        self._offsets: deque[int] = deque()  # rising; some are gone already
        self._by_time: list[Timer] = []  # a heap; some are gone already

    def __len__(self) -> int:
        return len(self._due_ms)

    def __contains__(self, timer: Timer) -> bool:
        return self._due_ms.get(timer.offset) == timer.due_ms

    def __iter__(self) -> Iterator[Timer]:
        return (Timer(due_ms, offset) for offset, due_ms in self._due_ms.items())

    def add(self, timer: Timer) -> None:
        """Timers are added in the order of their offsets."""
        assert not self._offsets or self._offsets[-1] < timer.offset
        self._due_ms[timer.offset] = timer.due_ms
        self._offsets.append(timer.offset)
        heappush(self._by_time, timer)

    def remove(self, offset: int) -> None:
        """It is late no more."""
        del self._due_ms[offset]

    def remove_before(self, offset: int) -> int:
        """Those before ``offset`` are late no more; how many."""
        count = 0
        while (first := self.first_offset) is not None and first < offset:
            self.remove(first)
            count += 1
        return count

    @property
    def first_offset(self) -> int | None:
        """Lowest offset; None: no timer is late."""
        while self._offsets and self._offsets[0] not in self._due_ms:
            self._offsets.popleft()
        return self._offsets[0] if self._offsets else None

    @property
    def next_due_ms(self) -> int | None:
        """When the next one is due; None: no timer is late."""
        while self._by_time and self._by_time[0] not in self:
            heappop(self._by_time)
        return self._by_time[0].due_ms if self._by_time else None

    def due(self, now_ms: int, count_max: int) -> list[Timer]:
        """Those that are due, in the order of their times, at most so many."""
        found: list[Timer] = []
        while len(found) < count_max and (next_ms := self.next_due_ms) is not None:
            if next_ms > now_ms:
                break
            found.append(heappop(self._by_time))
        for timer in found:
            heappush(self._by_time, timer)
        return found


class TimerTable:
    """The timers of a broker group. Deliveries and recalls take effect at once, and
    reach the state log as changes; a follower has what these changes tell.
    """

    def __init__(self) -> None:
        self.watermark = BEFORE_ALL
        self.rolled = 0
        self.read = 0  # offset of the first message that was not looked at yet
        self.late = LateTimers()
        self.skips: dict[int, int] = {}  # offset → when it is due
        # Topics that are newer than some messages: those for them below this offset are dropped.
        self.dropped: dict[str, int] = {}
        self._unwritten: dict[int, int] = {}
        self._written = TimerMark()
        self._forgot_by = TimerMark()  # the mark by which covered skips were forgotten
        self._forget_from = SKIPS_FEW  # so many skips are looked through again

    # --- what is done -----------------------------------------------------------------------------

    @property
    def mark(self) -> TimerMark:
        """What is done now."""
        first = self.late.first_offset
        return TimerMark(self.watermark, self.read if first is None else first, self.rolled)

    def arrived(self, timers: Iterable[Timer], end: int) -> None:
        """The queue was read up to ``end``; ``timers``: those of it that are late."""
        assert end >= self.read, (end, self.read)
        for timer in timers:
            assert timer <= self.watermark
            if not self._take_skip(timer):
                self.late.add(timer)
        self.read = end

    def wanted(self, timers: Iterable[Timer]) -> list[Timer]:
        """Those of due ``timers`` that are to be delivered."""
        return [t for t in timers if t.offset >= self.rolled and t.offset not in self.skips]

    def late_done(self, timers: Iterable[Timer]) -> None:
        """These late ones are delivered."""
        gone = sorted(timers, key=lambda timer: timer.offset)
        for timer in gone:
            self.late.remove(timer.offset)
        for timer in gone:
            self.skip(timer)  # unless those before it are done, too

    def done(self, timers: Sequence[Timer]) -> None:
        """All timers up to the last of these are delivered, or need not be."""
        if not timers:
            return
        assert timers[0] > self.watermark, (timers[0], self.watermark)
        if self.skips or self._unwritten:
            for timer in timers:
                self._take_skip(timer)
        self.watermark = timers[-1]

    def lost_before(self, offset: int) -> int:
        """The queue begins at ``offset`` now; how many messages were not looked at before."""
        lost = max(0, offset - self.read)
        self.read += lost
        lost += self.late.remove_before(offset)
        self.rolled = max(self.rolled, offset)
        return lost

    def rolled_to(self, offset: int) -> None:
        """All messages before ``offset`` are done, or were stored once more: also late ones, and
        those that were not looked at yet.
        """
        assert self.rolled <= offset
        self.rolled = offset
        self.late.remove_before(offset)
        self.read = max(self.read, offset)
        self._forget_dropped()

    def is_pending(self, timer: Timer) -> bool:
        """Whether a message of the queue is still to be delivered."""
        if timer.offset < self.rolled or timer.offset in self.skips:
            return False
        return timer.offset >= self.read or timer > self.watermark or timer in self.late

    def skip(self, timer: Timer) -> None:
        """It is not delivered in its turn: it was already, or is to be never."""
        if not self.mark.covers(timer):
            self.skips[timer.offset] = timer.due_ms
            self._unwritten[timer.offset] = timer.due_ms

    def check_room(self, count: int) -> None:
        """Raises LimitExceeded if with so many more too many recalled messages wait for their
        time.
        """
        if len(self.skips) + count > RECALLED_MAX and self._forgot_by != self._written:
            self._forget_covered(self._written)
        if len(self.skips) + count > RECALLED_MAX:
            raise LimitExceeded(
                f"{RECALLED_MAX} recalled messages wait for their time; recall more as it comes"
            )

    def _forget_dropped(self) -> None:
        self.dropped = {topic: end for topic, end in self.dropped.items() if end > self.rolled}

    def _take_skip(self, timer: Timer) -> bool:
        self._unwritten.pop(timer.offset, None)
        return self.skips.pop(timer.offset, None) is not None

    # --- in the state log -------------------------------------------------------------------------

    @property
    def has_unwritten(self) -> bool:
        """Whether the state log does not know all of this."""
        return bool(self._unwritten) or self.mark != self._written

    def unwritten(self) -> tuple[TimerMark, list[Timer]]:
        """The mark, and the skips that the state log does not know. Call :meth:`written` with what
        of them is in the log.
        """
        return self.mark, [Timer(due_ms, offset) for offset, due_ms in self._unwritten.items()]

    def written(self, mark: TimerMark, skips: Iterable[Timer]) -> None:
        """The state log has the mark, and these skips."""
        self._written = mark
        for timer in skips:
            del self._unwritten[timer.offset]
        self._forget_if_many(mark)

    def _forget_if_many(self, mark: TimerMark) -> None:
        """Not each time: all are looked at, tens of ms for the most there may be. One too many does
        no harm.
        """
        if len(self.skips) >= self._forget_from:
            self._forget_covered(mark)

    def _forget_covered(self, mark: TimerMark) -> None:
        covered = [o for o, due_ms in self.skips.items() if mark.covers(Timer(due_ms, o))]
        for offset in covered:
            del self.skips[offset]
        self._forgot_by = mark
        self._forget_from = max(SKIPS_FEW, 2 * len(self.skips))

    @property
    def rolled_written(self) -> int:
        """:attr:`rolled` as the state log has it."""
        return self._written.rolled

    def restore(self, mark: TimerMark, skips: Iterable[Timer]) -> None:
        """Takes what the state log has."""
        self._written = mark
        self.watermark, self.read, self.rolled = mark.watermark, mark.arrivals, mark.rolled
        self.skips |= {timer.offset: timer.due_ms for timer in skips}
        self._forget_if_many(mark)
        self._forget_dropped()

    def drop_older(self, topic: str, end: int) -> None:
        """A topic is created: its messages before ``end`` are dropped when they are due."""
        if end > self.rolled:
            self.dropped[topic] = end

    def forget_topic(self, topic: str) -> None:
        """A topic is deleted: nothing is delivered to it."""
        self.dropped.pop(topic, None)

    def is_dropped(self, topic: str, _queue_id: int, offset: int) -> bool:
        """Whether the message for the topic at this offset is dropped."""
        return offset < self.dropped.get(topic, 0)

    def as_written(self) -> Iterator[tuple[TimerMark, Sequence[Timer]]]:
        """The mark with all skips, in pieces that fit a change each; nothing while there never was
        a timer.
        """
        self._forget_covered(self.mark)
        timers = [Timer(due_ms, offset) for offset, due_ms in self.skips.items()]
        if timers or self.mark != TimerMark():
            for first in range(0, max(1, len(timers)), SKIPS_PER_CHANGE):
                yield self.mark, timers[first : first + SKIPS_PER_CHANGE]

    def limit(self, end: int) -> None:
        """The timer queue ends at ``end``: after damage its end may be lost."""
        if self.read > end:
            self.read = end
            self.rolled = min(self.rolled, end)
        # Others get these offsets.
        self.skips = {offset: due_ms for offset, due_ms in self.skips.items() if offset < end}
        self.dropped = {topic: min(limit, end) for topic, limit in self.dropped.items()}


def skip_changes(timers: Sequence[Timer]) -> Iterator[Sequence[Timer]]:
    """Pieces that fit a change each; an empty one if there are none."""
    for first in range(0, max(1, len(timers)), SKIPS_PER_CHANGE):
        yield timers[first : first + SKIPS_PER_CHANGE]

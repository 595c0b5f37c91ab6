"""Transactions: which half messages are open, when their producers are asked about them, and what
became of those that ended lately. RocketMQ's rules. Pure: the time is a parameter.

A half is named by its offset in the half queue. Offsets only rise, so the table keeps the halves in
the order of the log. The half queue and the op queue tell the table again after a restart: only how
often a half was asked about, and from where on the queues have to be read, is state of its own.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from itertools import groupby, islice, pairwise, repeat
from typing import NamedTuple

from cometmq.errors import FlowControl
from cometmq.format.halves import GIVEN_UP_TOPIC

HALVES_MAX = 200_000
ENDED_MAX = 32_768  # halves that ended last, of which it is known what became of them
ENDED_MORE = 4_096  # that are forgotten at once: each look for the oldest would pass those before
CHECK_STEPS_MAX = 8_192  # of the state's change
OPS_PER_STEP = 64  # op records: as exactly is known which of them are needed
STALE_MAX = 65_536  # entries of halves that have ended, beside twice the open ones
LOOK_MAX = 20_000  # entries of one look, some milliseconds
SWEPT_AT_ONCE = 1_024  # entries that are looked through for halves that have ended
SWEPT_PER_ENTRY = 4  # so many for each new one: more than come
COUNTS_AT_ONCE = 8_192  # halves, a ms or two

_NO_ENTRIES = array("q")


class Resolution(Enum):
    """The end of a transaction; the values are those of ``cometmq.v1.TransactionResolution``."""

    COMMIT = 1  # the message is for its consumers
    ROLLBACK = 2  # nobody ever sees it
    UNKNOWN = 3  # not yet: ask again


@dataclass(frozen=True, slots=True)
class CheckRules:
    """The times at which producers are asked how the transaction of a half ended."""

    immunity_s: float = 6.0  # not before, unless the half says otherwise
    interval_s: float = 30.0
    checks_max: int = 15


class HalfProgress(NamedTuple):
    """The part of the table that the state keeps. All halves below ``floor`` have ended; op records
    below ``op_floor`` name such halves only. ``checks``: (end, count) in order of ``end``;
    an open half was asked about as often as the first entry with a higher end says, or never.
    """

    floor: int = 0
    op_floor: int = 0
    checks: tuple[tuple[int, int], ...] = ()

    def checks_of(self, offset: int) -> int:
        """How often a half was asked about."""
        at = bisect_right(self.checks, (offset, math.inf))
        return self.checks[at][1] if at < len(self.checks) else 0


# Log offset and size of its record, producer group. No class of its own: the collector of garbage
# leaves such a tuple alone.
OpenHalf = tuple[int, int, str]


class EndedHalf(NamedTuple):
    """The outcome of a half whose record stands at ``half_log_offset``: the record that was made of
    it. ``queue_offset`` -1: none was, it is rolled back.
    """

    half_log_offset: int
    group: str
    topic: str = ""
    queue_id: int = 0
    queue_offset: int = -1
    log_offset: int = 0

    @property
    def is_given_up(self) -> bool:
        return self.topic == GIVEN_UP_TOPIC

    @property
    def is_committed(self) -> bool:
        return self.queue_offset >= 0 and not self.is_given_up


class HalfTable:
    """The open halves of a writer. A follower knows the progress alone."""

    def __init__(self, halves_max: int = HALVES_MAX) -> None:
        self.halves_max = halves_max
        self.written = HalfProgress()  # what the state in the log knows
        self.end = 0  # of the half queue
        # Halves that the log's end tells of, by their log offsets: while a writer opens its log.
        self.log_end: dict[int, EndedHalf] = {}
        # Topics that were deleted: open halves of before, which lie below this offset, are not
        # committed, also when the topic is created again.
        self.dropped: dict[str, int] = {}
        self._floor = 0
        self._op_floor = 0
        self._ops: deque[tuple[int, int]] = deque()  # end of some op records, highest half in them
        self._open: dict[int, OpenHalf] = {}  # in the order of their offsets
        # The fields of an :class:`EndedHalf`, the oldest first. Plain tuples, as of open ones.
        self._ended: dict[int, tuple[object, ...]] = {}
        self._checks: dict[int, int] = {}  # of open halves that were asked about
        self._steps: tuple[tuple[int, int], ...] | None = ()  # None: they have changed
        self._check_changes = 0
        self._has_older_steps = False  # they have changed while they were gathered
        # When to look at which halves again: by the second of the monotonic clock. Entries of
        # halves that have ended stay until their second comes, or there are too many.
        self._due: dict[int, array[int]] = {}
        self._seconds: list[int] = []  # a heap
        self._due_count = 0
        self._to_sweep: list[int] = []  # seconds; the last one up to the entry `_swept`
        self._swept = 0
        self._sweep_left = 0  # entries that may be looked through

    def __len__(self) -> int:
        """Open halves."""
        return len(self._open)

    # --- state ------------------------------------------------------------------------------------

    def restore(self, progress: HalfProgress) -> None:
        """The state in the log says so."""
        self.written = progress
        self._floor, self._op_floor, self._steps = progress
        self.end = progress.floor
        self._forget_dropped()

    def drop_topic(self, topic: str, end: int) -> None:
        """A topic is deleted: those of its halves below ``end`` that are open are not committed."""
        if end > self._floor:
            self.dropped[topic] = end

    def _forget_dropped(self) -> None:
        self.dropped = {topic: end for topic, end in self.dropped.items() if end > self._floor}

    @property
    def progress(self) -> HalfProgress:
        """What the state is to know."""
        self._advance()
        if self._steps is None:
            for _ in self._gather():
                pass
            assert self._steps is not None
        return HalfProgress(self._floor, self._op_floor, self._steps)

    @property
    def has_unwritten(self) -> bool:
        return self.progress != self.written

    @property
    def floors(self) -> tuple[int, int]:
        """From where on the half queue and the op queue have to be read."""
        self._advance()
        return self._floor, self._op_floor

    def _advance(self) -> None:
        # Millions may have ended behind the one that was open.
        self._floor = next(iter(self._open), self.end)
        while self._ops and self._ops[0][1] < self._floor:
            self._op_floor = self._ops.popleft()[0]
        if self.dropped:
            self._forget_dropped()

    def _checks_changed(self) -> None:
        self._steps = None
        self._check_changes += 1

    def count_checks(self) -> Iterator[None]:
        """Gather what :attr:`progress` is to tell of the checks, in pieces of a few ms: others may
        do their work between them. Checks of that time may be missing until the next time: then a
        half is asked about once more often.
        """
        if self._steps is None or self._has_older_steps:
            yield from self._gather()

    def _gather(self) -> Iterator[None]:
        """Piece by piece, runs of open halves that were asked about equally often."""
        self._has_older_steps = False
        changes = self._check_changes
        offsets = list(self._open)
        steps: list[tuple[int, int]] = []
        for first in range(0, len(offsets), COUNTS_AT_ONCE):
            piece = offsets[first : first + COUNTS_AT_ONCE]
            counts = list(map(self._checks.get, piece, repeat(0)))
            share = max(1, CHECK_STEPS_MAX * len(piece) // len(offsets))
            steps += _steps(piece, counts, share)
            yield
        while steps and not steps[-1][1]:
            steps.pop()
        self._steps = tuple(one for one, after in pairwise((*steps, (0, -1))) if one[1] != after[1])
        self._has_older_steps = changes != self._check_changes

    # --- halves -----------------------------------------------------------------------------------

    def check_room(self, count: int) -> None:
        """Raises ``FlowControl`` when so many more halves are too many."""
        if len(self._open) + count > self.halves_max:
            raise FlowControl(
                f"{len(self._open)} half messages are open here, {self.halves_max} may be: end "
                "transactions, or see cometmq transaction list"
            )

    def add(self, offset: int, half: OpenHalf, due_s: float, checks: int = 0) -> None:
        """A half was stored; its producers are asked about it from ``due_s`` on."""
        self.add_run(offset, [half], due_s)
        if checks:
            self._checks[offset] = checks
            self._checks_changed()

    def add_run(self, first: int, halves: Sequence[OpenHalf], due_s: float) -> None:
        """The same, of halves that follow each other from offset ``first`` on."""
        assert first >= self.end, (first, self.end)
        self.end = first + len(halves)
        offsets = range(first, self.end)
        self._open.update(zip(offsets, halves, strict=True))
        self._schedule_all(offsets, due_s)

    def passed(self, end: int) -> None:
        """All halves below ``end`` that are not open have ended."""
        self.end = max(self.end, end)

    def find(self, offset: int) -> OpenHalf | None:
        """None: it is not open."""
        return self._open.get(offset)

    def ended(self, offset: int) -> EndedHalf | None:
        """What became of a half that ended lately; None: it is not known any more, or it has not
        ended.
        """
        found = self._ended.get(offset)
        return None if found is None else EndedHalf._make(found)

    def close(self, offset: int, ended: EndedHalf) -> None:
        """An open half has ended."""
        self.close_all({offset: ended})

    def close_all(self, ended: Mapping[int, EndedHalf]) -> None:
        """Open halves have ended."""
        opened, checks = self._open, self._checks
        for offset in ended:
            del opened[offset]
            if checks and checks.pop(offset, 0):
                self._checks_changed()
        self.remember_all(ended)

    def remember_all(self, ended: Mapping[int, EndedHalf]) -> None:
        """What became of halves."""
        plain = [tuple(one) for one in ended.values()]
        self._ended.update(zip(ended, plain, strict=True))
        if len(self._ended) > ENDED_MAX + ENDED_MORE:
            for offset in list(islice(self._ended, len(self._ended) - ENDED_MAX)):
                del self._ended[offset]

    def told(self, op_end: int, offsets: Iterable[int]) -> None:
        """The op queue, up to ``op_end``, lists these halves; none of them is open."""
        highest = max(offsets)
        if self._ops and self._ops[-1][0] // OPS_PER_STEP == op_end // OPS_PER_STEP:
            highest = max(highest, self._ops.pop()[1])
        self._ops.append((op_end, highest))

    def open_halves(self, first: int, count_max: int) -> list[tuple[int, OpenHalf, int]]:
        """Open halves from offset ``first`` on: offset, half, how often it was asked about."""
        found: list[tuple[int, OpenHalf, int]] = []
        for offset, half in self._open.items():
            if offset >= first:
                found.append((offset, half, self._checks.get(offset, 0)))
                if len(found) >= count_max:
                    break
        return found

    def below(self, log_offset: int, count_max: int) -> list[int]:
        """Open halves whose records lie below this place of the log."""
        found: list[int] = []
        for offset, half in self._open.items():
            if half[0] >= log_offset or len(found) >= count_max:
                break
            found.append(offset)
        return found

    def ended_among_open(self, count_max: int) -> Iterator[list[int]]:
        """Halves that have ended, and were stored behind one that has not; the newest of them, from
        the last one on. In pieces of a ms or so: others may do their work between them.
        """
        end, left = self.end, count_max
        while left > 0 and end > self.floors[0]:
            first = max(self.floors[0], end - COUNTS_AT_ONCE)
            found = [at for at in range(end - 1, first - 1, -1) if at not in self._open][:left]
            left -= len(found)
            end = first
            yield found

    @property
    def oldest(self) -> OpenHalf | None:
        """The open half that was stored first."""
        return next(iter(self._open.values()), None)

    # --- checks -----------------------------------------------------------------------------------

    def checks_of(self, offset: int) -> int:
        """How often an open half was asked about."""
        return self._checks.get(offset, 0)

    def asked(self, offsets: Sequence[int], again_s: float) -> None:
        """A producer is asked about these open halves; look at them again then."""
        count_of, checks = self._checks.get, self._checks
        for offset in offsets:
            checks[offset] = count_of(offset, 0) + 1
        self._checks_changed()
        self._schedule_all(offsets, again_s)

    def schedule(self, offset: int, at_s: float) -> None:
        """Look at an open half then."""
        self._schedule_all((offset,), at_s)

    def _schedule_all(self, offsets: Sequence[int], at_s: float) -> None:
        second = math.ceil(at_s)
        bucket = self._due.get(second)
        if bucket is None:
            bucket = self._due[second] = array("q")
            heappush(self._seconds, second)
        bucket.extend(offsets)
        self._due_count += len(offsets)
        if self._due_count > 2 * len(self._open) + STALE_MAX:
            self._sweep_left += SWEPT_PER_ENTRY * len(offsets)
            while self._sweep_left >= SWEPT_AT_ONCE:
                self._sweep()

    def take_due(self, now_s: float, count_max: int) -> list[int]:
        """Open halves to be looked at now, at most so many: none of them comes again before it is
        scheduled again.
        """
        found: list[int] = []
        left = LOOK_MAX
        while left and self._seconds and self._seconds[0] <= now_s and len(found) < count_max:
            bucket = self._due[self._seconds[0]]
            count = min(len(bucket), left, count_max - len(found))
            piece = bucket[len(bucket) - count :]
            del bucket[len(bucket) - count :]
            left -= count
            self._due_count -= count
            found += filter(self._open.__contains__, piece)
            if not bucket:
                del self._due[heappop(self._seconds)]
        found.sort()
        return found

    @property
    def next_look_s(self) -> float | None:
        """When :meth:`take_due` may find something; None: nothing is open."""
        return self._seconds[0] if self._seconds else None

    def _sweep(self) -> None:
        """Forget entries of halves that have ended, among the next few: more than half of all are
        of such halves.
        """
        if not self._to_sweep:
            self._to_sweep = list(self._due)
        bucket = self._due.get(self._to_sweep[-1], _NO_ENTRIES)
        piece = slice(self._swept, self._swept + SWEPT_AT_ONCE)
        before = bucket[piece]
        if not before:
            self._to_sweep.pop()
            self._swept = 0
            self._sweep_left -= 1
            return
        kept = array("q", filter(self._open.__contains__, before))
        bucket[piece] = kept
        self._swept += len(kept)
        self._due_count -= len(before) - len(kept)
        self._sweep_left -= len(before)

    def validate(self) -> None:
        """Asserts what must hold; for tests."""
        assert list(self._open) == sorted(self._open)
        assert self._checks.keys() <= self._open.keys()
        assert self._due.keys() == set(self._seconds)
        assert self._due_count == sum(map(len, self._due.values()))
        assert self._floor <= self.end
        progress = self.progress
        if len(self._open) <= CHECK_STEPS_MAX:
            for offset in self._open:
                assert progress.checks_of(offset) == self._checks.get(offset, 0), offset


def _steps(offsets: Sequence[int], counts: Sequence[int], count_max: int) -> list[tuple[int, int]]:
    """Runs of halves that were asked about equally often. Where there are too many, neighbours
    become one with the lowest count: a half may be asked about once more often, and is never given
    up early.
    """
    steps: list[tuple[int, int]] = []
    at = 0
    for count, run in groupby(counts):
        at += len(list(run))
        steps.append((offsets[at - 1] + 1, count))
    length = -(-len(steps) // count_max)
    if length < 2:
        return steps
    pieces = (steps[first : first + length] for first in range(0, len(steps), length))
    return [(piece[-1][0], min(count for _, count in piece)) for piece in pieces]

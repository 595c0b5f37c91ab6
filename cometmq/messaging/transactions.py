"""Transactions: which half messages are open, when their producers are asked about them, and what
became of those that ended lately. RocketMQ's rules. Pure: the time is a parameter.

A half is named by its offset in the half queue. Offsets only rise, so the table keeps the halves in
the order of the log. The half queue and the op queue tell the table again after a restart: only how
often a half was asked about, and from where on the queues have to be read, is state of its own.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, islice, pairwise, takewhile
from typing import NamedTuple

from cometmq.errors import FlowControl
from cometmq.messaging.check_counts import CheckCounts
from cometmq.messaging.due_halves import DueHalves
from cometmq.messaging.ended_halves import EndedHalves
from cometmq.messaging.half_runs import EndedHalf, EndedRun, HalfRun, OpenHalf

HALVES_MAX = 200_000
CHECK_STEPS_MAX = 8_192  # of the state's change
OPS_PER_STEP = 64  # op records: as exactly is known which of them are needed
COUNTS_AT_ONCE = 8_192  # halves, a ms or two
RUN_MIN = 16  # halves that were stored together: fewer have an entry each
THIN_PART = 8  # the part of a run's halves that stay open, below which each gets its own entry


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


class HalfTable:
    """The open halves of a writer. A follower knows the progress alone."""

    def __init__(self, halves_max: int = HALVES_MAX) -> None:
        self.halves_max = halves_max
        self.written = HalfProgress()  # what the state in the log knows
        self.end = 0  # of the half queue
        # Halves at the end of the log, by their log offsets: while a writer opens its log.
        self.log_end: dict[int, EndedHalf] = {}
        # Topics that were created while halves were open: those below this offset are for a topic
        # of the same name that was deleted, and are not committed.
        self.dropped: dict[str, int] = {}
        self._floor = 0
        self._op_floor = 0
        self._ops: deque[tuple[int, int]] = deque()  # end of some op records, highest half in them
        # In the order of their offsets; those that were stored together have one run.
        self._open: dict[int, OpenHalf | HalfRun] = {}
        self._ended = EndedHalves()
        self._checks = CheckCounts()  # of open halves that were asked about
        self._steps: tuple[tuple[int, int], ...] | None = ()  # None: they have changed
        self._check_changes = 0
        self._has_older_steps = False  # they have changed while they were gathered
        self._dues = DueHalves(self._open)

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

    def drop_older(self, topic: str, end: int) -> None:
        """A topic is created: halves below ``end`` that are open are not committed into it."""
        if end > self._floor:
            self.dropped[topic] = end

    def forget_topic(self, topic: str) -> None:
        """A topic is deleted: nothing is committed into it."""
        self.dropped.pop(topic, None)

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
            counts = self._checks.counts_of(piece)
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
        self._extend(offset, offset + 1)
        self._open[offset] = half
        self._dues.add((offset,), due_s)
        if checks:
            self._checks.put(offset, checks)
            self._checks_changed()

    def add_run(self, run: HalfRun, due_s: float) -> None:
        """The same, of halves that were stored together."""
        self._extend(run.first, run.end)
        offsets = range(run.first, run.end)
        if len(offsets) >= RUN_MIN:
            self._open.update(dict.fromkeys(offsets, run))
        else:
            self._open.update(zip(offsets, map(run.at, offsets), strict=True))
        self._dues.add(offsets, due_s)

    def _extend(self, first: int, end: int) -> None:
        assert first >= self.end, (first, self.end)
        self.end = end

    def passed(self, end: int) -> None:
        """All halves below ``end`` that are not open have ended."""
        self.end = max(self.end, end)

    def find(self, offset: int) -> OpenHalf | None:
        """None: it is not open."""
        half = self._open.get(offset)
        return half.at(offset) if isinstance(half, HalfRun) else half

    def find_run(self, first: int, count: int) -> HalfRun | None:
        """The run that so many halves from offset ``first`` on were stored in; None: one of them is
        not open, or they were not stored together.
        """
        run = self._open.get(first)
        if not isinstance(run, HalfRun) or first + count > run.end:
            return None
        is_whole = run.open_count == run.end - run.first
        return run if is_whole or self.are_open(range(first, first + count)) else None

    def are_open(self, offsets: Iterable[int]) -> bool:
        """Whether none of the halves has ended."""
        return all(map(self._open.__contains__, offsets))

    def group_of(self, offset: int) -> str | None:
        """The producer group of a half; None: it is not open."""
        return self.groups_of((offset,))[0]

    def groups_of(self, offsets: Iterable[int]) -> list[str | None]:
        """The same, of many."""
        return [
            None if half is None else half.group if isinstance(half, HalfRun) else half[2]
            for half in map(self._open.get, offsets)
        ]

    def ended(self, offset: int) -> EndedHalf | None:
        """What became of a half that ended lately; None: it is not known any more, or it has not
        ended.
        """
        return self._ended.find(offset)

    def close(self, offset: int, ended: EndedHalf) -> None:
        """An open half has ended."""
        self.close_all({offset: ended})

    def close_all(self, ended: Mapping[int, EndedHalf]) -> None:
        """Open halves have ended."""
        opened = self._open
        for offset in ended:
            half = opened.pop(offset)
            if isinstance(half, HalfRun):
                self._leave_run(half, 1)
        self._forget_checks(ended)
        self.remember_all(ended)

    def close_run(self, ended: EndedRun) -> None:
        """Open halves of one run have ended."""
        offsets, opened = ended.offsets, self._open
        run = opened[ended.first]
        for offset in offsets:
            del opened[offset]
        if isinstance(run, HalfRun):
            self._leave_run(run, len(offsets))
        self._forget_checks(offsets)
        self._ended.add_run(ended)

    def _leave_run(self, run: HalfRun, count: int) -> None:
        """So many halves of a run are not open any more. Of one with few left each gets its own
        entry: the columns go.
        """
        run.open_count -= count
        assert run.open_count >= 0, run.first
        if 0 < run.open_count * THIN_PART < run.end - run.first:
            for offset in range(run.first, run.end):
                if offset in self._open:
                    self._open[offset] = run.at(offset)

    def _forget_checks(self, offsets: Collection[int]) -> None:
        if self._checks and self._checks.forget(offsets):
            self._checks_changed()

    def remember_all(self, ended: Mapping[int, EndedHalf]) -> None:
        """What became of halves."""
        self._ended.add_all(ended)

    def told(self, op_end: int, offsets: Iterable[int]) -> None:
        """The op queue, up to ``op_end``, lists these halves; none of them is open."""
        highest = max(offsets)
        if self._ops and self._ops[-1][0] // OPS_PER_STEP == op_end // OPS_PER_STEP:
            highest = max(highest, self._ops.pop()[1])
        self._ops.append((op_end, highest))

    def open_halves(self, first: int, count_max: int) -> list[tuple[int, OpenHalf, int]]:
        """Open halves from offset ``first`` on: offset, half, how often it was asked about."""
        offsets = islice((offset for offset in self._open if offset >= first), count_max)
        return [(offset, self._half(offset), self.checks_of(offset)) for offset in offsets]

    def below(self, log_offset: int, count_max: int) -> list[int]:
        """Open halves whose records lie below this place of the log."""
        offsets = takewhile(lambda offset: self._half(offset)[0] < log_offset, self._open)
        return list(islice(offsets, count_max))

    def _half(self, offset: int) -> OpenHalf:
        half = self.find(offset)
        assert half is not None, offset
        return half

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
        return next(map(self._half, self._open), None)

    # --- checks -----------------------------------------------------------------------------------

    def checks_of(self, offset: int) -> int:
        """How often an open half was asked about."""
        return self._checks.count_of(offset)

    def counts_of(self, offsets: Sequence[int]) -> list[int]:
        """The same, of many in their order."""
        return self._checks.counts_of(offsets)

    def asked(self, offsets: Sequence[int], again_s: float) -> None:
        """A producer is asked about these open halves; look at them again then."""
        self._checks.count(offsets)
        self._checks_changed()
        self._dues.add(offsets, again_s)

    def schedule(self, offset: int, at_s: float) -> None:
        """Look at an open half then."""
        self._dues.add((offset,), at_s)

    def take_due(self, now_s: float, count_max: int) -> list[int]:
        """Open halves to be looked at now, at most so many: none of them comes again before it is
        scheduled again.
        """
        return self._dues.take(now_s, count_max)

    @property
    def next_look_s(self) -> float | None:
        """When :meth:`take_due` may find something; None: nothing is open."""
        return self._dues.next_s

    def validate(self) -> None:
        """Asserts what must hold; for tests."""
        assert list(self._open) == sorted(self._open)
        assert self._checks.offsets() <= self._open.keys()
        runs = Counter(half for half in self._open.values() if isinstance(half, HalfRun))
        assert all(run.open_count == count for run, count in runs.items())
        self._dues.validate()
        assert self._floor <= self.end
        progress = self.progress
        if len(self._open) <= CHECK_STEPS_MAX:
            for offset in self._open:
                assert progress.checks_of(offset) == self.checks_of(offset), offset


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

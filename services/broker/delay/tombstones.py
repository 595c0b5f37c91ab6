"""Looks in the log for what says that delayed messages were recalled, by this writer or an earlier
one: a tombstone lies behind its message in the timer queue. One pass for all handles of a call.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cometmq.errors import CometError, FlowControl, MessageNotFound
from cometmq.format import queueunit, timers
from cometmq.format.record import Record
from cometmq.format.timers import TIMER_QUEUE
from cometmq.member.read.records import read_each, read_units, slices
from cometmq.messaging.timers import Timer
from cometmq.store.base import BaseStore
from cometmq.store.log.commitlog import Span

SEARCH_UNITS_MAX = 1_000_000  # of the timer queue, that are read behind one message: 20 MB
CALL_UNITS_MAX = 2 * SEARCH_UNITS_MAX
UNITS_AT_ONCE = 8_192
READ_COUNT_MAX = 1_024
READ_BYTES_MAX = 1 << 20


@dataclass(slots=True, eq=False)
class Sought:
    """A message that waits no more. ``log_offset`` None: the log does not have it any more.
    ``names``: how tombstones name it.
    """

    timer: Timer
    names: frozenset[str]
    log_offset: int | None
    is_recalled: bool = False


class TombstoneSearch:
    """For the handles of one call."""

    def __init__(self, store: BaseStore, all_sought: Sequence[Sought]) -> None:
        self._store = store
        self._all_sought = all_sought
        self._dues = {one.timer.due_ms for one in all_sought}
        # Those whose record is there, by where it is, and where each copy of it is.
        self._by_place: defaultdict[int, list[Sought]] = defaultdict(list)
        self._by_name: defaultdict[tuple[int, str], list[Sought]] = defaultdict(list)
        for one in all_sought:
            if one.log_offset is not None:
                self._by_place[one.log_offset].append(one)
                continue
            for name in one.names:
                self._by_name[one.timer.due_ms, name].append(one)

    async def run(self) -> list[bool | CometError]:
        """Whether each message was recalled. MessageNotFound: nothing shows it; FlowControl: the
        call has read as much as it may, the messages stored first come first.
        """
        low, end = self._store.queue_bounds(*TIMER_QUEUE)
        answers: dict[Sought, bool | CometError] = {}
        at, left = low, CALL_UNITS_MAX
        for one in sorted(self._all_sought, key=lambda sought: sought.timer.offset):
            behind = one.timer.offset + 1
            stop = min(end, behind + SEARCH_UNITS_MAX)
            at = max(at, behind)  # what lies between has been read for those before
            while at < stop and left and not one.is_recalled:
                count = await self._look(at, min(UNITS_AT_ONCE, stop - at, left))
                at, left = at + count, left - count
            answers[one] = _answer(one, is_read=at >= stop, is_all=stop == end)
        return [answers[one] for one in self._all_sought]

    async def _look(self, first: int, count: int) -> int:
        """At some units of the queue; how many."""
        units = await read_units(self._store, TIMER_QUEUE, first, count)
        codes = queueunit.tags_codes(units)
        if not self._dues.isdisjoint(codes):
            named = [n for n, code in enumerate(codes) if code in self._dues]
            await self._read({first + n: queueunit.unit_at(units, n)[:2] for n in named})
        if len(codes) == UNITS_AT_ONCE:  # there is more, and these may have been in memory
            await asyncio.sleep(0)
        return max(1, len(codes))

    async def _read(self, units: Mapping[int, Span]) -> None:
        spans = [span for span in units.values() if queueunit.is_message(*span)]
        places = [(TIMER_QUEUE, at) for at, span in units.items() if queueunit.is_message(*span)]
        for part in slices(spans, READ_COUNT_MAX, READ_BYTES_MAX):
            for found in await read_each(self._store, spans[part], places[part]):
                if isinstance(found, Record):
                    self._note(found)

    def _note(self, found: Record) -> None:
        name = timers.recalls(found.raw_properties)
        if not name:  # a copy, stored before retention
            if its := self._by_place.get(found.prepared_offset):
                self._by_place[found.log_offset] += its
            return
        for one in self._meant(found, name):
            one.is_recalled = True

    def _meant(self, tombstone: Record, name: str) -> Iterator[Sought]:
        yield from self._by_place.get(tombstone.prepared_offset, ())
        if (due_ms := timers.due_ms(tombstone.raw_properties)) is not None:
            yield from self._by_name.get((due_ms, name), ())


def _answer(one: Sought, *, is_read: bool, is_all: bool) -> bool | CometError:
    if one.is_recalled:
        return True
    if not is_read:
        return FlowControl("too much lies behind the messages of these handles: send fewer at once")
    if one.log_offset is None or not is_all:
        return MessageNotFound("the log does not tell any more whether the message was recalled")
    return False

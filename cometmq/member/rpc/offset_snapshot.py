"""One look at all queues and groups, for the lag job: the progress of each, and its times.

Two things make numbers of lag wrong elsewhere: an end of a queue that was read before the group's
offset (negative lag), and an unknown number that became 0. So minimum, maximum, generation and all
committed positions of one queue are read in one turn of the loop, and what is not known stays 0 on
the wire, where 0 can mean nothing else (store times), or absent (positions).

Store times are read afterwards: the message at an offset never changes while its queue lives. Hot
pages are read on the loop, cold ones in a thread. Work is done in pieces that are small enough for
the loop; between them other tasks have a turn.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.format import queueunit, record
from cometmq.member.read.reader import QueueView, Reader
from cometmq.member.rpc import convert
from cometmq.messaging.groups import MemberTable
from cometmq.messaging.state import BrokerState
from cometmq.model import Position, QueueKey
from cometmq.store.base import BaseStore
from cometmq.v1 import broker_pb2

PIECE_ROWS_MAX = 256  # queues and groups that are read in one turn of the loop: under a millisecond
TURN_ENTRIES_MAX = 1024  # entries of the tables that are looked through in one turn
TURN_READS_MAX = 32  # store times that are read in one turn: about half a millisecond


@dataclass(slots=True)
class GroupRow:
    """One group in one queue. ``open_offset``: the first message that is not done, None when none
    can be read there or the position does not hold any more. ``store_time_ms`` is that message's;
    0 = none.
    """

    group: str
    committed: Position | None
    member_count: int
    open_offset: int | None
    store_time_ms: int = 0


@dataclass(slots=True)
class QueueRow:
    """One queue and its groups, in order of name; all but the store times are of one instant."""

    key: QueueKey
    view: QueueView
    born: int  # generation of the queue's creation
    groups: list[GroupRow]
    max_store_time_ms: int = 0  # of the last readable message; 0 = there is none


@dataclass(slots=True)
class _Index:
    """Which groups to look for, decided when the snapshot begins."""

    committed: defaultdict[QueueKey, list[str]] = field(default_factory=lambda: defaultdict(list))
    # Live members by topic and group.
    readers: defaultdict[str, defaultdict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )


class _Pace:
    """Gives the loop a turn after every so many steps."""

    def __init__(self, steps_max: int) -> None:
        self._steps_max = steps_max
        self._steps = 0

    async def step(self) -> None:
        self._steps += 1
        if self._steps % self._steps_max == 0:
            await asyncio.sleep(0)


class OffsetSnapshot:
    """Reads all queues once. Belongs to the event loop; several may run at a time."""

    def __init__(
        self, store: BaseStore, reader: Reader, state: BrokerState, members: MemberTable
    ) -> None:
        self._store = store
        self._reader = reader
        self._state = state
        self._members = members
        self._reads = _Pace(TURN_READS_MAX)

    async def pieces(self) -> AsyncIterator[list[QueueRow]]:
        """Every queue once, in order of topic and number. A queue that is created meanwhile may be
        missing, so may a group's first commit; what is deleted meanwhile is left out.
        """
        index = await self._index()
        piece: list[QueueRow] = []
        row_count = 0
        for name in [config.name for config in self._state.topics]:
            for queue_id in range(len(self._state.generations.topic(name))):
                row = self._row((name, queue_id), index)
                if row is None:
                    break  # the topic was deleted since the last piece
                piece.append(row)
                row_count += 1 + len(row.groups)
                if row_count >= PIECE_ROWS_MAX:
                    yield await self._timed(piece)
                    piece, row_count = [], 0
        assert row_count < PIECE_ROWS_MAX, row_count
        if piece:
            yield await self._timed(piece)

    async def _index(self) -> _Index:
        index, pace = _Index(), _Pace(TURN_ENTRIES_MAX)
        for group in sorted({*self._state.groups, *self._members.groups()}):
            await pace.step()
            for key in self._state.offsets.of_group(group):
                index.committed[key].append(group)
                await pace.step()
            for member in self._members.view(group).members:
                for subscription in member.subscriptions:
                    index.readers[subscription.topic][group] += 1
                    await pace.step()
        return index

    # --- in one turn of the loop ------------------------------------------------------------------

    def _row(self, key: QueueKey, index: _Index) -> QueueRow | None:
        topic, queue_id = key
        config = self._state.topics.find(topic)
        history = self._state.generations.find(topic, queue_id)
        if config is None or history is None:
            return None
        view = self._reader.queue(topic, queue_id)
        assert view.min_offset <= view.max_offset, key
        readers: Mapping[str, int] = index.readers.get(topic, {})
        names = set(index.committed.get(key, ()))
        if queue_id < config.read_queue_count:  # members do not see the queues behind
            names.update(readers)
        groups = [self._group(name, key, view, readers.get(name, 0)) for name in sorted(names)]
        return QueueRow(key, view, history.born, [row for row in groups if row is not None])

    def _group(
        self, name: str, key: QueueKey, view: QueueView, member_count: int
    ) -> GroupRow | None:
        committed = self._state.offsets.get(name, key)
        if committed is None:
            return GroupRow(name, None, member_count, None) if member_count else None
        holds = self._state.generations.of(*key).fence(committed) is None
        is_open = holds and view.min_offset <= committed.offset < view.max_offset
        return GroupRow(name, committed, member_count, committed.offset if is_open else None)

    # --- afterwards -------------------------------------------------------------------------------

    async def _timed(self, piece: list[QueueRow]) -> list[QueueRow]:
        """The rows with their store times."""
        for row in piece:
            times: dict[int, int] = {}
            if row.view.max_offset > row.view.min_offset:
                row.max_store_time_ms = await self._time(row, row.view.max_offset - 1, times)
            for group in row.groups:
                if group.open_offset is not None:
                    group.store_time_ms = await self._time(row, group.open_offset, times)
        return piece

    async def _time(self, row: QueueRow, offset: int, known: dict[int, int]) -> int:
        """Store time of the message at a queue offset; 0 when it is gone by now."""
        if offset not in known:
            await self._reads.step()
            try:
                found = self._read(row.key, offset, True)
            except BlockingIOError:
                found = await asyncio.to_thread(self._read, row.key, offset, False)
            # A topic that was deleted and created again has another message there.
            history = self._state.generations.find(*row.key)
            alive = history is not None and history.born == row.born
            known[offset] = found if alive else 0
        return known[offset]

    def _read(self, key: QueueKey, offset: int, nowait: bool) -> int:
        try:
            units = self._store.read_units(*key, offset, 1, nowait=nowait)
            if not units:
                return 0
            log_offset, size, _ = queueunit.unit_at(units, 0)
            if not queueunit.is_message(log_offset, size):
                return 0
            found = record.decode(self._store.read_records([(log_offset, size)], nowait=nowait))
        except (MessageNotFound, StoreDamaged):
            return 0  # what cannot be read has no time; its consumer gets the error
        is_found = (found.topic, found.queue_id, found.queue_offset) == (*key, offset)
        return found.store_time_ms if is_found else 0


def queue_proto(row: QueueRow) -> broker_pb2.QueueSnapshot:
    """A row as it goes over the wire."""
    return broker_pb2.QueueSnapshot(
        queue=convert.queue_proto(*row.key),
        generation=row.view.generation,
        min_offset=row.view.min_offset,
        max_offset=row.view.max_offset,
        max_store_time_ms=row.max_store_time_ms,
        groups=[
            broker_pb2.GroupSnapshot(
                group=group.group,
                committed=convert.position_proto(group.committed) if group.committed else None,
                committed_store_time_ms=group.store_time_ms,
                member_count=group.member_count,
            )
            for group in row.groups
        ],
    )

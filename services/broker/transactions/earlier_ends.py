"""Answers to ends that come again: their half messages have ended before."""

from __future__ import annotations

import asyncio

from cometmq.errors import (
    CometError,
    FlowControl,
    MessageNotFound,
    StoreDamaged,
    TopicNotFound,
    TransactionEnded,
)
from cometmq.format import halves, record
from cometmq.format.halves import GIVEN_UP_TOPIC, HALF_TOPIC
from cometmq.format.record import Record
from cometmq.member.read.search import Finder, KeyQuery
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.half_runs import EndedHalf
from cometmq.messaging.transactions import Resolution
from services.broker.transactions.names import End, HalfName, check_owner, not_found

INDEX_LOOKS_MAX = 40  # for an end that is repeated long after the first
INDEX_PAUSE_S = 0.05


class EarlierEnds:
    """Belongs to the event loop."""

    def __init__(self, storage: MemberStorage, keeper: StateKeeper, finder: Finder) -> None:
        self._storage = storage
        self._keeper = keeper
        self._table = keeper.state.halves
        self._finder = finder

    async def answer(self, group: str, end: End) -> EndedHalf:
        """What became of the half. Raises TransactionNotFound, TransactionEnded (otherwise than
        ``end`` wants), NoPermission, FlowControl (not known yet).
        """
        name = end.half
        ended = self._table.ended(name.half_offset) or await self._became(name)
        if ended.half_log_offset != name.log_offset:
            raise not_found(name)
        check_owner(group, ended.group)
        if ended.is_given_up or ended.is_committed != (end.resolution is Resolution.COMMIT):
            how = "is committed" if ended.is_committed else "is rolled back"
            raise TransactionEnded(
                f"half {name.half_offset} {'was given up' if ended.is_given_up else how}"
            )
        return ended

    async def _became(self, name: HalfName) -> EndedHalf:
        """What the log has of a half that ended long ago."""
        if not 0 <= name.half_offset < self._table.end:
            raise not_found(name)
        half = await asyncio.to_thread(self._read_half, name)
        its = halves.read(half.raw_properties)
        if its is None or its.unique_id != name.transaction_id:
            raise not_found(name)
        if not its.unique_id:
            raise TransactionEnded(f"half {name.half_offset}: nobody can tell how it ended")
        for topic in (its.topic, GIVEN_UP_TOPIC):
            made = await self._made_of(half, topic)
            if made is not None:
                place = made.topic, made.queue_id, made.queue_offset, made.log_offset
                return EndedHalf(half.log_offset, its.group, *place)
        return EndedHalf(half.log_offset, its.group)

    async def _made_of(self, half: Record, topic: str) -> Record | None:
        """The record in ``topic`` that was made of a half; by the key index, which may have to come
        so far first. Raises FlowControl, IndexDisabled.
        """
        end = self._storage.store.appended_offset
        # Else the record may be there, and not be shown yet.
        await self._storage.stored(end, self._keeper.demands_of([topic]))
        for _ in range(INDEX_LOOKS_MAX):
            query = KeyQuery(topic, half.unique_id, True, 0, 2**63 - 1, 0)
            try:
                answer = await self._finder.by_key(query)
            except TopicNotFound:
                return None
            for found in answer.found:
                if found.message.prepared_offset == half.log_offset:
                    return found.message
            if answer.indexed_offset >= end:
                return None
            await asyncio.sleep(INDEX_PAUSE_S)
        raise FlowControl("the key index does not tell yet how the transaction ended")

    def _read_half(self, name: HalfName) -> Record:
        """In a thread. TransactionNotFound."""
        try:
            found = record.decode(self._storage.store.read_record(name.log_offset))
        except (MessageNotFound, StoreDamaged, CometError):
            raise not_found(name) from None
        if (found.topic, found.queue_offset) != (HALF_TOPIC, name.half_offset):
            raise not_found(name)
        return found

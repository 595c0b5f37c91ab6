"""Ends transactions at the writer: commits half messages into their topics, rolls them back, gives
up those that no producer has ended.

What becomes of some halves is one append: the records made of them, then the op records that list
them. A crash between the two is mended when the log is opened again: a record names the half that
it was made of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.errors import (
    CometError,
    FlowControl,
    InvalidRequest,
    MessageNotFound,
    NoPermission,
    StoreDamaged,
    TopicNotFound,
    TransactionEnded,
    TransactionNotFound,
)
from cometmq.format import halves, record
from cometmq.format.halves import (
    GIVEN_UP_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    QUEUE_ID,
    HalfProperties,
    op_records,
)
from cometmq.format.record import Record
from cometmq.format.relay import OwnRecord, Relayed, relay
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.records import read_each, slices
from cometmq.member.read.search import Finder, KeyQuery
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.groups import check_name
from cometmq.messaging.transaction_checks import CheckBoard
from cometmq.messaging.transactions import CheckRules, EndedHalf, Resolution
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields, logger

log = logger(__name__)

ENDS_MAX = 1_024  # of a call
SLICE_MAX = 256  # appended at once, so that a producer hardly waits for it
SLICE_BYTES_MAX = 1 << 20  # unless one message is larger
SINGLE_OPS_MAX = 10_000  # at a stop
INDEX_LOOKS_MAX = 40  # for an end that comes again long after the first
INDEX_PAUSE_S = 0.05


class HalfName(NamedTuple):
    """A half as its producer names it."""

    half_offset: int
    log_offset: int
    transaction_id: str


class End(NamedTuple):
    """The end that a producer wants for a transaction."""

    half: HalfName
    resolution: Resolution


class _Made(NamedTuple):
    """A half that is about to end. ``topic`` empty: it is given up. ``relayed`` None: nothing is
    made of it.
    """

    offset: int
    log_offset: int
    group: str
    topic: str
    store_time_ms: int
    relayed: Relayed | None


class _Call:
    """Ends that came together, and what is known of their answers."""

    def __init__(self, group: str, ends: Sequence[End]) -> None:
        self.group = group
        self.ends = ends
        self.answers: dict[int, EndedHalf | CometError] = {}
        self.topics: set[str] = set()  # of the messages that ended
        self.has_earlier = False  # some ended before: their callers may not have got the answer


class TransactionService:
    """Belongs to the event loop."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        finder: Finder,
        metrics: MemberMetrics,
        rules: CheckRules,
        clock: Clock,
    ) -> None:
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._finder = finder
        self._metrics = metrics
        self._clock = clock
        self.rules = rules
        self.table = keeper.state.halves
        self.board = CheckBoard(self.table, rules)

    # --- ends -------------------------------------------------------------------------------------

    async def end(self, group: str, ends: Sequence[End]) -> list[EndedHalf | CometError]:
        """What became of each half. Returns when all is as safe as messages of the topics. Raises
        GroupNameInvalid, and what appending raises: then some of the halves may have ended.
        """
        check_name(group)
        call = _Call(group, ends)
        spans = await self._open_spans(call)
        numbers, end_offset = list(spans), 0
        for part in slices(list(spans.values()), SLICE_MAX, SLICE_BYTES_MAX):
            some = {number: spans[number] for number in numbers[part]}
            end_offset = max(end_offset, await self._end_some(call, some))
        if call.has_earlier:
            end_offset = self._storage.store.appended_offset
        if end_offset:
            await self._storage.stored(end_offset, self._keeper.demands_of(call.topics))
        return [call.answers[number] for number in range(len(ends))]

    async def _open_spans(self, call: _Call) -> dict[int, Span]:
        """Where the halves of a call stand that are open; the others are answered."""
        spans: dict[int, Span] = {}
        met: set[int] = set()
        for number, end in enumerate(call.ends):
            try:
                _check_end(end, met)
                span = self._span(call.group, end.half)
            except CometError as error:
                call.answers[number] = error
                continue
            if span is None:
                await self._answer_ended(call, number)
            else:
                spans[number] = span
        return spans

    async def _end_some(self, call: _Call, spans: dict[int, Span]) -> int:
        """End halves; the end of the log behind what is made of them, 0 when nothing is."""
        found = await read_each(self._storage.store, list(spans.values()))
        made: dict[int, _Made] = {}
        ended: list[int] = []  # meanwhile
        for number, half in zip(spans, found, strict=True):
            if self.table.find(call.ends[number].half.half_offset) is None:
                ended.append(number)
                continue
            try:
                made[number] = self._made(call.ends[number], half)
            except CometError as error:
                call.answers[number] = error
        end_offset = 0
        if made:
            call.topics |= {one.topic for one in made.values()}
            became, end_offset = self._append(list(made.values()))
            call.answers.update(zip(made, became, strict=True))
        for number in ended:
            await self._answer_ended(call, number)
        return end_offset

    async def _answer_ended(self, call: _Call, number: int) -> None:
        try:
            ended = await self._after(call.group, call.ends[number])
        except CometError as error:
            call.answers[number] = error
        else:
            call.answers[number] = ended
            call.topics.add(ended.topic or OP_TOPIC)
            call.has_earlier = True

    def _span(self, group: str, name: HalfName) -> Span | None:
        """Where the half stands; None: it is not open any more. Raises NoPermission,
        TransactionNotFound.
        """
        half = self.table.find(name.half_offset)
        if half is None:
            return None
        log_offset, size, its_group = half
        if log_offset != name.log_offset:
            raise _not_found(name)
        _check_owner(group, its_group)
        return log_offset, size

    def _made(self, end: End, found: Record | CometError) -> _Made:
        """Raises what is wrong."""
        if isinstance(found, CometError):
            raise found
        name, its = end.half, halves.read(found.raw_properties)
        if its is None or its.unique_id != name.transaction_id:
            raise _not_found(name)
        relayed = None
        if end.resolution is Resolution.COMMIT:
            relayed = relay(
                found,
                its.topic,
                self._queue_of(its),
                self._relays.host,
                transaction_flags=halves.SYS_FLAG_COMMITTED,
            )
        return _Made(
            name.half_offset,
            found.log_offset,
            its.group,
            its.topic,
            found.store_time_ms,
            relayed,
        )

    def _queue_of(self, its: HalfProperties) -> int:
        """The queue that a message goes to: its topic may have fewer by now. Raises TopicNotFound,
        NoPermission.
        """
        config = self._keeper.state.topics.get(its.topic)
        self._keeper.check_open(its.topic)
        queue_id = config.delivery_queue_id(its.queue_id)
        if queue_id is None:
            raise NoPermission(f"topic {its.topic} has no queue")
        return queue_id

    def _append(self, made: Sequence[_Made]) -> tuple[list[EndedHalf], int]:
        """In one turn of the loop, so that no half ends twice; the end of the log."""
        offsets = [one.offset for one in made]
        relayed: list[OwnRecord] = [one.relayed for one in made if one.relayed is not None]
        ops = op_records(offsets, self._relays.host)
        appended = self._relays.append([*relayed, *ops]).appended
        places: list[tuple[int, int]] = []
        at = appended.log_offset
        for queue_offset, size in zip(appended.queue_offsets, appended.segment_bytes, strict=True):
            places.append((queue_offset, at))
            at += size
        self.table.told(appended.queue_offsets[-1] + 1, offsets)
        became: list[EndedHalf] = []
        left = iter(places)
        ages: dict[tuple[str, bool], list[float]] = {}
        now_ms = self._clock.wall_ms()
        for one in made:
            ended = EndedHalf(one.log_offset, one.group)
            if one.relayed is not None:
                to = one.relayed
                ended = EndedHalf(one.log_offset, one.group, to.topic, to.queue_id, *next(left))
            became.append(ended)
            self.table.close(one.offset, ended)
            self.board.closed(one.offset, one.group)
            if one.topic:
                age_s = max(0, now_ms - one.store_time_ms) / 1000
                ages.setdefault((one.topic, one.relayed is not None), []).append(age_s)
        for (topic, is_committed), ages_s in ages.items():
            self._metrics.transactions_ended(topic, ages_s, is_committed=is_committed)
        return became, appended.end_offset

    # --- halves that are not open -----------------------------------------------------------------

    async def _after(self, group: str, end: End) -> EndedHalf:
        """The answer to an end that comes again. Raises TransactionNotFound, TransactionEnded,
        NoPermission.
        """
        name = end.half
        ended = self.table.ended(name.half_offset) or await self._became(name)
        if ended.half_log_offset != name.log_offset:
            raise _not_found(name)
        _check_owner(group, ended.group)
        if ended.is_given_up or ended.is_committed != (end.resolution is Resolution.COMMIT):
            how = "is committed" if ended.is_committed else "is rolled back"
            raise TransactionEnded(
                f"half {name.half_offset} {'was given up' if ended.is_given_up else how}"
            )
        return ended

    async def _became(self, name: HalfName) -> EndedHalf:
        """What the log tells of a half that ended long ago."""
        if not 0 <= name.half_offset < self.table.end:
            raise _not_found(name)
        half = await asyncio.to_thread(self._read_half, name)
        its = halves.read(half.raw_properties)
        if its is None or its.unique_id != name.transaction_id:
            raise _not_found(name)
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
            raise _not_found(name) from None
        if (found.topic, found.queue_offset) != (HALF_TOPIC, name.half_offset):
            raise _not_found(name)
        return found

    # --- halves that are given up -----------------------------------------------------------------

    async def give_up(self, offsets: Sequence[int], reason: str) -> None:
        """Move open halves to the topic of those that nobody has ended. Raises what appending
        raises.
        """
        named = dict.fromkeys(offsets)
        open_ones = [(offset, half) for offset in named if (half := self.table.find(offset))]
        spans: list[Span] = [half[:2] for _, half in open_ones]
        for part in slices(spans, SLICE_MAX, SLICE_BYTES_MAX):
            found = await read_each(self._storage.store, spans[part])
            while not self._keeper.has_topic(GIVEN_UP_TOPIC):
                await self._keeper.create_system_topic(GIVEN_UP_TOPIC, 1)
            made = [
                self._given_up(offset, half[0], half[2], its)
                for (offset, half), its in zip(open_ones[part], found, strict=True)
                if self.table.find(offset) is not None
            ]
            if made:
                self._append(made)
                self._metrics.halves_given_up(len(made))
                log.warning(
                    "half messages were given up",
                    extra=fields(count=len(made), reason=reason, first=made[0].offset),
                )

    def _given_up(
        self, offset: int, log_offset: int, group: str, found: Record | CometError
    ) -> _Made:
        relayed = None
        try:
            if isinstance(found, CometError):
                raise found
            relayed = relay(found, GIVEN_UP_TOPIC, QUEUE_ID, self._relays.host)
        except CometError as error:  # it stops no other one
            log.error("a half message is lost", extra=fields(at=log_offset, reason=str(error)))
        return _Made(offset, log_offset, group, "", 0, relayed)

    def list_singly(self) -> None:
        """Before a stop: an op record for each half that has ended behind an open one. RocketMQ 4.9
        reads no op records that list several. Raises what appending raises.
        """
        offsets = self.table.ended_among_open(SINGLE_OPS_MAX) if len(self.table) else []
        for first in range(0, len(offsets), SLICE_MAX):
            some = offsets[first : first + SLICE_MAX]
            ops = [op for offset in some for op in op_records([offset], self._relays.host)]
            appended = self._relays.append(ops).appended
            self.table.told(appended.queue_offsets[-1] + 1, some)

    async def leave(self, log_offset: int) -> None:
        """The log before this place is about to go: what is open there is given up first."""
        while offsets := self.table.below(log_offset, SLICE_MAX):
            await self.give_up(offsets, "the log is cleaned")


def _check_end(end: End, met: set[int]) -> None:
    if end.resolution is Resolution.UNKNOWN:
        raise InvalidRequest("resolution: a transaction ends with COMMIT or ROLLBACK")
    if end.half.half_offset in met:
        raise InvalidRequest(f"half {end.half.half_offset} is named twice")
    met.add(end.half.half_offset)


def _check_owner(group: str, owner: str) -> None:
    if group != owner:
        raise NoPermission(f"the half message belongs to another producer group than {group}")


def _not_found(name: HalfName) -> TransactionNotFound:
    return TransactionNotFound(
        f"there is no half message {name.half_offset} at {name.log_offset} with the id "
        f"{name.transaction_id[:100]!r} here"
    )

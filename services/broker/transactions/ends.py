"""Ends transactions at the writer: commits half messages into their topics, rolls them back, gives
up those that no producer has ended.

What becomes of some halves is one append: the records made of them, then the op records that list
them. A crash between the two is mended when the log is opened again: a record names the half that
it was made of.
"""

from __future__ import annotations

import asyncio
import itertools
import operator
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, repeat
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
from cometmq.format import halves, queueunit, record
from cometmq.format.halves import (
    GIVEN_UP_TOPIC,
    HALF_TOPIC,
    OP_TOPIC,
    QUEUE_ID,
    op_records,
)
from cometmq.format.record import Record
from cometmq.format.relay import OwnRecord, Relayed, relay
from cometmq.format.relay_run import HalfTargets, RelayRun, half_targets
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.records import read_each, read_joined, slices
from cometmq.member.read.search import Finder, KeyQuery
from cometmq.member.relay import RelayWriter, batch_bytes_max
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.groups import check_name
from cometmq.messaging.transaction_checks import CheckBoard
from cometmq.messaging.transactions import CheckRules, EndedHalf, Resolution
from cometmq.model import QueueKey
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields, logger

log = logger(__name__)

ENDS_MAX = 1_024  # of a call
RUN_MAX = 1_024  # appended at once without a look at each, so that a producer hardly waits
SLICE_MAX = 256  # the same, of halves that are looked at one by one
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


class _Goal(NamedTuple):
    """Where halves with one target go. ``queue`` None: nowhere, and those below ``old_end``
    neither.
    """

    topic: str
    queue: QueueKey | None
    old_end: int


class _Columns(NamedTuple):
    """The ends of a call, field by field."""

    offsets: list[int]
    log_offsets: list[int]
    ids: list[str]
    resolutions: list[Resolution]

    def part(self, part: slice) -> _Columns:
        offsets, log_offsets, ids, resolutions = self
        return _Columns(offsets[part], log_offsets[part], ids[part], resolutions[part])


class _Run(NamedTuple):
    """Halves that end together. ``goals``: of the texts of the targets."""

    columns: _Columns
    are_commits: list[bool]
    targets: HalfTargets
    goals: list[_Goal]
    relays: RelayRun


# What an :class:`EndedHalf` has behind its first two fields when nothing was made of it.
_ROLLED_BACK = ("", 0, -1, 0)


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
        self.slice_bytes_max = batch_bytes_max(storage.store.log_file_bytes, SLICE_BYTES_MAX)
        self.rules = rules
        self.table = keeper.state.halves
        self.board = CheckBoard(self.table, rules)

    # --- ends -------------------------------------------------------------------------------------

    async def end(self, group: str, ends: Sequence[End]) -> list[EndedHalf | CometError]:
        """What became of each half. Returns when all is as safe as messages of the topics. Raises
        GroupNameInvalid, and what appending raises: then some of the halves may have ended.
        """
        check_name(group)
        return await self.decide(group, ends)

    async def decide(self, group: str, ends: Sequence[End]) -> list[EndedHalf | CometError]:
        """As :meth:`end`, for any group that halves belong to: those of RocketMQ may name none."""
        call = _Call(group, ends)
        end_offset = await self._end_together(call)
        spans = await self._open_spans(call) if len(call.answers) < len(ends) else {}
        for some in _parts(spans, self.slice_bytes_max):
            end_offset = max(end_offset, await self._end_some(call, some))
        if call.has_earlier:
            end_offset = self._storage.store.appended_offset
        if end_offset:
            await self._storage.stored(end_offset, self._keeper.demands_of(call.topics))
        return list(map(call.answers.__getitem__, range(len(ends))))

    async def _open_spans(self, call: _Call) -> dict[int, Span]:
        """Where the halves of a call stand that are open; the others are answered."""
        spans: dict[int, Span] = {}
        met: set[int] = set()
        for number, end in enumerate(call.ends):
            if number in call.answers:
                met.add(end.half.half_offset)
                continue
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

    # --- without a look at each -------------------------------------------------------------------

    async def _end_together(self, call: _Call) -> int:
        """End all halves of a call, if all of them are open, and of our form; otherwise none, or
        the first ones. The end of the log behind what is made of them, 0 when nothing is.
        """
        if len(call.ends) < 2:
            return 0
        names, resolutions = zip(*call.ends, strict=True)
        offsets, log_offsets, ids = map(list, zip(*names, strict=True))
        columns = _Columns(offsets, log_offsets, ids, list(resolutions))
        spans = self._spans(call.group, columns)
        end_offset = 0
        for part in slices(spans, RUN_MAX, self.slice_bytes_max):
            found = await read_joined(self._storage.store, spans[part])
            if found is None:
                break
            run = self._run(columns.part(part), *found)
            if run is None:
                break
            became, end_offset = self._append_run(call.group, run)
            call.answers.update(zip(range(part.start, part.stop), became, strict=True))
            call.topics.update(goal.topic for goal in run.goals)
        return end_offset

    def _spans(self, group: str, columns: _Columns) -> list[Span]:
        """Where the halves stand; nothing, unless all are open halves of the group, named once."""
        found = list(map(self.table.find, columns.offsets))
        if None in found or len({*columns.offsets}) < len(found):
            return []
        places, sizes, groups = zip(*(half for half in found if half is not None), strict=True)
        is_good = (
            list(places) == columns.log_offsets
            and {*groups} == {group}
            and Resolution.UNKNOWN not in columns.resolutions
        )
        return list(zip(places, sizes, strict=True)) if is_good else []

    def _run(self, columns: _Columns, sources: bytes, places: array[int]) -> _Run | None:
        """What is to be done, with halves that were read; None: some need a look at each."""
        targets = half_targets(sources, places)
        if targets.ids != columns.ids or None in map(self.table.find, columns.offsets):
            return None  # others, or one has ended meanwhile
        goals = [self._goal(text) for text in targets.texts]
        are_commits = [one is Resolution.COMMIT for one in columns.resolutions]
        chosen = array("I", compress(targets.chosen, are_commits))
        first = min(columns.offsets)
        if any(goals[index].queue is None or first < goals[index].old_end for index in {*chosen}):
            return None
        queues = dict.fromkeys([goals[index].queue for index in dict.fromkeys(chosen)])
        numbers = {queue: number for number, queue in enumerate(queues)}
        number_of = [numbers.get(goal.queue, 0) for goal in goals]
        relays = RelayRun(
            sources,
            array("I", compress(places, are_commits)),
            array("I", map(number_of.__getitem__, chosen)),
            tuple(queue for queue in queues if queue is not None),
            halves.SYS_FLAG_COMMITTED,
        )
        return _Run(columns, are_commits, targets, goals, relays)

    def _goal(self, text: bytes) -> _Goal:
        topic, queue_id = halves.target_of_text(text)
        try:
            queue = topic, self._queue_of(topic, queue_id)
        except CometError:  # raised again where each half is looked at
            return _Goal(topic, None, 0)
        return _Goal(topic, queue, self.table.dropped.get(topic, 0))

    def _append_run(self, group: str, run: _Run) -> tuple[list[EndedHalf], int]:
        """As :meth:`_append`."""
        offsets, relays = run.columns.offsets, run.relays
        ops = op_records(offsets, self._relays.host)
        if relays.chosen:
            appended = self._relays.append_run(relays, ops).appended
        else:
            appended = self._relays.append(ops).appended
        self.table.told(appended.queue_offsets[-1] + 1, offsets)
        firsts = appended.queue_offsets[: len(relays.queues)]
        made = [
            self._places(queue, first, count)
            for queue, first, count in zip(relays.queues, firsts, relays.sized(), strict=True)
        ]
        committed = iter([next(made[index]) for index in relays.chosen])
        parts = [next(committed) if is_commit else _ROLLED_BACK for is_commit in run.are_commits]
        heads = zip(run.columns.log_offsets, repeat(group))
        # A thousand of them: no call of Python for each.
        became: list[EndedHalf] = list(
            map(tuple.__new__, repeat(EndedHalf), map(operator.add, heads, parts))
        )
        self._close({group: dict(zip(offsets, became, strict=True))})
        ages: dict[tuple[str, bool], list[float]] = {}
        now_ms = self._clock.wall_ms()
        for index, is_commit, stored_ms in zip(
            run.targets.chosen, run.are_commits, run.targets.store_times_ms, strict=True
        ):
            age_s = max(0, now_ms - stored_ms) / 1000
            ages.setdefault((run.goals[index].topic, is_commit), []).append(age_s)
        self._count(ages)
        return became, appended.end_offset

    def _places(
        self, queue: QueueKey, first: int, count: int
    ) -> Iterator[tuple[str, int, int, int]]:
        """Topic, queue id, queue offset and log offset of the newest messages of a queue."""
        pieces: list[bytes] = []
        while count > 0:  # each read stops at the end of a queue file
            offset = first + sum(map(len, pieces)) // queueunit.UNIT_BYTES
            pieces.append(self._storage.store.read_units(*queue, offset, count))
            count -= len(pieces[-1]) // queueunit.UNIT_BYTES
        places = [place for place, _, _ in queueunit.iterate(b"".join(pieces))]
        topic, queue_id = queue
        return zip(repeat(topic), repeat(queue_id), itertools.count(first), places)

    # --- one by one -------------------------------------------------------------------------------

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
                self._queue_of(its.topic, its.queue_id, name.half_offset),
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

    def _queue_of(self, topic: str, queue_id: int, half_offset: int | None = None) -> int:
        """The queue that a message goes to: its topic may have fewer by now. ``half_offset``: of
        one that may have been sent to a topic of the same name that was deleted. Raises
        TopicNotFound, NoPermission.
        """
        config = self._keeper.state.topics.get(topic)
        self._keeper.check_open(topic)
        if half_offset is not None and half_offset < self.table.dropped.get(topic, 0):
            raise TopicNotFound(
                f"topic {topic} was deleted since the half message was sent, and created again"
            )
        delivery_queue_id = config.delivery_queue_id(queue_id)
        if delivery_queue_id is None:
            raise NoPermission(f"topic {topic} has no queue")
        return delivery_queue_id

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
        closed: dict[str, dict[int, EndedHalf]] = {}
        left = iter(places)
        ages: dict[tuple[str, bool], list[float]] = {}
        now_ms = self._clock.wall_ms()
        for one in made:
            ended = EndedHalf(one.log_offset, one.group)
            if one.relayed is not None:
                to = one.relayed
                ended = EndedHalf(one.log_offset, one.group, to.topic, to.queue_id, *next(left))
            became.append(ended)
            closed.setdefault(one.group, {})[one.offset] = ended
            if one.topic:
                age_s = max(0, now_ms - one.store_time_ms) / 1000
                ages.setdefault((one.topic, one.relayed is not None), []).append(age_s)
        self._close(closed)
        self._count(ages)
        return became, appended.end_offset

    def _close(self, closed: Mapping[str, Mapping[int, EndedHalf]]) -> None:
        """``closed``: by producer group and offset."""
        for group, of_group in closed.items():
            self.table.close_all(of_group)
            self.board.closed(of_group.keys(), group)

    def _count(self, ages: Mapping[tuple[str, bool], Sequence[float]]) -> None:
        """``ages``: in s, by topic and whether it was committed."""
        for (topic, is_committed), ages_s in ages.items():
            self._metrics.transactions_ended(topic, ages_s, is_committed=is_committed)

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
        for part in slices(spans, SLICE_MAX, self.slice_bytes_max):
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

    async def list_singly(self) -> None:
        """Before a stop: an op record for each half that has ended behind an open one. RocketMQ 4.9
        reads no op records that list several. Raises what appending raises.
        """
        if not len(self.table):
            return
        for offsets in self.table.ended_among_open(SINGLE_OPS_MAX):
            for first in range(0, len(offsets), SLICE_MAX):
                some = offsets[first : first + SLICE_MAX]
                ops = [op for offset in some for op in op_records([offset], self._relays.host)]
                appended = self._relays.append(ops).appended
                self.table.told(appended.queue_offsets[-1] + 1, some)
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    async def leave(self, log_offset: int) -> None:
        """The log before this place is about to go: what is open there is given up first."""
        while offsets := self.table.below(log_offset, SLICE_MAX):
            await self.give_up(offsets, "the log is cleaned")


def _parts(spans: Mapping[int, Span], bytes_max: int) -> Iterator[dict[int, Span]]:
    """In their order, what may be appended at once."""
    numbers = list(spans)
    for part in slices(list(spans.values()), SLICE_MAX, bytes_max):
        yield {number: spans[number] for number in numbers[part]}


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

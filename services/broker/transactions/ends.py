"""Ends transactions at the writer: commits half messages into their topics, or rolls them back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cometmq.clock import Clock
from cometmq.errors import CometError, InvalidRequest
from cometmq.format import halves
from cometmq.format.halves import HALF_QUEUE, OP_TOPIC, op_records
from cometmq.format.record import Record
from cometmq.format.relay import relay
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.records import read_each, slices
from cometmq.member.read.search import Finder
from cometmq.member.relay import RelayWriter, batch_bytes_max
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.groups import check_name
from cometmq.messaging.half_runs import EndedHalf, EndedRun
from cometmq.messaging.transaction_checks import CheckBoard
from cometmq.messaging.transactions import CheckRules, Resolution
from cometmq.store.log.commitlog import Span
from services.broker.transactions.destinations import Destinations
from services.broker.transactions.earlier_ends import EarlierEnds
from services.broker.transactions.giving_up import SLICE_MAX, GivingUp
from services.broker.transactions.half_closer import HalfCloser, Made
from services.broker.transactions.joint_ends import JointEnds, JointlyEnded
from services.broker.transactions.names import End, EndRun, HalfName, check_owner, not_found

ENDS_MAX = 1_024  # of a call
TOGETHER_MIN = 64  # halves of a run that get an append of their own
SLICE_BYTES_MAX = 1 << 20  # unless one message is larger
SINGLE_OPS_MAX = 10_000  # at a stop

Outcome = EndedRun | EndedHalf | CometError


class _Call:
    """Ends that came together, and what is known of their answers."""

    def __init__(self, group: str, ends: Iterable[End] = ()) -> None:
        self.group = group
        self.ends = list(ends)
        self.answers: dict[int, EndedHalf | CometError] = {}
        self.topics: set[str] = set()  # of the messages that ended
        self.has_earlier = False  # some ended before: their callers may not have got the answer
        self.end_offset = 0  # of the log behind what was appended; 0: nothing was

    def note(self, ended: JointlyEnded[Any]) -> None:
        """Halves have ended together."""
        self.end_offset = max(self.end_offset, ended.end_offset)
        self.topics |= ended.topics


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
        self.slice_bytes_max = batch_bytes_max(storage.store.log_file_bytes, SLICE_BYTES_MAX)
        self.rules = rules
        self.table = keeper.state.halves
        self.board = CheckBoard(self.table, rules)
        self.earlier = EarlierEnds(storage, keeper, finder)
        self._destinations = Destinations(keeper)
        self._closer = HalfCloser(self.table, self.board, relays, metrics, clock)
        store, bytes_max = storage.store, self.slice_bytes_max
        self._joint_ends = JointEnds(store, self._closer, self._destinations, bytes_max)
        self.giving_up = GivingUp(storage, self._closer, metrics, bytes_max)

    async def end_runs(self, group: str, runs: Sequence[EndRun]) -> list[list[Outcome]]:
        """What became of the halves of each run, in their order. Returns when all is as safe as
        messages of the topics. Raises GroupNameInvalid, and what appending raises: then some of the
        halves may have ended.
        """
        check_name(group)
        outcomes: list[list[Outcome]] = [[] for _ in runs]
        call = _Call(group)
        numbers: list[int] = []  # of the runs that the ends of the call are of
        for number, run in enumerate(runs):
            done = 0
            if len(run.log_offsets) >= TOGETHER_MIN:
                ended = await self._joint_ends.end_run(group, run)
                call.note(ended)
                outcomes[number] += ended.became
                done = sum([len(one.offsets) for one in ended.became])
            left = run.ends(done)
            call.ends += left
            numbers += [number] * len(left)
        for number, answer in zip(numbers, await self._decide(call), strict=True):
            outcomes[number].append(answer)
        return outcomes

    async def end(self, group: str, ends: Sequence[End]) -> list[EndedHalf | CometError]:
        """As :meth:`end_runs`, of any halves."""
        check_name(group)
        return await self.decide(group, ends)

    async def decide(self, group: str, ends: Sequence[End]) -> list[EndedHalf | CometError]:
        """As :meth:`end`, for any group that halves belong to: those of RocketMQ may name none."""
        return await self._decide(_Call(group, ends))

    async def _decide(self, call: _Call) -> list[EndedHalf | CometError]:
        if len(call.ends) > 1:
            await self._end_together(call)
        if len(call.answers) < len(call.ends):
            spans = await self._open_spans(call)
            for some in _parts(spans, self.slice_bytes_max):
                await self._end_some(call, some)
        if call.has_earlier:
            call.end_offset = self._storage.store.appended_offset
        if call.end_offset:
            await self._storage.stored(call.end_offset, self._keeper.demands_of(call.topics))
        return list(map(call.answers.__getitem__, range(len(call.ends))))

    async def _end_together(self, call: _Call) -> None:
        """Ends all halves of a call without a look at each, if all of them are open, and of our
        form; otherwise none, or the first ones.
        """
        ended = await self._joint_ends.end(call.group, call.ends)
        call.answers.update(enumerate(ended.became))
        call.note(ended)

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

    async def _end_some(self, call: _Call, spans: Mapping[int, Span]) -> None:
        """End halves one by one."""
        places = [(HALF_QUEUE, call.ends[number].half.half_offset) for number in spans]
        found = await read_each(self._storage.store, list(spans.values()), places)
        made: dict[int, Made] = {}
        ended: list[int] = []  # meanwhile
        for number, half in zip(spans, found, strict=True):
            if self.table.find(call.ends[number].half.half_offset) is None:
                ended.append(number)
                continue
            try:
                made[number] = self._made(call.ends[number], half)
            except CometError as error:
                call.answers[number] = error
        if made:
            call.topics |= {one.topic for one in made.values()}
            became, end_offset = self._closer.append(list(made.values()))
            call.answers.update(zip(made, became, strict=True))
            call.end_offset = max(call.end_offset, end_offset)
        for number in ended:
            await self._answer_ended(call, number)

    async def _answer_ended(self, call: _Call, number: int) -> None:
        try:
            ended = await self.earlier.answer(call.group, call.ends[number])
        except CometError as error:
            call.answers[number] = error
        else:
            call.answers[number] = ended
            call.topics.add(ended.topic or OP_TOPIC)
            call.has_earlier = True

    def _span(self, group: str, name: HalfName) -> Span | None:
        """Where the half is; None: it is not open any more. Raises NoPermission,
        TransactionNotFound.
        """
        half = self.table.find(name.half_offset)
        if half is None:
            return None
        log_offset, size, its_group = half
        if log_offset != name.log_offset:
            raise not_found(name)
        check_owner(group, its_group)
        return log_offset, size

    def _made(self, end: End, found: Record | CometError) -> Made:
        """Raises what is wrong."""
        if isinstance(found, CometError):
            raise found
        name, its = end.half, halves.read(found.raw_properties)
        if its is None or its.unique_id != name.transaction_id:
            raise not_found(name)
        relayed = None
        if end.resolution is Resolution.COMMIT:
            relayed = relay(
                found,
                its.topic,
                self._destinations.queue_of(its.topic, its.queue_id, name.half_offset),
                self._closer.host,
                transaction_flags=halves.SYS_FLAG_COMMITTED,
            )
        stored_ms = found.store_time_ms
        return Made(name.half_offset, found.log_offset, its.group, its.topic, stored_ms, relayed)

    async def list_singly(self) -> None:
        """Before a stop: an op record for each half that has ended behind an open one. RocketMQ 4.9
        reads no op records that list several. Raises what appending raises.
        """
        if not len(self.table):
            return
        for offsets in self.table.ended_among_open(SINGLE_OPS_MAX):
            for first in range(0, len(offsets), SLICE_MAX):
                some = offsets[first : first + SLICE_MAX]
                ops = [op for offset in some for op in op_records([offset], self._closer.host)]
                appended = self._relays.append(ops).appended
                self.table.told(appended.queue_offsets[-1] + 1, some)
                await asyncio.sleep(0)
            await asyncio.sleep(0)


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

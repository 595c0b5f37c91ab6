"""Asks producers what became of their transactions, over the streams that they hold open."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.errors import (
    BusyError,
    CometError,
    LimitExceeded,
    MessageNotFound,
    NoPermission,
    StoreDamaged,
)
from cometmq.format import halves, record
from cometmq.format.halves import HALF_QUEUE
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.reader import Room
from cometmq.member.read.records import read_mended_message, read_run, slices
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.groups import check_name
from cometmq.messaging.transaction_checks import ASK_MAX, ASKED_MAX, MEMBERS_MAX
from cometmq.messaging.transactions import Resolution
from cometmq.names import check_client_id
from cometmq.rpc.ticks import tick
from cometmq.store.base import BaseStore
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields, logger
from services.broker.transactions.ends import TransactionService
from services.broker.transactions.names import End, HalfName

log = logger(__name__)

LOOK_S = 0.25  # between two looks at what is due
REST_S = 1.0  # the same while no half is open: each look wakes the process
RETRY_S = 5.0  # after the disk took no more
REFUSED_MAX = 4_096  # answers of a producer that it has not read about
ASKS_MAX = 8  # batches that are handed out in a turn: 1,024 halves, a few ms
BATCH_BYTES_MAX = 1 << 20  # of records, unless one is larger


class Check(NamedTuple):
    """A question about one half."""

    half: HalfName
    record: bytes
    check_count: int


class Refused(NamedTuple):
    """An answer that did not count."""

    half: HalfName
    error: CometError


class CheckStream:
    """One producer that answers for its group, as long as its stream is open. It holds places of
    halves, never their records.
    """

    def __init__(self, checks: TransactionChecks, group: str, number: int) -> None:
        self.group = group
        self.number = number
        self._checks = checks
        # What does not fit has been asked of another one since, or is no question any more.
        self._asked: deque[int] = deque(maxlen=ASKED_MAX)
        self._refused: list[Refused] = []
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._ended = False

    def ask(self, offsets: Sequence[int]) -> None:
        """Ask the producer about these halves."""
        self._asked += offsets
        self._wake.set()

    async def refuse(self, refused: Sequence[Refused]) -> None:
        """Tell the producer which of its answers did not count. Waits for one that answers without
        reading.
        """
        while self._refused and len(self._refused) + len(refused) > REFUSED_MAX:
            self._has_room.clear()
            await self._has_room.wait()
        self._refused += refused
        self._wake.set()

    def end(self) -> None:
        """No more answers come: :meth:`outgoing` ends."""
        self._ended = True
        self._wake.set()

    async def outgoing(self, room: Room) -> AsyncIterator[tuple[list[Check], list[Refused]]]:
        """The checks to write, and the halves that are refused. Records are read when the one
        before has been written, and there is ``room`` for them.
        """
        while not self._ended:
            offsets = [self._asked.popleft() for _ in range(min(ASK_MAX, len(self._asked)))]
            refused, self._refused = self._refused, []
            self._has_room.set()
            if refused:
                yield [], refused
            async for some in self._checks.read(offsets, room):
                yield some, []
            if not self._asked and not self._refused:
                self._wake.clear()
                if not self._ended:
                    await self._wake.wait()


class TransactionChecks:
    """Belongs to the event loop. :meth:`run` is a task of the writer."""

    def __init__(
        self,
        service: TransactionService,
        storage: MemberStorage,
        metrics: MemberMetrics,
        clock: Clock,
    ) -> None:
        self._service = service
        self._board = service.board
        self._table = service.table
        self._storage = storage
        self._metrics = metrics
        self._clock = clock
        self._numbers = itertools.count(1)
        self._streams: dict[int, CheckStream] = {}

    def __len__(self) -> int:
        """Streams open now."""
        return len(self._streams)

    def join(self, group: str, client_id: str) -> CheckStream:
        """A producer answers for its group. Raises GroupNameInvalid, InvalidRequest,
        LimitExceeded.
        """
        check_name(group)
        check_client_id(client_id)
        if self._board.member_count(group) >= MEMBERS_MAX:
            raise LimitExceeded(f"{MEMBERS_MAX} producers of group {group} answer checks here")
        stream = CheckStream(self, group, next(self._numbers))
        self._streams[stream.number] = stream
        self._board.join(group, stream.number)
        return stream

    def leave(self, stream: CheckStream) -> None:
        """Its stream has ended."""
        del self._streams[stream.number]
        self._board.leave(stream.group, stream.number)

    async def answered(self, stream: CheckStream, ends: Sequence[End]) -> None:
        """A producer says what became of halves. Raises what appending raises."""
        refused: list[Refused] = []
        mine: list[End] = []
        for end in ends:
            offset = end.half.half_offset
            if not self._board.is_asked(offset, stream.number):
                error = NoPermission(f"this client was not asked about half {offset}")
                refused.append(Refused(end.half, error))
            elif end.resolution is Resolution.UNKNOWN:
                self._board.unknown(offset)
            else:
                mine.append(end)
        answers = await self._service.end(stream.group, mine) if mine else []
        for end, answer in zip(mine, answers, strict=True):
            if isinstance(answer, CometError):
                refused.append(Refused(end.half, answer))
        if refused:
            await stream.refuse(refused)

    async def run(self) -> None:
        """Ask until cancelled. StoreFailed."""
        while True:
            is_more = self._board.look(self._clock.monotonic_s())
            await self._give_up()
            # Few of them a turn: what is left waits for the next one.
            asks = list(islice(self._board.asks(self._clock.monotonic_s()), ASKS_MAX))
            for ask in asks:
                self._metrics.transaction_checks.inc(len(ask.offsets))
                self._streams[ask.member].ask(ask.offsets)
            if is_more or len(asks) == ASKS_MAX:
                await asyncio.sleep(0)
            else:
                await tick(LOOK_S if self._table else REST_S)

    async def _give_up(self) -> None:
        offsets, self._board.given_up = self._board.given_up, []
        if not offsets:
            return
        try:
            await self._service.giving_up.give_up(offsets, "no producer has ended them")
        except BusyError as error:
            log.warning("half messages wait", extra=fields(reason=str(error)))
            again_s = self._clock.monotonic_s() + RETRY_S
            for offset in offsets:
                if self._table.find(offset) is not None:
                    self._table.schedule(offset, again_s)

    async def read(self, offsets: Sequence[int], room: Room) -> AsyncIterator[list[Check]]:
        """Questions about these halves, in batches that wait for ``room``. A half that cannot be
        read ends.
        """
        known = [(offset, half) for offset in offsets if (half := self._table.find(offset))]
        spans: list[Span] = [half[:2] for _, half in known]
        for part in slices(spans, ASK_MAX, BATCH_BYTES_MAX):
            checks: list[Check] = []
            lost: list[int] = []
            await room(sum(size for _, size in spans[part]))
            found = await self._raw(spans[part], [offset for offset, _ in known[part]])
            for (offset, half), raw in zip(known[part], found, strict=True):
                if self._table.find(offset) is None:  # it ended while its record was read
                    continue
                its = halves.read(record.decode(raw).raw_properties) if raw else None
                if its is None:
                    lost.append(offset)
                else:
                    name = HalfName(offset, half[0], its.unique_id)
                    checks.append(Check(name, raw, self._table.checks_of(offset)))
            if lost:
                await self._service.giving_up.give_up(lost, "they cannot be read")
            if checks:
                yield checks

    async def _raw(self, spans: Sequence[Span], offsets: Sequence[int]) -> list[bytes]:
        """The records; empty for one that is damaged."""
        places = [(HALF_QUEUE, offset) for offset in offsets]
        store = self._storage.store
        data = await read_run(store, spans, places)
        if data is None:
            return await asyncio.to_thread(lambda: [_half(store, offset) for offset in offsets])
        ends = list(itertools.accumulate(size for _, size in spans))
        return [data[end - size : end] for end, (_, size) in zip(ends, spans, strict=True)]


def _half(store: BaseStore, offset: int) -> bytes:
    try:
        return read_mended_message(store, HALF_QUEUE, offset)
    except (StoreDamaged, MessageNotFound):
        return b""

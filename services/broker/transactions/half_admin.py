"""Half messages for operators: shown, checked again after they were given up, or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from cometmq.clock import Clock
from cometmq.errors import (
    AlreadyResent,
    CometError,
    TopicNotFound,
    TransactionNotFound,
)
from cometmq.format import halves
from cometmq.format.halves import (
    CHECK_TIMES,
    GIVEN_UP_TOPIC,
    HALF_QUEUE,
    HALF_TOPIC,
    OP_TOPIC,
    QUEUE_ID,
)
from cometmq.format.record import Record
from cometmq.format.relay import OwnRecord, Relayed, relay, with_properties
from cometmq.member.read.records import find_spans, read_each, slices
from cometmq.member.relay import RelayWriter
from cometmq.member.state.demands import topic_demands
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.changes import MessagesResent
from cometmq.messaging.resends import ResentKey
from cometmq.messaging.transactions import Resolution
from cometmq.store.log.commitlog import Span
from cometmq.telemetry import fields, logger
from services.broker.transactions.ends import SLICE_BYTES_MAX, TransactionService
from services.broker.transactions.giving_up import SLICE_MAX
from services.broker.transactions.names import End, HalfName

log = logger(__name__)

ITEMS_MAX = 256  # of a call
LOOK_MAX = 20_000  # open halves that are looked at for one answer
BYTES_MAX = 1 << 20  # of records in an answer, unless one is larger

_KEY = ResentKey(GIVEN_UP_TOPIC, QUEUE_ID, "")


class HalfInfo(NamedTuple):
    """An open half. ``record`` None: it cannot be read."""

    half_offset: int
    log_offset: int
    group: str
    check_count: int
    producer_count: int  # that are connected and can be asked
    record: Record | None


class HalfPage(NamedTuple):
    """Open halves in their order. ``next_offset`` None: there are no more."""

    found: list[HalfInfo]
    next_offset: int | None


class HalfAdmin:
    """Belongs to the event loop."""

    def __init__(
        self,
        service: TransactionService,
        storage: MemberStorage,
        keeper: StateKeeper,
        relays: RelayWriter,
        clock: Clock,
    ) -> None:
        self._service = service
        self._table = service.table
        self._storage = storage
        self._keeper = keeper
        self._relays = relays
        self._clock = clock

    async def query(self, group: str, first: int, count_max: int) -> HalfPage:
        """Open halves from offset ``first`` on, of a producer group unless it is empty."""
        looked = self._table.open_halves(first, LOOK_MAX)
        wanted = [one for one in looked if group in ("", one[1][2])]
        next_offset = looked[-1][0] + 1 if len(looked) == LOOK_MAX else None
        if len(wanted) > count_max:
            next_offset = wanted[count_max][0]
            wanted = wanted[:count_max]
        spans: list[Span] = [half[:2] for _, half, _ in wanted]
        part = next(slices(spans, count_max, BYTES_MAX), slice(0, 0))
        if part.stop < len(wanted):
            next_offset = wanted[part.stop][0]
        places = [(HALF_QUEUE, offset) for offset, _, _ in wanted[part]]
        found = await read_each(self._storage.store, spans[part], places)
        count_of = self._service.board.member_count
        return HalfPage(
            [
                HalfInfo(
                    offset,
                    half[0],
                    half[2],
                    checks,
                    count_of(half[2]),
                    one if isinstance(one, Record) else None,
                )
                for (offset, half, checks), one in zip(wanted[part], found, strict=True)
            ],
            next_offset,
        )

    async def drop(self, offsets: Sequence[int], asked_by: str) -> list[CometError | None]:
        """Roll open halves back, whatever their producers would say. Raises what appending
        raises.
        """
        answers: dict[int, CometError | None] = {}
        ends: dict[str, list[End]] = {}  # by producer group
        opened = {offset: half for offset in offsets if (half := self._table.find(offset))}
        spans: list[Span] = [half[:2] for half in opened.values()]
        for part in slices(spans, SLICE_MAX, SLICE_BYTES_MAX):
            some = [*opened.items()][part]
            places = [(HALF_QUEUE, offset) for offset, _ in some]
            found = await read_each(self._storage.store, spans[part], places)
            for (offset, half), one in zip(some, found, strict=True):
                its = halves.read(one.raw_properties) if isinstance(one, Record) else None
                if its is None:  # nobody can read it
                    await self._service.giving_up.give_up([offset], "it is dropped")
                    answers[offset] = None
                    continue
                end = End(HalfName(offset, half[0], its.unique_id), Resolution.ROLLBACK)
                ends.setdefault(half[2], []).append(end)
        for group, wanted in ends.items():
            became = await self._service.decide(group, wanted)
            for end, answer in zip(wanted, became, strict=True):
                error = answer if isinstance(answer, CometError) else None
                answers[end.half.half_offset] = error
        log.warning(
            "half messages were dropped",
            extra=fields(count=list(answers.values()).count(None), asked_by=asked_by),
        )
        return [
            answers[offset]
            if offset in answers
            else TransactionNotFound(f"there is no open half message {offset} here")
            for offset in offsets
        ]

    async def resume(self, offsets: Sequence[int], asked_by: str) -> list[CometError | None]:
        """Have halves checked again that were given up, by their offsets in the topic of these.
        None for each that is open again. Returns when all is safe. Raises TopicNotFound (none was
        given up), FlowControl, LimitExceeded, and what appending raises.
        """
        if not self._keeper.has_topic(GIVEN_UP_TOPIC):
            raise TopicNotFound("no half message was given up here")
        for topic in (HALF_TOPIC, OP_TOPIC):
            await self._keeper.create_system_topic(topic, 1)
        answers: dict[int, CometError | None] = {}
        spans: dict[int, Span] = {}
        wanted = sorted(set(offsets))
        places = [((GIVEN_UP_TOPIC, QUEUE_ID), offset) for offset in wanted]
        for offset, span in zip(wanted, await find_spans(self._storage, places), strict=True):
            if isinstance(span, CometError):
                answers[offset] = span
            else:
                spans[offset] = span
        named, end = list(spans), 0
        bytes_max = self._service.slice_bytes_max
        for part in slices(list(spans.values()), SLICE_MAX, bytes_max):
            some = named[part]
            its_places = [((GIVEN_UP_TOPIC, QUEUE_ID), offset) for offset in some]
            its_spans = [spans[offset] for offset in some]
            found = await read_each(self._storage.store, its_spans, its_places)
            end = max(end, self._open_again(dict(zip(some, found, strict=True)), answers))
        if end:
            demands = topic_demands(self._keeper.state.topics, HALF_TOPIC)
            await self._storage.stored(end, demands)
            log.warning(
                "half messages are checked again",
                extra=fields(count=list(answers.values()).count(None), asked_by=asked_by),
            )
        return [answers[offset] for offset in offsets]

    def _check_new(self, offset: int) -> None:
        if self._keeper.state.resent.holds(_KEY, offset):
            raise AlreadyResent(f"half {offset} of {GIVEN_UP_TOPIC} is checked again already")

    def _open_again(
        self, found: dict[int, Record | CometError], answers: dict[int, CometError | None]
    ) -> int:
        """Append halves and their marks at once; the end of the log, 0 when there are none."""
        made: dict[int, Relayed] = {}
        groups: list[str] = []
        for offset, one in found.items():
            try:
                if isinstance(one, CometError):
                    raise one
                self._check_new(offset)
                its = halves.read(one.raw_properties)
                if its is None:
                    raise TransactionNotFound(f"message {offset} is no half message")
                properties = with_properties(
                    one.raw_properties, b"", frozenset((CHECK_TIMES.encode(),))
                )
                made[offset] = relay(one, *HALF_QUEUE, self._relays.host, properties=properties)
                groups.append(its.group)
                answers[offset] = None
            except CometError as error:
                answers[offset] = error
        if not made:
            return 0
        self._table.check_room(len(made))
        low = self._storage.bounds((GIVEN_UP_TOPIC, QUEUE_ID))[0]
        mark = MessagesResent(_KEY, self._keeper.state.resent.plan(_KEY, list(made), low))
        batch: list[OwnRecord] = [*made.values(), *self._keeper.records_of([mark])]
        appended = self._relays.append(batch).appended
        at, now_s = appended.log_offset, self._clock.monotonic_s()
        places = zip(appended.queue_offsets, appended.segment_bytes, groups, strict=False)
        for half_offset, size, group in places:
            self._table.add(half_offset, (at, size, group), now_s)
            at += size
        self._keeper.state.apply(mark)
        return appended.end_offset

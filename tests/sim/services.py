"""The product's services of timers, recalls, transactions and receiving groups on the simulated
storage. Where they use threads, an event loop or files, these do the same at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cometmq.errors import BrokerDraining, CometError
from cometmq.format import halves, queueunit, record
from cometmq.format.halves import HALF_TOPIC
from cometmq.format.timers import TIMER_QUEUE
from cometmq.member.read.reader import PullAnswer, PullQuery
from cometmq.member.state.keeper import StateKeeper
from cometmq.messaging.half_runs import EndedHalf, EndedRun
from cometmq.messaging.pop.masks import offsets_of
from cometmq.messaging.pull import PullStatus
from cometmq.messaging.timers import Timer
from cometmq.messaging.transactions import CheckRules
from cometmq.model import Position, QueueKey
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.recalls import RecallService
from services.broker.delay.timers import TimerService
from services.broker.groups.resets import Bound, ResetTarget
from services.broker.pop.acks import AckItem, AckService, ChangeItem
from services.broker.pop.groups import PopGroups, Turn
from services.broker.pop.receive import ReceiveAsk, ReceiveService, Wanted
from services.broker.retry.retries import RetryService
from services.broker.transactions.checks import Check, CheckStream, TransactionChecks
from services.broker.transactions.earlier_ends import EarlierEnds
from services.broker.transactions.ends import TransactionService
from services.broker.transactions.names import End, EndRun, HalfName
from tests.sim.disk import Record
from tests.sim.storage import Storage
from tests.sim.topics import BROKER_GROUP, RECEIVING
from tests.sim.world import Future

if TYPE_CHECKING:
    from tests.sim.writer import Writer

CHECK_RULES = CheckRules(immunity_s=2.0, interval_s=5.0, checks_max=4)
RECEIVE_MAX = 8
RECEIVE_BYTES_MAX = 1 << 20

T = TypeVar("T")


class Timers(TimerService):
    """Without the rolling before retention, which there is none of."""

    def __init__(
        self, storage: Any, keeper: StateKeeper, relays: Any, metrics: Any, time: BelievedTime
    ) -> None:
        super().__init__(storage, keeper, relays, metrics, time, time, reserved_ms=0)
        self._roll_at_s = math.inf

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return work()

    @property
    def is_empty(self) -> bool:
        """No message waits for its time."""
        is_read = self._is_loaded and not self._has_arrivals
        return is_read and not len(self.index) and not self.table.late


class Recalls(RecallService):
    async def _read(self, timer: Timer) -> record.Record | None:
        unit = self._storage.store.read_units(*TIMER_QUEUE, timer.offset, 1)
        if not unit:
            return None
        return record.decode(self._storage.store.read_record(queueunit.unit_at(unit, 0)[0]))

    async def _units(self, offset: int, count: int) -> bytes:
        return self._storage.store.read_units(*TIMER_QUEUE, offset, count)


class EndsInLog(EarlierEnds):
    async def _became(self, name: HalfName) -> EndedHalf:
        """From the log instead of the key index."""
        store: Any = self._storage.store
        half = self._read_half(name)
        its = halves.read(half.raw_properties)
        assert its is not None
        for one in store.disk.records:
            found = record.decode(one.data) if one.queue >= 0 else None
            if found is not None and found.prepared_offset == half.log_offset:
                place = found.topic, found.queue_id, found.queue_offset, found.log_offset
                return EndedHalf(half.log_offset, its.group, *place)
        return EndedHalf(half.log_offset, its.group)


class Checks(TransactionChecks):
    """Producers fetch what they are asked."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._questions: dict[int, list[int]] = defaultdict(list)

    async def turn(self) -> None:
        """As one round of :meth:`run`."""
        self._board.look(self._clock.monotonic_s())
        await self._give_up()
        for ask in self._board.asks(self._clock.monotonic_s()):
            self._questions[ask.member] += ask.offsets

    async def questions(self, stream: CheckStream) -> list[Check]:
        """What the producer of this stream is asked, since it fetched last."""
        offsets = self._questions.pop(stream.number, [])
        return [check async for some in self.read(offsets, _enough_room) for check in some]


async def _enough_room(_size_bytes: int) -> None:
    """Producers read what they are asked."""


class SimLock:
    """One at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: list[Future] = []

    async def __aenter__(self) -> None:
        while self._is_held:
            waits = Future()
            self._waiting.append(waits)
            await waits
        self._is_held = True

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_held = False
        if self._waiting:
            self._waiting.pop(0).set()


class Pops(PopGroups):
    def turn(self, group: str, key: QueueKey) -> Turn:
        turns = self._turns.setdefault(group, {})
        if key not in turns:
            lock: Any = SimLock()
            turns[key] = Turn(lock)
        return turns[key]


class Receives(ReceiveService):
    async def _room(self, call: object) -> None:
        """No member of the simulation reads slowly."""


class QueueView(NamedTuple):
    min_offset: int
    max_offset: int


class QueueReader:
    """What consumers may see of the simulated log."""

    def __init__(self, storage: Storage) -> None:
        self.store = storage.store
        self._storage = storage

    def queue(self, topic: str, queue_id: int) -> QueueView:
        return QueueView(*self._storage.bounds((topic, queue_id))[:2])

    def flush_promptly(self) -> None:
        """The simulated disk is synced at its times."""

    async def pull(self, query: PullQuery, room: object) -> PullAnswer:
        low, readable, _ = self._storage.bounds((query.topic, query.queue_id))
        start = query.position.offset
        count = max(0, min(query.max_count, readable - start))
        store = self._storage.store
        units = store.read_units(query.topic, query.queue_id, start, count) if count else b""
        spans = [(place, size) for place, size, _ in queueunit.iterate(units)]
        status = PullStatus.FOUND if spans else PullStatus.NOT_FOUND
        after = Position(query.position.generation, start + len(spans))
        return PullAnswer(status, store.read_records(spans), len(spans), after, low, readable)


class Delivery(NamedTuple):
    """Messages of one handle, with their offsets in the queue."""

    key: QueueKey
    handle: str
    messages: tuple[Record, ...]
    attempt: int
    visible_ms: int


class Receiving:
    """The receiving group at one writer."""

    def __init__(
        self,
        writer: Writer,
        storage: Storage,
        keeper: StateKeeper,
        retries: RetryService,
        metrics: Any,
        time: BelievedTime,
    ) -> None:
        self._writer = writer
        self._storage = storage
        store: Any = storage
        reader: Any = QueueReader(storage)
        self.groups = Pops(store, keeper, retries, metrics, time)
        self._receives = Receives(self.groups, store, reader)
        self._acks = AckService(self.groups)
        self._topics = tuple(
            Wanted(topic) for topic, _ in writer.rules.topics.keys()[: writer.rules.topics.count]
        )

    async def receive(self, invisible_ms: int) -> list[Delivery]:
        ask = ReceiveAsk(
            RECEIVING,
            self._topics,
            None,
            RECEIVE_MAX,
            RECEIVE_BYTES_MAX,
            invisible_ms,
            ResetTarget(Bound.FIRST),
        )
        waited = self._storage.waits_for_right
        received = await self._receives.receive(ask, _no_room)
        self._writer.world.counts["received after a wait for the right to give"] += (
            self._storage.waits_for_right > waited
        )
        disk, indexes = self._writer.disk, self._writer.group.indexes
        found = []
        for run in received.runs:
            units = disk.queues[indexes[run.key]]
            messages = tuple(units[one.queue_offset] for one in record.decode_all(run.records))
            given = Delivery(run.key, run.handle, messages, run.attempt, run.visible_ms)
            self._writer.group.judge.messages.given(self._writer, given)
            found.append(given)
        return found

    async def acknowledge(self, items: Sequence[tuple[str, Record]]) -> list[CometError | None]:
        asked = [AckItem(handle, one.number - 1, 1) for handle, one in items]
        answers = await self._acks.acknowledge(RECEIVING, asked)
        for (_, one), answer in zip(items, answers, strict=True):
            if answer is None:
                self._writer.group.judge.messages.acknowledged(self._writer, one)
        return answers

    async def change(self, handle: str, one: Record, invisible_ms: int, *, failed: bool) -> str:
        """The new handle; empty: the messages have left the group's leases. Raises CometError."""
        item = ChangeItem(AckItem(handle, one.number - 1, 1), invisible_ms, failed)
        try:
            [answer] = await self._acks.change(RECEIVING, [item])
        except CometError:
            self._writer.group.judge.messages.unsure(one)
            raise
        if isinstance(answer, CometError):
            raise answer
        self._writer.group.judge.messages.changed(self._writer, one, answer.visible_ms)
        return answer.handle

    @property
    def open_count(self) -> int:
        """Messages that were given and are not done."""
        queues = self.groups.pops.of_group(RECEIVING).values()
        return sum(len(list(offsets_of(lease.mask, lease.first))) for q in queues for lease in q)


async def _no_room(_size_bytes: int) -> None:
    return None


class Later:
    """What a writer does later, by itself: timers and checks; and what clients ask of both."""

    def __init__(
        self,
        writer: Writer,
        storage: Storage,
        keeper: StateKeeper,
        relays: Any,
        metrics: Any,
        time: BelievedTime,
    ) -> None:
        store: Any = storage
        none: Any = None
        clock = writer.clock
        self._writer = writer
        self._storage = storage
        self.timers = Timers(store, keeper, relays, metrics, time)
        self.recalls = Recalls(store, keeper, relays, self.timers, BROKER_GROUP)
        self.transactions = TransactionService(
            store, keeper, relays, none, metrics, CHECK_RULES, clock
        )
        self.transactions.earlier = EndsInLog(store, keeper, none)
        self.checks = Checks(self.transactions, store, metrics, clock)
        self._streams: dict[str, tuple[CheckStream, float]] = {}

    async def turn(self) -> None:
        """Deliver what is due, and ask what is to be asked."""
        try:
            while await self.timers.turn() == 0.0:
                pass
            await self.checks.turn()
        except BrokerDraining:
            return

    async def recall(self, handles: Sequence[str]) -> list[bool | CometError]:
        self._storage.check_open()
        answers = await self.recalls.recall(handles)
        for text, answer in zip(handles, answers, strict=True):
            if not isinstance(answer, CometError):
                self._writer.group.judge.messages.recalled(self._writer, text, in_time=answer)
        return answers

    # --- transactions ---

    async def end(self, group: str, ends: Sequence[End]) -> list[EndedHalf | CometError]:
        self._storage.check_open()
        answers = await self.transactions.end(group, ends)
        for answer in answers:
            self._writer.group.judge.messages.ended(self._writer, answer)
        return answers

    async def end_run(self, group: str, run: EndRun) -> list[EndedHalf | CometError]:
        """As :meth:`end`, of halves that were stored together."""
        self._storage.check_open()
        [outcomes] = await self.transactions.end_runs(group, [run])
        answers: list[EndedHalf | CometError] = []
        for one in outcomes:
            if isinstance(one, EndedRun):
                self._writer.world.counts["halves ended as runs"] += len(one.offsets)
                answers += map(one.at, one.offsets)
            else:
                answers.append(one)
        assert len(answers) == len(run.offsets), "each half has one outcome"
        for answer in answers:
            self._writer.group.judge.messages.ended(self._writer, answer)
        return answers

    async def end_opposite(self, group: str, ends: Sequence[End]) -> list[EndedHalf | CometError]:
        """Ends that contradict what ended already; those of open halves are left out."""
        self._storage.check_open()
        table = self.transactions.table
        ended = [end for end in ends if table.find(end.half.half_offset) is None]
        return await self.transactions.end(group, ended)

    async def questions(self, group: str, client: str) -> list[Check]:
        """What a producer is asked, which is heard from now."""
        now_s = self._writer.clock.monotonic_s()
        if client not in self._streams:
            self._streams[client] = self.checks.join(group, client), now_s
        stream, _ = self._streams[client]
        self._streams[client] = stream, now_s
        return await self.checks.questions(stream)

    def leave_silent(self, silence_s_max: float) -> None:
        """Streams of producers that are not heard any more end."""
        now_s = self._writer.clock.monotonic_s()
        for client, (stream, heard_s) in list(self._streams.items()):
            if now_s - heard_s > silence_s_max:
                del self._streams[client]
                self.checks.leave(stream)

    async def answer(self, client: str, ends: Sequence[End]) -> None:
        self._storage.check_open()
        if client in self._streams:
            await self.checks.answered(self._streams[client][0], ends)

    def half_names(self, first: int, count: int, ids: Sequence[str]) -> list[HalfName]:
        """The names of halves that were stored beside each other."""
        units = self._storage.store.read_units(HALF_TOPIC, 0, first, count)
        places = [place for place, _, _ in queueunit.iterate(units)]
        return [
            HalfName(first + at, place, unique_id)
            for at, (place, unique_id) in enumerate(zip(places, ids, strict=False))
        ]

"""What a writer does for producers and groups: the product's own handlers of batches, queue locks,
send-backs, delayed messages, transactions and receiving groups on the simulated storage. What
asyncio does in the product, the simulated world does here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cometmq.errors import CometError, OffsetReset
from cometmq.member.read import queue_ends
from cometmq.member.read.reader import END_S_MAX
from cometmq.member.relay import RelayWriter
from cometmq.member.state.keeper import StateDemands, StateKeeper
from cometmq.messaging.changes import OffsetsReset
from cometmq.messaging.delay import DelayProgress
from cometmq.messaging.groups import MemberTable
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.state import BrokerState
from cometmq.model import Position, QueueKey, QueueRef, TopicConfig
from services.broker.delay.believed_time import BelievedTime
from services.broker.delay.schedule import ScheduleService
from services.broker.groups.queue_locks import QueueLocks
from services.broker.retry.retries import RetryService, SendBackItem, SentBack
from services.broker.sending.produce import Accepted, Claim, ProduceHandler, ProducePolicy
from tests.sim.disk import Record
from tests.sim.questions import Asking
from tests.sim.services import CHECK_RULES, Later, Receiving
from tests.sim.storage import HOST, Storage

if TYPE_CHECKING:
    from tests.sim.writer import Writer

PROGRESS_S = 1.0
DELIVERY_S = 0.2
LOOK_S = 0.02  # at what is shown, while somebody waits for it
SILENCE_S_MAX = 3.0  # then a client that does not call is no member any more
SNAPSHOT_SHARE = 0.05  # of the seconds, in which retention wants a snapshot


Members = Mapping[str, Sequence[QueueRef]]


class Silent:
    """Metrics that nobody reads."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: object, **__: object) -> Any:
        return self


class Keeper(StateKeeper):
    """The product's, without an event loop."""

    async def create_system_topic(
        self, name: str, queue_count: int, *, reserve_time_ms: int = 0
    ) -> None:
        assert name in self.state.topics

    async def offsets_stored(self, topics: Iterable[str]) -> None:
        self.write_offsets()
        await self._storage.stored(self._offsets_end, self.demands_of(topics))

    async def pops_written(self) -> None:
        self.write_pops()

    async def pops_stored(self, topics: Iterable[str]) -> None:
        self.write_pops()
        await self._storage.stored(self._pops_end, self.demands_of(topics))


class Broker:
    """Everything of one writer's epoch."""

    def __init__(
        self, writer: Writer, storage: Storage, state: BrokerState, delays: DelayProgress
    ) -> None:
        clock = writer.clock
        metrics: Any = Silent()
        self.state = state
        self._writer = writer
        self._storage = storage
        store: Any = storage
        demands = StateDemands(state.topics)
        self.keeper = keeper = Keeper(state, store, HOST, clock, demands, delays)
        self.time = time = BelievedTime(clock, metrics, 0, writer.member.clocks)
        storage.stamp_by(time)
        policy = ProducePolicy(1 << 30, False, TopicConfig(""), 30.0, 30.0, CHECK_RULES.immunity_s)
        self._produce = ProduceHandler(store, keeper, policy, HOST, metrics, time)
        relays = RelayWriter(store, state.topics, HOST, metrics)
        self._locks = QueueLocks(keeper, store, clock)
        self._retries = RetryService(store, keeper, relays, metrics, MemberTable(), time)
        self._schedule = ScheduleService(store, keeper, relays, metrics, clock, time)
        self.later = Later(writer, storage, keeper, relays, metrics, time)
        self.asking = Asking(writer, metrics)
        self.receiving = Receiving(writer, storage, keeper, self._retries, metrics, time)
        # By group and client: when it was heard last, and what it reads.
        self._members: dict[tuple[str, str], tuple[float, Sequence[QueueRef]]] = {}

    def start(self) -> None:
        self._writer.after(PROGRESS_S, self._write_at_times)
        self._writer.after(DELIVERY_S, self._deliver_at_times)

    def _write_at_times(self) -> None:
        self._writer.after(PROGRESS_S, self._write_at_times)
        if self._storage.sealed:
            return
        if self._writer.world.rng.random() < SNAPSHOT_SHARE:
            self.keeper.write_snapshot()
            self._writer.world.counts["snapshots that retention wanted"] += 1
        else:
            self.keeper.write_progress(self._writer.clock.monotonic_s())

    def _deliver_at_times(self) -> None:
        self._writer.after(DELIVERY_S, self._deliver_at_times)
        if not self._storage.sealed:
            self._writer.spawn(self._schedule_turn())

    async def _schedule_turn(self) -> None:
        await self._schedule.deliver_due()
        await self.later.turn()
        self.later.leave_silent(SILENCE_S_MAX)
        self.asking.leave_silent(SILENCE_S_MAX)

    # --- producers --------------------------------------------------------------------------------

    async def send(self, records: bytes, claims: Sequence[Claim]) -> Accepted:
        """Take a batch, answered when it is acknowledged."""
        accepted = await self._produce.take(records, claims, HOST)
        if accepted.ticket.acked is not None:
            await accepted.ticket.acked
        if accepted.is_known:
            self._writer.world.counts["batches that came again"] += 1
        return accepted

    async def end_of(self, key: QueueKey, told: Record | None) -> int:
        """Where a reader begins that wants what comes from now on, as ``Reader.uncertain_ends`` has
        it. ``told``: the newest message of the queue that somebody knew of before the call.
        """
        writer, storage = self._writer, self._storage
        ends = queue_ends.appended_ends(storage, [key])
        until_s = writer.world.now + END_S_MAX
        while writer.world.now < until_s and not queue_ends.are_shown(storage, ends):
            await writer.sleep(LOOK_S)
        for error in queue_ends.uncertain(storage, ends).values():
            raise error
        _, end, _ = storage.bounds(key)
        writer.group.judge.end_told(writer, end, told)
        return end

    # --- groups -----------------------------------------------------------------------------------

    def join(self, group: str, client_id: str, held: Sequence[QueueRef]) -> tuple[Members, int]:
        """The members of a group with what each of them reads, and the number of the group's newest
        reset.
        """
        now_s = self._writer.clock.monotonic_s()
        self._members[group, client_id] = now_s, held
        members = {
            client: queues
            for (name, client), (heard_s, queues) in self._members.items()
            if name == group and now_s - heard_s < SILENCE_S_MAX
        }
        return members, self.state.resets.newest(group)

    def leave(self, group: str, client_id: str) -> None:
        self._members.pop((group, client_id), None)

    async def lock(
        self, group: str, client_id: str, keys: Sequence[QueueKey]
    ) -> list[int | CometError]:
        self._storage.check_open()
        return await self._locks.lock(group, client_id, keys)

    async def unlock(self, group: str, client_id: str, keys: Sequence[QueueKey]) -> None:
        self._storage.check_open()
        await self._locks.unlock(group, client_id, keys)

    def committed(self, group: str, key: QueueKey) -> tuple[Position | None, int]:
        """Where a group is, and the number of the newest reset that led there."""
        return self.state.offsets.get(group, key), self.state.resets.number(group, key)

    async def commit(
        self, group: str, key: QueueKey, position: Position, lock_number: int, reset_number: int
    ) -> Position:
        """As ``BrokerServicer.CommitOffsets`` does it, of one queue."""
        self._storage.check_open()
        state = self.state
        if lock_number:
            state.locks.check_commit(group, key, lock_number)
        try:
            state.resets.check(group, key, reset_number, state.offsets.get(group, key))
        except OffsetReset:
            self._writer.world.counts["commits refused for a reset"] += 1
            raise
        history = state.generations.of(*key)
        _, readable, _ = self._storage.bounds(key)
        kept = state.offsets.commit(group, key, position, history, readable)
        self._writer.group.judge.groups.kept(self._writer, group, key, lock_number, reset_number)
        await self.keeper.offsets_stored([key[0]])
        return kept

    async def send_back(
        self, group: str, items: Sequence[SendBackItem]
    ) -> list[SentBack | CometError]:
        self._storage.check_open()
        answers = await self._retries.send_back(group, items)
        for item, answer in zip(items, answers, strict=True):
            if not isinstance(answer, CometError):
                self._writer.group.judge.groups.taken_back(self._writer, group, item)
        return answers

    async def reset(self, group: str, key: QueueKey, offset: int) -> int:
        """As ``OffsetResets`` does it: the number of the reset."""
        self._storage.check_open()
        state = self.state
        number = state.resets.next_number(self._storage.epoch)
        position = Position(state.generations.of(*key).current, offset)
        self.keeper.write_doings()
        end = self.keeper.write(OffsetsReset(number, (CommittedOffset(group, *key, position),)))
        self._writer.group.judge.groups.reset(self._writer, group, key, offset, number)
        await self._storage.stored(end, self.keeper.demands_of([key[0]]))
        return number

"""The writer's state: plans a change, appends its record, applies it when the record is on disk.

One change at a time: plans enter the log in the order in which they were made. Committed offsets
are the exception: they count at once, and those of one turn of the loop enter the log together,
before any of them is answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from cometmq.clock import Clock
from cometmq.errors import GroupNotFound, SlaveNotAvailable, TopicNotFound
from cometmq.flight_recorder import Stage, recorder
from cometmq.format.delayed import SCHEDULE_TOPIC, queue_id_of
from cometmq.format.halves import GIVEN_UP_TOPIC, HALF_TOPIC
from cometmq.format.timers import TIMER_QUEUE, TIMER_TOPIC
from cometmq.member.state.demands import topic_demands
from cometmq.member.state.statelog import OwnStateRecord, encode_record
from cometmq.member.storage.member_storage import MemberStorage, Segment
from cometmq.messaging import group_policy
from cometmq.messaging.changes import (
    Change,
    DelaysDropped,
    DelaysReached,
    GroupLeft,
    HalvesDropped,
    HalvesReached,
    KindsUsed,
    MessagesResent,
    OffsetsReset,
    QueuesLocked,
    QueuesUnlocked,
    TimersDropped,
    TimersReached,
    TopicPut,
    newer_kinds,
)
from cometmq.messaging.delay import DelayProgress
from cometmq.messaging.group_policy import GroupPolicy
from cometmq.messaging.groups import GroupSettings, check_name
from cometmq.messaging.quotas import Limits, Quota, Scope
from cometmq.messaging.state import (
    STATE_QUEUE_ID,
    STATE_TOPIC,
    BrokerState,
    StateRecord,
    attempt_changes,
    change_parts,
    change_record,
    change_records,
    pop_changes,
    stream_changes,
)
from cometmq.messaging.timers import skip_changes
from cometmq.messaging.topics import TopicTable, is_system
from cometmq.model import RETRY_PREFIX, TopicConfig
from cometmq.replication.watermarks import REPLICATED, DurabilityClass, union
from cometmq.rpc.tasks import ShieldedTasks

T = TypeVar("T")
P = ParamSpec("P")

# The next start reads the log from where progress was written last: 0.3 s at most, at 6 ms for each
# MiB of the smallest messages.
PROGRESS_BYTES_MAX = 32 << 20
# Messages that wait in the one topic go to the other before their log file does. That cannot wait
# until followers have a new topic, so both are made together.
MOVED_TO = {SCHEDULE_TOPIC: TIMER_TOPIC, HALF_TOPIC: GIVEN_UP_TOPIC}
FIRST_COPIES_S_MAX = 3.0  # until connected followers are in sync
RETRY_S = 0.05
OFFSETS_COPIED_S_MAX = 2.0  # below the 3 s after which a client gives a commit up


class StateDemands:
    """What a change of the state waits for: all that any topic asks for, also a topic that a change
    on its way makes. Else a member that lacks the change could take the lease.
    """

    def __init__(self, topics: TopicTable) -> None:
        self._topics = topics
        self._coming = DurabilityClass.ASYNC

    @property
    def of_topics(self) -> DurabilityClass:
        """What the topics ask for that are there."""
        return topic_demands(self._topics, STATE_TOPIC)

    @property
    def now(self) -> DurabilityClass:
        return self._coming | self.of_topics

    @contextmanager
    def with_coming(self, coming: DurabilityClass) -> Iterator[None]:
        """While a change is on its way that asks for ``coming``. There is one at a time."""
        assert self._coming is DurabilityClass.ASYNC
        self._coming = coming
        try:
            yield
        finally:
            self._coming = DurabilityClass.ASYNC


class _Turn:
    """Writes once, at the end of a turn of the loop, what all that wait for it have done in it."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._written: asyncio.Future[None] | None = None  # None: no caller waits in this turn

    async def ended(self) -> None:
        """Raises what ``write`` raises."""
        if self._written is None:
            loop = asyncio.get_running_loop()
            self._written = loop.create_future()
            loop.call_soon(self._end)
        await asyncio.shield(self._written)

    def _end(self) -> None:
        written, self._written = self._written, None
        assert written is not None
        try:
            self._write()
        except Exception as error:  # whatever it is: each caller is answered
            written.set_exception(error)
            written.exception()  # the clients may have gone away
        else:
            written.set_result(None)


def to_its_end(
    change: Callable[Concatenate[StateKeeper, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[StateKeeper, P], Coroutine[Any, Any, T]]:
    """A change whose record is in the log comes to its end, even if its caller goes away."""

    @wraps(change)
    async def shielded(keeper: StateKeeper, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await keeper.shielded.run(change(keeper, *args, **kwargs))

    return shielded


class StateKeeper:
    """Owns all changes of a writer's :class:`BrokerState`. ``on_topics`` is called after topics
    have changed, before it ``on_drop`` with the name of a deleted topic; ``on_drop_group`` with the
    name of a deleted group; ``on_system_topic`` with the name of a new topic of the broker's own.
    """

    def __init__(
        self,
        state: BrokerState,
        storage: MemberStorage,
        host: bytes,
        clock: Clock,
        demands: StateDemands,
        delays: DelayProgress,
        on_topics: Callable[[], None] = lambda: None,
        on_drop: Callable[[str], None] = lambda _topic: None,
        on_drop_group: Callable[[str], None] = lambda _group: None,
        on_system_topic: Callable[[str], None] = lambda _topic: None,
    ) -> None:
        self.state = state
        self.delays = delays
        # While its deletion is on its way, a topic takes no sends and a group no commits.
        self.closing: set[str] = set()
        self.closing_groups: set[str] = set()
        self._storage = storage
        self._host = host
        self._clock = clock
        self._on_topics = on_topics
        self._on_system_topic = on_system_topic
        self._on_drop = on_drop
        self._on_drop_group = on_drop_group
        self._one_at_a_time = asyncio.Lock()
        self.shielded = ShieldedTasks()  # changes that have begun
        self._demands = demands
        self._in_flight: list[Change] = []  # appended, not yet applied
        self._admitted = state.kinds_used  # kinds of which every member reads the records
        self._offsets_turn = _Turn(self.write_offsets)
        self._pops_turn = _Turn(self.write_pops)
        # Log offsets: the ends of the newest written offsets, leases, and last state snapshot.
        self._offsets_end = self._snapshot_end = self._progress_end = storage.store.appended_offset
        self._pops_end = self._offsets_end

    async def put_topic(self, config: TopicConfig) -> bool:
        """Create or change a topic; True when it is new. Raises what ``plan_topic`` raises."""
        _, created = await self.change_topic(config.name, lambda _: config)
        return created

    async def change_topic(
        self, name: str, wanted: Callable[[TopicConfig | None], TopicConfig]
    ) -> tuple[TopicConfig, bool]:
        """Give a topic the settings ``wanted``, which gets those that it has in its turn, None for
        a new one; they, and True when it is new. Raises what ``wanted`` and ``plan_topic`` raise.
        """
        return await self._put_topic(name, wanted)

    async def create_topic(self, config: TopicConfig) -> bool:
        """As :meth:`put_topic`, but a topic that is there keeps its settings."""
        _, created = await self._put_topic(config.name, lambda before: before or config)
        return created

    async def create_system_topic(
        self, name: str, queue_count: int, *, reserve_time_ms: int = 0
    ) -> None:
        """Make a topic that the broker itself writes, unless it is there."""
        if (moved_to := MOVED_TO.get(name)) is not None:
            await self.create_system_topic(moved_to, 1)
        if not self.has_topic(name):
            config = TopicConfig(name, queue_count, queue_count, reserve_time_ms=reserve_time_ms)
            await self._put_topic(name, lambda before: before or config, by_system=True)

    async def put_system_topic(self, config: TopicConfig) -> None:
        """Give a topic that the broker itself writes other settings."""
        await self._put_topic(config.name, lambda _: config, by_system=True)

    @to_its_end
    async def _put_topic(
        self,
        name: str,
        wanted: Callable[[TopicConfig | None], TopicConfig],
        *,
        by_system: bool = False,
    ) -> tuple[TopicConfig, bool]:
        # From when it was asked for: were each to wait in its turn, they would pile up.
        until_s = self._clock.monotonic_s() + FIRST_COPIES_S_MAX
        async with self._one_at_a_time:
            before = self.state.topics.find(name)
            config = wanted(before)
            assert config.name == name
            if before != config:
                put = self.state.plan_topic(config, by_system=by_system)
                extras: list[Change] = [*self.state.plan_extras(config)]
                if before is None and (not by_system or name.startswith(RETRY_PREFIX)):
                    extras += self._older(name)
                await self._commit(put, *extras, until_s=until_s)
                self._on_topics()
                if by_system and before is None:
                    self._on_system_topic(name)
            return config, before is None

    def _older(self, topic: str) -> Iterator[Change]:
        """Notes at the creation of a topic: there may have been one of the name, and messages for
        that one may wait, by what the log knows: nothing else shows that one was dropped.
        """
        if len(self.state.halves):
            yield HalvesDropped(topic, self.state.halves.end)
        _, timers_end = self._storage.store.queue_bounds(*TIMER_QUEUE)
        if self.state.timers.rolled_written < timers_end:
            yield TimersDropped(topic, timers_end)
        if level_ends := self.delays.waiting_ends(self._level_end):
            yield DelaysDropped(topic, level_ends)

    @to_its_end
    async def put_quota(self, topic: str, quota: Quota) -> None:
        """Let each client send so much to a topic. TopicNotFound; raises what ``plan_quota``
        raises.
        """
        async with self._one_at_a_time:
            self.state.topics.get(topic)
            if changes := self.state.plan_quota(topic, quota):
                await self._commit(*changes)

    @to_its_end
    async def put_limits(
        self, scope: Scope, name: str, wanted: Callable[[Limits], Limits]
    ) -> Limits:
        """Let an address or a topic send and read what is ``wanted``, which gets the limits that it
        has in its turn. Raises what ``plan_limits`` raises.
        """
        async with self._one_at_a_time:
            limits = wanted(self.state.quotas.get(scope, name))
            if changes := self.state.plan_limits(scope, name, limits):
                await self._commit(*changes)
            return limits

    @to_its_end
    async def drop_topic(self, topic: str, *, by_system: bool = False) -> None:
        """Delete a topic; ``by_system``: one that the broker itself writes. Raises what
        ``plan_drop`` raises.
        """
        async with self._one_at_a_time:
            change = self.state.plan_drop(topic, by_system=by_system)
            _, timers_end = self._storage.store.queue_bounds(*TIMER_QUEUE)
            gone = [TimersDropped(TIMER_TOPIC, timers_end)] if timers_end else []
            # Nothing may follow the deletion into the old queues: at recovery everything after it
            # counts as new.
            self.closing.add(topic)
            try:
                await self._commit(change, *gone)
                self._storage.drop_topic(topic)
            finally:
                self.closing.discard(topic)
            self._on_drop(topic)
            self._on_topics()

    def _level_end(self, level: int) -> int:
        return self._storage.store.queue_bounds(SCHEDULE_TOPIC, queue_id_of(level))[1]

    async def put_group(self, settings: GroupSettings) -> None:
        """Create a consumer group or change its settings. Raises what ``plan_group`` raises."""
        await self.change_group(settings.name, lambda _: settings)

    async def create_group(self, name: str, policy: GroupPolicy = group_policy.DEFAULT) -> None:
        """Create a consumer group; one that is there keeps its settings. Raises what ``plan_group``
        raises.
        """
        await self.change_group(name, lambda before: before or GroupSettings(name, policy=policy))

    @to_its_end
    async def change_group(
        self, name: str, wanted: Callable[[GroupSettings | None], GroupSettings]
    ) -> tuple[GroupSettings, bool]:
        """As :meth:`change_topic`, for a consumer group."""
        async with self._one_at_a_time:
            before = self.state.groups.get(name)
            settings = wanted(before)
            assert settings.name == name
            if before != settings:
                await self._commit(
                    self.state.plan_group(settings),
                    *self.state.plan_policy(settings, self._storage.store.epoch),
                )
            return settings, before is None

    @to_its_end
    async def drop_group(self, group: str) -> None:
        """Delete a consumer group. Raises what ``plan_group_drop`` raises."""
        async with self._one_at_a_time:
            change = self.state.plan_group_drop(group)
            self.closing_groups.add(group)
            try:
                # Read from the log it would be another group's of the name.
                self.write_doings()
                await self._commit(change)
            finally:
                self.closing_groups.discard(group)
            self._on_drop_group(group)

    def write_progress(self, now_s: float) -> None:
        """Append how far delayed messages were delivered and transactions have ended, and what
        producers have sent and groups have sent back since the last time. No answer waits for it.
        May raise DiskFull, BrokerDraining: then the next call writes it.
        """
        self.state.streams.expire(now_s)
        self._write_progress()

    def _write_progress(self) -> None:
        state = self.state
        offsets = self.delays.offsets
        halves = state.halves.progress
        has_unwritten = (
            state.streams.has_unwritten
            or state.attempts.has_unwritten
            or state.timers.has_unwritten
            or halves != state.halves.written
        )
        is_recent = self.progress_bytes < PROGRESS_BYTES_MAX
        if offsets == self.delays.written and not has_unwritten and is_recent:
            return
        mark, skips = state.timers.unwritten()
        # The delays come last: from the record that has them on the next writer reads the log.
        changes: list[Change] = [
            *stream_changes(*state.streams.unwritten()),
            *attempt_changes(state.attempts.unwritten()),
            *([HalvesReached(halves)] if halves != state.halves.written else []),
            *(TimersReached(mark, tuple(some)) for some in skip_changes(skips)),
            DelaysReached(offsets),
        ]
        for record, some in change_parts(changes):
            self._append([record], DurabilityClass.ASYNC)
            for change in some:
                state.written(change)
        self.delays.written = offsets
        self._progress_end = self._storage.store.appended_offset

    def write_doings(self) -> None:
        """Append what groups have committed, received and sent back so far: before a change that
        makes them begin again, because behind it in the log it would count. May raise DiskFull,
        BrokerDraining.
        """
        self.write_offsets()
        self.write_pops()
        self._write_progress()

    @property
    def progress_bytes(self) -> int:
        """How far the log has grown since progress was written."""
        return self._storage.store.appended_offset - self._progress_end

    def records_of(self, marks: Iterable[MessagesResent]) -> list[OwnStateRecord]:
        """For the batch of the messages that the marks are of: both are stored, or neither. Apply
        the marks when the batch is in the log.
        """
        records = change_records(marks)
        return [OwnStateRecord(one.body, one.tag, self._host) for one in records]

    def write(
        self, change: MessagesResent | QueuesLocked | QueuesUnlocked | OffsetsReset | GroupLeft
    ) -> int:
        """Append a change that takes effect at once; the end of the log. May raise DiskFull,
        BrokerDraining, VersionUnsupported: then nothing has changed.
        """
        changes = self._admit(change)
        end = self._append([change_record(*changes)])
        for one in changes:
            self.state.apply(one)
        return end

    async def settled(self) -> None:
        """Wait until no change is on its way."""
        async with self._one_at_a_time:
            assert not self._in_flight

    def drop_orphans(self) -> list[str]:
        """Remove the queues of topics that do not exist, and return those topics. There are none,
        unless a crash or another program left some.
        """
        topics = {topic for topic, _ in self._storage.store.queues()}
        orphans = sorted(t for t in topics if t not in self.state.topics and not is_system(t))
        for topic in orphans:
            self._storage.drop_topic(topic)
        return orphans

    def has_topic(self, topic: str) -> bool:
        """Whether the topic is there, and is not being deleted."""
        return topic in self.state.topics and topic not in self.closing

    def check_open(self, topic: str) -> None:
        """Raises TopicNotFound for a topic that is being deleted."""
        if topic in self.closing:
            raise TopicNotFound(f"topic {topic} is being deleted")

    def find_group(self, name: str) -> GroupSettings | None:
        """Settings of a group; None: there is none, or it is being deleted."""
        return None if name in self.closing_groups else self.state.groups.get(name)

    def group(self, name: str) -> GroupSettings:
        """As :meth:`find_group`. Raises GroupNameInvalid, GroupNotFound."""
        check_name(name)
        settings = self.find_group(name)
        if settings is None:
            raise GroupNotFound(f"there is no consumer group {name} here")
        return settings

    def write_offsets(self) -> None:
        """Append what groups have committed since the last time. May raise DiskFull; then the next
        call writes it.
        """
        while (change := self.state.plan_offsets()) is not None:
            demands = self.demands_of({commit.topic for commit in change.commits})
            end = self._append([change_record(change)], demands)
            assert end > self._offsets_end
            self._offsets_end = end
            self.state.written(change)

    async def offsets_stored(self, topics: Iterable[str]) -> None:
        """Wait until what groups have committed so far is as safe as messages of ``topics``. All
        commits of a turn of the loop are written at once. Raises what :meth:`write_offsets` raises,
        and SlaveNotAvailable while too few followers copy.
        """
        await self._offsets_turn.ended()
        await self._stored(self._offsets_end, topics)

    def write_pops(self) -> None:
        """Append what groups have received and acknowledged since the last time. May raise
        DiskFull; then the next call writes it.
        """
        state = self.state
        for change in pop_changes(state.pops.unwritten(state.pop_generation)):
            demands = self.demands_of({one.key[0] for one in change.queues})
            self._pops_end = self._append([change_record(change)], demands)
            state.written(change)

    async def pops_written(self) -> None:
        """Wait until what groups have received so far is in the log: all of a turn of the loop at
        once. Raises what :meth:`write_pops` raises.
        """
        await self._pops_turn.ended()

    async def pops_stored(self, topics: Iterable[str]) -> None:
        """As :meth:`offsets_stored`, for what groups have acknowledged."""
        await self._pops_turn.ended()
        await self._stored(self._pops_end, topics)

    async def _stored(self, end: int, topics: Iterable[str]) -> None:
        demands = self.demands_of(topics)
        if not demands & REPLICATED:
            return await self._storage.stored(end, demands)
        self._storage.authority.check_in_sync()
        try:
            async with asyncio.timeout(OFFSETS_COPIED_S_MAX):
                await self._storage.stored(end, demands)
        except TimeoutError:
            raise SlaveNotAvailable(
                f"written here, and not copied within {OFFSETS_COPIED_S_MAX:g} s"
            ) from None

    def demands_of(self, topics: Iterable[str]) -> DurabilityClass:
        """All that any of ``topics`` asks for; a deleted topic asks for nothing."""
        known = (self.state.topics.find(topic) for topic in topics)
        return union(DurabilityClass.of_topic(config) for config in known if config is not None)

    def write_snapshot_if_due(self, interval_bytes: int) -> None:
        """Append a state snapshot when the log has grown by ``interval_bytes`` since the last. May
        raise DiskFull.
        """
        if self._storage.store.appended_offset - self._snapshot_end >= interval_bytes:
            self.write_snapshot()

    def write_snapshot(self) -> None:
        """Append a state snapshot. May raise DiskFull, BrokerDraining."""
        begun_ns = recorder.now_ns()
        self.write_pops()
        # The next writer looks at the log behind the snapshot only.
        self._write_progress()
        bounds = self._storage.store.queue_bounds
        self._snapshot_end = self._append(
            self.state.snapshot_records(
                self._in_flight, next_offset_of=lambda *queue: bounds(*queue)[1]
            )
        )
        recorder.note(Stage.STATE_SNAPSHOT, begun_ns)

    async def _commit(self, *changes: Change, until_s: float = 0.0) -> None:
        """Write the changes as one record, wait until they are safe, apply them. In its turn."""
        assert self._one_at_a_time.locked()
        assert not self._in_flight
        coming = union(
            DurabilityClass.of_topic(c.config) for c in changes if isinstance(c, TopicPut)
        )
        try:
            with self._demands.with_coming(coming):
                self._storage.settle()  # what counts as replicated depends on the demands
                await self._check_copies(until_s)
                changes = self._admit(*changes)
                end = self._append([change_record(*changes)])
                self._in_flight += changes
                # On our disk too: else the next start could do without a change that was answered.
                await self._storage.stored(end, self._demands.now | DurabilityClass.FLUSHED)
                for change in changes:
                    self.state.apply(change)
        finally:
            self._in_flight.clear()
            self._storage.settle()

    def _admit(self, *changes: Change) -> tuple[Change, ...]:
        """The changes, behind a note of the kinds that come into the log with them and that not
        every release knows. VersionUnsupported: a member could not read them.
        """
        newer = newer_kinds(changes) - self.state.kinds_used
        if not newer:
            return changes
        note = KindsUsed(newer | newer_kinds([KindsUsed(newer)]))
        self._storage.authority.check_kinds(note.kinds)
        self._admitted |= note.kinds
        return note, *changes

    async def _check_copies(self, until_s: float) -> None:
        """Raises SlaveNotAvailable while too few members are in sync. If no topic has asked for
        replication so far, connected followers may not be in sync yet: it waits for them, at most
        until ``until_s``.
        """
        if not self._demands.now & REPLICATED:
            return
        is_first = not self._demands.of_topics & REPLICATED
        while True:
            try:
                return self._storage.authority.check_in_sync()
            except SlaveNotAvailable:
                if not is_first or self._clock.monotonic_s() >= until_s:
                    raise
            await asyncio.sleep(RETRY_S)

    def _append(
        self, records: Sequence[StateRecord], demands: DurabilityClass | None = None
    ) -> int:
        """Returns the end of the log. ``demands``: by default all that the state waits for."""
        demands = self._demands.now if demands is None else demands
        segment = Segment(STATE_TOPIC, STATE_QUEUE_ID, 1, demands)
        end = self._storage.store.appended_offset
        for state_record in records:
            assert state_record.newer_kinds <= self._admitted, "a member cannot read this record"
            data = encode_record(state_record, self._host, self._clock.wall_ms())
            ticket = self._storage.append(
                data, [segment], born_host=self._host, store_host=self._host
            )
            end = ticket.appended.end_offset
        return end

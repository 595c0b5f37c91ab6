"""The state of a broker group, and how it lives in the log.

Topics, generations, groups and committed offsets are tables in memory; each change of them is a
record of the topic ``rmq_sys_cometmq_state`` in the same log as the messages
(``docs/format/state.md``). A state snapshot of all tables is written now and then, so that the
state can be rebuilt from the last complete copy and the changes after it.

The writer plans a change (:meth:`BrokerState.plan_topic` and its sisters), appends it, and applies
it when its record is acknowledged. Two rules make its tables and those rebuilt from the log the
same: plans are appended in the order in which they were made, and every change is applied in the
order of the log. Offset commits take effect at once, reach the log before they are answered, and
are applied again then, which changes nothing unless a deletion came between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from cometmq.errors import GroupNotFound, LimitExceeded, NoPermission, StateTooNew, StoreDamaged
from cometmq.messaging import group_policy, groups, topics
from cometmq.messaging.changes import (
    AttemptsStored,
    Change,
    DelaysDropped,
    DelaysReached,
    GenerationsCounted,
    GenerationsRaised,
    GroupDropped,
    GroupLeft,
    GroupPolicyPut,
    GroupPut,
    HalvesDropped,
    HalvesReached,
    KindsUsed,
    LimitsPut,
    MessagesResent,
    OffsetsCommitted,
    OffsetsReset,
    PopsMoved,
    QueuesCounted,
    QueuesLocked,
    QueuesUnlocked,
    SecretAdded,
    StreamsReached,
    TimersDropped,
    TimersReached,
    TopicDropped,
    TopicPut,
    TopicQuotaPut,
    TopicReserved,
    TopicSnapshot,
    TopicTyped,
    decode,
    encode,
    encode_change,
    join,
    newer_kinds,
)
from cometmq.messaging.dedup import StreamEntry, StreamTable
from cometmq.messaging.delay import LevelDrops
from cometmq.messaging.generations import GenerationTable, History
from cometmq.messaging.group_policy import ConsumeMode
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.handle_secrets import HandleSecrets, Secret
from cometmq.messaging.locks import LockTable
from cometmq.messaging.offsets import CommittedOffset, OffsetTable, batched
from cometmq.messaging.pop.table import PopTable, QueueMoved
from cometmq.messaging.quotas import (
    EACH,
    NO_QUOTA,
    Limits,
    Quota,
    QuotaRules,
    Scope,
    Way,
    check_quota,
)
from cometmq.messaging.resends import ResentTable
from cometmq.messaging.resets import ResetTable, positions_of
from cometmq.messaging.retry import Attempt, AttemptTable
from cometmq.messaging.sent_ids import SentIds
from cometmq.messaging.timers import TimerTable
from cometmq.messaging.topics import TopicTable
from cometmq.messaging.transactions import HalfProgress, HalfTable
from cometmq.model import Position, QueueKey, TopicConfig
from cometmq.names import check_new_group, check_new_topic

STATE_TOPIC = "rmq_sys_cometmq_state"
STATE_QUEUE_ID = 0

# What a record of the state topic is, as its tag: the queue alone tells where a state snapshot
# begins.
CHANGE = "CHANGE"
SNAPSHOT_FIRST = "COPY_FIRST"
SNAPSHOT_PART = "COPY"
SNAPSHOT_LAST = "COPY_LAST"
SNAPSHOT_ONLY = "COPY_ONLY"  # a copy of one record
STATE_TAGS = (CHANGE, SNAPSHOT_FIRST, SNAPSHOT_PART, SNAPSHOT_LAST, SNAPSHOT_ONLY)

# Topic and queue id → the offset of the queue's next message.
NextOffsetOf = Callable[[str, int], int]

# A record with several changes stays below; a change that is larger has a record of its own.
RECORD_BYTES_MAX = 256 * 1024

# Of an entry in a state snapshot, with names of middle length.
TOPIC_BYTES, QUEUE_BYTES, GROUP_BYTES, COMMIT_BYTES = 200, 60, 200, 80
STREAM_BYTES = 2_000
RESENT_BYTES = 200
LIMITS_BYTES = 220
LOCK_BYTES = 300
POP_BYTES, LEASE_BYTES = 200, 120
ATTEMPT_BYTES = 60
SECRET_ENTRY_BYTES = 110
TIMER_SKIP_BYTES, DROP_BYTES, LEVEL_END_BYTES = 40, 200, 25
ATTEMPTS_PER_CHANGE = 800  # with the longest names they fit a record
CHECK_STEP_BYTES = 16
POLICY_BYTES = 1_200  # with as many retry steps as there may be
KIND_BYTES = 70
RECORD_HEAD_BYTES = 4096  # a block for what is around a record's body


@dataclass(frozen=True, slots=True)
class StateRecord:
    """One record of the state topic: its tag and its body."""

    tag: str
    body: bytes
    # Of its changes, those that not every release knows which replicates with this one.
    newer_kinds: frozenset[str] = frozenset()


class BrokerState:
    """All tables. Only :meth:`apply` changes them, but for ``offsets``, which takes commits."""

    def __init__(
        self, topics_max: int = topics.TOPICS_MAX, groups_max: int = groups.GROUPS_MAX
    ) -> None:
        self.topics = TopicTable(topics_max)
        self.generations = GenerationTable()
        self.groups: dict[str, GroupSettings] = {}
        self.quotas = QuotaRules()
        self.groups_max = groups_max
        self.offsets = OffsetTable()
        self.streams = StreamTable()  # takes what producers send, as `offsets` takes commits
        self.sent_ids = SentIds()  # of messages that stubs send; only the end of the log has them
        self.attempts = AttemptTable()  # takes what groups send back
        self.resent = ResentTable()
        self.locks = LockTable()
        self.resets = ResetTable()
        self.halves = HalfTable()  # takes halves and ends
        self.delays: dict[int, int] = {}  # level → offset in its queue of delayed messages
        self.delay_drops = LevelDrops()
        self.timers = TimerTable()  # takes what is delivered and recalled
        self.secrets = HandleSecrets()
        self.pops = PopTable()  # takes what members receive and acknowledge
        # Kinds of changes that the log may have, of those that not every release knows.
        self.kinds_used: frozenset[str] = frozenset()

    # --- plan: what is asked for → the change to append ---

    def plan_topic(self, config: TopicConfig, *, by_system: bool = False) -> TopicPut:
        """The change that creates a topic or gives it these settings.

        Raises ``TopicNameInvalid``, ``QueueCountInvalid``, ``InvalidRequest``, ``LimitExceeded``,
        and ``NoPermission`` for a system topic unless the system itself asks.
        """
        topics.check_settings(config)
        self._check_owner(config.name, by_system)
        if config.name not in self.topics and not by_system:
            check_new_topic(config.name)
        self.topics.check_room(config.name)
        return TopicPut(config.plain(), self.generations.allocate())

    def plan_extras(self, config: TopicConfig) -> list[TopicReserved | TopicTyped]:
        """What has to follow :meth:`plan_topic` when the topic is to have another reserve time,
        type or order.
        """
        before = self.topics.find(config.name) or TopicConfig(config.name)
        changes: list[TopicReserved | TopicTyped] = []
        if config.reserve_time_ms != before.reserve_time_ms:
            changes.append(TopicReserved(config.name, config.reserve_time_ms))
        if TopicTyped.of(config) != TopicTyped.of(before):
            changes.append(TopicTyped.of(config))
        return changes

    def plan_quota(self, topic: str, quota: Quota) -> list[TopicQuotaPut]:
        """What has to be added when each client may send so much to a topic that is there.
        InvalidRequest.
        """
        check_quota("send_quota", quota)
        if quota == self.quotas.of_clients[Way.SEND].get(topic, NO_QUOTA):
            return []
        return [TopicQuotaPut(topic, quota)]

    def plan_limits(self, scope: Scope, name: str, limits: Limits) -> list[LimitsPut]:
        """The change that lets an address, a topic, or each of them (EACH) send and read so much.
        InvalidRequest, LimitExceeded, TopicNameInvalid, TopicNotFound, and NoPermission for a
        system topic.
        """
        for what, quota in (("send", limits.send), ("read", limits.read)):
            check_quota(what, quota or NO_QUOTA)
        if scope is Scope.TOPIC and name != EACH:
            self._check_owner(name, by_system=False)
            self.topics.get(name)
        self.quotas.check_room(scope, name)
        is_known = limits == self.quotas.get(scope, name)
        return [] if is_known else [LimitsPut(scope, name, limits)]

    def is_metered(self, topic: str) -> bool:
        """Whether a quota counts who reads the topic: of all, or of a group that reads it."""
        groups_limited = self.quotas.of_clients[Way.READ]
        return self.quotas.is_topic_read_limited(topic) or any(
            self.offsets.reads(group, topic) for group in groups_limited
        )

    def plan_drop(self, topic: str, *, by_system: bool = False) -> TopicDropped:
        """The change that deletes a topic.

        Raises ``TopicNameInvalid``, ``TopicNotFound``, and ``NoPermission`` as above.
        """
        self._check_owner(topic, by_system)
        return TopicDropped(self.topics.get(topic).name)

    def plan_group(self, settings: GroupSettings) -> GroupPut:
        """The change that creates a group or gives it these settings.

        Raises ``GroupNameInvalid``, ``LimitExceeded``.
        """
        groups.check_name(settings.name)
        is_new = settings.name not in self.groups
        if is_new:
            check_new_group(settings.name)
        if is_new and len(self.groups) >= self.groups_max:
            raise LimitExceeded(
                f"this broker group holds its {self.groups_max} consumer groups (groups_max)"
            )
        return GroupPut(replace(settings, policy=group_policy.DEFAULT))

    def plan_policy(self, settings: GroupSettings, epoch: int) -> list[GroupPolicyPut | PopsMoved]:
        """What has to follow :meth:`plan_group` when the group is to have another policy, of the
        writer of this epoch. A group that receives again does not get what it had done before.
        """
        before = self.groups.get(settings.name)
        if settings.policy == (before.policy if before else group_policy.DEFAULT):
            return []
        changes: list[GroupPolicyPut | PopsMoved] = [GroupPolicyPut(settings.name, settings.policy)]
        if settings.policy.mode is ConsumeMode.POP and not self.receives(settings.name):
            changes += pop_changes(self._waiting(settings.name, epoch))
        return changes

    def receives(self, group: str) -> bool:
        """Whether the group's mode is POP."""
        settings = self.groups.get(group)
        return settings is not None and settings.policy.mode is ConsumeMode.POP

    def _waiting(self, group: str, epoch: int) -> Iterator[QueueMoved]:
        for key in self.pops.of_group(group):
            position, history = self.offsets.get(group, key), self.generations.find(*key)
            if position is not None and history is not None:
                offset = history.settle(position).offset
                yield self.pops.as_waiting(group, key, history.current, offset, epoch)

    def plan_group_drop(self, name: str) -> GroupDropped:
        """The change that deletes a group and all that it committed.

        Raises ``GroupNameInvalid``, ``GroupNotFound``.
        """
        groups.check_name(name)
        if name not in self.groups and not self.offsets.of_group(name):
            raise GroupNotFound(f"there is no consumer group {name} here")
        return GroupDropped(name)

    def plan_raise(self, maximum_of: Callable[[str, int], int]) -> list[GenerationsRaised]:
        """The changes that begin a new generation for all queues, each where ``maximum_of`` says
        that its messages stop being those that everybody had.

        Due after an unclean start. One change, but for tens of thousands of queues; all have the
        same generation. They count only together with the state snapshot that begins the epoch: an
        epoch without a complete copy was cut short while it started, and its successor raises
        again.
        """
        generation = self.generations.allocate()
        changes: list[GenerationsRaised] = []
        starts: dict[str, tuple[int, ...]] = {}
        size = 0
        for config in self.topics:
            name = config.name
            queue_count = len(self.generations.topic(name))
            entry = len(name) + 8 + 20 * queue_count  # 20 bytes: a number with its comma
            if starts and size + entry > RECORD_BYTES_MAX:
                changes.append(GenerationsRaised(generation, starts))
                starts, size = {}, 0
            size += entry
            starts[name] = tuple(maximum_of(name, queue_id) for queue_id in range(queue_count))
        return [*changes, GenerationsRaised(generation, starts)] if starts else changes

    def plan_secret(self, now_ms: int, key: bytes) -> list[SecretAdded]:
        """The change that gives an epoch which begins now the random ``key``, if it needs one."""
        return [SecretAdded(Secret(now_ms, key))] if self.secrets.needs_renewal(now_ms) else []

    def plan_offsets(self) -> OffsetsCommitted | None:
        """A change with what was committed since the last one, as much as fits a record.

        None when nothing was. After it was appended call :meth:`OffsetTable.written` with its
        commits; after a refusal just ask again.
        """
        commits = next(batched(self.offsets.unwritten(), RECORD_BYTES_MAX), None)
        return OffsetsCommitted(commits) if commits else None

    def written(self, change: Change) -> None:
        """A change is in the log that tells what took effect before. Each counts by itself: one
        that is refused leaves those before it written, and the next try does not repeat them.
        """
        match change:
            case OffsetsCommitted(commits):
                self.offsets.written(commits)
            case PopsMoved(queues):
                for moved in queues:
                    self.pops.written(moved)
                    self._commit_floor(moved)
            case StreamsReached(streams, gone):
                self.streams.written(streams, gone)
            case AttemptsStored(attempts):
                self.attempts.written(attempts)
            case HalvesReached(progress):
                self.halves.written = progress
            case TimersReached(mark, skips):
                self.timers.written(mark, skips)
            case _:
                self.apply(change)

    # --- instead of apply: another state's tables ---

    def become(self, other: BrokerState) -> None:
        """Hold the tables of ``other`` from now on, and share them with it."""
        self.topics = other.topics
        self.generations = other.generations
        self.groups = other.groups
        self.quotas = other.quotas
        self.offsets = other.offsets
        self.delays = other.delays
        self.delay_drops = other.delay_drops
        self.streams = other.streams
        self.sent_ids = other.sent_ids
        self.attempts = other.attempts
        self.halves = other.halves
        self.resent = other.resent
        self.locks = other.locks
        self.resets = other.resets
        self.timers = other.timers
        self.secrets = other.secrets
        self.pops = other.pops
        self.kinds_used = other.kinds_used

    @staticmethod
    def _check_owner(topic: str, by_system: bool) -> None:
        topics.check_name(topic)
        if topics.is_system(topic) and not by_system:
            raise NoPermission(f"{topic} is a system topic")

    # --- apply: the only way that tables change ---

    def apply(self, change: Change) -> None:
        """Takes a change that is in the log. ``QueuesCounted`` is the store's matter.

        Raises ``StoreDamaged`` when it does not fit what is there.
        """
        match change:
            case TopicPut(config, generation):
                self._put_topic(config, generation)
            case TopicReserved() | TopicTyped():
                self._change_topic(change)
            case TopicDropped(topic):
                self._drop_topic(topic)
            case TopicSnapshot(config, histories):
                self._copy_topic(config, histories)
            case GenerationsRaised() | GenerationsCounted() | KindsUsed():
                self._raise(change)
            case GroupPut() | GroupPolicyPut() | GroupDropped():
                self._change_group(change)
            case OffsetsCommitted(commits):
                self._restore_all(commits)
            case QueuesCounted():
                pass
            case TimersReached() | TimersDropped() | SecretAdded() | PopsMoved():
                self._move(change)
            case _:
                self._reach(change)

    def _raise(self, change: GenerationsRaised | GenerationsCounted | KindsUsed) -> None:
        match change:
            case GenerationsRaised(generation, starts):
                self.generations.raise_all(generation, starts)
                self.pops.cut(starts)
            case GenerationsCounted(last):
                self.generations.count_from(last)
            case KindsUsed(kinds):
                self.kinds_used |= kinds

    def _reach(
        self,
        change: DelaysReached
        | DelaysDropped
        | HalvesReached
        | HalvesDropped
        | StreamsReached
        | AttemptsStored
        | MessagesResent
        | QueuesLocked
        | QueuesUnlocked
        | OffsetsReset
        | GroupLeft
        | TopicQuotaPut
        | LimitsPut,
    ) -> None:
        match change:
            case TopicQuotaPut() | LimitsPut():
                self._limit(change)
            case OffsetsReset(number, commits):
                self._reset(number, commits)
            case GroupLeft(group, topic):
                self._leave(group, topic)
            case QueuesLocked(run):
                self.locks.grant(run)
            case QueuesUnlocked(group, queues):
                self.locks.release(group, queues)
            case _:
                self._progress(change)

    def _progress(
        self,
        change: DelaysReached
        | DelaysDropped
        | HalvesReached
        | HalvesDropped
        | StreamsReached
        | AttemptsStored
        | MessagesResent,
    ) -> None:
        match change:
            case DelaysReached(offsets):
                self.delays = dict(offsets)
                self.delay_drops.reached(offsets)
            case DelaysDropped(topic, ends):
                self.delay_drops.drop_older(topic, ends)
            case HalvesReached(progress):
                self.halves.restore(progress)
            case HalvesDropped(topic, end):
                self.halves.drop_older(topic, end)
            case StreamsReached(streams, gone):
                self.streams.restore(streams, gone)
            case AttemptsStored(attempts):
                self.attempts.restore(attempts)
            case MessagesResent(key, intervals):
                self.resent.put(key, intervals)

    def _move(self, change: TimersReached | TimersDropped | SecretAdded | PopsMoved) -> None:
        match change:
            case PopsMoved(queues):
                self._move_pops(queues)
            case TimersReached(mark, skips):
                self.timers.restore(mark, skips)
            case TimersDropped(topic, end):
                self.timers.drop_older(topic, end)
            case SecretAdded(secret):
                self.secrets.add(secret)

    def _put_topic(self, config: TopicConfig, generation: int) -> None:
        before = self.topics.find(config.name)
        self.topics.put(config.with_extras_of(before) if before else config)
        self.generations.extend(config.name, _queue_count(config), generation)

    def _change_topic(self, change: TopicReserved | TopicTyped) -> None:
        config = self.topics.find(change.topic)
        if config is None:
            raise StoreDamaged(f"{type(change).__name__}: there is no topic {change.topic}")
        if isinstance(change, TopicReserved):
            changed = replace(config, reserve_time_ms=change.reserve_time_ms)
        else:
            changed = replace(
                config,
                message_type=change.message_type,
                is_ordered=change.is_ordered,
                attributes=change.attributes,
            )
        self.topics.put(changed)

    def _limit(self, change: TopicQuotaPut | LimitsPut) -> None:
        match change:
            case TopicQuotaPut(topic, quota):
                self._check_limited(topic)
                self.quotas.put_clients(Way.SEND, topic, quota)
            case LimitsPut(scope, name, limits):
                if scope is Scope.TOPIC and name != EACH:
                    self._check_limited(name)
                self.quotas.put(scope, name, limits)

    def _check_limited(self, topic: str) -> None:
        if topic not in self.topics:
            raise StoreDamaged(f"a quota is given to the topic {topic}, which is not there")

    def _drop_topic(self, topic: str) -> None:
        self.topics.drop(topic)
        self.quotas.forget_topic(topic)
        self.generations.drop(topic)
        self.offsets.forget_topic(topic)
        self.locks.forget_topic(topic)
        self.resets.forget_topic(topic)
        self.resent.forget_topic(topic)
        self.pops.forget_topic(topic)
        self.halves.forget_topic(topic)
        self.timers.forget_topic(topic)
        self.delay_drops.forget_topic(topic)

    def _copy_topic(self, config: TopicConfig, histories: tuple[History, ...]) -> None:
        if len(histories) < _queue_count(config):
            raise StoreDamaged(f"the copy of topic {config.name} has too few histories")
        self.topics.put(config)
        self.generations.put(config.name, histories)

    def _change_group(self, change: GroupPut | GroupPolicyPut | GroupDropped) -> None:
        match change:
            case GroupPut(settings):
                before = self.groups.get(settings.name)
                policy = before.policy if before else group_policy.DEFAULT
                self.groups[settings.name] = replace(settings, policy=policy)
            case GroupPolicyPut(group, policy):
                known = self.groups.get(group)
                if known is None:
                    raise StoreDamaged(
                        f"a policy is given to the consumer group {group}, which is not there"
                    )
                if policy.mode is ConsumeMode.PULL:
                    self.pops.leave(group)
                elif not self.receives(group):  # what is left over comes behind, as leases
                    self.pops.forget_group(group)
                self.groups[group] = replace(known, policy=policy)
                self.quotas.put_clients(Way.READ, group, policy.read_quota)
            case GroupDropped(group):
                self.groups.pop(group, None)
                self.quotas.put_clients(Way.READ, group, NO_QUOTA)
                self.offsets.forget_group(group)
                self.attempts.forget_group(group)
                self.locks.forget_group(group)
                self.resets.forget_group(group)
                self.resent.forget_group(group)
                self.pops.forget_group(group)

    def _restore_all(self, commits: Iterable[CommittedOffset]) -> None:
        for commit in commits:
            # A commit may have entered the log behind the deletion of its topic, whose record it
            # did not wait for: then the queue is gone, or born again with a later generation.
            history = self.generations.find(commit.topic, commit.queue_id)
            if history is not None and commit.position.generation >= history.born:
                self.offsets.restore(commit)
                self.pulled(commit.group, (commit.topic, commit.queue_id))

    def pulled(self, group: str, key: QueueKey) -> None:
        """A group has committed: what it did above that when it received may be behind it now."""
        if self.pops.find(group, key) is not None and not self.receives(group):
            position = self.offsets.get(group, key)
            if position is not None:
                self.pops.pulled(group, key, self.generations.of(*key).settle(position).offset)

    def _move_pops(self, queues: Iterable[QueueMoved]) -> None:
        for moved in queues:
            # As a commit it may have come behind the deletion of its topic or of its group.
            history = self.generations.find(*moved.key)
            is_there = history is not None and moved.generation >= history.born
            if is_there and moved.group in self.groups:
                self.pops.restore(moved)
                self._commit_floor(moved)

    def _commit_floor(self, moved: QueueMoved) -> None:
        """What a group that receives has done of a queue without a gap is its committed offset.
        Before the last part of its leases is known an older message may be missing.
        """
        queue = self.pops.find(moved.group, moved.key)
        history = self.generations.find(*moved.key)
        receives = self.receives(moved.group)
        if moved.is_last and queue is not None and history is not None and receives:
            position = Position(history.current, queue.floor)
            self.offsets.restore(CommittedOffset(moved.group, *moved.key, position))

    def pop_generation(self, key: QueueKey) -> int:
        """The generation of a queue; 0: it is not there."""
        history = self.generations.find(*key)
        return history.current if history is not None else 0

    def _reset(self, number: int, commits: Sequence[CommittedOffset]) -> None:
        for group in {commit.group for commit in commits}:
            # It may get messages again that it sent back before, and send them back again.
            self.attempts.forget_group(group)
        for commit in commits:
            history = self.generations.find(commit.topic, commit.queue_id)
            if history is not None and commit.position.generation >= history.born:
                self.offsets.reset(commit)
                self.pops.forget(commit.group, (commit.topic, commit.queue_id))
                self.resets.put(commit.group, number, [(commit.topic, commit.queue_id)])

    def queues_of(self, group: str, topic: str) -> list[QueueKey]:
        """Queues of a topic in which a group has a place, in order."""
        known = self.offsets.of_group(group).keys() | self.pops.of_group(group).keys()
        return sorted(key for key in known if key[0] == topic)

    def _leave(self, group: str, topic: str) -> None:
        # It may get messages again that it sent back before, and send them back again.
        self.attempts.forget_group(group)
        for key in self.queues_of(group, topic):
            self.pops.forget(group, key)
        self.offsets.forget(group, topic)
        self.resets.forget(group, topic)
        self.locks.forget(group, topic)
        self.resent.forget(group, topic)

    # --- copy: everything, as changes that rebuild it from nothing ---

    def as_changes(self, next_offset_of: NextOffsetOf | None = None) -> Iterator[Change]:
        """The changes that make an empty state equal to this one; with how far the queues have
        counted, if that is known.
        """
        if self.kinds_used:
            yield KindsUsed(self.kinds_used)
        yield GenerationsCounted(self.generations.last)
        for config in self.topics:
            yield TopicSnapshot(config.plain(), self.generations.topic(config.name))
            yield from extras_of(config)
            if quota := self.quotas.of_clients[Way.SEND].get(config.name):
                yield TopicQuotaPut(config.name, quota)
            if next_offset_of is not None:
                yield from self._counted(config.name, next_offset_of)
        for scope, name, limits in self.quotas:
            yield LimitsPut(scope, name, limits)
        for name in sorted(self.groups):
            settings = self.groups[name]
            yield GroupPut(replace(settings, policy=group_policy.DEFAULT))
            if settings.policy != group_policy.DEFAULT:
                yield GroupPolicyPut(name, settings.policy)
        yield from self._committed()
        yield from self._timed()
        for run in self.locks:
            yield QueuesLocked(run)
        yield from self._reached()

    def _reached(self) -> Iterator[Change]:
        if self.delays:
            yield DelaysReached(self.delays)
        for topic, ends in self.delay_drops.dropped.items():
            yield DelaysDropped(topic, ends)
        if self.halves.progress != HalfProgress():
            yield HalvesReached(self.halves.progress)
        for topic, end in self.halves.dropped.items():
            yield HalvesDropped(topic, end)
        for key, intervals in self.resent:
            yield MessagesResent(key, intervals)
        yield from stream_changes(self.streams, [])
        yield from attempt_changes(self.attempts)
        yield from pop_changes(self.pops.as_moved(self.pop_generation))

    def _timed(self) -> Iterator[TimersReached | TimersDropped | SecretAdded]:
        for mark, skips in self.timers.as_written():
            yield TimersReached(mark, tuple(skips))
        for topic, end in self.timers.dropped.items():
            yield TimersDropped(topic, end)
        for secret in self.secrets:
            yield SecretAdded(secret)

    def _committed(self) -> Iterator[OffsetsCommitted | OffsetsReset]:
        for commits in batched(self.offsets, RECORD_BYTES_MAX):
            yield OffsetsCommitted(commits)
        for group, number, keys in self.resets:
            # A reset leaves a position, which commits have moved on since.
            committed = positions_of(group, keys, self.offsets.of_group(group))
            for commits in batched(committed, RECORD_BYTES_MAX):
                yield OffsetsReset(number, commits)

    def _counted(self, topic: str, next_offset_of: NextOffsetOf) -> Iterator[QueuesCounted]:
        queue_ids = range(len(self.generations.topic(topic)))
        next_offsets = tuple(next_offset_of(topic, queue_id) for queue_id in queue_ids)
        if any(next_offsets):
            yield QueuesCounted(topic, next_offsets)

    def snapshot_records(
        self,
        in_flight: Iterable[Change] = (),
        bytes_max: int | None = None,
        next_offset_of: NextOffsetOf | None = None,
    ) -> list[StateRecord]:
        """The records of a state snapshot, to be appended in order; changes may come between them.

        ``in_flight``: changes that are in the log but not yet applied here. They stand before the
        copy, so that a reader that begins at the snapshot would miss them; therefore they are part
        of it. ``bytes_max``: of a record's body, None: as of other changes.
        """
        changes = [*self.as_changes(next_offset_of), *in_flight]
        bodies = list(_bodies(changes, bytes_max or RECORD_BYTES_MAX))
        tags = [SNAPSHOT_FIRST, *[SNAPSHOT_PART] * (len(bodies) - 2), SNAPSHOT_LAST]
        if len(bodies) == 1:
            tags = [SNAPSHOT_ONLY]
        return [
            StateRecord(tag, body, newer_kinds(some))
            for tag, (body, some) in zip(tags, bodies, strict=True)
        ]

    def copy_bytes(self) -> int:
        """About how long a state snapshot is on the disk, rather too much than too little, without
        making one.
        """
        entries = TOPIC_BYTES * len(self.topics) + QUEUE_BYTES * self.generations.queue_count
        entries += self.topics.typed_bytes + KIND_BYTES * len(self.kinds_used)
        entries += GROUP_BYTES * len(self.groups) + COMMIT_BYTES * self.offsets.count
        entries += STREAM_BYTES * len(self.streams) + RESENT_BYTES * self.resent.interval_count
        entries += LIMITS_BYTES * len(self.quotas)
        entries += sum(_policy_bytes(settings) for settings in self.groups.values())
        entries += LOCK_BYTES * self.locks.count + COMMIT_BYTES * self.resets.count
        entries += CHECK_STEP_BYTES * len(self.halves.written.checks)
        entries += ATTEMPT_BYTES * len(self.attempts) + SECRET_ENTRY_BYTES * len(self.secrets)
        entries += POP_BYTES * self.pops.queue_count + LEASE_BYTES * self.pops.lease_count
        entries += TIMER_SKIP_BYTES * len(self.timers.skips)
        entries += DROP_BYTES * (len(self.timers.dropped) + len(self.halves.dropped))
        level_ends = self.delay_drops.dropped.values()
        entries += DROP_BYTES * len(level_ends) + LEVEL_END_BYTES * sum(map(len, level_ends))
        return entries + entries // 8 + RECORD_HEAD_BYTES  # more heads: one in each record

    def validate(self) -> None:
        """Asserts what must hold between the tables; for tests."""
        self.streams.validate()
        self.pops.validate()
        for config in self.topics:
            assert len(self.generations.topic(config.name)) >= _queue_count(config), config
        for topic, queue_id in self.generations.queues():
            assert topic in self.topics
            assert self.generations.of(topic, queue_id).current <= self.generations.last
        assert all(topic in self.topics for topic in self.quotas.of_clients[Way.SEND])
        limited = {name for scope, name, _ in self.quotas if scope is Scope.TOPIC}
        assert all(topic in self.topics for topic in limited - {EACH})
        policies = {name: one.policy.read_quota for name, one in self.groups.items()}
        reads = {name: quota for name, quota in policies.items() if quota}
        assert self.quotas.of_clients[Way.READ] == reads
        for commit in self.offsets:
            history = self.generations.of(commit.topic, commit.queue_id)
            assert history.born <= commit.position.generation <= history.current, commit


def stream_changes(streams: Iterable[StreamEntry], gone: Sequence[str]) -> Iterator[StreamsReached]:
    """The streams as changes that fit a record each."""
    each = RECORD_BYTES_MAX // STREAM_BYTES
    entries, left = iter(streams), tuple(gone)
    while (some := tuple(islice(entries, each))) or left:
        yield StreamsReached(some, left)
        left = ()


def attempt_changes(attempts: Iterable[Attempt]) -> Iterator[AttemptsStored]:
    """The send-backs as changes that fit a record each."""
    left = iter(attempts)
    while some := tuple(islice(left, ATTEMPTS_PER_CHANGE)):
        yield AttemptsStored(some)


def pop_changes(moved: Iterable[QueueMoved]) -> Iterator[PopsMoved]:
    """Leases as changes that fit a record each, but for one of a single queue that is larger."""
    some: list[QueueMoved] = []
    size = 0
    for one in moved:
        if some and size + one.size_bytes > RECORD_BYTES_MAX:
            yield PopsMoved(tuple(some))
            some, size = [], 0
        some.append(one)
        size += one.size_bytes
    if some:
        yield PopsMoved(tuple(some))


def _policy_bytes(settings: GroupSettings) -> int:
    policy = settings.policy
    if policy == group_policy.DEFAULT:
        return 0
    attributes = 4 * sum(len(name) + len(value) + 6 for name, value in policy.attributes)
    return POLICY_BYTES + attributes


def extras_of(config: TopicConfig) -> Iterator[TopicReserved | TopicTyped]:
    """The changes that give a topic, which has none of it, its reserve time, type and order."""
    if config.reserve_time_ms:
        yield TopicReserved(config.name, config.reserve_time_ms)
    if (typed := TopicTyped.of(config)) != TopicTyped(config.name):
        yield typed


def _queue_count(config: TopicConfig) -> int:
    return max(config.read_queue_count, config.write_queue_count)


def _bodies(changes: Iterable[Change], bytes_max: int) -> Iterator[tuple[bytes, Sequence[Change]]]:
    """Record bodies with the changes in order, each as full as ``bytes_max`` allows."""
    encoded: list[bytes] = []
    some: list[Change] = []
    size = len(join([]))
    for change in changes:
        entry = encode_change(change)
        if encoded and size + len(entry) + 1 > bytes_max:
            yield join(encoded), some
            encoded, some, size = [], [], len(join([]))
        encoded.append(entry)
        some.append(change)
        size += len(entry) + 1
    yield join(encoded), some


def change_record(*changes: Change) -> StateRecord:
    """The record of changes that take effect together, however large it is."""
    return StateRecord(CHANGE, encode(changes), newer_kinds(changes))


def change_parts(changes: Iterable[Change]) -> Iterator[tuple[StateRecord, Sequence[Change]]]:
    """Changes that may take effect one after the other, in records of a bounded size: each with
    what it carries.
    """
    for body, some in _bodies(changes, RECORD_BYTES_MAX):
        yield StateRecord(CHANGE, body, newer_kinds(some)), some


def change_records(changes: Iterable[Change]) -> list[StateRecord]:
    """The records of :func:`change_parts` alone."""
    return [record for record, _ in change_parts(changes)]


def check_tag(tag: str) -> None:
    """StateTooNew: no release up to this one gives a state record that tag."""
    if tag not in STATE_TAGS:
        raise StateTooNew(
            f"a record of the state topic has the tag {tag!r}, which this program does not know"
        )


def find_copy_start(tags: Iterable[str]) -> int | None:
    """How many records to go back to the first one of the newest complete copy.

    None when there is no such copy. ``tags`` are those of the state topic's records, newest first;
    reading stops at the copy's first record.
    """
    complete = False
    for back, tag in enumerate(tags):
        if tag == SNAPSHOT_ONLY or (tag == SNAPSHOT_FIRST and complete):
            return back
        if tag == SNAPSHOT_FIRST:
            complete = False  # a copy that was never finished
        elif tag == SNAPSHOT_LAST:
            complete = True
    return None


class StateLoader:
    """Rebuilds the state from the records of the state topic, in their order.

    A complete copy replaces everything before it. Until its last record has come, changes go on
    being applied to what was there, so that a copy that a crash cut short does no harm. Changes
    that come while there is nothing to apply them to, because reading began behind their copy, are
    passed over.
    """

    def __init__(
        self, base: BrokerState | None = None, new_state: Callable[[], BrokerState] = BrokerState
    ) -> None:
        """Begins with ``base``: the state before the first record.

        An empty state when the state topic is read from its very beginning, None when older records
        may be gone. ``new_state`` makes the state that a copy is built in.
        """
        self._new_state = new_state
        self._state = base
        self._copy: BrokerState | None = None  # the copy that is being read
        self._behind: list[Change] = []  # changes met between the records of that copy

    @property
    def state(self) -> BrokerState:
        """The state after all records so far.

        Raises ``StoreDamaged`` when there was neither a base nor a complete copy.
        """
        if self._state is None:
            raise StoreDamaged("the state log holds no complete copy of the state")
        return self._state

    @property
    def complete(self) -> bool:
        """Whether there is a state: a base, or a complete copy."""
        return self._state is not None

    def feed(self, tag: str, body: bytes) -> tuple[Change, ...]:
        """Takes the next record and answers the changes in it.

        Raises ``StateTooNew``, ``StoreDamaged``.
        """
        changes = decode(body)
        check_tag(tag)
        if tag == CHANGE:
            self._take_changes(changes)
        else:
            self._take_copy(tag, changes)
        return changes

    def _take_changes(self, changes: Sequence[Change]) -> None:
        if self._state is not None:
            _apply_all(self._state, changes)
        if self._copy is not None:
            self._behind += changes

    def _take_copy(self, tag: str, changes: Sequence[Change]) -> None:
        if tag in (SNAPSHOT_FIRST, SNAPSHOT_ONLY):
            self._copy, self._behind = self._new_state(), []
        if self._copy is None:
            return  # the rest of a copy that began before the first record we were given
        _apply_all(self._copy, changes)
        if tag in (SNAPSHOT_LAST, SNAPSHOT_ONLY):
            _apply_all(self._copy, self._behind)
            self._state, self._copy, self._behind = self._copy, None, []


def _apply_all(state: BrokerState, changes: Iterable[Change]) -> None:
    for change in changes:
        state.apply(change)

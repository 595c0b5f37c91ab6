"""Consumer groups at the writer, apart from reading: made on demand, their offsets and progress."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from cometmq.clock import Clock
from cometmq.errors import (
    GroupInUse,
    GroupModeMismatch,
    GroupNotFound,
    LimitExceeded,
    NoPermission,
    OffsetInvalid,
    TopicNotFound,
)
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.read.reader import Reader
from cometmq.member.read.replica_selector import ReplicaSelector
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging import retry
from cometmq.messaging.group_policy import ConsumeMode, GroupPolicy
from cometmq.messaging.groups import (
    GroupSettings,
    MemberDetails,
    check_name,
    check_settings,
    in_the_way,
)
from cometmq.messaging.quotas import Scope, Way
from cometmq.model import (
    BROADCAST_PREFIX,
    DLQ_PREFIX,
    RETRY_PREFIX,
    Position,
    Subscription,
    TopicConfig,
)
from cometmq.rpc.shares import Buckets
from cometmq.telemetry import fields, logger
from cometmq.turns import Turns
from services.broker.groups.membership import NOWHERE, Groups, MemberStream, Origin

BROADCASTERS_MAX = 10_000

_log = logger(__name__)


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group at a glance. ``member_count``: the ``away_count`` that are away included.
    ``idle_s``: for how long it has had neither a member nor a commit. ``retry_count``,
    ``dead_letter_count``: messages in its topics.
    """

    group: str
    member_count: int
    away_count: int
    queue_count: int
    idle_s: float
    retry_count: int
    dead_letter_count: int


class GroupCoordinator(GroupReads):
    """Groups and their offsets. Belongs to the event loop."""

    def __init__(
        self,
        keeper: StateKeeper,
        storage: MemberStorage,
        reader: Reader,
        groups: Groups,
        selector: ReplicaSelector,
        creations: Buckets,
        clock: Clock,
        *,
        auto_create_groups: bool,
        leaving_pop: Callable[[str], AbstractAsyncContextManager[None]],
        throttled: Callable[[Way, Scope], None],
    ) -> None:
        super().__init__(keeper.state, reader, groups.table, selector, clock, throttled)
        self._keeper = keeper
        self._storage = storage
        self._groups = groups
        self._creations = creations
        self._creating = WeakValueDictionary[str, asyncio.Lock]()  # groups
        self._auto_create_groups = auto_create_groups
        self._leaving_pop = leaving_pop
        self._since_s = clock.monotonic_s()
        # When groups last had a member or a commit; of those that are there.
        self._used_s: dict[str, float] = {}

    def is_there(self, group: str) -> bool:
        """Whether the group is known; False: it may be created. Raises GroupNameInvalid,
        GroupNotFound (not allowed here).
        """
        if self._keeper.find_group(group) is not None:
            return True
        check_name(group)
        if not self._auto_create_groups:
            raise GroupNotFound(f"there is no consumer group {group} here")
        return False

    async def ensure_group(
        self, name: str, address: str, mode: ConsumeMode = ConsumeMode.PULL
    ) -> None:
        """Create a missing group, which the client at ``address`` wants. Raises what
        :meth:`is_there` raises; LimitExceeded; GroupNameInvalid of one that would receive.
        """
        if self.is_there(name):
            return
        # Members that start together want the same group, and it counts as one.
        creating = self._creating.setdefault(name, asyncio.Lock())
        turns = Turns("creation of a group that is deleted meanwhile")
        async with creating:
            while not self.is_there(name):
                turns.next()
                await self._create_group(name, address, mode)

    async def _create_group(self, name: str, address: str, mode: ConsumeMode) -> None:
        _check_mode(name, mode)
        is_broadcaster = name.startswith(BROADCAST_PREFIX)
        if is_broadcaster and len(self._broadcasters()) >= BROADCASTERS_MAX:
            raise LimitExceeded(
                f"offsets of {BROADCASTERS_MAX} broadcasting clients are kept here "
                "(BROADCASTERS_MAX)"
            )
        self._creations.take(address, self._clock.monotonic_s())
        await self._keeper.create_group(name, GroupPolicy(mode=mode))

    def _broadcasters(self) -> list[str]:
        """Groups that keep the offsets of one broadcasting client."""
        return [name for name in self._state.groups if name.startswith(BROADCAST_PREFIX)]

    async def drop_idle_broadcasters(self, idle_s_max: float) -> list[str]:
        """Forget broadcasting clients that have committed nothing for so long; their groups."""
        dropped = []
        for name in self._broadcasters():
            # Looked at in its turn: it may have come back while others were dropped.
            if self._idle_s(name) >= idle_s_max:
                with suppress(GroupNotFound):
                    await self._keeper.drop_group(name)
                self._used_s.pop(name, None)
                dropped.append(name)
        return dropped

    def _idle_s(self, group: str) -> float:
        """For how long it has had neither a member nor a commit."""
        if self._members.count(group):
            return 0.0
        return self._clock.monotonic_s() - self._used_s.get(group, self._since_s)

    def check_open(self) -> None:
        """Raises BrokerDraining while no commit is taken."""
        self._storage.check_open()

    async def join(
        self,
        group: str,
        client_id: str,
        subscriptions: Sequence[Subscription],
        details: MemberDetails,
        address: str,
        origin: Origin = NOWHERE,
        known_questions: Iterable[int] = (),
    ) -> MemberStream:
        """Let a client into a group, as long as the stream lives. A client that is refused leaves
        no group behind.
        """
        mode = ConsumeMode.POP if details.receives else ConsumeMode.PULL
        if self.is_there(group):
            self._check_join(group, details)
        stream = self._groups.join(
            group, client_id, subscriptions, details, origin, known_questions
        )
        try:
            await self.ensure_group(group, address, mode)
        except BaseException:
            stream.leave(for_good=True)
            raise
        return stream

    def _check_join(self, group: str, details: MemberDetails) -> None:
        settings = self._keeper.group(group)
        if details.receives and settings.policy.mode is not ConsumeMode.POP:
            raise GroupModeMismatch(f"group {group} pulls: its mode is not POP")
        if details.is_broadcasting and not settings.consume_broadcast_enable:
            raise NoPermission(
                f"group {group} takes no broadcasting consumers (consume_broadcast_enable)"
            )

    def left(self, stream: MemberStream) -> bool:
        """A member's stream is over. Whether its client stays a member, and is away."""
        self._used(stream.group)
        return stream.leave()

    def remove_members(self, group: str, client_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """End the sessions of members that are away, of all when none is named: the others get
        their queues. Those that were removed, and those that have a stream and stay. Raises
        GroupNameInvalid.
        """
        check_name(group)
        table = self._members
        wanted = client_ids or [one.client_id for one in table.away(group)]
        removed = self._groups.remove_away(group, wanted)
        if removed:
            self._used(group)
            _log.warning(
                "members that were away are removed",
                extra=fields(group=group, count=len(removed), first=removed[0]),
            )
        return removed, [one for one in client_ids if table.member(group, one) is not None]

    def end_members(self) -> None:
        """The process drains: members are to find another broker."""
        self._groups.end()

    async def change_group(
        self, name: str, wanted: Callable[[GroupSettings | None], GroupSettings]
    ) -> tuple[GroupSettings, bool]:
        """Create a group or change its settings, as :meth:`StateKeeper.change_group`, and notify
        its members. Raises GroupNameInvalid, InvalidRequest, and what the keeper raises.
        """

        def checked(before: GroupSettings | None) -> GroupSettings:
            settings = wanted(before)
            check_settings(settings)
            _check_mode(name, settings.policy.mode)
            return settings

        async with AsyncExitStack() as leaving:
            before = self._keeper.find_group(name)
            leaves = before is not None and before.policy.mode is ConsumeMode.POP
            if leaves and checked(before).policy.mode is ConsumeMode.PULL:
                await leaving.enter_async_context(self._leaving_pop(name))
            settings, created = await self._keeper.change_group(name, checked)
        await self._fit_topics(settings)
        self._groups.notify(name)
        return settings, created

    async def _fit_topics(self, settings: GroupSettings) -> None:
        """The group's topics follow its settings. Queues of the retry topic that are too many are
        read to their end, but take no more.
        """
        topics = self._state.topics
        if retrying := topics.find(RETRY_PREFIX + settings.name):
            count = retry.queue_count_of(settings)
            read_count = max(count, retrying.read_queue_count)
            await self._keeper.put_system_topic(
                replace(retrying, read_queue_count=read_count, write_queue_count=count)
            )
        if dead := topics.find(DLQ_PREFIX + settings.name):
            reserve_time_ms = settings.policy.dlq_reserve_ms
            await self._keeper.put_system_topic(replace(dead, reserve_time_ms=reserve_time_ms))

    def is_consume_disabled(self, group: str) -> bool:
        settings = self._keeper.find_group(group)
        return settings is not None and not settings.consume_enable

    def retry_times_max(self, group: str) -> int:
        """By the group's settings; members may say otherwise."""
        settings = self._keeper.find_group(group) or GroupSettings(group)
        return settings.retry_times_max

    async def drop_group(self, group: str, *, dead_letters: bool) -> list[str]:
        """Delete a group with its retry topic, and with its dead letters if there are none or
        ``dead_letters``; the names of the deleted topics. Raises GroupInUse, and what the keeper
        raises.
        """
        if members := self._members.view(group).members:
            raise GroupInUse(in_the_way(group, {one.client_id: one.is_away for one in members}))
        wanted = [RETRY_PREFIX + group]
        dead_count = self._message_count(DLQ_PREFIX + group)
        if dead_letters or not dead_count:
            wanted.append(DLQ_PREFIX + group)
        topics = [topic for topic in wanted if topic in self._state.topics]
        try:
            await self._keeper.drop_group(group)
        except GroupNotFound:
            if dead_count and not topics:
                raise GroupNotFound(
                    f"consumer group {group} is gone but for its {dead_count} dead letters, which "
                    "go only with dead_letters (--dead-letters)"
                ) from None
            if not topics:
                raise
        self._used_s.pop(group, None)
        for topic in topics:
            with suppress(TopicNotFound):  # gone meanwhile
                await self._keeper.drop_topic(topic, by_system=True)
        return topics

    def summaries(self) -> list[GroupSummary]:
        """All groups, and what those that are gone have left of topics."""
        names = {*self._state.groups, *map(_group_of, self._state.topics)} - {""}
        return [self._summary(group) for group in sorted(names)]

    def _message_count(self, topic: str) -> int:
        """Messages that a topic has, readable or not; 0: it is not there."""
        config = self._state.topics.find(topic)
        if config is None:
            return 0
        views = [self._reader.queue(topic, one) for one in range(config.read_queue_count)]
        return sum(view.appended_offset - view.min_offset for view in views)

    def _summary(self, group: str) -> GroupSummary:
        return GroupSummary(
            group,
            self._members.count(group),
            len(self._members.away(group)),
            len(self._state.offsets.of_group(group)),
            self._idle_s(group),
            self._message_count(RETRY_PREFIX + group),
            self._message_count(DLQ_PREFIX + group),
        )

    def _used(self, group: str) -> None:
        if group in self._state.groups:
            self._used_s[group] = self._clock.monotonic_s()

    def check_real(self, topic: str, queue_id: int, position: Position) -> None:
        """Whether a first commit is one that a group is made for. Raises what :meth:`commit`
        raises, and OffsetInvalid for what is above the end of the queue.
        """
        end = self._reader.queue(topic, queue_id).max_offset
        offset = self._state.generations.of(topic, queue_id).validate(position).offset
        if offset > end:
            raise OffsetInvalid(
                f"{offset} is above the end of queue {queue_id} of {topic}, {end}, and the group "
                "is not known here"
            )

    def commit(self, group: str, topic: str, queue_id: int, position: Position) -> Position:
        """Take one commit; the position that is kept. Raises TopicNotFound, QueueNotFound, and
        what the offset table raises.
        """
        self.check_open()
        if group in self._keeper.closing_groups:
            raise GroupNotFound(f"consumer group {group} is being deleted")
        view = self._reader.queue(topic, queue_id)
        history = self._state.generations.of(topic, queue_id)
        key = (topic, queue_id)
        self._used(group)
        kept = self._state.offsets.commit(group, key, position, history, view.max_offset)
        self._state.pulled(group, key)
        return kept

    def begin(self, group: str, topic: str, queue_id: int, position: Position) -> Position:
        """As :meth:`commit`, where the group has no position yet; the one that it has stays."""
        known = self._state.offsets.get(group, (topic, queue_id))
        return known or self.commit(group, topic, queue_id, position)

    def check_commit(
        self, group: str, topic: str, queue_id: int, lock_number: int, reset_number: int
    ) -> None:
        """Raises QueueLocked, OffsetReset for a commit of a member that has lost the queue, or that
        does not know the newest reset; GroupModeMismatch of a group that receives from the queue.
        ``lock_number`` 0: the member consumes without locks.
        """
        key = (topic, queue_id)
        if self._state.pops.find(group, key) is not None and self._state.receives(group):
            raise GroupModeMismatch(
                f"group {group} receives: what its members acknowledge is its position"
            )
        if lock_number:
            self._state.locks.check_commit(group, key, lock_number)
        position = self._state.offsets.get(group, key)
        self._state.resets.check(group, key, reset_number, position)

    def mode_and_members(self, group: str, topic: str) -> tuple[ConsumeMode, list[str]]:
        """How a group gets its messages, and its members that read the topic. Raises
        GroupNameInvalid; a group that is not there pulls, and has none.
        """
        check_name(group)
        settings = self._keeper.find_group(group)
        mode = settings.policy.mode if settings is not None else ConsumeMode.PULL
        members = self._members.view(group).members
        reading = [
            member
            for member in members
            if not member.details.receives and topic in {s.topic for s in member.subscriptions}
        ]
        return mode, [member.client_id for member in reading]

    def readable_queues(self, topic: str) -> int:
        """How many queues of a topic clients may read. Raises TopicNotFound, NoPermission."""
        return self._state.topics.for_read(topic, 0).read_queue_count

    def newest_reset(self, group: str) -> int:
        """The number of the group's newest reset."""
        return self._state.resets.newest(group)

    async def stored(self, topics: Iterable[str]) -> None:
        """Wait until what was committed is as safe as these topics ask for their messages."""
        await self._keeper.offsets_stored(topics)


def _group_of(config: TopicConfig) -> str:
    """The group that a topic is for; empty: it is for all."""
    for prefix in (RETRY_PREFIX, DLQ_PREFIX):
        if config.name.startswith(prefix):
            return config.name.removeprefix(prefix)
    return ""


def _check_mode(group: str, mode: ConsumeMode) -> None:
    """GroupNameInvalid: the group is to receive, and the name of its retry topic would be invalid.
    A message that fails could not be sent back, and would block all messages behind it.
    """
    if mode is ConsumeMode.POP:
        retry.retry_topic(group)

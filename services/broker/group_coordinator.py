"""What the writer does for consumers besides reading: groups on demand, committed offsets,
progress.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cometmq.clock import Clock
from cometmq.errors import GroupInUse, GroupNotFound, NoPermission, OffsetInvalid
from cometmq.member.read.group_progress import GroupReads
from cometmq.member.read.reader import Reader
from cometmq.member.read.replica_selector import ReplicaSelector
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.groups import GroupSettings, MemberDetails, check_name, check_settings
from cometmq.model import Position, Subscription
from cometmq.rpc.shares import Buckets
from services.broker.membership import Groups, MemberStream


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A group at a glance. ``idle_s``: for how long it has had neither a member nor a commit."""

    group: str
    member_count: int
    queue_count: int
    idle_s: float


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
    ) -> None:
        super().__init__(keeper.state, reader, groups.table, selector)
        self._keeper = keeper
        self._storage = storage
        self._groups = groups
        self._creations = creations
        self._clock = clock
        self._auto_create_groups = auto_create_groups
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

    async def ensure_group(self, name: str, address: str) -> None:
        """Create a missing group, which the client at ``address`` wants. Raises what
        :meth:`is_there` raises; LimitExceeded.
        """
        while not self.is_there(name):
            self._creations.take(address, self._clock.monotonic_s())
            await self._keeper.put_group(GroupSettings(name))

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
    ) -> MemberStream:
        """Let a client into a group, as long as the stream lives. A client that is refused leaves
        no group behind.
        """
        if self.is_there(group) and details.is_broadcasting:
            self._check_broadcast(group)
        stream = self._groups.join(group, client_id, subscriptions, details)
        try:
            await self.ensure_group(group, address)
        except BaseException:
            stream.leave()
            raise
        return stream

    def _check_broadcast(self, group: str) -> None:
        if not self._keeper.group(group).consume_broadcast_enable:
            raise NoPermission(
                f"group {group} takes no broadcasting consumers (consume_broadcast_enable)"
            )

    def left(self, stream: MemberStream) -> None:
        """A member's stream is over."""
        stream.leave()
        self._used(stream.group)

    async def put_group(self, settings: GroupSettings) -> None:
        """Create a group or change its settings, and tell its members. Raises GroupNameInvalid,
        InvalidRequest, and what the keeper raises.
        """
        check_settings(settings)
        await self._keeper.put_group(settings)
        self._groups.tell(settings.name)

    def is_consume_disabled(self, group: str) -> bool:
        settings = self._keeper.find_group(group)
        return settings is not None and not settings.consume_enable

    async def drop_group(self, group: str) -> None:
        """Delete a group. Raises GroupInUse, and what the keeper raises."""
        members = self._members.view(group).members
        if members:
            raise GroupInUse(f"group {group} has {len(members)} live members")
        await self._keeper.drop_group(group)
        self._used_s.pop(group, None)

    def summaries(self) -> list[GroupSummary]:
        now_s = self._clock.monotonic_s()
        return [self._summary(group, now_s) for group in sorted(self._state.groups)]

    def _summary(self, group: str, now_s: float) -> GroupSummary:
        members = len(self._members.view(group).members)
        idle_s = 0.0 if members else now_s - self._used_s.get(group, self._since_s)
        assert idle_s >= 0.0, group
        return GroupSummary(group, members, len(self._state.offsets.of_group(group)), idle_s)

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
        return self._state.offsets.commit(group, key, position, history, view.max_offset)

    def check_commit(
        self, group: str, topic: str, queue_id: int, lock_number: int, reset_number: int
    ) -> None:
        """Raises QueueLocked, OffsetReset for a commit of a member that has lost the queue, or that
        does not know the newest reset. ``lock_number`` 0: the member consumes without locks.
        """
        key = (topic, queue_id)
        if lock_number:
            self._state.locks.check_commit(group, key, lock_number)
        position = self._state.offsets.get(group, key)
        self._state.resets.check(group, key, reset_number, position)

    def newest_reset(self, group: str) -> int:
        """The number of the group's newest reset."""
        return self._state.resets.newest(group)

    async def stored(self, topics: Iterable[str]) -> None:
        """Wait until what was committed is as safe as these topics ask for their messages."""
        await self._keeper.offsets_stored(topics)

"""How far consumer groups are: what a member answers about them from its state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cometmq.clock import Clock
from cometmq.errors import GroupModeMismatch, GroupNotFound, NoPermission
from cometmq.member.read.reader import QueueView, Reader
from cometmq.member.read.replica_selector import ReplicaSelector
from cometmq.messaging.group_policy import ConsumeMode
from cometmq.messaging.groups import MemberTable, check_name
from cometmq.messaging.quotas import Caller, QuotaMeter, Scope, Use, Way
from cometmq.messaging.state import BrokerState
from cometmq.model import Position, QueueKey


@dataclass(frozen=True, slots=True)
class Progress:
    """A group in one queue. All numbers were read at the same instant."""

    key: QueueKey
    queue: QueueView
    committed: Position | None


class GroupReads:
    """Groups and their offsets, to be read. ``members``: the live ones, none on a follower.
    ``selector``: says where groups pull next. ``throttled``: called where a quota is used up.
    """

    def __init__(
        self,
        state: BrokerState,
        reader: Reader,
        members: MemberTable,
        selector: ReplicaSelector,
        clock: Clock,
        throttled: Callable[[Way, Scope], None],
    ) -> None:
        self._clock = clock
        self._quotas = QuotaMeter(Way.READ, lambda: state.quotas, throttled)
        self._selector = selector
        self._state = state
        self._reader = reader
        self._members = members

    def committed(self, group: str, topic: str, queue_id: int) -> Position | None:
        """The group's position, None = never committed. Raises TopicNotFound, QueueNotFound."""
        self._reader.queue(topic, queue_id)
        return self._state.offsets.get(group, (topic, queue_id))

    def reset_number(self, group: str, topic: str, queue_id: int) -> int:
        """The number of the group's newest reset in a queue; 0: there was none."""
        return self._state.resets.number(group, (topic, queue_id))

    def begins_at_end(self, group: str) -> bool:
        """Whether the group's settings forbid that it begins at the first message of a queue."""
        settings = self._state.groups.get(group)
        return settings is not None and not settings.consume_from_min_enable

    def check_read(self, group: str, topic: str, queue_id: int, lock_number: int) -> None:
        """Raises NoPermission for a group whose settings forbid that it reads, GroupModeMismatch
        for one that receives, QueueLocked when another client of the group has locked the queue
        since. ``lock_number`` 0: the client reads without locks.
        """
        settings = self._state.groups.get(group)
        if settings is not None and not settings.consume_enable:
            raise NoPermission(f"group {group} may not read (consume_enable)")
        if settings is not None and settings.policy.mode is ConsumeMode.POP:
            raise GroupModeMismatch(f"group {group} receives: its mode is POP")
        if lock_number:
            self._state.locks.check_pull(group, (topic, queue_id), lock_number)

    def next_wanted(self, group: str, key: QueueKey, offset: int) -> tuple[int, int]:
        """Where a group that pulls from ``offset`` on goes on, and up to which message; 0: to the
        end. Before its mode was changed it may have done messages behind others.
        """
        return self._state.pops.left_over(group, key, offset)

    @property
    def has_quotas(self) -> bool:
        """Whether any quota counts reads."""
        return self._state.quotas.limits_reads

    def check_quotas(self, caller: Caller, topics: Iterable[str], group: str = "") -> None:
        """Raises FlowControl while a quota is used up that reads of these topics count against."""
        for topic in topics:
            self._quotas.check(
                self._quotas.charges(caller, topic, group), self._clock.monotonic_s()
            )

    def use_quotas(
        self, caller: Caller, got: Iterable[tuple[str, int, int]], group: str = ""
    ) -> None:
        """The client got messages: topic, how many, and their bytes."""
        uses = [
            Use(self._quotas.charges(caller, topic, group), count, size_bytes)
            for topic, count, size_bytes in got
        ]
        self._quotas.take(uses, self._clock.monotonic_s())

    def known_or_empty(self, group: str) -> str:
        """The group's name if it exists, for metrics: a label must not be what a client made up."""
        return group if group in self._state.groups else ""

    def suggested(self, group: str, backlog_bytes: int) -> int | None:
        """The member that the group is to pull from next; None = the writer."""
        return self._selector.member(self._state.groups, group, backlog_bytes)

    async def progress(self, group: str, topic: str = "") -> list[Progress]:
        """The group in every queue that it committed for or that its members read, in order of
        topic and queue.

        Raises GroupNameInvalid, GroupNotFound.
        """
        check_name(group)
        members = self._members.view(group).members
        committed = self._state.offsets.of_group(group)
        if group not in self._state.groups and not members and not committed:
            raise GroupNotFound(f"there is no consumer group {group} here")
        keys = set(committed)
        for name in {s.topic for member in members for s in member.subscriptions}:
            config = self._state.topics.find(name)
            keys.update(
                (name, queue_id) for queue_id in range(config.read_queue_count if config else 0)
            )
        wanted = sorted(key for key in keys if topic in ("", key[0]))
        await self._reader.show_appended(wanted)
        committed = self._state.offsets.of_group(group)
        there = (key for key in wanted if self._state.topics.find(key[0]))  # still
        return [Progress(key, self._reader.queue(*key), committed.get(key)) for key in there]

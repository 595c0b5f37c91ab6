"""Where consumer groups go on, and that they leave a topic, by an operator; at the writer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from cometmq.errors import (
    CometError,
    GroupInUse,
    InvalidRequest,
    NoPermission,
    OffsetInvalid,
)
from cometmq.member.metrics import MemberMetrics
from cometmq.member.read.reader import Reader
from cometmq.member.read.search import Finder, TimeAnswer
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.changes import GroupLeft, OffsetsReset
from cometmq.messaging.groups import MemberTable, in_the_way
from cometmq.messaging.offsets import CommittedOffset
from cometmq.messaging.topics import is_system
from cometmq.model import Position, QueueKey
from cometmq.store.queries import Boundary
from cometmq.telemetry import fields, logger

_log = logger(__name__)


class Bound(Enum):
    """An end of what can be read of a queue."""

    FIRST = "first"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class ResetTarget:
    """New offsets for a group. One of these is set: a bound, a store time in ms, an offset, or
    another group, whose positions it gets.
    """

    bound: Bound | None = None
    time_ms: int | None = None
    offset: int | None = None
    clone_of: str = ""


@dataclass(frozen=True, slots=True)
class QueueReset:
    """The reset of a group in one queue. ``before`` None: it had never committed."""

    queue_id: int
    before: Position | None
    after: Position


class OffsetResets:
    """Belongs to the event loop. ``on_reset`` gets a group's name, and where it was reset."""

    def __init__(
        self,
        keeper: StateKeeper,
        storage: MemberStorage,
        reader: Reader,
        metrics: MemberMetrics,
        members: MemberTable,
        on_reset: Callable[[str, Sequence[QueueKey]], None],
    ) -> None:
        self._keeper = keeper
        self._storage = storage
        self._reader = reader
        self._finder = Finder(reader)
        self._metrics = metrics
        self._members = members
        self._on_reset = on_reset

    async def reset(
        self,
        group: str,
        topic: str,
        queue_ids: Sequence[int],
        target: ResetTarget,
        *,
        dry: bool,
        asked_by: str,
    ) -> list[QueueReset | CometError]:
        """Reset the offsets of a group in queues of a topic, all if none is named; ``dry``: only
        report them. ``asked_by`` goes into the log. A clone changes no queue where the other group
        has not committed. Returns when it is as safe as messages of the topic. Raises
        GroupNameInvalid, GroupNotFound, TopicNotFound, OffsetInvalid, and what appending raises.
        """
        if not target.clone_of:
            self._keeper.group(group)
        elif target.clone_of == group:
            raise InvalidRequest("a group cannot be a clone of itself")
        else:
            self._keeper.group(target.clone_of)
        config = self._keeper.state.topics.get(topic)
        keys = [(topic, one) for one in queue_ids or range(config.read_queue_count)]
        places = await self._places(keys, target)
        if target.clone_of and not dry and self._keeper.find_group(group) is None:
            await self._keeper.create_group(group)
        committed = self._keeper.state.offsets.of_group(group)
        answers: list[QueueReset | CometError] = [
            place
            if isinstance(place, CometError)
            else QueueReset(key[1], committed.get(key), place)
            for key, place in zip(keys, places, strict=True)
            if place is not None
        ]
        resets = [one for one in answers if isinstance(one, QueueReset)]
        if resets and not dry:
            self._keeper.group(group)  # it may have been deleted while we read
            self._keeper.check_open(topic)
            await self._write(group, topic, resets, asked_by)
        return answers

    async def forget(self, group: str, topic: str, asked_by: str) -> list[int]:
        """Forget a group in a topic that it has left; the queues in which it had a place. Returns
        when that is as safe as messages of the topic. Raises GroupNameInvalid, GroupNotFound,
        TopicNotFound, NoPermission (a topic of the broker's own), GroupInUse (members read the
        topic), and what appending raises.
        """
        self._keeper.group(group)
        if is_system(topic):
            raise NoPermission(f"{topic} is a system topic: group delete forgets a group in it")
        state = self._keeper.state
        state.topics.get(topic)
        self._keeper.check_open(topic)
        self._check_left(group, topic)
        keys = state.queues_of(group, topic)
        # As for a reset: nothing of before may come behind it in the log.
        self._keeper.write_doings()
        end = self._keeper.write(GroupLeft(group, topic))
        _log.warning(
            "group has left a topic",
            extra=fields(group=group, topic=topic, queues=len(keys), asked_by=asked_by),
        )
        self._on_reset(group, keys)
        await self._storage.stored(end, self._keeper.demands_of([topic]))
        return [queue_id for _, queue_id in keys]

    def _check_left(self, group: str, topic: str) -> None:
        reading = {
            member.client_id: member.is_away
            for member in self._members.view(group).members
            if any(one.topic == topic for one in member.subscriptions)
        }
        if reading:
            raise GroupInUse(f"topic {topic} is read: {in_the_way(group, reading)}")

    async def _write(self, group: str, topic: str, resets: list[QueueReset], asked_by: str) -> None:
        number = self._keeper.state.resets.next_number(self._storage.store.epoch)
        # A commit of before must not come behind the reset: read from the log it would undo it. And
        # what was sent back before may be sent back again.
        self._keeper.write_doings()
        change = OffsetsReset(
            number, tuple(CommittedOffset(group, topic, one.queue_id, one.after) for one in resets)
        )
        end = self._keeper.write(change)
        for one in resets:
            _log.warning(
                "group was reset",
                extra=fields(
                    group=group,
                    topic=topic,
                    queue=one.queue_id,
                    offset=one.before.offset if one.before is not None else None,
                    goes_on_at=one.after.offset,
                    reset=number,
                    asked_by=asked_by,
                ),
            )
        self._metrics.offsets_reset(topic, group, len(resets))
        self._on_reset(group, [(topic, one.queue_id) for one in resets])
        await self._storage.stored(end, self._keeper.demands_of([topic]))

    async def _places(
        self, keys: Sequence[QueueKey], target: ResetTarget
    ) -> list[Position | CometError | None]:
        """The new position of the group in each queue; None: it stays."""
        if target.time_ms is not None:
            answers = await self._finder.by_time(keys, target.time_ms, Boundary.LOWER)
            return [one.position if isinstance(one, TimeAnswer) else one for one in answers]
        if target.offset is not None and target.offset < 0:
            raise OffsetInvalid(f"queue offset {target.offset} is negative")
        if target.bound is Bound.LAST:
            uncertain = await self._reader.uncertain_ends(keys)
            return [uncertain.get(key) or self._place(key, target) for key in keys]
        await self._reader.show_appended(keys)
        return [self._place(key, target) for key in keys]

    def _place(self, key: QueueKey, target: ResetTarget) -> Position | CometError | None:
        try:
            view = self._reader.queue(*key)
        except CometError as error:
            return error
        low, high = view.min_offset, view.max_offset
        if target.clone_of:
            position = self._keeper.state.offsets.get(target.clone_of, key)
            if position is None:
                return None
            return self._keeper.state.generations.of(*key).settle(position)
        if target.offset is not None:
            return Position(view.generation, min(max(target.offset, low), high))
        return Position(view.generation, low if target.bound is Bound.FIRST else high)

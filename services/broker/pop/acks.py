"""Takes acknowledgements of groups that receive (POP), and changes of invisible times."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cometmq.errors import CometError, HandleInvalid, InvisibleTimeInvalid, LimitExceeded
from cometmq.format import delayed
from cometmq.messaging import retry
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.pop import acking, handles
from cometmq.messaging.pop.handles import Handle
from cometmq.messaging.pop.leases import Done, Lease, QueueLeases
from cometmq.messaging.pop.masks import trimmed
from services.broker.pop.groups import PopGroups

ITEMS_MAX = 1_024
REPEATS_MAX = 10_000  # changes whose answers can be repeated
# A failed message so far before the next new one goes to the retry topic: else the group's
# committed offset, and its lag, would wait for it.
WINDOW_HALF = 32_768


@dataclass(frozen=True, slots=True)
class AckItem:
    """Messages of a handle; ``count`` 0: all of it."""

    handle: str
    first: int = 0
    count: int = 0


@dataclass(frozen=True, slots=True)
class ChangeItem:
    """``failed``: they could not be consumed."""

    messages: AckItem
    invisible_ms: int
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Changed:
    """Empty handle: the messages went to the retry topic or, with ``visible_ms`` 0, are dead
    letters.
    """

    handle: str
    visible_ms: int


@dataclass(frozen=True, slots=True)
class _Held:
    """The messages of an item that its member still has."""

    handle: Handle
    queue: QueueLeases
    first: int
    mask: int
    lease: Lease


class AckService:
    """Belongs to the event loop."""

    def __init__(self, groups: PopGroups) -> None:
        self._groups = groups
        self._changes: OrderedDict[tuple[str, ChangeItem], Changed] = OrderedDict()

    async def acknowledge(self, group: str, items: Sequence[AckItem]) -> list[CometError | None]:
        """None for each item that is acknowledged, as safely as messages of its topic. Raises
        GroupNotFound, GroupModeMismatch, LimitExceeded, and what appending raises.
        """
        _check_count(items)
        self._groups.check(group)
        topics: set[str] = set()
        answers = [self._acknowledge(group, item, topics) for item in items]
        if topics:
            await self._groups.keeper.pops_stored(topics)
        return answers

    def _acknowledge(self, group: str, item: AckItem, topics: set[str]) -> CometError | None:
        try:
            handle = self._handle(group, item)
            held = self._held(group, handle, item)
        except CometError as error:
            return error
        if held is not None:
            done = Done(held.lease.number, held.first, held.mask)
            count = self._groups.finish(group, handle.key, done)
            self._groups.metrics.pop_acknowledged(handle.key[0], group, count)
        topics.add(handle.key[0])
        return None

    async def change(self, group: str, items: Sequence[ChangeItem]) -> list[Changed | CometError]:
        """Changes invisible times; the outcome of each item, when it is as safe as messages of its
        topic. An item that is repeated, because its answer was lost, gets its time once more while
        its messages are its member's. Raises as :meth:`acknowledge`, and FlowControl.
        """
        _check_count(items)
        settings = self._groups.check(group)
        self._groups.pops.check_room()
        topics: set[str] = set()
        answers: dict[int, Changed | CometError] = {}
        # What failed may have to be sent away: the times of the others count from the answer.
        for number in sorted(range(len(items)), key=lambda number: not items[number].failed):
            item = items[number]
            try:
                answers[number] = answer = await self._changed(settings, item, topics)
            except CometError as error:
                answers[number] = error
            else:
                self._keep(group, item, answer)
        if topics:
            await self._groups.keeper.pops_stored(topics)
        return [answers[number] for number in range(len(items))]

    async def _changed(
        self, settings: GroupSettings, item: ChangeItem, topics: set[str]
    ) -> Changed:
        before = self._repeated(settings.name, item)
        if before is None:
            return await self._change(settings, item, topics)
        if item.failed:
            return before
        return await self._change(settings, replace(item, messages=AckItem(before.handle)), topics)

    def _keep(self, group: str, item: ChangeItem, answer: Changed) -> None:
        self._changes[group, item] = answer
        if len(self._changes) > REPEATS_MAX:
            self._changes.popitem(last=False)

    def _repeated(self, group: str, item: ChangeItem) -> Changed | None:
        """What the item got before; None: it is new, or its messages are no longer in the lease
        that it got.
        """
        before = self._changes.get((group, item))
        if before is None or not before.handle:
            return before
        handle = self._handle(group, AckItem(before.handle))
        queue = self._groups.pops.find(group, handle.key)
        return before if queue is not None and queue.find(handle.number) is not None else None

    async def _change(self, settings: GroupSettings, item: ChangeItem, topics: set[str]) -> Changed:
        group = settings.name
        if not item.failed or item.invisible_ms > acking.INVISIBLE_MS_MAX:
            acking.check_invisible(item.invisible_ms)
        elif item.invisible_ms < 0:
            raise InvisibleTimeInvalid(f"an invisible time of {item.invisible_ms} ms cannot be")
        handle = self._handle(group, item.messages)
        held = self._held(group, handle, item.messages)
        if held is None:
            raise HandleInvalid("the messages of this handle are acknowledged")
        topics.add(handle.key[0])
        delay_ms, lease = item.invisible_ms, held.lease
        if item.failed:
            tries = lease.attempt
            delay_ms = max(delay_ms, retry.delay_after(tries - 1, settings.policy.retry))
            if self._groups.is_dead(settings, tries):
                return await self._send_away(group, held, retry.DEAD)
            is_far = held.queue.next_offset - held.first > WINDOW_HALF
            if is_far and not settings.policy.is_orderly:
                return await self._send_away(
                    group, held, delayed.level_of_delay(delay_ms), delay_ms
                )
        visible_ms = self._groups.now_ms() + delay_ms
        changed = self._groups.give(
            group, handle.key, lease.number, held.first, held.mask, visible_ms, lease.attempt
        )
        return Changed(self._groups.handle(group, handle.key, changed), visible_ms)

    async def _send_away(self, group: str, held: _Held, level: int, delay_ms: int = 0) -> Changed:
        """Not while a receive reads the queue: it may be about to give the messages to another."""
        key = held.handle.key
        async with self._groups.turn(group, key).lock:
            mask = held.lease.part(held.first, held.mask)
            if self._groups.pops.find(group, key) is not held.queue:
                raise HandleInvalid("the group was reset")
            if held.queue.find(held.lease.number) is not held.lease or not mask:
                raise HandleInvalid("the messages of this handle came again")
            lease = held.lease
            first, mask = trimmed(lease.first, mask)
            await self._groups.send_away(
                group, key, lease, first, mask, level, 0 if level else max(1, delay_ms)
            )
        return Changed("", self._groups.now_ms() + delay_ms if level != retry.DEAD else 0)

    def _handle(self, group: str, item: AckItem) -> Handle:
        if item.count < 0:
            raise HandleInvalid(f"an item cannot be of {item.count} messages")
        handle = handles.decode(self._groups.state.secrets, group, item.handle)
        self._groups.keeper.check_open(handle.key[0])
        self._groups.state.topics.get(handle.key[0])
        return handle

    def _held(self, group: str, handle: Handle, item: AckItem) -> _Held | None:
        """None: all messages are done."""
        queue = self._groups.pops.find(group, handle.key)
        history = self._groups.state.generations.of(*handle.key)
        sent_away = self._groups.sent_away(handle)
        mask = acking.held_part(queue, history, handle, item.first, item.count, sent_away)
        if not mask:
            return None
        assert queue is not None
        lease = queue.find(handle.number)
        assert lease is not None
        first, mask = trimmed(handle.first, mask)
        return _Held(handle, queue, first, mask, lease)


def _check_count(items: Sequence[object]) -> None:
    if len(items) > ITEMS_MAX:
        raise LimitExceeded(f"{len(items)} items, {ITEMS_MAX} are allowed")

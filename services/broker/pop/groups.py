"""Shared by all calls of groups that receive (POP): the right to receive, the time, and messages
that leave a group's leases for its retry topic or its dead letters.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from cometmq.clock import Clock
from cometmq.errors import (
    CometError,
    GroupModeMismatch,
    MessageNotFound,
    NoPermission,
    StoreDamaged,
)
from cometmq.member.metrics import MemberMetrics
from cometmq.member.state.keeper import StateKeeper
from cometmq.member.storage.member_storage import MemberStorage
from cometmq.messaging.group_policy import ConsumeMode
from cometmq.messaging.groups import GroupSettings
from cometmq.messaging.pop import handles
from cometmq.messaging.pop.handles import Handle
from cometmq.messaging.pop.leases import OPEN_MAX, Done, Given, Lease, QueueLeases
from cometmq.messaging.pop.masks import offsets_of, shifted
from cometmq.messaging.pop.ordering import ORDERED_OPEN_MAX, QueueKeys
from cometmq.messaging.pop.returns import ALL_MEMBERS
from cometmq.model import RETRY_PREFIX, Position, QueueKey, TopicConfig
from cometmq.telemetry import fields, logger
from services.broker.pop.returns import PopReturns
from services.broker.retry.retries import RetryService, SendBackItem, SentBack

_log = logger(__name__)

SENT_AWAY_MAX = 10_000  # leases of which it is known what left them for elsewhere
LEVEL_NEXT = 1  # of messages that come again in the retry topic as soon as may be


@dataclass(slots=True)
class Turn:
    """One receive at a time reads a group's queue. ``keys``: of groups that consume in order."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    keys: QueueKeys = field(default_factory=QueueKeys)


class PopGroups:
    """Belongs to the event loop."""

    def __init__(
        self,
        storage: MemberStorage,
        keeper: StateKeeper,
        retries: RetryService,
        metrics: MemberMetrics,
        clock: Clock,
    ) -> None:
        self.keeper = keeper
        self.state = keeper.state
        self.pops = keeper.state.pops
        self.metrics = metrics
        self._storage = storage
        self._retries = retries
        self._clock = clock
        # The wall's clock as it was when we began: no lease ends early because it was set.
        self._ahead_ms = clock.wall_ms() - round(clock.boottime_s() * 1000)
        self.returns = PopReturns(storage.arrivals, self.pops, self._next_number, self.now_ms)
        self._turns: dict[str, dict[QueueKey, Turn]] = {}
        # Queues of a topic in which a group has a place, as long as the topic is as it was.
        self._begun: dict[str, dict[str, tuple[TopicConfig, list[QueueKey]]]] = {}
        self._leaving: set[str] = set()  # groups that are about to pull instead
        # By the number of a lease: a first offset, and a mask.
        self._sent_away: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def now_ms(self) -> int:
        """Milliseconds since 1970; never goes back."""
        return self._ahead_ms + round(self._clock.boottime_s() * 1000)

    def check(self, group: str) -> GroupSettings:
        """Raises GroupNameInvalid, GroupNotFound, GroupModeMismatch, and BrokerDraining while
        nothing is written.
        """
        self._storage.check_open()
        settings = self.keeper.group(group)
        if settings.policy.mode is not ConsumeMode.POP or group in self._leaving:
            raise GroupModeMismatch(f"group {group} pulls: its mode is not POP")
        return settings

    def check_receive(self, group: str) -> GroupSettings:
        """As :meth:`check`; NoPermission for a group whose settings forbid that it reads."""
        settings = self.check(group)
        if not settings.consume_enable:
            raise NoPermission(f"group {group} may not read (consume_enable)")
        return settings

    def begun(self, group: str, config: TopicConfig) -> list[QueueKey] | None:
        """The queues of a topic, if the group has a place in each."""
        known = self._begun.get(group, {}).get(config.name)
        return known[1] if known is not None and known[0] is config else None

    def note_begun(self, group: str, config: TopicConfig, keys: list[QueueKey]) -> None:
        """The group has a place in each queue of the topic."""
        self._begun.setdefault(group, {})[config.name] = config, keys

    def note_ended(self, group: str, topic: str) -> None:
        """The group has lost a place: it was reset."""
        self._begun.get(group, {}).pop(topic, None)

    def turn(self, group: str, key: QueueKey) -> Turn:
        return self._turns.setdefault(group, {}).setdefault(key, Turn())

    def give(
        self, group: str, key: QueueKey, source: int, first: int, mask: int, ms: int, attempt: int
    ) -> Lease:
        """Put messages into a lease until ``ms``."""
        given = Given(self._next_number(), source, first, mask, ms, attempt)
        lease = self.pops.give(group, key, given)
        if attempt:
            self.returns.expect(group, key, ms)
        return lease

    def _next_number(self) -> int:
        return self.pops.next_number(self._storage.store.epoch)

    def finish(self, group: str, key: QueueKey, done: Done) -> int:
        """Messages of a lease are done; how many were not before."""
        settings, queue = self.keeper.find_group(group), self.pops.find(group, key)
        assert queue is not None
        was_full = settings is not None and self.is_full(settings, queue)
        count = self.pops.finish(group, key, done)
        if was_full or (settings is not None and settings.policy.is_orderly):
            self.returns.freed(group, key, queue, count, has_room=was_full)
        return count

    @staticmethod
    def is_full(settings: GroupSettings, queue: QueueLeases) -> bool:
        """Whether nothing new is delivered from the queue until something is done."""
        open_max = ORDERED_OPEN_MAX if settings.policy.is_orderly else OPEN_MAX
        return queue.open_count >= open_max

    def system_topic_made(self, topic: str) -> None:
        """Members that wait do not know a new retry topic of their group."""
        if topic.startswith(RETRY_PREFIX):
            self.returns.look_again(topic.removeprefix(RETRY_PREFIX))

    def was_reset(self, group: str, keys: Iterable[QueueKey]) -> None:
        """The group goes on elsewhere in these queues."""
        settings = self.keeper.find_group(group)
        if settings is not None and settings.policy.mode is ConsumeMode.POP:
            for key in keys:
                self.note_ended(group, key[0])
                self.returns.came_back(group, key, ALL_MEMBERS)

    def handle(self, group: str, key: QueueKey, lease: Lease) -> str:
        handle = Handle(
            key,
            self.state.generations.of(*key).current,
            lease.number,
            lease.first,
            lease.mask.bit_length(),
            lease.visible_ms,
        )
        return handles.encode(self.state.secrets, group, handle)

    async def send_away(
        self,
        group: str,
        key: QueueKey,
        lease: Lease,
        first: int,
        mask: int,
        level: int,
        delay_ms: int = 0,
    ) -> None:
        """Messages of a lease leave it: for the retry topic after the time of a delay level, or
        (level 0) so many ms, or for the dead letters (``retry.DEAD``). From now on their member
        cannot acknowledge them. Raises what appending raises; those that the log has not taken stay
        in the lease then, also where the caller goes away.
        """
        queue, number, tries = self.pops.find(group, key), lease.number, max(0, lease.attempt - 1)
        generation = self.state.generations.of(*key).current
        offsets = list(offsets_of(mask, first))
        items = [
            SendBackItem(*key, Position(generation, offset), level, tries=tries, delay_ms=delay_ms)
            for offset in offsets
        ]
        left, refusals, rest = mask, list[CometError](), iter(offsets)

        def taken(answers: Sequence[SentBack | CometError]) -> None:
            nonlocal left
            gone = 0
            for answer, offset in zip(answers, rest, strict=False):
                if isinstance(answer, CometError):
                    if not isinstance(answer, MessageNotFound | StoreDamaged):
                        refusals.append(answer)
                        continue
                    self.note_lost(group, key, offset, answer)
                gone |= 1 << (offset - first)
            left &= ~gone
            if gone and queue is not None and self.pops.find(group, key) is queue:
                self.finish(group, key, Done(number, first, gone))

        self._note_sent_away(number, first, mask)
        try:
            await self._retries.send_back(group, items, taken)
            if refusals:
                raise refusals[0]
        except BaseException:
            self._note_sent_away(number, first, 0, left)
            raise

    def _note_sent_away(self, number: int, first: int, added: int, removed: int = 0) -> None:
        """The messages ``added``, and not those ``removed``, bit 0 for ``first``."""
        low, known = self._sent_away.pop(number, (first, 0))
        start = min(low, first)
        known = shifted(known, low, start) & ~shifted(removed, first, start)
        self._sent_away[number] = start, known | shifted(added, first, start)
        if len(self._sent_away) > SENT_AWAY_MAX:
            self._sent_away.popitem(last=False)

    def sent_away(self, handle: Handle) -> int:
        """Which messages of a handle went elsewhere, or are about to; bit 0 for its first."""
        first, mask = self._sent_away.get(handle.number, (handle.first, 0))
        return shifted(mask, first, handle.first)

    def note_lost(self, group: str, key: QueueKey, offset: int, error: CometError) -> None:
        """A message that the group cannot get: it is passed over."""
        self.metrics.pop_lost(key[0], group)
        _log.warning(
            "a message cannot be received and is passed over",
            extra=fields(
                group=group, topic=key[0], queue=key[1], offset=offset, reason=error.message
            ),
        )

    @asynccontextmanager
    async def leaving(self, group: str) -> AsyncIterator[None]:
        """The group is about to pull instead, and gets nothing a second time that its members have
        acknowledged. What they have comes in its retry topic; or in its place, for a group that
        consumes in order: it goes on at its floor, and pulls pass over what is done.
        """
        if group in self._leaving:
            raise GroupModeMismatch(f"group {group}: its mode is being changed")
        self._leaving.add(group)
        try:
            settings = self.keeper.group(group)
            if not settings.policy.is_orderly:
                for key, queue in self.pops.of_group(group).items():
                    async with self.turn(group, key).lock:
                        await self._hand_over(group, key, queue)
            await self.keeper.pops_written()
            self.returns.look_again(group)
            yield
        finally:
            self._leaving.discard(group)
        self.forget_group(group)

    async def _hand_over(self, group: str, key: QueueKey, queue: QueueLeases) -> None:
        for lease in list(queue):
            # A reset is final: nothing of before is sent away behind it.
            is_there = self.pops.find(group, key) is queue
            if is_there and queue.find(lease.number) is lease:
                await self.send_away(group, key, lease, lease.first, lease.mask, LEVEL_NEXT)

    def forget_group(self, group: str) -> None:
        """The group was deleted, or pulls."""
        self._turns.pop(group, None)
        self._begun.pop(group, None)
        self.returns.forget_group(group)

    def forget_topic(self, topic: str) -> None:
        self.returns.forget_topic(topic)
        for topics in self._begun.values():
            topics.pop(topic, None)
        for turns in self._turns.values():
            for key in [key for key in turns if key[0] == topic]:
                del turns[key]

    def is_dead(self, settings: GroupSettings, tries: int) -> bool:
        """Whether a message that could not be consumed ``tries`` times has no try left."""
        return tries > self._retries.times_max(settings)

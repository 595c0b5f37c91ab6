"""Where a consumer begins in a queue in which it has no position.

What ``consume_from`` says counts once for a topic: it is kept for all queues that the topic has at
its broker groups then. A queue that appears later begins at its first message, so that nothing that
was sent to it is skipped. docs/client.md has the table.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Protocol, TypeVar

from cometmq.client.messages import ConsumeFrom
from cometmq.client.options import ConsumerOptions
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.errors import CometError
from cometmq.model import RETRY_PREFIX, Position, QueueRef
from cometmq.telemetry import fields, logger

BEGIN_S_MAX = 1.0  # that a member may need to begin a topic at all its broker groups
BEGUN_POLL_S = 0.05

Answer = TypeVar("Answer")

_log = logger(__name__)


class Kept(Protocol):
    """Where positions are kept."""

    async def begun_at(self, queues: Collection[QueueRef]) -> set[str]:
        """The broker groups where any of these queues has a position, of those that answer."""

    async def begin(
        self, positions: Mapping[QueueRef, Position]
    ) -> Mapping[QueueRef, Position | CometError | None]:
        """Keeps these for queues that have none; what is kept now."""


class NewTopics:
    """At which broker groups the group is new in a topic, so that it begins there as its options
    say. Everywhere else a queue without a position appeared later. Decided once for a topic.
    ``begun_at``: as ``Kept`` says. ``is_shared``: other members of the group begin topics, too.
    """

    def __init__(
        self,
        calls: BrokerCalls,
        begun_at: Callable[[Collection[QueueRef]], Awaitable[set[str]]],
        *,
        is_shared: bool,
    ) -> None:
        self._calls = calls
        self._begun_at = begun_at
        self._is_shared = is_shared
        self._new_at: dict[str, set[str]] = {}
        self._deciding: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def new_at(self, topic: str) -> Collection[str]:
        """The broker groups. A topic that was not there when the client subscribed to it is new
        nowhere: all its messages came afterwards.
        """
        async with self._deciding[topic]:
            if self._calls.was_absent(topic):
                self._new_at[topic] = set()
            elif topic not in self._new_at:
                self._new_at[topic] = await self._decide(topic)
            return self._new_at[topic]

    def begun(self, topic: str, broker_groups: Collection[str]) -> None:
        """The group has begun there."""
        self._new_at[topic].difference_update(broker_groups)

    async def _decide(self, topic: str) -> set[str]:
        queues = self._calls.queues_of(topic)
        broker_groups = {queue.broker_group for queue in queues}
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + BEGIN_S_MAX
        while True:
            begun = await self._begun_at(queues)
            if not begun:
                return broker_groups
            # Where it has not begun a member may be about to, which has begun here already.
            if begun == broker_groups or not self._is_shared or loop.time() >= deadline_s:
                return set()
            await asyncio.sleep(BEGUN_POLL_S)


class Beginnings:
    """Begins queues."""

    def __init__(
        self, calls: BrokerCalls, options: ConsumerOptions, kept: Kept, *, is_shared: bool
    ) -> None:
        self._calls = calls
        self._options = options
        self._kept = kept
        self._topics = NewTopics(calls, kept.begun_at, is_shared=is_shared)
        self._beginning: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def begin(self, queue: QueueRef) -> Position:
        """Where to begin in a queue without a position, which is kept from now on. Raises what its
        broker group refuses it with.
        """
        if _begins_at_first(self._calls, queue, self._options):
            return await first_position(self._calls, queue, self._options)
        async with self._beginning[queue.topic]:
            new_at = await self._topics.new_at(queue.topic)
            if queue.broker_group not in new_at:
                bounds = _good((await self._calls.bounds([queue]))[queue])
                return await self._keep(queue, Position(bounds.generation, bounds.min_offset))
            return await self._begin_topic(queue, new_at)

    async def _begin_topic(self, queue: QueueRef, new_at: Collection[str]) -> Position:
        """Begins at its broker group first, then at the others where the group is new: one that
        cannot be asked now is new as long as this client runs.
        """
        parts: defaultdict[str, list[QueueRef]] = defaultdict(list)
        for one in self._calls.queues_of(queue.topic):
            if one.broker_group in new_at:
                parts[one.broker_group].append(one)
        own = parts.pop(queue.broker_group, [queue])
        firsts = await _first_positions(self._calls, own, self._options)
        kept = await self._kept.begin(firsts)
        position = _good(kept[queue]) or firsts[queue]
        self._topics.begun(queue.topic, [queue.broker_group])
        await asyncio.gather(*(self._begin_beside(name, part) for name, part in parts.items()))
        return position

    async def _begin_beside(self, broker_group: str, queues: Collection[QueueRef]) -> None:
        topic = next(iter(queues)).topic
        try:
            kept = await self._kept.begin(
                await _first_positions(self._calls, queues, self._options)
            )
            for answer in kept.values():
                _good(answer)
        except CometError as error:
            _log.info(
                "the group does not begin there yet",
                extra=fields(
                    group=self._calls.group, topic=topic, broker_group=broker_group, error=error
                ),
            )
        else:
            self._topics.begun(topic, [broker_group])

    async def _keep(self, queue: QueueRef, position: Position) -> Position:
        return _good((await self._kept.begin({queue: position}))[queue]) or position


async def first_position(calls: BrokerCalls, queue: QueueRef, options: ConsumerOptions) -> Position:
    """Where a consumer begins that has not read the queue, as ``consume_from`` says."""
    return (await _first_positions(calls, [queue], options))[queue]


async def _first_positions(
    calls: BrokerCalls, queues: Collection[QueueRef], options: ConsumerOptions
) -> dict[QueueRef, Position]:
    if options.consume_from is ConsumeFrom.TIMESTAMP and not any(map(_is_retry, queues)):
        found = await calls.positions_at(queues, options.consume_from_time_ms)
        return {queue: _good(position) for queue, position in found.items()}
    first = {queue: _begins_at_first(calls, queue, options) for queue in queues}
    answers = await calls.bounds(queues, end_wanted=not all(first.values()))
    bounds = {queue: _good(one) for queue, one in answers.items()}
    return {
        queue: Position(one.generation, one.min_offset if first[queue] else one.max_offset)
        for queue, one in bounds.items()
    }


def _begins_at_first(calls: BrokerCalls, queue: QueueRef, options: ConsumerOptions) -> bool:
    if _is_retry(queue):
        return True
    is_allowed = not calls.begins_at_end(queue.broker_group)
    return options.consume_from is ConsumeFrom.FIRST and is_allowed


def _is_retry(queue: QueueRef) -> bool:
    """A message that the group sent back was for it, whenever the group began."""
    return queue.topic.startswith(RETRY_PREFIX)


def _good(answer: Answer | CometError) -> Answer:
    if isinstance(answer, CometError):
        raise answer
    return answer

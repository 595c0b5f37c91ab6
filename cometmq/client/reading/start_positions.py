"""Where a consumer begins in a queue that it gets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from cometmq.client.messages import ConsumeFrom
from cometmq.client.options import ConsumerOptions
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.errors import CometError
from cometmq.model import RETRY_PREFIX, Position, QueueRef

Answer = TypeVar("Answer")
StartPosition = Callable[[BrokerCalls, QueueRef, ConsumerOptions], Awaitable[Position]]


async def start_position(calls: BrokerCalls, queue: QueueRef, options: ConsumerOptions) -> Position:
    """Where the group goes on: its committed position, else as ``consume_from`` says."""
    committed = _good((await calls.went_on([queue]))[queue])
    return committed or await first_position(calls, queue, options)


async def group_position(calls: BrokerCalls, queue: QueueRef, options: ConsumerOptions) -> Position:
    """As :func:`start_position`, and what ``consume_from`` says counts once: the group's first
    member commits it for all queues that the topic has at the broker group. A queue that comes
    later begins at its first message: nothing that was sent to it is skipped.
    """
    committed = _good((await calls.went_on([queue]))[queue])
    if committed is not None:
        return committed
    if not _begins_at_first(calls, queue, options):
        beside = [one for one in calls.queues_beside(queue) if one != queue]
        known = await calls.committed(beside)
        if any(isinstance(one, Position) for one in known.values()):
            bounds = _good((await calls.bounds([queue]))[queue])
            return Position(bounds.generation, bounds.min_offset)
        firsts = await _first_positions(calls, [queue, *beside], options)
        kept = await calls.commit(firsts)
        return _good(kept[queue]) or firsts[queue]
    return await first_position(calls, queue, options)


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

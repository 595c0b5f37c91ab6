"""Calls of a consumer to brokers about queues, one at a time: which there are, their ends, and
single pulls.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TypeVar

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.cluster.routing import readable_queues
from cometmq.client.hooks import message_filter
from cometmq.client.lifecycle import Lifecycle
from cometmq.client.messages import PullBatch
from cometmq.client.names import (
    check_group,
    check_position,
    check_queues,
    check_tags,
    check_topic,
    filter_of,
)
from cometmq.client.namespaces import Namespace
from cometmq.client.options import ConsumerOptions, backoff_policy
from cometmq.client.reading.fetcher import pull
from cometmq.client.reading.offsets import Bounds, BrokerCalls
from cometmq.errors import CometError, InvalidRequest
from cometmq.model import Position, QueueRef
from cometmq.rpc.retry import Backoff

Answer = TypeVar("Answer")


class QueueCalls(Lifecycle):
    """The calls of one consumer; ``_open`` while they may be made."""

    def __init__(
        self,
        namesrv: str | None,
        group: str,
        options: ConsumerOptions,
        route_changed: Callable[[str], None],
    ) -> None:
        """ConfigInvalid, GroupNameInvalid."""
        super().__init__(options.loop_stall_ms)
        self._usual = options
        namespace = Namespace(options.namespace)
        self._connections = Connections(namesrv)
        self._routes = RouteWatcher(
            self._connections,
            Backoff(backoff_policy(options), random.Random()),
            route_changed,
            namespace=namespace,
        )
        self._timeout_s = options.request_timeout_ms / 1000
        self._calls = BrokerCalls(
            check_group(group, namespace),
            self._connections,
            self._routes,
            self._timeout_s,
            message_filter(options.filter_hooks),
            namespace,
        )

    async def queues(self, topic: str) -> list[QueueRef]:
        """The topic's readable queues, sorted. TopicNotFound when no broker serves it within
        request_timeout_ms.
        """
        self._check_open()
        return readable_queues(await self._routes.wait_for(check_topic(topic), self._timeout_s))

    async def pull(
        self,
        queue: QueueRef,
        position: Position,
        *,
        count_max: int | None = None,
        bytes_max: int | None = None,
        tags: Collection[str] = (),
        sql: str | None = None,
    ) -> PullBatch:
        """One pull, answered at once. ``sql``, instead of tags, is an SQL92 expression over
        properties. Raises errors of the catalogue, PositionFenced with its fence
        among them.
        """
        check_position(position)
        usual = self._usual
        limits = replace(  # and so checked
            usual,
            pull_count_max=usual.pull_count_max if count_max is None else count_max,
            pull_bytes_max=usual.pull_bytes_max if bytes_max is None else bytes_max,
        )
        wanted = filter_of(check_tags(tags), sql)
        await self._know([queue])
        return await pull(
            self._calls,
            queue,
            position,
            count_max=limits.pull_count_max,
            bytes_max=limits.pull_bytes_max,
            wanted=wanted,
        )

    async def bounds(self, queues: Collection[QueueRef]) -> dict[QueueRef, Bounds]:
        """Generation and readable offsets of each queue; raises the first queue's error."""
        await self._know(queues)
        return {q: good(answer) for q, answer in (await self._calls.bounds(queues)).items()}

    async def committed(self, queues: Collection[QueueRef]) -> dict[QueueRef, Position | None]:
        """The positions that brokers keep for the group; None = never committed. Raises the first
        error.
        """
        await self._know(queues)
        return {q: good(answer) for q, answer in (await self._calls.committed(queues)).items()}

    async def positions_at(
        self, queues: Collection[QueueRef], time_ms: int
    ) -> dict[QueueRef, Position]:
        """The first message of each queue that was stored at the time or later, in milliseconds
        since 1970; behind the last one when there is none. Raises the first queue's error.
        """
        if type(time_ms) is not int or not 0 <= time_ms < 2**63:
            raise InvalidRequest(f"time_ms is milliseconds since 1970, not {time_ms!r}.")
        await self._know(queues)
        answers = await self._calls.positions_at(queues, time_ms)
        return {queue: good(answer) for queue, answer in answers.items()}

    async def _know(self, queues: Collection[QueueRef]) -> None:
        """Waits for the routes of the queues' topics."""
        self._check_open()
        for topic in sorted({queue.topic for queue in check_queues(queues)}):
            await self._routes.wait_for(topic, self._timeout_s)


def good(answer: Answer | CometError) -> Answer:
    """The answer; raises the error that came instead."""
    if isinstance(answer, CometError):
        raise answer
    return answer

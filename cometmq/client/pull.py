"""A consumer that the application calls: single pulls, or ``assign`` and ``poll`` with prefetch. No
membership.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self, TypeVar

from cometmq.client.connections import Connections
from cometmq.client.fetcher import Fetcher, pull
from cometmq.client.messages import PullBatch, ReceivedMessage
from cometmq.client.names import (
    check_group,
    check_position,
    check_queues,
    check_tags,
    check_topic,
    filter_of,
)
from cometmq.client.offsets import Bounds, BrokerCalls
from cometmq.client.options import PullConsumerOptions, backoff_policy, options_of
from cometmq.client.routes import RouteWatcher
from cometmq.client.routing import readable_queues
from cometmq.errors import ClientClosed, CometError, InvalidRequest, QueueNotFound, Retry
from cometmq.model import Position, QueueRef
from cometmq.rpc.retry import Backoff
from cometmq.rpc.tasks import Tasks, stop_all

Answer = TypeVar("Answer")


class PullConsumer:
    """Use it inside ``async with``; one event loop. Leaving the block commits nothing: call
    :meth:`commit`.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        *,
        options: PullConsumerOptions | None = None,
    ) -> None:
        """``namesrv``: ``host:port`` of the name servers, ``;`` between them; None = what
        COMETMQ_NAMESRV says. ConfigInvalid, GroupNameInvalid.
        """
        self._options = options_of(PullConsumerOptions, options)
        self._connections = Connections(namesrv)
        self._tasks = Tasks(f"pull consumer {group}")
        self._routes = RouteWatcher(
            self._connections,
            Backoff(backoff_policy(self._options), random.Random()),
            lambda topic: None,
        )
        self._timeout_s = self._options.request_timeout_ms / 1000
        self._calls = BrokerCalls(
            check_group(group), self._connections, self._routes, self._timeout_s
        )
        # of assigned queues; the next to be polled comes first
        self._fetchers: dict[QueueRef, Fetcher] = {}
        self._fetching: dict[QueueRef, asyncio.Task[PullBatch]] = {}
        # behind what poll has handed out, and not yet committed
        self._polled: dict[QueueRef, Position] = {}
        self._open = False

    async def __aenter__(self) -> Self:
        self._routes.start(self._tasks)
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._open = False
        try:
            await self.assign([])
        finally:
            try:
                await self._tasks.stop()
            finally:
                await self._connections.close()

    # --- single calls -----------------------------------------------------------------------------

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
        usual = self._options
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
        return {q: _good(answer) for q, answer in (await self._calls.bounds(queues)).items()}

    async def committed(self, queues: Collection[QueueRef]) -> dict[QueueRef, Position | None]:
        """The group's committed positions; None = never committed. Raises the first error."""
        await self._know(queues)
        return {q: _good(answer) for q, answer in (await self._calls.committed(queues)).items()}

    async def commit(
        self, positions: Mapping[QueueRef, Position] | None = None
    ) -> dict[QueueRef, Position | None]:
        """Commits; without ``positions`` everything that :meth:`poll` has handed out. Answers the
        positions that the broker keeps now. A queue whose broker group has no writer for a moment
        is tried again until the time for one request is over. Raises the first queue's error.
        """
        if positions is not None and not isinstance(positions, Mapping):
            raise InvalidRequest(
                f"positions is a dict of QueueRef to Position, or nothing, not {positions!r:.80}"
            )
        positions = dict(self._polled if positions is None else positions)
        for position in positions.values():
            check_position(position)
        await self._know(positions)
        answers = await self._calls.commit(positions)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        backoff = Backoff(backoff_policy(self._options), random.Random())
        while (again := _to_try_again(answers)) and loop.time() < deadline_s:
            await self._calls.wait(min(backoff.next_s(), deadline_s - loop.time()))
            answers.update(await self._calls.commit({q: positions[q] for q in again}))
        for queue, answer in answers.items():
            if not isinstance(answer, CometError) and self._polled.get(queue) == positions[queue]:
                del self._polled[queue]
        return {queue: _good(answer) for queue, answer in answers.items()}

    # --- assign and poll --------------------------------------------------------------------------

    async def assign(
        self,
        queues: Iterable[QueueRef],
        *,
        tags: Collection[str] = (),
        sql: str | None = None,
    ) -> None:
        """Reads exactly these queues from now on, each from the group's committed position or as
        ``consume_from`` says; with ``tags`` or ``sql``, an SQL92 expression, only what passes.
        What was fetched and not polled is forgotten.
        """
        wanted, only = check_queues(queues), filter_of(check_tags(tags), sql)
        await stop_fetching(self._fetching)
        self._polled.clear()
        self._fetchers.clear()
        if wanted:
            await self._know(wanted)
        for queue in wanted:
            self._fetchers[queue] = Fetcher(self._calls, queue, only, self._options)

    async def seek(self, queue: QueueRef, position: Position) -> None:
        """The next poll of an assigned queue begins there. QueueNotFound: it is not assigned."""
        fetcher = self._fetcher(queue)
        check_position(position)
        await stop_fetching(self._fetching, queue)
        fetcher.position = position
        self._polled.pop(queue, None)

    async def position(self, queue: QueueRef) -> Position:
        """What the next poll of an assigned queue begins with. QueueNotFound when it is not
        assigned.
        """
        fetched = self._polled.get(queue)
        return fetched if fetched is not None else await self._fetcher(queue).locate()

    async def poll(self, timeout_ms: int = 5_000) -> list[ReceivedMessage]:
        """Messages of one assigned queue as soon as there are some; none when the time is over.
        While the application works, the next ones are fetched. Raises what no retry can mend, once
        for each try.
        """
        self._check_open()
        if isinstance(timeout_ms, bool) or not isinstance(timeout_ms, int | float):
            raise InvalidRequest(f"timeout_ms is a number of milliseconds, not {timeout_ms!r}.")
        if not self._fetchers:
            raise InvalidRequest("No queue is assigned.")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        while True:
            for queue in self._fetchers:
                if queue not in self._fetching:
                    self._fetching[queue] = loop.create_task(self._fetchers[queue].fetch())
            done, _ = await asyncio.wait(
                self._fetching.values(),
                timeout=max(0.0, deadline_s - loop.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                return []
            messages = self._take_turn()
            if messages:
                return messages

    def _take_turn(self) -> list[ReceivedMessage]:
        """The messages of the first queue in turn that has an answer; its turn is over then."""
        for queue in list(self._fetchers):
            if queue in self._fetching and self._fetching[queue].done():
                self._fetchers[queue] = fetcher = self._fetchers.pop(queue)
                batch = self._fetching.pop(queue).result()
                self._polled[queue] = batch.next_position
                if self._open:
                    self._fetching[queue] = asyncio.create_task(fetcher.fetch())
                if batch.messages:
                    return batch.messages
        return []

    def _fetcher(self, queue: QueueRef) -> Fetcher:
        if queue not in self._fetchers:
            raise QueueNotFound(f"{queue} is not assigned.")
        return self._fetchers[queue]

    def _check_open(self) -> None:
        if not self._open:
            raise ClientClosed("The consumer is not open.")

    async def _know(self, queues: Collection[QueueRef]) -> None:
        """Waits for the routes of the queues' topics."""
        self._check_open()
        for topic in sorted({queue.topic for queue in check_queues(queues)}):
            await self._routes.wait_for(topic, self._timeout_s)


async def stop_fetching(
    fetching: dict[QueueRef, asyncio.Task[PullBatch]], only: QueueRef | None = None
) -> None:
    """Cancels fetches that run and forgets those that ended."""
    queues = [queue for queue in fetching if only is None or queue == only]
    await stop_all([fetching.pop(queue) for queue in queues])


def _to_try_again(answers: Mapping[QueueRef, Position | CometError | None]) -> list[QueueRef]:
    return [
        queue
        for queue, answer in answers.items()
        if isinstance(answer, CometError) and answer.retry is not Retry.NEVER
    ]


def _good(answer: Answer | CometError) -> Answer:
    if isinstance(answer, CometError):
        raise answer
    return answer

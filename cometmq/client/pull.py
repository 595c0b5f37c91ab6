"""A consumer that the application calls: single pulls, or ``assign`` and ``poll`` with prefetch. No
membership.
"""

from __future__ import annotations

import asyncio
import logging
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
    of,
)
from cometmq.client.offsets import ITEMS_PER_CALL_MAX, Bounds, BrokerCalls, send_back_item
from cometmq.client.options import PullConsumerOptions, backoff_policy, options_of
from cometmq.client.routes import RouteWatcher
from cometmq.client.routing import readable_queues
from cometmq.errors import (
    ClientClosed,
    CometError,
    DelayLevelInvalid,
    InvalidRequest,
    OffsetReset,
    QueueNotFound,
    Retry,
)
from cometmq.model import DELAY_LEVEL_MAX, Position, QueueRef
from cometmq.rpc.retry import Backoff
from cometmq.rpc.tasks import Tasks, stop_all
from cometmq.telemetry import fields, logger

Answer = TypeVar("Answer")

_log = logger(__name__)


class PullConsumer:
    """Use it inside ``async with``; one event loop. Without ``commit_interval_ms`` leaving the
    block commits nothing: call :meth:`commit`.
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
        self._begins: dict[QueueRef, Position] = {}  # of the fetch that runs or has ended
        self._paused: set[QueueRef] = set()
        self._resumed = asyncio.Event()
        # Behind what poll has handed out; what of it earlier polls did, and what is committed.
        self._polled: dict[QueueRef, Position] = {}
        self._done: dict[QueueRef, Position] = {}
        self._committed: dict[QueueRef, Position] = {}
        self._open = False

    async def __aenter__(self) -> Self:
        self._routes.start(self._tasks)
        if self._options.commit_interval_ms:
            self._tasks.start(self._commit_loop(), "commit")
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._open = False
        try:
            if error is None:
                self._done |= self._polled
            if self._options.commit_interval_ms:
                await self._commit_done()
            await self._forget_all()
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
        positions = _changed(self._polled, self._committed) if positions is None else positions
        for position in positions.values():
            check_position(position)
        await self._know(positions)
        answers = await self._commit_once(positions)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._timeout_s
        backoff = Backoff(backoff_policy(self._options), random.Random())
        while (again := _to_try_again(answers)) and loop.time() < deadline_s:
            await self._calls.wait(min(backoff.next_s(), deadline_s - loop.time()))
            answers.update(await self._commit_once({q: positions[q] for q in again}))
        return {queue: _good(answer) for queue, answer in answers.items()}

    async def _commit_once(
        self, positions: Mapping[QueueRef, Position]
    ) -> dict[QueueRef, Position | CometError | None]:
        answers = await self._calls.commit(positions)
        for queue, answer in answers.items():
            if not isinstance(answer, CometError):
                self._committed[queue] = positions[queue]
            elif isinstance(answer, OffsetReset) and answer.fence and queue in self._fetchers:
                _log.warning("the group was reset", extra=fields(**of(queue), error=answer))
                answers[queue] = position = Position(*answer.fence)
                await self.seek(queue, position)
        return answers

    async def _commit_loop(self) -> None:
        while True:
            await asyncio.sleep(self._options.commit_interval_ms / 1000)
            await self._commit_done()

    async def _commit_done(self) -> None:
        """Commits what is done and new. What a retry can mend is tried the next time."""
        answers = await self._commit_once(_changed(self._done, self._committed))
        for queue, answer in answers.items():
            if isinstance(answer, CometError):
                will_retry = answer.retry is not Retry.NEVER
                level = logging.INFO if will_retry else logging.WARNING
                event = "commits wait" if will_retry else "commit refused"
                _log.log(level, event, extra=fields(**of(queue), error=answer))
                if not will_retry:
                    self._done.pop(queue, None)

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
        return {queue: _good(answer) for queue, answer in answers.items()}

    async def send_back(self, messages: Collection[ReceivedMessage], delay_level: int = 0) -> None:
        """The brokers deliver these messages again after a delay, in the group's retry topic
        ``%RETRY%`` and its name, which has to be read too: 0 = by the number of their tries, 1
        (1 s) to 18 (2 h), -1 = never, they are dead letters. Commit afterwards. Raises the first
        message's error.
        """
        if type(delay_level) is not int or not -1 <= delay_level <= DELAY_LEVEL_MAX:
            raise DelayLevelInvalid(f"delay_level is -1 to {DELAY_LEVEL_MAX}, not {delay_level!r}.")
        await self._know([message.queue for message in messages])
        for broker_group in sorted({message.queue.broker_group for message in messages}):
            items = [
                send_back_item(message.queue, self._position_of(message), delay_level)
                for message in messages
                if message.queue.broker_group == broker_group
            ]
            for start in range(0, len(items), ITEMS_PER_CALL_MAX):
                some = items[start : start + ITEMS_PER_CALL_MAX]
                for error in await self._calls.send_back(broker_group, some):
                    if error is not None:
                        raise error

    def _position_of(self, message: ReceivedMessage) -> Position:
        """With the generation that was polled last; of messages that were pulled it is unknown."""
        polled = self._polled.get(message.queue)
        return Position(polled.generation if polled else 0, message.queue_offset)

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
        self._check_open()
        if self._options.commit_interval_ms:
            self._done |= self._polled
            await self._commit_done()
        await self._forget_all()
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
        for known in (self._polled, self._done, self._begins):
            known.pop(queue, None)

    async def seek_to_begin(self, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these assigned queues, or of all, begin at the first message."""
        for queue, bounds in (await self.bounds(self._some(queues))).items():
            await self.seek(queue, Position(bounds.generation, bounds.min_offset))

    async def seek_to_end(self, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these assigned queues, or of all, begin behind the last message."""
        for queue, bounds in (await self.bounds(self._some(queues))).items():
            await self.seek(queue, Position(bounds.generation, bounds.max_offset))

    async def seek_to_time(self, time_ms: int, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these assigned queues, or of all, begin as :meth:`positions_at`
        says.
        """
        for queue, position in (await self.positions_at(self._some(queues), time_ms)).items():
            await self.seek(queue, position)

    def pause(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out nothing of these assigned queues before :meth:`resume`. They stay
        assigned. QueueNotFound.
        """
        self._paused |= set(self._some(queues))

    def resume(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out messages of these queues again. QueueNotFound."""
        self._paused -= set(self._some(queues))
        self._resumed.set()

    def _some(self, queues: Collection[QueueRef] | None) -> list[QueueRef]:
        """Those, or all that are assigned."""
        self._check_open()
        some = sorted(self._fetchers) if queues is None else check_queues(queues)
        for queue in some:
            self._fetcher(queue)
        return some

    async def position(self, queue: QueueRef) -> Position:
        """What the next poll of an assigned queue begins with. QueueNotFound when it is not
        assigned.
        """
        fetcher = self._fetcher(queue)
        known = self._polled.get(queue) or self._begins.get(queue)
        return known if known is not None else await fetcher.locate()

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
        self._done |= self._polled  # the application has come back
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_ms / 1000
        while True:
            self._resumed.clear()
            wanted = [queue for queue in self._fetchers if queue not in self._paused]
            for queue in wanted:
                if queue not in self._fetching:
                    self._start_fetching(queue)
            resumed = loop.create_task(self._resumed.wait())
            try:
                done, _ = await asyncio.wait(
                    [resumed, *(self._fetching[queue] for queue in wanted)],
                    timeout=max(0.0, deadline_s - loop.time()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                resumed.cancel()
            if not done:
                return []
            messages = self._take_turn()
            if messages:
                return messages

    def _start_fetching(self, queue: QueueRef) -> None:
        async def fetch(fetcher: Fetcher) -> PullBatch:
            self._begins[queue] = await fetcher.locate()
            return await fetcher.fetch()

        self._fetching[queue] = asyncio.create_task(fetch(self._fetchers[queue]))

    def _take_turn(self) -> list[ReceivedMessage]:
        """The messages of the first queue in turn that has an answer; its turn is over then."""
        for queue in list(self._fetchers):
            if queue in self._paused:
                continue
            if queue in self._fetching and self._fetching[queue].done():
                self._fetchers[queue] = self._fetchers.pop(queue)
                batch = self._fetching.pop(queue).result()
                self._polled[queue] = batch.next_position
                if self._open:
                    self._start_fetching(queue)
                if batch.messages:
                    return batch.messages
        return []

    async def _forget_all(self) -> None:
        await stop_fetching(self._fetching)
        self._fetchers.clear()
        self._paused.clear()
        for known in (self._begins, self._polled, self._done, self._committed):
            known.clear()

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


def _changed(
    positions: Mapping[QueueRef, Position], committed: Mapping[QueueRef, Position]
) -> dict[QueueRef, Position]:
    return {queue: at for queue, at in positions.items() if committed.get(queue) != at}


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

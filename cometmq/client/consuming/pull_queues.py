"""The queues that a pull consumer reads: taken over with the listener's word, given up when the
application is done with what it has of them, committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import replace

from cometmq.client.consuming.polled import PolledQueues
from cometmq.client.consuming.queue_listener import QueueEvents, QueueListener
from cometmq.client.names import of
from cometmq.client.options import PullConsumerOptions
from cometmq.client.reading.fetcher import Fetcher
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.memory import Memory
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.reading.positions import (
    Answers,
    GroupPositions,
    OffsetStore,
    OwnPositions,
    Positions,
)
from cometmq.client.reading.pull_budget import PullBudget
from cometmq.client.remote.description import QueueState
from cometmq.errors import CometError, OffsetReset, Retry
from cometmq.model import Filter, Position, QueueRef
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger

_log = logger(__name__)


class PullQueues:
    """A QueueReader (``group_share``), and the same for queues that the application assigns itself.
    ``subscriptions``: the filter of each topic that is read.
    """

    def __init__(
        self,
        options: PullConsumerOptions,
        calls: BrokerCalls,
        subscriptions: Mapping[str, Filter],
        long_poller: LongPoller,
        store: OffsetStore | None,
        listener: QueueListener | None,
    ) -> None:
        self.polled = PolledQueues()
        self._options = options
        self._calls = calls
        self._subscriptions = subscriptions
        self._long_poller = long_poller
        self._store = store
        self._events = QueueEvents(listener, options.drain_timeout_ms / 1000)
        self._budget = PullBudget(options.pull_bytes_in_flight_max)
        self._memory = Memory(options.memory_bytes_max)
        self._positions = self._kept(alone=True)
        self._is_member = False
        self._committed: dict[QueueRef, Position] = {}
        self._leaving: set[QueueRef] = set()  # about to be given up
        self._loop: asyncio.Task[None] | None = None  # which commits

    def _kept(self, *, alone: bool) -> Positions:
        """Where positions are. Who assigns queues alone decides nothing for the group."""
        if self._store is not None:
            return OwnPositions(self._store, self._calls, self._options, decides=not alone)
        return GroupPositions(self._calls, self._options, decides=not alone)

    def start(self, tasks: Tasks) -> None:
        """Commit again and again, if the options say so."""
        if self._options.commit_interval_ms:
            self._loop = tasks.start(self._commit_loop(), "commit")

    async def stop(self) -> None:
        """Give all queues up."""
        if self._loop is not None:
            await stop_all([self._loop])
        await self._give_up(list(self.polled.queues))

    def assign(self, queues: Collection[QueueRef], wanted: Filter) -> None:
        """Exactly these are read now."""
        for queue in queues:
            self.polled.add(self._fetcher(queue, wanted))

    def _fetcher(
        self, queue: QueueRef, wanted: Filter, long_poller: LongPoller | None = None
    ) -> Fetcher:
        return Fetcher(
            self._calls,
            queue,
            wanted,
            self._options,
            self._positions.start,
            self._budget,
            self._memory.share(),
            long_poller,
        )

    async def unassign(self) -> None:
        """The application is done with all that it has assigned."""
        if self._options.commit_interval_ms:
            self.polled.all_done()
            await self._commit_done()
        await self._drop(list(self.polled.queues))

    def states(self) -> list[QueueState]:
        """The states of the queues, for ``client info``."""
        return [
            replace(state, committed=self._committed.get(state.queue))
            for state in self.polled.states()
        ]

    def become_member(self) -> None:
        """From now on queues come from the group."""
        self._is_member = True
        self._positions = self._kept(alone=False)

    @property
    def reading(self) -> Collection[QueueRef]:
        """As QueueReader says."""
        return set(self.polled.queues) - self._leaving

    @property
    def leaving(self) -> Collection[QueueRef]:
        """As QueueReader says."""
        return self._leaving

    async def begin(self, queues: set[QueueRef]) -> set[QueueRef]:
        """As QueueReader says."""
        there = {
            q: f for q in sorted(queues) if (f := self._subscriptions.get(q.topic)) is not None
        }
        for queue, wanted in there.items():
            self.polled.add(self._fetcher(queue, wanted, self._long_poller), resting=True)
        await self._events.assigned(list(there))
        self.polled.go_on(there)
        return set()

    async def revoke(self, queues: Collection[QueueRef]) -> None:
        """As QueueReader says. A queue whose messages the application has in work is given up when
        it polls again, or after drain_timeout_ms.
        """
        going = [queue for queue in queues if queue in self.polled]
        if not going:
            return
        self._leaving |= {*going}
        await self.polled.rest(going)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._options.drain_timeout_ms / 1000
        while self.polled.in_work(going) and loop.time() < deadline_s:
            self.polled.came_back.clear()
            await wait_at_most(self.polled.came_back, deadline_s - loop.time())
        if self.polled.in_work(going):
            _log.warning(
                "queues are given up while the application works on their messages",
                extra=fields(group=self._calls.group, queue_count=len(going), first=str(going[0])),
            )
        await self._give_up(going)

    async def _give_up(self, queues: list[QueueRef]) -> None:
        if self._is_member:
            await self._events.revoked(queues)
        if self._options.commit_interval_ms:
            await self._commit_done()
        await self._drop(queues)

    async def _drop(self, queues: list[QueueRef]) -> None:
        await self.polled.remove(queues)
        self._leaving -= {*queues}
        for queue in queues:
            self._committed.pop(queue, None)

    def take_lost(self) -> set[QueueRef]:
        """As QueueReader says: it has no locks that could be lost."""
        return set()

    async def reset(self, queue: QueueRef, position: Position) -> None:
        """As QueueReader says."""
        _log.warning("the group was reset", extra=fields(**of(queue), goes_on_at=position.offset))
        await self.polled.seek(queue, position)
        self._committed[queue] = position

    # --- commits ----------------------------------------------------------------------------------

    def not_committed(self, positions: Mapping[QueueRef, Position]) -> dict[QueueRef, Position]:
        """Those of the positions that are not committed."""
        return {q: at for q, at in positions.items() if self._committed.get(q) != at}

    async def commit(self, positions: Mapping[QueueRef, Position]) -> Answers:
        """Commit; what is kept of each queue now, or why it was refused."""
        if not positions:
            return {}
        answers = await self._positions.commit(positions)
        for queue, answer in answers.items():
            if not isinstance(answer, CometError):
                if queue in self.polled:  # else it is stale when the queue comes again
                    self._committed[queue] = positions[queue]
            elif isinstance(answer, OffsetReset) and answer.fence and queue in self.polled:
                answers[queue] = position = Position(*answer.fence)
                await self.reset(queue, position)
        return answers

    async def _commit_loop(self) -> None:
        while True:
            await asyncio.sleep(self._options.commit_interval_ms / 1000)
            await self._commit_done()

    async def _commit_done(self) -> None:
        """Commits what is done and new. What a retry can mend is tried the next time."""
        answers = await self.commit(self.not_committed(self.polled.done))
        for queue, answer in answers.items():
            if isinstance(answer, CometError):
                will_retry = answer.retry is not Retry.NEVER
                level = logging.INFO if will_retry else logging.WARNING
                event = "commits wait" if will_retry else "commit refused"
                _log.log(level, event, extra=fields(**of(queue), error=answer))
                if not will_retry:
                    self.polled.done.pop(queue, None)

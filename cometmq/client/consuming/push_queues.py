"""The queues that a push consumer reads: begun with their lock, drained and committed before they
go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from cometmq.client.consuming.assigned import AssignedQueue
from cometmq.client.consuming.listener import Workers
from cometmq.client.consuming.orderly import OrderlyQueue
from cometmq.client.group.queue_locks import QueueLocks
from cometmq.client.messages import MessageModel
from cometmq.client.options import PushConsumerOptions
from cometmq.client.reading.fetcher import Fetcher
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.memory import Memory
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.reading.positions import (
    GroupPositions,
    OffsetStore,
    OwnPositions,
    Positions,
    may_pass,
)
from cometmq.client.reading.pull_budget import PullBudget
from cometmq.client.remote.description import QueueState
from cometmq.model import Filter, Position, QueueRef
from cometmq.rpc.tasks import Tasks, stop_all
from cometmq.telemetry import fields, logger

LOCK_NAME_LENGTH_MAX = 230  # of the client id in it

_log = logger(__name__)


class PushQueues:
    """A QueueReader (``group_share``). ``subscriptions``: the filter of each topic that is read.
    ``own_calls``: for a consumer whose positions the brokers keep apart from the group's.
    ``on_change`` is called when a queue has become free, or was lost.
    """

    def __init__(
        self,
        options: PushConsumerOptions,
        calls: BrokerCalls,
        subscriptions: Mapping[str, Filter],
        instance_id: str,
        workers: Workers,
        long_poller: LongPoller,
        store: OffsetStore | None,
        own_calls: BrokerCalls | None,
        on_change: Callable[[], None],
    ) -> None:
        self._options = options
        self._calls = calls
        self._subscriptions = subscriptions
        self._workers = workers
        self._long_poller = long_poller
        self._on_change = on_change
        # Another client of this one's name, an earlier process say, must not have its lock number.
        holder = f"{options.client_id[:LOCK_NAME_LENGTH_MAX]} {instance_id}"
        self._locks = QueueLocks(calls, holder, self._locks_lost) if options.orderly else None
        self._budget = PullBudget(options.pull_bytes_in_flight_max)
        self._memory = Memory(options.memory_bytes_max)
        self._positions = self._kept_at(store, own_calls)
        self._assigned: dict[QueueRef, AssignedQueue] = {}
        self._leaving: list[AssignedQueue] = []  # revoked, not yet committed
        # of queues given up while nobody took commits
        self._left: dict[QueueRef, Position] = {}
        self._lost: set[QueueRef] = set()  # queues whose lock ended
        self._outlived: set[QueueRef] = set()  # revoked, in order, and a call still runs
        self._loop: asyncio.Task[None] | None = None  # which commits; None: it is over

    def _kept_at(self, store: OffsetStore | None, own_calls: BrokerCalls | None) -> Positions:
        is_shared = self._options.message_model is MessageModel.CLUSTERING
        if store is not None:
            return OwnPositions(store, self._calls, self._options, is_shared=is_shared)
        if own_calls is not None:
            return GroupPositions(own_calls, self._options, is_shared=False)
        if self._locks is not None:
            return GroupPositions(self._calls, self._options, self._locks.number)
        return GroupPositions(self._calls, self._options)

    def start(self, tasks: Tasks) -> None:
        """Renew locks and commit again and again."""
        self._tasks = tasks
        if self._locks is not None:
            tasks.start(self._locks.renew(), "renew locks")
        self._loop = tasks.start(self._commit_loop(), "commit")

    async def stop(self) -> None:
        """Give up all queues; none is read again."""
        loop, self._loop = self._loop, None
        if loop is not None:
            await stop_all([loop])
        rest, self._assigned = self._assigned, {}
        self._leaving += rest.values()  # beside those that a rebalance was about to give up
        await self._give_up(list(self._leaving))

    @property
    def reading(self) -> Collection[QueueRef]:
        """As QueueReader says."""
        return self._assigned.keys()

    @property
    def leaving(self) -> Collection[QueueRef]:
        """As QueueReader says."""
        return {assigned.queue for assigned in self._leaving} | self._outlived

    def states(self) -> list[QueueState]:
        """The states of the queues, for ``client info``."""
        return [assigned.state() for assigned in self._assigned.values()]

    async def begin(self, queues: set[QueueRef]) -> set[QueueRef]:
        """As QueueReader says."""
        locks, subscriptions = self._locks, self._subscriptions
        got = await locks.lock(queues) if locks is not None else queues
        if self._left.keys() & got:
            await self._commit([])  # else what was done there would come again
        still = {
            queue
            for queue in got
            if queue.topic in subscriptions and (locks is None or locks.holds(queue))
        }
        for queue in sorted(still):
            self._assign(queue, subscriptions[queue.topic])
        if locks is not None and got != still:
            await locks.unlock(got - still)
        return queues - got

    def take_lost(self) -> set[QueueRef]:
        """As QueueReader says."""
        lost, self._lost = self._lost, set()
        return lost

    async def reset(self, queue: QueueRef, position: Position) -> None:
        """As QueueReader says."""
        self._assigned[queue].reset(position)

    def _locks_lost(self, queues: Collection[QueueRef]) -> None:
        self._lost.update(queues)
        self._on_change()

    def _assign(self, queue: QueueRef, wanted: Filter) -> None:
        options, workers, locks = self._options, self._workers, self._locks
        lock_number = locks.number(queue) if locks is not None else 0
        fetcher = Fetcher(
            self._calls,
            queue,
            wanted,
            options,
            self._positions.start,
            self._budget,
            self._memory.share(),
            self._long_poller,
            lock_number,
        )
        self._assigned[queue] = (
            OrderlyQueue(fetcher, workers, options, self._tasks, locks.get(queue))
            if locks is not None
            else AssignedQueue(fetcher, workers, options, self._tasks)
        )

    async def revoke(self, queues: Collection[QueueRef]) -> None:
        """Drains the queues together, then commits what was done there."""
        leaving = [self._assigned.pop(q) for q in queues if q in self._assigned]
        if leaving:
            self._leaving += leaving
            await self._give_up(leaving)

    async def _give_up(self, leaving: list[AssignedQueue]) -> None:
        await asyncio.gather(*(assigned.revoke() for assigned in leaving))
        await self._commit(leaving)
        self._leaving = [assigned for assigned in self._leaving if assigned not in leaving]
        if self._locks is not None:
            await self._release(self._locks, leaving)

    async def _release(self, locks: QueueLocks, leaving: list[AssignedQueue]) -> None:
        """Lets other members have the queues, each when its last call has ended. What could not be
        committed now is committed while the lock lasts, which is renewed no more.
        """
        idle = {assigned.queue for assigned in leaving if not assigned.running}
        locks.abandon(idle & self._left.keys())
        await locks.unlock(idle - self._left.keys())
        for assigned in leaving:
            if assigned.running and self._loop is not None:
                self._outlived.add(assigned.queue)
                self._tasks.start(self._release_late(locks, assigned), "release late")

    async def _release_late(self, locks: QueueLocks, assigned: AssignedQueue) -> None:
        await assigned.until_idle()
        await self._commit([assigned])
        self._outlived.discard(assigned.queue)
        await self._release(locks, [assigned])
        self._on_change()

    # --- commits ----------------------------------------------------------------------------------

    async def _commit_loop(self) -> None:
        while True:
            await asyncio.sleep(self._options.commit_interval_ms / 1000)
            await self._commit(list(self._assigned.values()))

    async def _commit(self, queues: list[AssignedQueue]) -> None:
        """Commits where something has changed: one call a broker. While a broker group has no
        writer its commits stay here.
        """
        positions = self._left | {a.queue: p for a in queues if (p := a.to_commit()) is not None}
        if not positions:
            return
        answers = await self._positions.commit(positions)
        for assigned in queues:
            if assigned.queue in answers:
                assigned.commit_answered(answers[assigned.queue])
        waiting = {queue for queue, answer in answers.items() if may_pass(answer)}
        if waiting:
            groups = {queue.broker_group for queue in waiting}
            why = answers[next(iter(sorted(waiting)))]
            _log.info(
                "commits wait",
                extra=fields(
                    group=self._calls.group,
                    broker_groups=",".join(sorted(groups)),
                    queue_count=len(waiting),
                    error=why,
                ),
            )
        for queue in answers:
            left = queue in waiting and queue not in self._assigned
            if left and self._positions.may_come_late:
                self._left[queue] = positions[queue]
            else:
                self._left.pop(queue, None)

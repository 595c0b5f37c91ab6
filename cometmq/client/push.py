"""A consumer that calls the application: it divides the queues with the group's other members and
reads its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from dataclasses import replace
from types import TracebackType
from typing import Self

from cometmq.client.assigned import AssignedQueue
from cometmq.client.connections import Connections
from cometmq.client.fetcher import Fetcher
from cometmq.client.handover import Handover, common_allocation
from cometmq.client.listener import Listener, Work, Workers, check_listener
from cometmq.client.long_poller import LongPoller
from cometmq.client.membership import KnownMember, Membership
from cometmq.client.messages import Later, MessageModel
from cometmq.client.names import check_group, check_topic, filter_of, of
from cometmq.client.offset_file import OffsetFile
from cometmq.client.offsets import BrokerCalls
from cometmq.client.options import PushConsumerOptions, backoff_policy, options_of
from cometmq.client.orderly import OrderlyQueue, orderly_not_done
from cometmq.client.queue_locks import QueueLocks
from cometmq.client.rebalance import Allocation, allocate_topics
from cometmq.client.routes import RouteWatcher
from cometmq.client.routing import readable_queues, writers
from cometmq.client.send_backs import SendBacks
from cometmq.client.start_positions import first_position, group_position
from cometmq.errors import ClientClosed, CometError, ConfigInvalid, Retry, TopicNotFound
from cometmq.model import RETRY_PREFIX, Filter, Position, QueueRef
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger

LOCK_RETRY_S = 1.0
HANDOVER_DELAY_MS = 10

_log = logger(__name__)


class PushConsumer:
    """Use it inside ``async with``; one event loop. Leaving the block lets running listener calls
    end, commits, leaves the group.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        listener: Listener | None = None,
        *,
        options: PushConsumerOptions | None = None,
    ) -> None:
        """``namesrv``: ``host:port`` of the name servers, ``;`` between them; None = what
        COMETMQ_NAMESRV says. ``listener`` gets messages of one queue, in the queue's order, at most
        ``options.batch_count``. It is an async function, or a plain one, which is called in a
        thread. None or SUCCESS = done. LATER, a :class:`Later` or any exception = they come again:
        the broker takes them back, and delivers them after 10 s to 2 h; after 16 tries they are
        dead letters. Raises ConfigInvalid, GroupNameInvalid, InvalidRequest.
        """
        self._options = options_of(PushConsumerOptions, options)
        self._is_broadcasting = self._options.message_model is MessageModel.BROADCASTING
        if self._is_broadcasting and self._options.orderly:
            raise ConfigInvalid("orderly: a queue has no lock when all members read it.")
        self._connections = Connections(namesrv)
        self._tasks = Tasks(f"push consumer {group}")
        policy = backoff_policy(self._options)
        self._routes = RouteWatcher(
            self._connections, Backoff(policy, random.Random()), self._route_changed
        )
        self._calls = BrokerCalls(
            check_group(group),
            self._connections,
            self._routes,
            self._options.request_timeout_ms / 1000,
        )
        self._membership = Membership(
            self._options.client_id,
            self._options.allocation.value,
            self._is_broadcasting,
            self._calls,
            policy,
            self._membership_changed,
            self._was_reset,
        )
        self._handover = Handover(
            self._options.client_id,
            self._membership.instance_id,
            self._options.handover_timeout_ms / 1000,
        )
        self._offsets = (
            OffsetFile(self._options.offset_file, group) if self._is_broadcasting else None
        )
        self._differing: set[str] = set()  # what members do not agree on, as logged
        self._reset: set[str] = set()  # broker groups where the group was reset
        self._long_poller = LongPoller(
            self._options.client_id,
            self._connections,
            self._routes.cluster,
            self._options.hold_ms,
        )
        self._workers = Workers(
            check_listener(listener),
            self._options.concurrency,
            self._options.batch_count,
            _redelivery(self._options),
            self._options.consume_timeout_ms / 1000,
        )
        goes_back = not (self._options.retry_in_place or self._is_broadcasting)
        self._retries = RETRY_PREFIX + group if goes_back else None
        self._subscriptions: dict[str, Filter] = {}  # by topic
        self._absent: set[str] = set()  # topics without a broker, as logged
        self._assigned: dict[QueueRef, AssignedQueue] = {}
        self._leaving: list[AssignedQueue] = []  # revoked, not yet committed
        # of queues given up while nobody took commits
        self._left: dict[QueueRef, Position] = {}
        self._locks = (
            QueueLocks(self._calls, self._options.client_id, self._locks_lost)
            if self._options.orderly
            else None
        )
        self._lost: set[QueueRef] = set()  # queues whose lock ended
        self._outlived: set[QueueRef] = set()  # revoked, in order, and a call still runs
        self._unbalanced = asyncio.Event()  # something has changed since the last rebalance
        self._loops: list[asyncio.Task[None]] = []
        self._open = False

    async def __aenter__(self) -> Self:
        if self._offsets is not None:
            self._offsets.load()
            if not self._options.retry_in_place:
                self._workers.not_done = _pass_by
        self._routes.start(self._tasks)
        self._long_poller.start(self._tasks)
        self._workers.start(self._tasks)
        if self._retries is not None:
            self._send_failed_back()
            self._subscriptions[self._retries] = Filter()
            self._routes.watch(self._retries)
        if self._locks is not None:
            self._tasks.start(self._locks.renew(), "renew locks")
        self._loops = [
            self._tasks.start(self._rebalance_loop(), "rebalance"),
            self._tasks.start(self._commit_loop(), "commit"),
        ]
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._open = False
        try:
            await stop_all(self._loops)
            await self._revoke(list(self._assigned))
            await self._membership.leave()
        finally:
            self._workers.close()
            try:
                await self._tasks.stop()
            finally:
                await self._connections.close()

    def _send_failed_back(self) -> None:
        workers, options = self._workers, self._options
        send_backs = SendBacks(
            self._calls, self._tasks, options.retry_times_max, workers.redeliver, workers.wake
        )
        if options.orderly:
            # A call that takes long goes on: the queue cannot pass it by.
            workers.not_done = orderly_not_done(workers, send_backs.put, options)
        else:
            workers.send_back = send_backs.put
            workers.not_done = lambda work, start, stop, later: send_backs.put(
                work, start, stop, later.delay_level
            )

    async def subscribe(
        self, topic: str, expression: str | Collection[str] = "*", *, sql: str | None = None
    ) -> None:
        """Reads the topic from now on; ``expression`` is ``*`` or tags with ``||`` between them, or
        a collection of tags. ``sql``, instead of tags, is an SQL92 expression over properties:
        ``"price > 5 AND region = 'eu'"``. A second call for a topic replaces its filter. Raises
        TopicNameInvalid, FilterInvalid, ClientClosed. A topic that is not there is no error:
        reading begins when it is, and until then the log has a WARNING.
        """
        if not self._open:
            raise ClientClosed("The consumer is not open.")
        wanted = filter_of(expression, sql)
        if self._subscriptions.get(check_topic(topic)) == wanted:
            return
        self._routes.watch(topic)
        self._tell_absence(topic)
        changed = [queue for queue in self._assigned if queue.topic == topic]
        self._subscriptions[topic] = wanted
        await self._revoke(changed)
        self._unbalanced.set()

    async def unsubscribe(self, topic: str) -> None:
        """Reads the topic no more: listener calls with its messages end, what they did is
        committed, and other members get its queues. A topic that is not read is no error. Raises
        TopicNameInvalid, ClientClosed.
        """
        if not self._open:
            raise ClientClosed("The consumer is not open.")
        if check_topic(topic) == self._retries or topic not in self._subscriptions:
            return
        del self._subscriptions[topic]
        self._absent.discard(topic)
        await self._revoke([queue for queue in self._assigned if queue.topic == topic])
        self._unbalanced.set()

    def suspend(self) -> None:
        """No listener call begins before :meth:`resume`; those that run go on. Queues are kept, and
        read until they have as many unfinished messages as the options allow.
        """
        self._workers.suspend()

    def resume(self) -> None:
        """Listener calls begin again."""
        self._workers.resume()

    def set_concurrency(self, concurrency: int) -> None:
        """So many listener calls at a time from now on (RocketMQ's updateCorePoolSize). Raises
        ConfigInvalid, ClientClosed.
        """
        if not self._open:
            raise ClientClosed("The consumer is not open.")
        self._options = replace(self._options, concurrency=concurrency)
        self._workers.resize(concurrency, self._tasks)

    @property
    def assigned(self) -> list[QueueRef]:
        """The queues that this consumer reads now."""
        return sorted(self._assigned)

    @property
    def pullhold(self) -> str | None:
        """Address of the pullhold where queues without messages wait; None: they are polled."""
        return self._long_poller.address

    # --- rebalance --------------------------------------------------------------------------------

    def _route_changed(self, topic: str) -> None:
        if topic in self._subscriptions:
            self._unbalanced.set()
            self._tell_absence(topic)

    def _tell_absence(self, topic: str) -> None:
        """A misspelt topic would be waited for in silence."""
        route = self._routes.get(topic)
        if route is None or topic == self._retries:  # that one is made when it is needed
            return
        if route.groups:
            if topic in self._absent:
                self._absent.discard(topic)
                _log.info("the topic is there", extra=fields(topic=topic, group=self._calls.group))
        elif topic not in self._absent:
            self._absent.add(topic)
            _log.warning(
                "nothing to read: the topic is not there yet",
                extra=fields(topic=topic, group=self._calls.group, advice=TopicNotFound.advice),
            )

    def _was_reset(self, broker_group: str) -> None:
        self._reset.add(broker_group)
        self._unbalanced.set()

    async def _follow_resets(self) -> None:
        """Goes on where the group was reset to. A broker that does not answer is asked again. A
        broadcasting consumer has offsets of its own.
        """
        at, self._reset = self._reset, set()
        if self._is_broadcasting:
            return
        queues = [queue for queue in self._assigned if queue.broker_group in at]
        if not queues:
            return
        try:
            positions = await self._calls.reset_positions(queues)
        except CometError as error:
            _log.info("reset not followed yet", extra=fields(group=self._calls.group, error=error))
            self._reset |= at
            self._unbalanced.set()
            return
        for queue, position in positions.items():
            if queue in self._assigned:
                self._assigned[queue].reset(position)

    def _membership_changed(self) -> None:
        self._unbalanced.set()

    async def _rebalance_loop(self) -> None:
        while True:
            await wait_at_most(self._unbalanced, self._options.rebalance_interval_ms / 1000)
            delay_ms = self._options.rebalance_delay_ms
            if self._handover.awaited:  # a queue rests until somebody begins it
                delay_ms = min(delay_ms, HANDOVER_DELAY_MS)
            await asyncio.sleep(delay_ms / 1000)
            self._unbalanced.clear()
            await self._rebalance()

    async def _rebalance(self) -> None:
        await self._follow_resets()
        routes = {topic: self._routes.get(topic) for topic in self._subscriptions}
        known = {topic: route for topic, route in routes.items() if route is not None}
        groups = {topic: list(writers(route)) for topic, route in known.items()}
        await self._membership.update(
            self._subscriptions, {group for some in groups.values() for group in some}, self._tasks
        )
        read = known.keys() & self._subscriptions  # still
        members = {topic: self._membership.members(topic, groups[topic]) for topic in read}
        decided = {topic: some for topic, some in members.items() if some is not None}
        mine = self._allocate({topic: readable_queues(known[topic]) for topic in decided}, decided)
        mine = {queue for queue in mine if not self._membership.is_disabled(queue.broker_group)}
        lost, self._lost = self._lost, set()
        await self._revoke(sorted(lost))
        await self._begin(mine, decided)
        # A topic whose membership nobody tells now keeps its queues: a broker that restarts is no
        # reason to stop.
        gone = [q for q in self._assigned if q not in mine and q.topic in decided]
        await self._revoke(gone)
        self._membership.hold(self._held())

    def _allocate(
        self,
        queues: dict[str, list[QueueRef]],
        members: dict[str, dict[str, KnownMember]],
    ) -> set[QueueRef]:
        """The queues that this consumer is to read."""
        if self._is_broadcasting:
            return {queue for some in queues.values() for queue in some}
        sharing = {
            topic: {client: one for client, one in some.items() if not one.is_broadcasting}
            for topic, some in members.items()
        }
        allocation = self._agreed_allocation(sharing, members != sharing)
        held = {client: one.held for some in sharing.values() for client, one in some.items()}
        return allocate_topics(allocation, self._options.client_id, queues, sharing, held)

    def _agreed_allocation(
        self, decided: dict[str, dict[str, KnownMember]], some_broadcast: bool
    ) -> Allocation:
        """Tells what the members do not agree on, once."""
        own = self._options.allocation
        members = [member for some in decided.values() for member in some.values()]
        agreed = common_allocation(own, members)
        differing = {
            f"the filter of {topic}"
            for topic, some in decided.items()
            if any(one.filters[topic] != self._subscriptions[topic] for one in some.values())
        }
        if some_broadcast:
            differing.add("the message model")
        if agreed is not own:
            differing.add("the allocation: all use AVERAGE")
        for what in sorted(differing - self._differing):
            _log.warning(
                "members of the group do not agree", extra=fields(group=self._calls.group, on=what)
            )
        self._differing = differing
        return agreed

    async def _begin(self, mine: set[QueueRef], decided: dict[str, dict[str, KnownMember]]) -> None:
        """Reads those queues that no other member reads, and tells that it is about to read the
        others.
        """
        loop = asyncio.get_running_loop()
        wanted = mine - self._assigned.keys() - self._outlived
        self._handover.want(wanted, loop.time())
        self._membership.hold(self._held())
        if self._is_broadcasting:
            return self._begin_all(wanted)
        new = {q for q in wanted if self._handover.may_begin(q, decided[q.topic], loop.time())}
        if self._locks is not None and new:
            new = await self._lock(self._locks, new)
        if self._left.keys() & new:
            await self._commit([])  # else what was done there would come again
        still = {
            queue
            for queue in new
            if queue.topic in self._subscriptions
            and (self._locks is None or self._locks.holds(queue))
        }
        for queue in sorted(still):
            self._assign(queue)
        self._handover.begun(new)
        if self._locks is not None and new != still:
            await self._locks.unlock(new - still)
        if wanted - new:  # the broker tells when they are free; or the time is over
            loop.call_later(self._options.handover_timeout_ms / 1000, self._unbalanced.set)

    def _begin_all(self, queues: set[QueueRef]) -> None:
        for queue in sorted(queues):
            self._assign(queue)
        self._handover.begun(queues)

    def _held(self) -> frozenset[QueueRef]:
        if self._is_broadcasting:
            return frozenset()
        leaving = {assigned.queue for assigned in self._leaving}
        return frozenset(
            self._assigned.keys() | leaving | self._outlived | set(self._handover.awaited)
        )

    async def _lock(self, locks: QueueLocks, queues: set[QueueRef]) -> set[QueueRef]:
        """Those that no other member has; soon it asks for the others again."""
        locked = await locks.lock(queues)
        if locked != queues:
            loop = asyncio.get_running_loop()
            loop.call_later(LOCK_RETRY_S, self._unbalanced.set)
        return locked

    def _locks_lost(self, queues: Collection[QueueRef]) -> None:
        self._lost.update(queues)
        self._unbalanced.set()

    def _assign(self, queue: QueueRef) -> None:
        wanted = self._subscriptions[queue.topic]
        options, workers, locks = self._options, self._workers, self._locks
        lock_number = locks.number(queue) if locks is not None else 0
        fetcher = Fetcher(
            self._calls,
            queue,
            wanted,
            options,
            self._long_poller,
            lock_number,
            group_position if self._offsets is None else first_position,
        )
        if self._offsets is not None:
            fetcher.position = self._offsets.get(queue)
        self._assigned[queue] = (
            OrderlyQueue(fetcher, workers, options, self._tasks, locks.get(queue))
            if locks is not None
            else AssignedQueue(fetcher, workers, options, self._tasks)
        )

    async def _revoke(self, queues: list[QueueRef]) -> None:
        """Drains the queues together, then commits what was done there."""
        self._leaving += [self._assigned.pop(q) for q in queues if q in self._assigned]
        leaving = list(self._leaving)
        if not leaving:
            return
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
            if assigned.running and self._open:
                self._outlived.add(assigned.queue)
                self._tasks.start(self._release_late(locks, assigned), "release late")

    async def _release_late(self, locks: QueueLocks, assigned: AssignedQueue) -> None:
        await assigned.until_idle()
        await self._commit([assigned])
        self._outlived.discard(assigned.queue)
        await self._release(locks, [assigned])
        self._unbalanced.set()

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
        if self._offsets is not None:
            await asyncio.to_thread(self._offsets.store, positions)
            for assigned in queues:
                if assigned.queue in positions:
                    assigned.commit_answered(positions[assigned.queue])
            return
        answers = await (
            self._calls.commit(positions, self._locks.number)
            if self._locks is not None
            else self._calls.commit(positions)
        )
        for assigned in queues:
            if assigned.queue in answers:
                assigned.commit_answered(answers[assigned.queue])
        waiting = {queue for queue, answer in answers.items() if _may_pass(answer)}
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
            if queue in waiting and queue not in self._assigned:
                self._left[queue] = positions[queue]
            else:
                self._left.pop(queue, None)


def _pass_by(work: Work, start: int, stop: int, _: Later) -> None:
    """What a broadcasting consumer cannot do is told, and does not come again."""
    for message in work.messages[start:stop]:
        _log.error(
            "message failed, passed by",
            extra=fields(**of(message.queue), offset=message.queue_offset, id=message.message_id),
        )
    work.queue.finish(work.run, start, stop)


def _may_pass(answer: Position | CometError | None) -> bool:
    return isinstance(answer, CometError) and answer.retry is not Retry.NEVER


def _redelivery(options: PushConsumerOptions) -> BackoffPolicy:
    first_s = options.redeliver_backoff_ms / 1000
    return BackoffPolicy(first_s, max(first_s, options.redeliver_backoff_max_ms / 1000))

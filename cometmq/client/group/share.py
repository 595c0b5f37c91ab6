"""A client's share of its group's queues: it subscribes to topics, is a member of the group, and
hands queues to a :class:`QueueReader` or takes them back. Push and pull consumers share this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.cluster.routing import readable_queues, writers
from cometmq.client.group.agreement import Agreement
from cometmq.client.group.handover import Handover
from cometmq.client.group.membership import KnownMember, Membership
from cometmq.client.group.rebalance import Allocation, allocate_topics, in_order
from cometmq.client.options import GroupOptions, backoff_policy, check_session
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.remote.answers import Answers
from cometmq.errors import CometError, TopicNotFound
from cometmq.model import RETRY_PREFIX, Filter, Position, QueueRef
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger
from cometmq.v1 import namesrv_pb2

HANDOVER_DELAY_MS = 10
MISSED_S = 1.0  # after which a queue is asked for again that could not be begun

Members = Mapping[str, Mapping[str, KnownMember]]  # by topic, then by client id

_log = logger(__name__)


class QueueReader(Protocol):
    """The part of a consumer that reads its share. ``reading``: queues that it reads. ``leaving``:
    queues that it was to give up and still works on, so that nobody else may begin them.
    """

    @property
    def reading(self) -> Collection[QueueRef]: ...

    @property
    def leaving(self) -> Collection[QueueRef]: ...

    async def begin(self, queues: set[QueueRef]) -> set[QueueRef]:
        """Reads these queues too; answers those that it could not get now, to be offered again."""

    async def revoke(self, queues: Collection[QueueRef]) -> None:
        """Reads these queues no more; returns when what was done there is committed."""

    def take_lost(self) -> set[QueueRef]:
        """Queues that it cannot go on with: they are revoked, and begun again if they are ours."""

    async def reset(self, queue: QueueRef, position: Position) -> None:
        """The group was reset: goes on there."""


class GroupShare:
    """Belongs to the event loop. ``is_broadcasting``: every member reads all queues.
    ``instance_id``: of this client, unlike that of any other with its name.
    ``subscriptions``: by topic, changed here, and read by the reader.
    ``follows_resets``: the group's positions count for this client; else it has its own.
    """

    def __init__(
        self,
        options: GroupOptions,
        calls: BrokerCalls,
        routes: RouteWatcher,
        reader: QueueReader,
        subscriptions: dict[str, Filter],
        instance_id: str,
        *,
        is_broadcasting: bool = False,
        follows_resets: bool = True,
    ) -> None:
        check_session(options)
        self._options = options
        self._calls = calls
        self._routes = routes
        self._reader = reader
        self._is_broadcasting = is_broadcasting
        self._follows_resets = follows_resets and not is_broadcasting
        self._membership = Membership(
            options.client_id,
            instance_id,
            options.allocation.label,
            is_broadcasting,
            options.session_ms,
            calls,
            backoff_policy(options),
            self.look_again,
            self._was_reset,
        )
        patience_s = options.handover_timeout_ms / 1000
        self._handover = Handover(options.client_id, instance_id, patience_s)
        self._agreement = Agreement(calls.group, options.allocation, patience_s)
        self._subscriptions = subscriptions
        # By topic: the route, and what it has.
        self._queues: dict[str, tuple[namesrv_pb2.TopicRoute, list[QueueRef]]] = {}
        self._absent: set[str] = set()  # topics without a broker, as logged
        self._reset: set[str] = set()  # broker groups where the group was reset
        # Allocated to this client and, by a list of its own, to one before it.
        self._contested: frozenset[QueueRef] = frozenset()
        self._unbalanced = asyncio.Event()  # something has changed since the last rebalance
        self._loop: asyncio.Task[None] | None = None

    @property
    def subscriptions(self) -> Mapping[str, Filter]:
        """The filters of the topics that are read."""
        return self._subscriptions

    @property
    def is_started(self) -> bool:
        """Whether it is a member, or about to be."""
        return self._loop is not None

    @property
    def retry_times_max(self) -> int | None:
        """How often the group's messages are tried again, as brokers say; None: not known."""
        return self._membership.known_retry_times_max

    def limit_tries(self, retry_times_max: int) -> None:
        """Before the start: tell the brokers after how many tries a message is a dead letter; below
        0 nothing.
        """
        self._membership.retry_times_max = retry_times_max

    def answer(self, answers: Answers) -> None:
        """Before the start: let brokers ask this client questions."""
        self._membership.answers = answers

    def start(self, tasks: Tasks) -> None:
        """Become a member, and divide the queues again and again."""
        self._tasks = tasks
        self._loop = tasks.start(self._rebalance_loop(), "rebalance")

    async def stop(self) -> None:
        """No queue comes or goes any more."""
        if self._loop is not None:
            await stop_all([self._loop])

    async def end_session(self) -> None:
        """The other members get the queues when this one leaves, though it has a session."""
        await self._membership.end_session()

    async def leave(self) -> None:
        """The other members get the queues, now or when the session ends."""
        await self._membership.leave()

    def subscribe_early(self, topic: str, wanted: Filter) -> None:
        """As :meth:`subscribe`, of a client that reads nothing yet."""
        self._routes.watch(topic)
        self._subscriptions[topic] = wanted
        self.look_again()

    async def subscribe(self, topic: str, wanted: Filter, *, waits: bool = True) -> None:
        """Read a topic, or read it by another filter. As :meth:`unsubscribe`."""
        if self._subscriptions.get(topic) == wanted:
            return
        self._routes.watch(topic)
        self._tell_absence(topic)
        changed = self._of(topic)
        self._subscriptions[topic] = wanted
        await self._give_up(changed, waits=waits)

    async def unsubscribe(self, topic: str, *, waits: bool = True) -> None:
        """Read a topic no more. What is read of it is given up; a caller that is cancelled, or does
        not wait (``waits``), changes nothing about that.
        """
        if self._subscriptions.pop(topic, None) is None:
            return
        self._absent.discard(topic)
        self._queues.pop(topic, None)
        await self._give_up(self._of(topic), waits=waits)

    async def _give_up(self, queues: list[QueueRef], *, waits: bool) -> None:
        async def give_up() -> None:
            await self._reader.revoke(queues)
            self.look_again()

        giving_up = self._tasks.start(give_up(), "give up")
        if waits:
            await asyncio.shield(giving_up)

    def _of(self, topic: str) -> list[QueueRef]:
        return [queue for queue in self._reader.reading if queue.topic == topic]

    def look_again(self) -> None:
        """Something has changed by which queues are divided."""
        self._unbalanced.set()

    def look_again_in(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._unbalanced.set)

    def route_changed(self, topic: str) -> None:
        """The route watcher has another route of a topic."""
        if topic in self._subscriptions:
            self.look_again()
            self._tell_absence(topic)

    def _tell_absence(self, topic: str) -> None:
        """A misspelt topic would be waited for in silence."""
        route = self._routes.get(topic)
        if route is None or topic.startswith(RETRY_PREFIX):  # that one is made when it is needed
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

    # --- resets -----------------------------------------------------------------------------------

    def _was_reset(self, broker_group: str) -> None:
        self._reset.add(broker_group)
        self.look_again()

    async def _follow_resets(self) -> None:
        """Goes on where the group was reset to. A broker that does not answer is asked again."""
        at, self._reset = self._reset, set()
        if not self._follows_resets:
            return
        queues = [queue for queue in self._reader.reading if queue.broker_group in at]
        if not queues:
            return
        try:
            positions = await self._calls.reset_positions(queues)
        except CometError as error:
            _log.info("reset not followed yet", extra=fields(group=self._calls.group, error=error))
            self._reset |= at
            self.look_again()
            return
        for queue, position in positions.items():
            if queue in self._reader.reading:
                await self._reader.reset(queue, position)

    # --- rebalance --------------------------------------------------------------------------------

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
        queues = {topic: self._queues_of(known[topic]) for topic in decided}
        mine = self._allocate(queues, decided)
        if mine is None:
            return
        mine = {queue for queue in mine if not self._membership.is_disabled(queue.broker_group)}
        await self._reader.revoke(sorted(self._reader.take_lost()))
        await self._begin(mine, decided)
        # A topic whose membership is unknown now keeps its queues: a broker that restarts is no
        # reason to stop.
        gone = [q for q in self._reader.reading if q not in mine and q.topic in decided]
        await self._reader.revoke(gone)
        self._membership.hold(self._held())

    def _queues_of(self, route: namesrv_pb2.TopicRoute) -> list[QueueRef]:
        """The readable queues, in order: looked up once for each route."""
        known = self._queues.get(route.topic)
        if known is None or known[0] is not route:
            known = self._queues[route.topic] = route, in_order(readable_queues(route))
        return known[1]

    def _allocate(
        self, queues: Mapping[str, Sequence[QueueRef]], members: Members
    ) -> set[QueueRef] | None:
        """The queues that this consumer is to read. None: the application's strategy failed, and
        all stays as it is.
        """
        if self._is_broadcasting:
            return {queue for some in queues.values() for queue in some}
        sharing = {
            topic: {client: one for client, one in some.items() if not one.is_broadcasting}
            for topic, some in members.items()
        }
        strategy = self._agreement.strategy(sharing, self._subscriptions, members != sharing)
        held = {client: one.held for some in sharing.values() for client, one in some.items()}
        self._contested = frozenset()
        if isinstance(strategy, Allocation):
            return allocate_topics(strategy, self._options.client_id, queues, sharing, held)
        try:
            mine = allocate_topics(strategy, self._options.client_id, queues, sharing, held)
            mine &= {queue for some in queues.values() for queue in some}
        except Exception as error:  # the application's: whatever it raises
            _log.error(
                "the allocation failed: this member keeps the queues that it has",
                extra=fields(group=self._calls.group, error=error),
                exc_info=error,
            )
            return None
        # What several want is for the first of them; the others tell that they want it, too.
        first = {
            queue
            for client, queues_held in held.items()
            if client < self._options.client_id
            for queue in queues_held
        }
        self._contested = frozenset(mine & first)
        loop = asyncio.get_running_loop()
        if self._agreement.check_readers(queues, sharing, loop.time()):
            self.look_again_in(self._options.handover_timeout_ms / 1000)
        return mine - first

    async def _begin(self, mine: set[QueueRef], decided: Members) -> None:
        """Reads those queues that no other member reads, and announces that it is about to read the
        others.
        """
        loop = asyncio.get_running_loop()
        reader = self._reader
        wanted = mine - set(reader.reading) - set(reader.leaving)
        self._handover.want(wanted, loop.time())
        self._membership.hold(self._held())
        free = (
            wanted
            if self._is_broadcasting
            else {q for q in wanted if self._handover.may_begin(q, decided[q.topic], loop.time())}
        )
        missed = await reader.begin(free) if free else set()
        self._handover.begun(free - missed)
        if missed:
            self.look_again_in(MISSED_S)
        if wanted - free:  # the broker says when they are free; or the time is over
            self.look_again_in(self._options.handover_timeout_ms / 1000)

    def _held(self) -> frozenset[QueueRef]:
        if self._is_broadcasting:
            return frozenset()
        reader = self._reader
        return self._contested.union(reader.reading, reader.leaving, self._handover.awaited)

"""One link to each broker group that holds wait for: arrivals come in, pulls go out. It leads to
the group's writer, or to a follower while the group has no writer.

A link watches the queues that holds wait for, and a little longer. When its watch breaks the link
finds a member again and watches all queues from the start, so it keeps nothing in between.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from cometmq.clock import Clock
from cometmq.errors import CometError, LimitExceeded, PeerUnavailable
from cometmq.format.record import first_store_time_ms
from cometmq.messaging.inline_messages import InlineMessages
from cometmq.rpc.background import Restarts
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.secret import SharedSecret
from cometmq.rpc.tasks import race, stop_all
from cometmq.rpc.ticks import tick
from cometmq.telemetry import ThrottledLog, fields
from cometmq.v1 import broker_pb2
from services.pullhold.answers import Answers
from services.pullhold.directory import Directory, Member
from services.pullhold.holds import Holds
from services.pullhold.inline_delivery import Deliveries, InlineBatch
from services.pullhold.metrics import HoldMetrics
from services.pullhold.model import ClusterQueue, Hold
from services.pullhold.peers import ArrivalStream, BrokerPeer, Change
from services.pullhold.pulls import Pulls

QUEUES_PER_QUESTION_MAX = 4_096
QUEUES_PER_CHANGE_MAX = 10_000  # in one request of a watch
# A maximum may overtake its arrival by the time that a busy event loop takes for one turn.
SUSPICION_S = 1.0
STALL_S = 0.1  # a sleep that takes so much longer shows that the loop stood still
SUSPICIONS_MAX = 30
BETTER_MEMBER_INTERVAL_S = 1.0
COLLECT_INTERVAL_S = 0.5
RECONNECT = BackoffPolicy(first_s=0.05, max_s=2.0)

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkPolicy:
    """See the options of the same names. ``secret`` is for the brokers' internal ports."""

    broker_groups_max: int
    pulls_per_broker_max: int
    safety_check_interval_s: float
    watch_linger_s: float
    secret: SharedSecret | None = None


class WatchChanges:
    """The changes that a link has still to send on its watch."""

    def __init__(self, holds: Holds) -> None:
        self.deliveries = Deliveries()
        self._holds = holds
        self._watched: dict[ClusterQueue, bool] = {}  # True = watch, False = stop watching
        self._inline: dict[ClusterQueue, None] = {}  # whose arrivals should carry messages
        self._changed = asyncio.Event()

    def watch(self, keys: Iterable[ClusterQueue]) -> None:
        """Asks for the queues' arrivals, and for their maxima now."""
        self._watched.update(dict.fromkeys(keys, True))
        self._changed.set()

    def unwatch(self, key: ClusterQueue) -> None:
        self._inline.pop(key, None)
        self._watched[key] = False
        self._changed.set()

    def watch_only(self, keys: Iterable[ClusterQueue]) -> None:
        """Starts a new watch, which has no queues yet."""
        self._watched.clear()
        self.watch(keys)

    def want_inline(self, hold: Hold) -> None:
        """Asks for arrivals with messages in a waiting hold's queue, if they can answer it."""
        if hold.limits is not None and hold.queue.want_inline():
            self._inline[hold.key] = None
            self._changed.set()

    def flush_deliveries(self) -> None:
        """Sends the deliveries without waiting for another change."""
        self._changed.set()

    async def send_on(self, stream: ArrivalStream) -> None:
        """Sends changes as they come; until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._watched or self._inline or self.deliveries:
                watched = _take_some(self._watched)
                # A queue is watched before its messages are asked for.
                inline = [] if self._watched else _take_some(self._inline)
                change = Change(
                    add=[key for key, wanted in watched if wanted],
                    remove=[key for key, wanted in watched if not wanted],
                    inline_wanted=[key for key, _ in inline],
                    delivered=self.deliveries.take(),
                )
                await stream.change(change)


def _take_some(changes: dict[ClusterQueue, T]) -> list[tuple[ClusterQueue, T]]:
    some = list(itertools.islice(changes.items(), QUEUES_PER_CHANGE_MAX))
    for key, _ in some:
        del changes[key]
    return some


class Link:
    """A broker group. Belongs to the event loop; :meth:`run` is its task."""

    def __init__(
        self,
        broker_group: str,
        holds: Holds,
        answers: Answers,
        directory: Directory,
        policy: LinkPolicy,
        clock: Clock,
        metrics: HoldMetrics,
        unreached: ThrottledLog,
    ) -> None:
        self.broker_group = broker_group
        self.address = ""  # of the watched member
        self.error: CometError = PeerUnavailable(f"{broker_group[:127]!r} was not reached yet")
        self._holds = holds
        self._answers = answers
        self._directory = directory
        self._policy = policy
        self._clock = clock
        self._metrics = metrics
        self._unreached = unreached
        self._was_watched = False
        self.changes = WatchChanges(holds)
        self.pulls = Pulls(
            holds,
            answers,
            policy.pulls_per_broker_max,
            clock,
            metrics,
            on_waiting=self.changes.want_inline,
        )

    def collect_idle(self) -> bool:
        """Stops watching idle queues and reports deliveries. True: the link has nothing to do."""
        now_s, linger_s = self._clock.monotonic_s(), self._policy.watch_linger_s
        for key in self._holds.queues.drop_idle(self.broker_group, now_s, linger_s):
            self.changes.unwatch(key)
        has_deliveries = bool(self.changes.deliveries) and bool(self.address)
        if has_deliveries:
            self.changes.flush_deliveries()
        return not has_deliveries and not self._holds.queues.of(self.broker_group)

    async def run(self) -> None:
        """Watches a member of the group; until cancelled."""
        backoff = Backoff(RECONNECT, random.Random())
        while True:
            try:
                member = await self._directory.member(self.broker_group)
                try:
                    async with BrokerPeer(self.broker_group, member, self._policy.secret) as peer:
                        await self._watch_member(peer, member, backoff)
                except CometError:
                    self._directory.failed(member)
                    raise
            except CometError as error:
                self.error = error
                if self._was_watched:
                    _log.info("broker lost", extra=fields(group=self.broker_group, error=error))
                else:  # a client may name any group
                    self._unreached.log(
                        "broker group not reached", group=self.broker_group, error=error
                    )
            await asyncio.sleep(backoff.next_s())

    async def _watch_member(self, peer: BrokerPeer, member: Member, backoff: Backoff) -> None:
        """Watches ``member`` until the watch breaks or another member is better."""
        self.address = member.address
        self.pulls.connect(peer)
        self.changes.watch_only(self._holds.queues.of(self.broker_group))
        stream = peer.watch()
        try:
            await race(
                self._read(stream, backoff),
                self.changes.send_on(stream),
                self._check_maxima(peer),
                self._until_better(member),
            )
        finally:
            self.address = ""
            self.pulls.disconnect()
            self._holds.lose_watch(self.broker_group, self._clock.monotonic_s())
            stream.cancel()
            await self.pulls.finish()

    async def _read(self, stream: ArrivalStream, backoff: Backoff) -> None:
        updates = await stream.read()
        self._was_watched = True
        backoff.reset()
        with self._metrics.watch_streams.track_inprogress():
            while True:
                for one in updates:
                    if one.error is None:
                        self._wake(
                            one.key, one.generation, one.maximum, one.codes, one.inline_messages
                        )
                        for returned in one.returns:
                            self._wake_returned(one.key, *returned)
                        continue
                    for hold in self._holds.end_queue(one.key, self._clock.monotonic_s()):
                        self._answers.send_error(hold, one.error)
                updates = await stream.read()

    def _wake(
        self,
        key: ClusterQueue,
        generation: int,
        maximum: int,
        codes: frozenset[int] = frozenset(),
        inline_messages: InlineMessages | None = None,
    ) -> None:
        now_s = self._clock.monotonic_s()
        woken = self._holds.observe_arrival(key, generation, maximum, codes, now_s)
        if not woken:
            return
        self._metrics.wakes.inc(len(woken))
        if inline_messages is not None:
            batch = InlineBatch(generation, inline_messages)
            woken = [hold for hold in woken if not self._answer_inline(batch, hold)]
        self.pulls.pull(woken)

    def _wake_returned(self, key: ClusterQueue, group: str, number: int, count: int) -> None:
        now_s = self._clock.monotonic_s()
        woken = self._holds.observe_return(key, group, number, count, now_s)
        self._metrics.wakes.inc(len(woken))
        self.pulls.pull(woken)

    def _answer_inline(self, batch: InlineBatch, hold: Hold) -> bool:
        """Answers a hold out of an arrival; False: only a pull can answer it."""
        reply = None if self._answers.full(hold) else batch.reply(hold)
        if reply is None:
            return False
        response = reply.response
        if response.status == broker_pb2.PULL_STATUS_FOUND:
            self.changes.deliveries.add(hold, response)
            self._metrics.direct.inc()
            self._metrics.delivery.answered(first_store_time_ms(response.records))
            self.pulls.found(hold, reply, batch.begun_ns)
        else:
            position = response.next_position
            self.pulls.advance(hold, position.generation, position.offset)
        return True

    async def _check_maxima(self, peer: BrokerPeer) -> None:
        """The safety check asks for all maxima now and then. It finds lost arrivals, which are
        faults of ours, and a broker that has gone although its stream is open.
        """
        while True:
            await tick(self._policy.safety_check_interval_s)
            keys = self._holds.queues.waited_for(self.broker_group)
            suspects: list[tuple[ClusterQueue, int, int]] = []
            for first in range(0, len(keys), QUEUES_PER_QUESTION_MAX):
                maxima = await peer.maxima(keys[first : first + QUEUES_PER_QUESTION_MAX])
                suspects += [one for one in maxima if self._holds.queues.behind(*one)]
            if suspects:
                await self._give_arrivals_time()
            for suspect in suspects:
                if self._holds.queues.behind(*suspect):
                    _log.error("an arrival was lost", extra=fields(queue=suspect[0]))
                    self._metrics.safety_finds.inc()
                    self._wake(*suspect)

    async def _give_arrivals_time(self) -> None:
        """Waits for SUSPICION_S in which the event loop ran in time. A loop without CPU reads
        arrivals late, too; each such stall begins the wait again.
        """
        for _ in range(SUSPICIONS_MAX):
            begun_s = self._clock.monotonic_s()
            await asyncio.sleep(SUSPICION_S)
            if self._clock.monotonic_s() - begun_s < SUSPICION_S + STALL_S:
                return

    async def _until_better(self, member: Member) -> None:
        """Returns when a better member than ``member`` answers: a writer where the group had none,
        or a newer one.
        """
        group, directory = self.broker_group, self._directory
        while True:
            await tick(BETTER_MEMBER_INTERVAL_S)
            try:
                better = await directory.member(group)
            except CometError:  # name servers know no member, or none answers
                continue
            # A writer of another epoch is another process, even if it has the same name.
            same = better.epoch == member.epoch or not better.writes
            if better.address == member.address and same:
                continue
            try:
                async with BrokerPeer(group, better, self._policy.secret) as peer:
                    await peer.maxima([])
            except CometError:
                directory.failed(better)
                continue
            directory.answered(better)
            _log.info(
                "another member is watched", extra=fields(group=group, address=better.address)
            )
            return


class Brokers:
    """All links; a link lives as long as holds wait for its queues."""

    def __init__(
        self,
        holds: Holds,
        answers: Answers,
        directory: Directory,
        policy: LinkPolicy,
        clock: Clock,
        metrics: HoldMetrics,
        restarts: Restarts,
    ) -> None:
        self._restarts = restarts
        unreached = ThrottledLog(_log, logging.INFO, clock)
        self._parts = (holds, answers, directory, policy, clock, metrics, unreached)
        self._links_max = policy.broker_groups_max
        self._links: dict[str, Link] = {}
        self._linked = asyncio.Event()  # there is a link
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None  # of the links' tasks, while `run` runs

    def link(self, broker_group: str) -> Link:
        """The group's link, made if it is missing. LimitExceeded. Only while :meth:`run` runs."""
        link = self._links.get(broker_group)
        if link is None:
            assert self._group is not None
            if len(self._links) >= self._links_max:
                raise LimitExceeded(f"{self._links_max} broker groups are watched")
            link = self._links[broker_group] = Link(broker_group, *self._parts)
            # A fault that one broker group meets keeps no other one from being watched.
            self._tasks[broker_group] = self._group.create_task(
                self._restarts.keep("broker link", link.run)
            )
            self._linked.set()
        return link

    @property
    def pulls_count(self) -> int:
        """Pulls in flight."""
        return sum(len(link.pulls) for link in list(self._links.values()))

    async def run(self) -> None:
        """Ends the links that have nothing to do; until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            while True:
                await self._linked.wait()
                await tick(COLLECT_INTERVAL_S)
                for broker_group, link in list(self._links.items()):
                    if link.collect_idle():
                        await self._close(broker_group)

    async def _close(self, broker_group: str) -> None:
        link = self._links.pop(broker_group)
        if not self._links:
            self._linked.clear()
        await link.pulls.close()
        await stop_all([self._tasks.pop(broker_group)])

    async def close(self) -> None:
        """Ends all links."""
        for broker_group in list(self._links):
            await self._close(broker_group)

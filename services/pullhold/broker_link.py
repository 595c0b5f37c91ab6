"""One link to each broker group that holds wait for: its arrivals in, pulls out. To its writer, or
to a follower while there is none, until there is one again.

A link watches the queues that holds wait for, and a little longer. When its watch breaks it looks
for a member again and watches all of them anew, so nothing has to be remembered in between.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from cometmq.clock import Clock
from cometmq.errors import CometError, LimitExceeded, PeerUnavailable
from cometmq.format.record import first_store_time_ms
from cometmq.messaging.inline_messages import InlineMessages
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.secret import SharedSecret
from cometmq.rpc.tasks import stop_all
from cometmq.telemetry import fields
from cometmq.v1 import broker_pb2
from services.pullhold.answers import Answers
from services.pullhold.directory import Directory, Member
from services.pullhold.holds import Holds
from services.pullhold.inline_delivery import Deliveries, InlineBatch
from services.pullhold.metrics import HoldMetrics
from services.pullhold.model import ClusterQueue, Hold
from services.pullhold.peers import ArrivalStream, ArrivalUpdate, BrokerPeer, Change
from services.pullhold.pulls import Pulls

QUEUES_PER_QUESTION_MAX = 4_096
QUEUES_PER_CHANGE_MAX = 10_000  # of one request of a watch
# A maximum asked for may overtake the arrival that tells of it, by the time of a busy loop's turn.
SUSPICION_S = 1.0
BETTER_MEMBER_INTERVAL_S = 1.0
TEND_INTERVAL_S = 0.5
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
    """What a link has still to send on its watch."""

    def __init__(self, holds: Holds) -> None:
        self.deliveries = Deliveries()
        self._holds = holds
        self._watched: dict[ClusterQueue, bool] = {}  # True = watch it, False = no longer
        self._inline: dict[ClusterQueue, None] = {}  # messages are to come with the next arrivals
        self._changed = asyncio.Event()

    def watch(self, keys: Iterable[ClusterQueue]) -> None:
        """Ask for these queues' arrivals."""
        self._watched.update(dict.fromkeys(keys, True))
        self._changed.set()

    def unwatch(self, key: ClusterQueue) -> None:
        self._inline.pop(key, None)
        self._watched[key] = False
        self._changed.set()

    def watch_only(self, keys: Iterable[ClusterQueue]) -> None:
        """A new watch: it knows of nothing yet."""
        self._watched.clear()
        self.watch(keys)

    def want_inline(self, hold: Hold) -> None:
        """A hold waits: its messages are to come with their arrival, where that will do."""
        if hold.limits is not None and self._holds.queues[hold.key].want_inline():
            self._inline[hold.key] = None
            self._changed.set()

    def flush_deliveries(self) -> None:
        """Send what was delivered without waiting for another change."""
        self._changed.set()

    async def send_on(self, stream: ArrivalStream) -> None:
        """Send changes as they come; until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while change := self._next_change():
                await stream.change(change)

    def _next_change(self) -> Change:
        """What one request takes; nothing is wanted of a queue before it is watched."""
        some = _take_some(self._watched)
        return Change(
            add=[key for key, wanted in some if wanted],
            remove=[key for key, wanted in some if not wanted],
            inline_wanted=[] if self._watched else [key for key, _ in _take_some(self._inline)],
            delivered=self.deliveries.take(),
        )


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
    ) -> None:
        self.broker_group = broker_group
        self.address = ""  # of the member that is watched now
        self.error: CometError = PeerUnavailable(f"{broker_group[:127]!r} was not reached yet")
        self._holds = holds
        self._answers = answers
        self._directory = directory
        self._policy = policy
        self._clock = clock
        self._metrics = metrics
        self._changes = WatchChanges(holds)
        self.pulls = Pulls(
            holds,
            answers,
            policy.pulls_per_broker_max,
            clock,
            metrics,
            on_waiting=self._changes.want_inline,
        )

    # --- what holds ask for -----------------------------------------------------------------------

    def watch(self, key: ClusterQueue) -> None:
        """Ask how the queue stands, now and on every change."""
        self._changes.watch([key])

    def want_inline(self, hold: Hold) -> None:
        """See :meth:`WatchChanges.want_inline`."""
        self._changes.want_inline(hold)

    def tend(self) -> bool:
        """Stop watching what no hold waits for, report what was delivered; True when nothing is
        left to do.
        """
        now_s, linger_s = self._clock.monotonic_s(), self._policy.watch_linger_s
        for key in self._holds.queues.drop_idle(self.broker_group, now_s, linger_s):
            self._changes.unwatch(key)
        has_deliveries = bool(self._changes.deliveries) and bool(self.address)
        if has_deliveries:
            self._changes.flush_deliveries()
        return not has_deliveries and not self._holds.queues.of(self.broker_group)

    # --- the watch --------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff(RECONNECT, random.Random())
        while True:
            try:
                member = await self._directory.member(self.broker_group)
                try:
                    async with BrokerPeer(self.broker_group, member, self._policy.secret) as peer:
                        await self._stay(peer, member, backoff)
                except CometError:
                    self._directory.failed(member)
                    raise
            except CometError as error:
                self.error = error
                _log.info("broker lost", extra=fields(group=self.broker_group, error=error))
            await asyncio.sleep(backoff.next_s())

    async def _stay(self, peer: BrokerPeer, member: Member, backoff: Backoff) -> None:
        """Until the watch breaks, or another member is to be watched."""
        self.address = member.address
        self.pulls.connect(peer)
        self._changes.watch_only(self._holds.queues.of(self.broker_group))
        stream = peer.watch()
        parts = [
            self._read(stream, backoff),
            self._changes.send_on(stream),
            self._check(peer),
            until_better(self._directory, self.broker_group, member, self._policy.secret),
        ]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            self.address = ""
            self.pulls.disconnect()
            self._holds.lose_watch(self.broker_group, self._clock.monotonic_s())
            stream.cancel()
            await stop_all(tasks)
            await self.pulls.finish()

    async def _read(self, stream: ArrivalStream, backoff: Backoff) -> None:
        told = await stream.read()
        backoff.reset()
        with self._metrics.watch_streams.track_inprogress():
            while True:
                self._take(told)
                told = await stream.read()

    def _take(self, told: Iterable[ArrivalUpdate]) -> None:
        for one in told:
            if one.error is None:
                self._wake(one.key, one.generation, one.maximum, one.codes, one.inline_messages)
                continue
            for hold in self._holds.end_queue(one.key, self._clock.monotonic_s()):
                self._answers.send_error(hold, one.error)

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

    def _answer_inline(self, batch: InlineBatch, hold: Hold) -> bool:
        """Answer a hold with what came; False: it has to be pulled for."""
        response = None if self._answers.full(hold) else batch.response(hold)
        if response is None:
            return False
        if response.status == broker_pb2.PULL_STATUS_FOUND:
            self._changes.deliveries.add(hold, response)
            self._metrics.direct.inc()
            self._metrics.delivery.answered(first_store_time_ms(response.records))
            self._answers.found(hold, response)
        else:
            position = response.next_position
            self.pulls.advance(hold, position.generation, position.offset)
        return True

    # --- the safety check -------------------------------------------------------------------------

    async def _check(self, peer: BrokerPeer) -> None:
        """Ask for all maxima now and then: what is found was lost on its way, which must not be. A
        broker that does not answer is not there, whatever its stream pretends.
        """
        while True:
            await asyncio.sleep(self._policy.safety_check_interval_s)
            keys = self._holds.queues.waited_for(self.broker_group)
            suspects: list[tuple[ClusterQueue, int, int]] = []
            for first in range(0, len(keys), QUEUES_PER_QUESTION_MAX):
                maxima = await peer.maxima(keys[first : first + QUEUES_PER_QUESTION_MAX])
                suspects += [one for one in maxima if self._holds.queues.behind(*one)]
            if suspects:
                await asyncio.sleep(SUSPICION_S)
            for suspect in suspects:
                if self._holds.queues.behind(*suspect):
                    _log.error("an arrival was lost", extra=fields(queue=suspect[0]))
                    self._metrics.safety_finds.inc()
                    self._wake(*suspect)


async def until_better(
    directory: Directory, broker_group: str, member: Member, secret: SharedSecret | None
) -> None:
    """Returns when a member other than ``member`` is the one to watch, and answers: a writer where
    there was none, or a newer one.
    """
    while True:
        await asyncio.sleep(BETTER_MEMBER_INTERVAL_S)
        with suppress(CometError):  # name servers know no better one, or none answers
            better = await directory.member(broker_group)
            # A writer of another epoch is another process, even if it has the same name.
            same = better.epoch == member.epoch or not better.writes
            if better.address == member.address and same:
                continue
            if await _answers(directory, broker_group, better, secret):
                _log.info(
                    "another member is watched",
                    extra=fields(group=broker_group, address=better.address),
                )
                return


async def _answers(
    directory: Directory, broker_group: str, member: Member, secret: SharedSecret | None
) -> bool:
    async with BrokerPeer(broker_group, member, secret) as peer:
        try:
            await peer.maxima([])
        except CometError:
            directory.failed(member)
            return False
    directory.answered(member)
    return True


class Brokers:
    """All links; a link lives as long as its queues are waited for."""

    def __init__(
        self,
        holds: Holds,
        answers: Answers,
        directory: Directory,
        policy: LinkPolicy,
        clock: Clock,
        metrics: HoldMetrics,
    ) -> None:
        self._parts = (holds, answers, directory, policy, clock, metrics)
        self._links_max = policy.broker_groups_max
        self._links: dict[str, Link] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None  # of the links' tasks, while `run` runs

    def link(self, broker_group: str) -> Link:
        """The group's link, made when there is none. LimitExceeded. Only while :meth:`run` runs."""
        link = self._links.get(broker_group)
        if link is None:
            assert self._group is not None
            if len(self._links) >= self._links_max:
                raise LimitExceeded(f"{self._links_max} broker groups are watched")
            link = self._links[broker_group] = Link(broker_group, *self._parts)
            self._tasks[broker_group] = self._group.create_task(link.run())
        return link

    def why_unreachable(self, broker_group: str) -> CometError:
        """What to tell holds of a group that cannot be reached."""
        return self._links[broker_group].error

    @property
    def pulls_count(self) -> int:
        """Pulls in flight."""
        return sum(len(link.pulls) for link in list(self._links.values()))

    async def run(self) -> None:
        """Tends the links, ends those that have nothing to do; until cancelled, or until a link
        fails in a way that it must not.
        """
        async with asyncio.TaskGroup() as self._group:
            while True:
                await asyncio.sleep(TEND_INTERVAL_S)
                for broker_group, link in list(self._links.items()):
                    if link.tend():
                        await self._close(broker_group)

    async def _close(self, broker_group: str) -> None:
        link = self._links.pop(broker_group)
        await link.pulls.close()
        await stop_all([self._tasks.pop(broker_group)])

    async def close(self) -> None:
        """End all links."""
        for broker_group in list(self._links):
            await self._close(broker_group)

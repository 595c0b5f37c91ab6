"""One link to each broker group that holds wait for: its arrivals in, pulls out. To its writer, or
to a follower while there is none, until there is one again.

A link watches the queues that somebody waits for, and a little longer. When its watch breaks it
looks for a member anew and is told everything again, so nothing has to be remembered in between.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from cometmq.clock import Clock
from cometmq.errors import CometError, LimitExceeded, PeerUnavailable
from cometmq.format.record import first_store_time_ms
from cometmq.messaging.news import News
from cometmq.messaging.pull import BYTES_MAX
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.secret import SharedSecret
from cometmq.telemetry import fields
from cometmq.v1 import broker_pb2
from services.pullhold.answers import Answers
from services.pullhold.directory import Directory, Member
from services.pullhold.holds import Holds
from services.pullhold.inline_delivery import Deliveries, Handout
from services.pullhold.lookout import until_better
from services.pullhold.metrics import HoldMetrics
from services.pullhold.model import Hold, HoldState, QueueKey
from services.pullhold.peers import (
    ArrivalStream,
    BrokerPeer,
    Change,
    Told,
)

QUEUES_PER_QUESTION_MAX = 4_096
QUEUES_PER_CHANGE_MAX = 10_000  # of one request of a watch
# Answers on their way from a broker: as large as their queue's last one, or as their pull allows.
COMING_BYTES_MAX = 16 * 1024 * 1024
# A maximum asked for may overtake the arrival that tells of it, by the time of a busy loop's turn.
SUSPICION_S = 1.0
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
        self._peer: BrokerPeer | None = None
        self._changes: dict[QueueKey, bool] = {}  # not yet said on the watch: True = watch it
        self._wants: dict[QueueKey, None] = {}  # not yet said: messages are to come with arrivals
        self._deliveries = Deliveries()  # not yet said either
        self._changed = asyncio.Event()
        self._wanted: deque[Hold] = deque()  # PULLING, in the order in which they woke
        self._pulls: set[asyncio.Task[None]] = set()
        self._coming_bytes = 0

    # --- watching ---------------------------------------------------------------------------------

    def watch(self, key: QueueKey) -> None:
        """Ask how the queue stands, now and on every change."""
        self._change(key, True)

    def want_news(self, hold: Hold) -> None:
        """A hold waits: what it waits for is to come with its arrival, where that will do."""
        if hold.limits is not None and self._holds.queues[hold.key].want():
            self._wants[hold.key] = None
            self._changed.set()

    def tend(self) -> bool:
        """Stop watching what nobody waits for, tell what was delivered; True when nothing is left
        to do.
        """
        now_s, linger_s = self._clock.monotonic_s(), self._policy.watch_linger_s
        for key in self._holds.queues.drop_idle(self.broker_group, now_s, linger_s):
            self._wants.pop(key, None)
            self._change(key, False)
        told = not self._deliveries or self._peer is None
        if not told:
            self._changed.set()
        return told and not self._holds.queues.of(self.broker_group)

    def _change(self, key: QueueKey, wanted: bool) -> None:
        self._changes[key] = wanted
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff(RECONNECT, random.Random())
        while True:
            try:
                await self._connect(backoff)
            except CometError as error:
                self.error = error
                _log.info("broker lost", extra=fields(group=self.broker_group, error=error))
            await asyncio.sleep(backoff.next_s())

    async def _connect(self, backoff: Backoff) -> None:
        member = await self._directory.member(self.broker_group)
        try:
            async with BrokerPeer(self.broker_group, member, self._policy.secret) as peer:
                await self._stay(peer, member, backoff)
        except CometError:
            self._directory.failed(member)
            raise

    async def _stay(self, peer: BrokerPeer, member: Member, backoff: Backoff) -> None:
        """Until the watch breaks, or another member is to be watched."""
        self._peer, self.address = peer, member.address
        self._changes = dict.fromkeys(self._holds.queues.of(self.broker_group), True)
        self._changed.set()
        stream = peer.watch()
        parts = [
            self._read(stream, backoff),
            self._tell(stream),
            self._check(peer),
            until_better(self._directory, self.broker_group, member, self._policy.secret),
        ]
        tasks = [asyncio.create_task(part) for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            self._peer, self.address = None, ""
            self._holds.lost(self.broker_group, self._clock.monotonic_s())
            stream.cancel()
            await _end(tasks)
            if self._pulls:  # they have deadlines, and holds to answer
                await asyncio.wait(list(self._pulls))

    async def _read(self, stream: ArrivalStream, backoff: Backoff) -> None:
        told = await stream.read()
        backoff.reset()
        with self._metrics.watch_streams.track_inprogress():
            while True:
                self._take(told)
                told = await stream.read()

    def _take(self, told: Iterable[Told]) -> None:
        for one in told:
            if one.error is None:
                self._wake(one.key, one.generation, one.maximum, one.codes, one.news)
                continue
            for hold in self._holds.gone(one.key, self._clock.monotonic_s()):
                self._answers.send_error(hold, one.error)

    def _wake(
        self,
        key: QueueKey,
        generation: int,
        maximum: int,
        codes: frozenset[int] = frozenset(),
        news: News | None = None,
    ) -> None:
        woken = self._holds.told(key, generation, maximum, codes, self._clock.monotonic_s())
        if not woken:
            return
        self._metrics.wakes.inc(len(woken))
        if news is not None:
            handout = Handout(generation, news)
            woken = [hold for hold in woken if not self._hand_out(handout, hold)]
        self.pull(woken)

    def _hand_out(self, handout: Handout, hold: Hold) -> bool:
        """Answer a hold with what came; False: it has to be pulled for."""
        response = None if self._answers.full(hold) else handout.response(hold)
        if response is None:
            return False
        if response.status == broker_pb2.PULL_STATUS_FOUND:
            self._deliveries.add(hold, response)
            self._metrics.direct.inc()
            self._metrics.delivery.answered(first_store_time_ms(response.records))
            self._answers.found(hold, response)
        else:
            position = response.next_position
            self._continue(hold, position.generation, position.offset)
        return True

    async def _tell(self, stream: ArrivalStream) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while change := self._next_change():
                await stream.change(change)

    def _next_change(self) -> Change:
        """What one request takes; nothing is wanted of a queue before it is watched."""
        some = _take_some(self._changes)
        return Change(
            add=[key for key, wanted in some if wanted],
            remove=[key for key, wanted in some if not wanted],
            want=[] if self._changes else [key for key, _ in _take_some(self._wants)],
            delivered=self._deliveries.take(),
        )

    # --- the safety check -------------------------------------------------------------------------

    async def _check(self, peer: BrokerPeer) -> None:
        """Ask for all maxima now and then: what is found was lost on its way, which must not be. A
        broker that does not answer is not there, whatever its stream pretends.
        """
        while True:
            await asyncio.sleep(self._policy.safety_check_interval_s)
            keys = self._holds.queues.waited_for(self.broker_group)
            suspects: list[tuple[QueueKey, int, int]] = []
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

    # --- pulling ----------------------------------------------------------------------------------

    @property
    def pulls_count(self) -> int:
        """Pulls in flight."""
        return len(self._pulls)

    def pull(self, holds: Iterable[Hold]) -> None:
        """Pull for these, which are PULLING, each when its turn comes."""
        self._wanted.extend(holds)
        self._pump()

    def _pump(self) -> None:
        while self._wanted and len(self._pulls) < self._policy.pulls_per_broker_max:
            hold = self._wanted.popleft()
            if hold.state is HoldState.DONE:
                continue
            if self._peer is None:  # it is to be told of the queue again
                self._continue(hold, hold.generation, hold.offset)
            elif self._answers.full(hold):  # its client pulls when it has the time
                self._answers.nothing(hold)
            else:
                size_bytes = self._likely_bytes(hold)
                if self._pulls and self._coming_bytes + size_bytes > COMING_BYTES_MAX:
                    self._wanted.appendleft(hold)
                    return
                task = asyncio.create_task(self._pull(self._peer, hold))
                self._pulls.add(task)
                self._coming_bytes += size_bytes
                task.add_done_callback(partial(self._pulled, size_bytes))

    def _likely_bytes(self, hold: Hold) -> int:
        usual_bytes = self._holds.queues[hold.key].answer_bytes
        return BYTES_MAX if usual_bytes is None else usual_bytes

    def _pulled(self, size_bytes: int, task: asyncio.Task[None]) -> None:
        self._pulls.discard(task)
        self._coming_bytes -= size_bytes
        if not task.cancelled():
            task.result()
        self._pump()

    async def _pull(self, peer: BrokerPeer, hold: Hold) -> None:
        request: broker_pb2.PullRequest = hold.request
        request.position.generation, request.position.offset = hold.generation, hold.offset
        self._metrics.pulls.inc()
        try:
            response = await peer.pull(request)
        except CometError as error:
            self._answers.failed(hold, error)
            return
        if (queue := self._holds.queues.find(hold.key)) is not None:
            queue.answer_bytes = max(response.ByteSize(), queue.answer_bytes or 0)
        if hold.state is HoldState.DONE:  # its time was over first, or it was taken back
            return
        if response.status in (broker_pb2.PULL_STATUS_FOUND, broker_pb2.PULL_STATUS_OFFSET_MOVED):
            self._answers.found(hold, response)
        else:
            position = response.next_position
            self._continue(hold, position.generation, position.offset)

    def _continue(self, hold: Hold, generation: int, offset: int) -> None:
        state = self._holds.pulled(hold, generation, offset, self._clock.monotonic_s())
        if state is HoldState.PULLING:
            self._wanted.append(hold)
        elif state is HoldState.DONE:
            self._answers.nothing(hold)
        else:
            self.want_news(hold)

    async def close(self) -> None:
        """End the pulls; nobody waits for what they find any more."""
        await _end(list(self._pulls))


def _take_some(changes: dict[QueueKey, T]) -> list[tuple[QueueKey, T]]:
    some = list(itertools.islice(changes.items(), QUEUES_PER_CHANGE_MAX))
    for key, _ in some:
        del changes[key]
    return some


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
        return sum(link.pulls_count for link in list(self._links.values()))

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
        await link.close()
        await _end([self._tasks.pop(broker_group)])

    async def close(self) -> None:
        """End all links."""
        for broker_group in list(self._links):
            await self._close(broker_group)

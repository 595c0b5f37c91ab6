"""Routes as they are now: one watch stream to one name server at a time, the next one when it
fails.

A route once known is not forgotten because a name server that has just started knows little yet: a
broker group that a stream has not sent stays in a topic's route until it was missing for longer
than brokers need to register. Without any name server the last known routes stay; a group whose
writer does not answer then is asked itself who writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.inquiry import describe
from cometmq.client.cluster.routing import (
    AUTO_CREATE_TOPIC,
    by_their_own_words,
    cluster,
    with_groups,
    with_members,
    with_order_of,
)
from cometmq.client.names import check_topic
from cometmq.client.namespaces import Namespace
from cometmq.clock import Clock, SystemClock
from cometmq.errors import CometError, LimitExceeded, NotWriter, PeerUnavailable, TopicNotFound
from cometmq.rpc.interceptors import is_not_served
from cometmq.rpc.retry import Backoff
from cometmq.rpc.streams import Stream, read, write
from cometmq.rpc.tasks import Tasks, stop_all, wait_at_most
from cometmq.telemetry import fields, logger
from cometmq.v1 import common_pb2, namesrv_pb2

WATCHED_TOPICS_MAX = 10_000
MISSING_S_MAX = 45.0  # brokers register each 30 s
TELL_EVERY_S = 60.0  # that no name server answers
DOUBT_AFTER_S = 5.0  # how long a name server is believed whatever comes of it
ANSWER_S_MAX = 4.0  # a name server that is asked answers in that time, or is left
SILENCE_S = 1.0  # so long a name server is waited for before members are asked

ORDER = ""  # in place of a broker group: the fixed queues of an ordered topic

RouteStream: TypeAlias = "Stream[namesrv_pb2.WatchRoutesRequest, namesrv_pb2.WatchRoutesResponse]"

_log = logger(__name__)


class RouteWatcher:
    """The routes of the topics that a client uses. ``on_change`` is called with a topic whenever
    its route changes.
    """

    def __init__(
        self,
        connections: Connections,
        backoff: Backoff,
        on_change: Callable[[str], None],
        *,
        clock: Clock | None = None,
        namespace: Namespace | None = None,
    ) -> None:
        self._namespace = namespace or Namespace()
        self._connections = connections
        self._backoff = backoff
        self._on_change = on_change
        self._clock = clock or SystemClock()
        self._routes: dict[str, namesrv_pb2.TopicRoute] = {}  # sent last comes last
        # of the routes, by broker group
        self._members: dict[str, Sequence[namesrv_pb2.Member]] = {}
        self._absent: set[str] = set()  # topics that no broker had, at some time
        self._epochs: dict[str, int] = {}  # of writers, by address
        # (topic, broker group) that no stream has any more, since when
        self._missing: dict[tuple[str, str], float] = {}
        self._heard = False  # something, in this round of the name servers
        self._silence_told_s: float | None = None
        self._failed: CometError | None = None  # with what the last name server was left
        self._has_answer = asyncio.Event()  # a name server has answered since it was last asked
        self._doubted = asyncio.Event()
        self._unreached: set[str] = set()  # broker groups whose writers do not answer
        self._unreached_more = asyncio.Event()
        self._topics: dict[str, None] = {}  # all watched, in the order asked for
        self._unsent: list[str] = []  # not yet asked for on the present stream
        self._wake = asyncio.Event()  # there is something unsent
        self._changed = asyncio.Event()  # set and replaced at every change

    def start(self, tasks: Tasks) -> None:
        tasks.start(self._run(), "watch routes")
        tasks.start(self._ask_members(), "ask members")

    def watch(self, topic: str) -> None:
        """Asks for the topic's route from now on. TopicNameInvalid: with its namespace it is no
        name, and the name server would answer nothing more. LimitExceeded above 10,000 topics.
        """
        if topic in self._topics:
            return
        check_topic(self._namespace.wire(topic))
        if len(self._topics) >= WATCHED_TOPICS_MAX:
            raise LimitExceeded(f"A client watches at most {WATCHED_TOPICS_MAX} topics.")
        self._topics[topic] = None
        self._unsent.append(topic)
        self._wake.set()

    def get(self, topic: str) -> namesrv_pb2.TopicRoute | None:
        """The last known route; None = no answer yet. It may have no groups: nobody serves the
        topic.
        """
        return self._routes.get(topic)

    def was_absent(self, topic: str) -> bool:
        """Whether a name server has said, since the topic is watched, that no broker has it."""
        return topic in self._absent

    def members(self, broker_group: str) -> Sequence[namesrv_pb2.Member]:
        """The group's live members, as the last route has them."""
        return self._members.get(broker_group, ())

    def _look_up(self) -> dict[str, Sequence[namesrv_pb2.Member]]:
        missing: dict[str, Sequence[namesrv_pb2.Member]] = {}
        found: dict[str, Sequence[namesrv_pb2.Member]] = {}
        for topic, route in self._routes.items():
            for group in route.groups:
                name = group.broker_group
                (missing if (topic, name) in self._missing else found)[name] = group.members
        return missing | found

    def writing(self, broker_group: str) -> namesrv_pb2.Member | None:
        """The group's live writer."""
        members = self.members(broker_group)
        return next((m for m in members if m.role == common_pb2.MEMBER_ROLE_WRITER), None)

    def require_writer(self, broker_group: str) -> namesrv_pb2.Member:
        """As :meth:`writing`. PeerUnavailable when none is known."""
        member = self.writing(broker_group)
        if member is None:
            raise PeerUnavailable(f"Broker group {broker_group!r} has no live writer.")
        return member

    def writer(self, broker_group: str) -> str | None:
        """Its address."""
        member = self.writing(broker_group)
        return None if member is None else member.address

    async def until_deposed(self, member: namesrv_pb2.Member) -> None:
        """Waits until a writer of a newer epoch is known than ``member``, wherever it is: it is
        another process. Raises NotWriter. A machine that has gone closes no connection: this does.
        """
        while True:
            now = self.writing(member.broker_group)
            if now is not None and now.epoch > member.epoch:
                raise NotWriter(f"{now.address} writes for {member.broker_group!r} now")
            await self._changed.wait()

    def doubt(self, broker_group: str) -> None:
        """The route leads to no writer of the group: another name server may know more; if none
        answers, its members do.
        """
        self._doubted.set()
        self._unreached.add(broker_group)
        self._unreached_more.set()

    def cluster(self) -> str:
        """The cluster of the client's brokers, by any route; empty while none names it."""
        return next(filter(None, map(cluster, self._routes.values())), "")

    async def wait_change(self, timeout_s: float) -> bool:
        """Waits for any route to change; False when the time is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def wait_for(
        self, topic: str, timeout_s: float, *, or_auto_create: bool = False
    ) -> namesrv_pb2.TopicRoute:
        """The topic's route, or with ``or_auto_create`` the route by which a new topic is created,
        as soon as somebody serves it. When the time is over first: TopicNotFound, nobody does;
        PeerUnavailable, no name server has answered.
        """
        self.watch(topic)
        if or_auto_create:
            self.watch(AUTO_CREATE_TOPIC)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    route = self._served(topic, or_auto_create)
                    if route is not None:
                        return route
                    await self._changed.wait()
        except TimeoutError:
            raise self._why_not(topic) from None

    def _served(self, topic: str, or_auto_create: bool) -> namesrv_pb2.TopicRoute | None:
        route = self._routes.get(topic)
        if route is not None and not route.groups and or_auto_create:
            route = self._routes.get(AUTO_CREATE_TOPIC)
        return route if route is not None and route.groups else None

    def _why_not(self, topic: str) -> CometError:
        if topic in self._routes:
            return TopicNotFound(f"no registered broker has the topic {topic}")
        failed = self._failed
        if failed is not None and is_not_served(failed):
            return PeerUnavailable(
                f"{self._connections.namesrv} is no name server, though a process answers there"
            ).advising(failed.advice)
        return PeerUnavailable(f"no name server answers: {self._connections.namesrv}").after(failed)

    async def _run(self) -> None:
        while True:
            self._heard = False
            failed: CometError | None = None
            for address in await self._connections.namesrv_addresses():
                try:
                    await self._watch_at(address)
                except CometError as error:
                    failed = self._failed = error
                    _log.info("name server left", extra=fields(address=address, error=error))
                await asyncio.sleep(self._backoff.next_s())
            if not self._heard and failed is not None:
                self._tell_silence(failed)

    def _tell_silence(self, error: CometError) -> None:
        """Log once a minute why a route is waited for."""
        now_s = self._clock.monotonic_s()
        if self._silence_told_s is None or now_s - self._silence_told_s >= TELL_EVERY_S:
            self._silence_told_s = now_s
            _log.warning(
                "no name server answers",
                extra=fields(namesrv=self._connections.namesrv, error=error),
            )

    def _answered(self, address: str) -> None:
        self._backoff.reset()
        self._has_answer.set()
        self._heard = True
        if self._silence_told_s is not None:
            self._silence_told_s = None
            _log.info("a name server answers again", extra=fields(address=address))

    async def _watch_at(self, address: str) -> None:
        """One stream, until it fails, or is doubted."""
        call = self._connections.name_server(address).WatchRoutes()
        self._ask_for_all()
        parts = [self._hear(call, address), self._ask(call), self._ask_again(), self._leave()]
        tasks = [asyncio.create_task(part, name="watch routes") for part in parts]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._has_answer.clear()
            call.cancel()
            await stop_all(tasks)
        for task in done:
            task.result()

    async def _hear(self, call: RouteStream, address: str) -> None:
        sent: set[tuple[str, str]] = set()
        while (response := await read(call)) is not None:
            self._answered(address)
            self._take(response.routes, sent)
        raise PeerUnavailable(f"The name server {address} ended the stream.")

    async def _ask_again(self) -> None:
        """While something is missing: a name server sends only what changes."""
        while True:
            await asyncio.sleep(MISSING_S_MAX / 3)
            if self._missing:
                self._ask_for_all()

    async def _leave(self) -> None:
        """When the writers that it names cannot be reached, and there are other name servers."""
        await asyncio.sleep(DOUBT_AFTER_S)
        self._doubted.clear()
        while True:
            await self._doubted.wait()
            if len(await self._connections.namesrv_addresses()) > 1:
                raise PeerUnavailable("it names writers that do not answer")
            await asyncio.sleep(DOUBT_AFTER_S)
            self._doubted.clear()

    def _ask_for_all(self) -> None:
        self._unsent = list(self._topics)
        self._wake.set()

    async def _ask(self, call: RouteStream) -> None:
        """Each question is answered, known topics too: silence is a dead name server's."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            topics, self._unsent = self._unsent, []
            if not topics:
                continue
            self._has_answer.clear()
            try:
                wire = map(self._namespace.wire, topics)
                await write(call, namesrv_pb2.WatchRoutesRequest(add=wire))
            except CometError:
                await asyncio.Event().wait()  # the reader gets the error
            if not await wait_at_most(self._has_answer, ANSWER_S_MAX):
                raise PeerUnavailable(f"No answer within {ANSWER_S_MAX:g} s.")

    async def _ask_members(self) -> None:
        """Where a writer is gone and no name server answers, its group is asked who writes, until
        somebody says so.
        """
        while True:
            await self._unreached_more.wait()
            self._unreached_more.clear()
            groups, self._unreached = self._unreached, set()
            self._has_answer.clear()
            self._unsent += list(self._topics)[:1]
            self._wake.set()
            if await wait_at_most(self._has_answer, SILENCE_S):
                await asyncio.sleep(SILENCE_S)  # not with each failure of each sender
                continue
            found = await asyncio.gather(*map(self._ask_group, groups))
            for group, writes in zip(groups, found, strict=True):
                if not writes:
                    self._unreached.add(group)
                    self._unreached_more.set()

    async def _ask_group(self, broker_group: str) -> bool:
        """Whether a member says that it writes."""
        described = await describe(self._connections, self.members(broker_group))
        known = list(self.members(broker_group))
        members = by_their_own_words(known, described)
        if not self._has_answer.is_set() and members != known:
            _log.info(
                "members have described themselves",
                extra=fields(group=broker_group, members=len(described)),
            )
            self._replace(
                with_members(route, broker_group, members)
                for route in self._routes.values()
                if any(group.broker_group == broker_group for group in route.groups)
            )
        return any(member.role == common_pb2.MEMBER_ROLE_WRITER for member in described)

    def _take(self, routes: Sequence[namesrv_pb2.TopicRoute], sent: set[tuple[str, str]]) -> None:
        for route in routes:
            route.topic = self._namespace.shown(route.topic)
        self._replace(
            self._completed(route, self._routes.get(route.topic), sent) for route in routes
        )

    def _replace(self, answered: Iterable[namesrv_pb2.TopicRoute]) -> None:
        """An answer that changes nothing wakes nobody: it must not cut short a back-off."""
        routes = list(answered)
        changed = [route for route in routes if route != self._routes.get(route.topic)]
        self._absent.update(route.topic for route in routes if not route.groups)
        for route in routes:
            self._routes.pop(route.topic, None)
            self._routes[route.topic] = route
        members = self._look_up()
        if not changed and members == self._members:
            return
        self._members = members
        self._forget_deposed()
        for route in changed:
            self._on_change(route.topic)
        self._changed.set()
        self._changed = asyncio.Event()

    def _forget_deposed(self) -> None:
        """A writer of another epoch is another process; its name may stand for another machine."""
        writers = {w.address: w.epoch for w in map(self.writing, self._members) if w}
        for address, epoch in writers.items():
            if self._epochs.get(address, epoch) < epoch:
                self._connections.forget(address)
        self._epochs.update(writers)

    def _completed(
        self,
        route: namesrv_pb2.TopicRoute,
        known: namesrv_pb2.TopicRoute | None,
        sent: set[tuple[str, str]],
    ) -> namesrv_pb2.TopicRoute:
        """The route, with groups that it lacks so far. ``sent``: what its stream has sent."""
        if route.order:
            sent.add((route.topic, ORDER))
        elif (route.topic, ORDER) not in sent:
            route = with_order_of(route, known)
        now_s = self._clock.monotonic_s()
        here = {(route.topic, group.broker_group) for group in route.groups}
        sent |= here
        for key in here:
            self._missing.pop(key, None)
        kept = []
        for group in known.groups if known is not None else ():
            key = route.topic, group.broker_group
            if key in here:
                continue
            since_s = self._missing.setdefault(key, now_s)
            if key in sent or now_s - since_s >= MISSING_S_MAX:
                del self._missing[key]
            else:
                kept.append(group)
        return with_groups(route, kept) if kept else route

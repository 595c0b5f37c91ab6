"""Routes as they are now: one watch stream to one name server at a time, the next one when it
fails.

A route once known is not forgotten because a name server that has just started knows nothing yet:
on a new stream an empty answer counts only after the same stream has told of the topic before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

from cometmq.client.connections import Connections, Stream, read, write
from cometmq.client.routing import AUTO_CREATE_TOPIC, cluster, writers
from cometmq.client.tasks import Tasks, stop_all
from cometmq.errors import CometError, LimitExceeded, PeerUnavailable, RouteNotFound
from cometmq.rpc.retry import Backoff
from cometmq.telemetry import fields
from cometmq.v1 import namesrv_pb2

WATCHED_TOPICS_MAX = 10_000

RouteStream: TypeAlias = "Stream[namesrv_pb2.WatchRoutesRequest, namesrv_pb2.WatchRoutesResponse]"

_log = logging.getLogger(__name__)


class RouteWatcher:
    """The routes of the topics that a client uses. ``on_change`` is called with a topic whenever
    its route changes.
    """

    def __init__(
        self, connections: Connections, backoff: Backoff, on_change: Callable[[str], None]
    ) -> None:
        self._connections = connections
        self._backoff = backoff
        self._on_change = on_change
        self._routes: dict[str, namesrv_pb2.TopicRoute] = {}
        self._topics: dict[str, None] = {}  # all watched, in the order asked for
        self._unsent: list[str] = []  # not yet asked for on the present stream
        self._wake = asyncio.Event()  # there is something unsent
        self._changed = asyncio.Event()  # set and replaced at every change

    def start(self, tasks: Tasks) -> None:
        tasks.start(self._run(), "watch routes")

    def watch(self, topic: str) -> None:
        """Asks for the topic's route from now on. LimitExceeded above 10,000 topics."""
        if topic in self._topics:
            return
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

    def writer(self, broker_group: str) -> str | None:
        """Address of the group's live writer, by any route that is known."""
        for route in self._routes.values():
            address = writers(route).get(broker_group)
            if address is not None:
                return address
        return None

    def cluster(self) -> str:
        """The cluster of the client's brokers, by any route that tells; empty while none does."""
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
        as soon as somebody serves it. RouteNotFound when the time is over first.
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
            raise RouteNotFound(self._why_not(topic)) from None

    def _served(self, topic: str, or_auto_create: bool) -> namesrv_pb2.TopicRoute | None:
        route = self._routes.get(topic)
        if route is not None and not route.groups and or_auto_create:
            route = self._routes.get(AUTO_CREATE_TOPIC)
        return route if route is not None and route.groups else None

    def _why_not(self, topic: str) -> str:
        if topic in self._routes:
            return f"No broker serves topic {topic!r}."
        return f"No name server has answered for topic {topic!r}: {self._connections.namesrv}."

    async def _run(self) -> None:
        while True:
            for address in await self._connections.namesrv_addresses():
                try:
                    await self._watch_at(address)
                except CometError as error:
                    _log.info("name server left", extra=fields(address=address, error=error))
                await asyncio.sleep(self._backoff.next_s())

    async def _watch_at(self, address: str) -> None:
        """One stream, until it fails."""
        call = self._connections.name_server(address).WatchRoutes()
        self._unsent = list(self._topics)
        self._wake.set()
        asking = asyncio.create_task(self._ask(call), name="ask for routes")
        try:
            told: set[str] = set()
            while (response := await read(call)) is not None:
                self._backoff.reset()
                self._take(response.routes, told)
            raise PeerUnavailable(f"The name server {address} ended the stream.")
        finally:
            call.cancel()
            await stop_all([asking])

    async def _ask(self, call: RouteStream) -> None:
        with contextlib.suppress(CometError):  # the reader is told why
            while True:
                await self._wake.wait()
                self._wake.clear()
                topics, self._unsent = self._unsent, []
                if topics:
                    await write(call, namesrv_pb2.WatchRoutesRequest(add=topics))

    def _take(self, routes: Iterable[namesrv_pb2.TopicRoute], told: set[str]) -> None:
        for route in routes:
            if route.groups:
                told.add(route.topic)
            elif route.topic not in told and route.topic in self._routes:
                continue
            self._routes[route.topic] = route
            self._on_change(route.topic)
        self._changed.set()
        self._changed = asyncio.Event()

"""Replies to requests: sent to the broker group that stores the request, whose writer hands them to
the requester.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from typing import TypeAlias

from cometmq.client.messages import SendReceipt
from cometmq.client.options import ProducerOptions
from cometmq.client.received import ReceivedMessage
from cometmq.client.requests.deadlines import Deadlines
from cometmq.client.requests.late_producer import LateProducer
from cometmq.clock import Clock, SystemClock
from cometmq.errors import (
    ClientClosed,
    InvalidRequest,
    QueueNotFound,
    RequestExpired,
    RouteNotFound,
    TopicNotFound,
)
from cometmq.format.request_reply import (
    CLUSTER,
    Requester,
    reply_properties,
    reply_topic,
    requester_of,
)
from cometmq.model import Message, QueueRef

# That the clocks of a requester and of a replier may differ: replies to older requests are refused.
SKEW_MS = 3_600_000
WAIT_MS = 5_000  # a reply is tried for longer than its requester waits
ROUTE_S_MAX = 0.5  # between two looks at the route

_CLOCK = SystemClock()


_Sent: TypeAlias = "tuple[Future[SendReceipt], Requester]"


class Replier:
    """Sends replies through a producer of its own, which is opened with the first one: the reply
    topic is in no namespace.
    """

    def __init__(self, namesrv: str, client_id: str, clock: Clock = _CLOCK) -> None:
        self._producer = LateProducer(namesrv, ProducerOptions(client_id=client_id))
        self._clock = clock
        self._cluster = ""  # that the routes are of; empty: not known yet
        self._deadlines: Deadlines[_Sent] = Deadlines(_is_waiting, self._expire)
        self.is_open = False  # its client is

    async def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Waits until the reply is stored, at most as long as the requester waits. Raises
        ReplyInvalid, RequestExpired, and what sending raises.
        """
        if not self.is_open:
            raise ClientClosed("The client is not open.")
        if not isinstance(message, ReceivedMessage):
            raise InvalidRequest(f"reply takes a received message, not {type(message).__name__}.")
        requester = requester_of(message.properties, message.born_time_ms)
        if self._clock.wall_ms() >= requester.until_ms + SKEW_MS:
            raise RequestExpired(f"The requester waited {requester.ttl_ms} ms, and waits no more.")
        # No clock is compared: the requester waits no longer than this from now.
        until_s = self._clock.monotonic_s() + (requester.ttl_ms + WAIT_MS) / 1000
        left_s = until_s - self._clock.monotonic_s()
        sent = self._send_now(message, requester, body)
        if sent is not None:
            self._deadlines.add((sent, requester), left_s)
            try:
                return await sent
            except (TopicNotFound, QueueNotFound, RouteNotFound):
                left_s = until_s - self._clock.monotonic_s()
        try:
            async with asyncio.timeout(left_s):
                return await self._send(message, requester, body)
        except TimeoutError:
            raise self._expired(requester) from None

    def _send_now(
        self, message: ReceivedMessage, requester: Requester, body: bytes
    ) -> Future[SendReceipt] | None:
        """Sends the reply where nothing has to be waited for; else None."""
        producer = self._producer.now
        if producer is None:
            return None
        self._cluster = self._cluster or producer._routes.cluster()
        cluster = message.properties.get(CLUSTER) or self._cluster
        if not cluster:
            return None
        return producer._send_now(self._made(message, requester, body, cluster))

    async def _send(
        self, message: ReceivedMessage, requester: Requester, body: bytes
    ) -> SendReceipt:
        producer = await self._producer.opened()
        routes = producer._routes
        cluster = message.properties.get(CLUSTER) or routes.cluster()
        if not cluster:
            await routes.wait_for(message.record.topic, requester.ttl_ms / 1000)
            cluster = routes.cluster()
        reply = self._made(message, requester, body, cluster)
        while True:
            try:
                return await producer.send_and_wait(reply)
            except (TopicNotFound, QueueNotFound, RouteNotFound):
                # The first requester of all has made the topic a moment ago: routes follow.
                await routes.wait_change(ROUTE_S_MAX)

    @staticmethod
    def _made(message: ReceivedMessage, requester: Requester, body: bytes, cluster: str) -> Message:
        topic = reply_topic(cluster)
        return Message(
            topic,
            body,
            keys=(requester.correlation_id,),
            properties=reply_properties(requester),
            queue=QueueRef(topic, 0, message.queue.broker_group),
        )

    def _expire(self, sent: _Sent) -> None:
        future, requester = sent
        future.set_exception(self._expired(requester))

    def _expired(self, requester: Requester) -> RequestExpired:
        producer = self._producer.now
        what = f"The reply could not be stored while its requester waited: {requester.ttl_ms} ms."
        return RequestExpired(what).after(None if producer is None else producer._hindrance())

    async def close(self) -> None:
        """Sends what is on its way; then there are no more replies."""
        self.is_open = False
        await self._producer.close()
        self._deadlines.close()


def _is_waiting(sent: _Sent) -> bool:
    return not sent[0].done()

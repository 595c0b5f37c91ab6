"""Requests: messages whose sender waits for a reply. The requester holds a stream to each broker
group that it asks, on which replies come.

A stream that breaks is opened again, to another writer maybe, and names the requests that still
wait: the broker finds what came meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import secrets
from asyncio import Future
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import NamedTuple, TypeAlias

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.messages import SendReceipt
from cometmq.client.options import ProducerOptions, backoff_policy
from cometmq.client.received import ReceivedMessage, decode_received
from cometmq.client.requests.deadlines import Deadlines
from cometmq.errors import (
    ClientClosed,
    CometError,
    InternalError,
    InvalidRequest,
    PeerUnavailable,
    RequestTimeout,
    TooManyRequests,
)
from cometmq.format.request_reply import CORRELATION_ID, TTL_MS_MAX, request_properties
from cometmq.model import Message, QueueRef
from cometmq.rpc.retry import Backoff
from cometmq.rpc.streams import Stream, read, read_first, write
from cometmq.rpc.tasks import Tasks, race, wait_at_most
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2, namesrv_pb2

OUTSTANDING_MAX = 10_000
IDS_MAX = 1_024  # correlation ids in one message to a broker
TELL_LATE_S = 1.0
FIRST_STREAM_S_MAX = 1.0  # a first request waits for its streams; without one it goes all the same
CLIENT_ID_LENGTH_MAX = 230

RepliesStream: TypeAlias = "Stream[broker_pb2.RepliesRequest, broker_pb2.RepliesResponse]"
# Gets the reply, or why there is none.
ReplyCallback = Callable[[ReceivedMessage | None, CometError | None], object]

_log = logger(__name__)


class _Outstanding:
    """A request without a reply. ``broker_group`` None: it is not stored yet, as far as is
    known.
    """

    __slots__ = ("broker_group", "future", "timeout_s", "topic")

    def __init__(self, topic: str, future: Future[ReceivedMessage], timeout_s: float) -> None:
        self.topic = topic
        self.future = future
        self.timeout_s = timeout_s
        self.broker_group: str | None = None


class Sending(NamedTuple):
    """How requests leave. ``groups_of``: the broker groups of a topic; ``queues_of``: its queues as
    they are known, the same object until they change; ``send_now``: sends a message where nothing
    has to be waited for, else None; ``hindrance``: why a topic's messages are not stored now.
    """

    groups_of: Callable[[str], Awaitable[Collection[str]]]
    queues_of: Callable[[str], tuple[QueueRef, ...]]
    send: Callable[[Message], Awaitable[Future[SendReceipt]]]
    send_now: Callable[[Message], Future[SendReceipt] | None]
    hindrance: Callable[[str], CometError | None]


class Requests:
    """All requests of one producer."""

    def __init__(
        self,
        options: ProducerOptions,
        connections: Connections,
        routes: RouteWatcher,
        tasks: Tasks,
        sending: Sending,
    ) -> None:
        self._options = options
        self._connections = connections
        self._routes = routes
        self._tasks = tasks
        self._sending = sending
        token = secrets.token_hex(8)  # two producers may have one client id
        self._client_id = f"{options.client_id[:CLIENT_ID_LENGTH_MAX]}@{token}"
        self._token = token
        self._number = 0
        self._outstanding: dict[str, _Outstanding] = {}  # by correlation id
        self._deadlines = Deadlines(self._outstanding.__contains__, self._expire)
        self._streams: dict[str, _ReplyStream] = {}  # by broker group
        # Queues of topics whose broker groups all have a stream, by topic.
        self._heard: dict[str, tuple[QueueRef, ...]] = {}
        self._is_closed = False

    async def start(self, message: Message, timeout_s: float) -> Future[ReceivedMessage]:
        """Sends the request; the future has the reply, or why there is none. Raises what is wrong
        with the request, TooManyRequests, and what ``send`` raises.
        """
        ttl_ms = _ttl_ms(timeout_s)
        _check_request(message)
        if len(self._outstanding) >= OUTSTANDING_MAX:
            raise TooManyRequests(f"{OUTSTANDING_MAX} requests wait for their replies.")
        self._number += 1
        correlation_id = f"{self._token}{self._number:x}"
        future: Future[ReceivedMessage] = asyncio.get_running_loop().create_future()
        self._outstanding[correlation_id] = _Outstanding(message.topic, future, timeout_s)
        self._deadlines.add(correlation_id, timeout_s)
        future.add_done_callback(partial(self._forget, correlation_id))
        request = _copy(message, request_properties(self._client_id, correlation_id, ttl_ms))
        try:
            sent = self._send_now(request)
            if sent is None:
                async with asyncio.timeout(timeout_s):
                    await self._listen(message.topic)
                    sent = await self._sending.send(request)
        except TimeoutError:
            self._expire(correlation_id)
            return future
        except BaseException:
            future.cancel()
            raise
        sent.add_done_callback(partial(self._sent, correlation_id))
        return future

    def _send_now(self, request: Message) -> Future[SendReceipt] | None:
        """Sends where nothing has to be waited for; else None."""
        heard = self._heard.get(request.topic)
        if heard is None or heard is not self._sending.queues_of(request.topic):
            return None
        return self._sending.send_now(request)

    def close(self) -> None:
        """No reply is waited for any more."""
        self._is_closed = True
        self._deadlines.close()
        for waiting in list(self._outstanding.values()):
            _fail(waiting.future, ClientClosed("The producer was closed before the reply came."))

    def waiting_at(self, broker_group: str) -> list[str]:
        """Correlation ids of requests that the broker group may have the replies of."""
        return [
            correlation_id
            for correlation_id, one in self._outstanding.items()
            if one.broker_group in (None, broker_group)
        ]

    def take(self, reply: ReceivedMessage) -> bool:
        """A reply has come; False: nobody waits for it."""
        waiting = self._outstanding.get(reply.properties.get(CORRELATION_ID, ""))
        if waiting is None or waiting.future.done():
            return False
        waiting.future.set_result(reply)
        return True

    def _sent(self, correlation_id: str, sent: Future[SendReceipt]) -> None:
        error = ClientClosed("The send was cancelled.") if sent.cancelled() else sent.exception()
        waiting = self._outstanding.get(correlation_id)
        if waiting is None:
            return
        if error is not None:
            _fail(waiting.future, error)
        else:
            waiting.broker_group = sent.result().queue.broker_group

    def _expire(self, correlation_id: str) -> None:
        waiting = self._outstanding.get(correlation_id)
        if waiting is None:
            return
        error = RequestTimeout(f"No reply came in {waiting.timeout_s:g} s.")
        if waiting.broker_group is None:
            error = RequestTimeout(
                f"No reply came in {waiting.timeout_s:g} s: the request is not acknowledged yet."
            ).after(self._sending.hindrance(waiting.topic))
        _fail(waiting.future, error)

    def _forget(self, correlation_id: str, _: Future[ReceivedMessage]) -> None:
        del self._outstanding[correlation_id]

    async def _listen(self, topic: str) -> None:
        """Streams to the topic's broker groups. The first requests wait for them a little: a reply
        that comes before its stream is found when that opens, but later.
        """
        broker_groups = await self._sending.groups_of(topic)
        queues = self._sending.queues_of(topic)
        for group in broker_groups:
            if group not in self._streams:
                stream = self._streams[group] = _ReplyStream(group, self)
                self._tasks.start(stream.run(), f"replies of {group}")
        for group in broker_groups:
            tried = self._streams[group].tried
            if not tried.is_set():
                await wait_at_most(tried, FIRST_STREAM_S_MAX)
        if self._is_closed:
            raise ClientClosed("The producer is not open.")
        self._heard[topic] = queues

    def new_backoff(self) -> Backoff:
        """For a stream's tries."""
        return Backoff(backoff_policy(self._options), random.Random())

    def call(self, address: str) -> RepliesStream:
        """A stream to the broker there."""
        return self._connections.broker(address).Replies()

    @property
    def client_id(self) -> str:
        """The client id that requests carry as REPLY_TO_CLIENT."""
        return self._client_id

    @property
    def routes(self) -> RouteWatcher:
        return self._routes

    @property
    def timeout_s(self) -> float:
        """Of opening a stream."""
        return self._options.request_timeout_ms / 1000


class _ReplyStream:
    """Replies of one broker group. ``tried``: a stream was opened, or could not be."""

    def __init__(self, broker_group: str, requests: Requests) -> None:
        self._broker_group = broker_group
        self._requests = requests
        self._late_count = 0
        self.tried = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        routes, backoff = self._requests.routes, self._requests.new_backoff()
        while True:
            try:
                await self._one_stream(backoff)
            except CometError as error:
                _log.info(
                    "reply stream ended",
                    extra=fields(
                        broker_group=self._broker_group,
                        address=routes.writer(self._broker_group) or "none",
                        waiting=len(self._requests.waiting_at(self._broker_group)),
                        error=error,
                    ),
                )
                routes.doubt(self._broker_group)
            self.tried.set()
            if await routes.wait_change(backoff.next_s()):
                backoff.reset()

    async def _one_stream(self, backoff: Backoff) -> None:
        group = self._broker_group
        writer = self._requests.routes.require_writer(group)
        call = self._requests.call(writer.address)
        try:
            first = broker_pb2.RepliesRequest(client_id=self._requests.client_id)
            await write(call, first)
            response = await read_first(call, self._requests.timeout_s)
            if response is None or response.WhichOneof("kind") != "opened":
                raise InternalError(f"The broker at {writer.address} opened the stream wrongly.")
            if response.opened.broker_group != group:
                raise PeerUnavailable(f"At {writer.address} is another broker group now.")
            backoff.reset()
            self.tried.set()
            queue = QueueRef(response.opened.topic, 0, group)
            await self._exchange(call, queue, writer)
        finally:
            call.cancel()

    async def _exchange(
        self, call: RepliesStream, queue: QueueRef, writer: namesrv_pb2.Member
    ) -> None:
        await race(
            self._read(call, queue),
            self._write(call),
            self._requests.routes.until_deposed(writer),
            name=f"replies of {self._broker_group}",
        )

    async def _read(self, call: RepliesStream, queue: QueueRef) -> None:
        while (response := await read(call)) is not None:
            for reply in decode_received(response.records, queue, None):
                if not self._requests.take(reply):
                    self._late_count += 1
        raise PeerUnavailable(f"Broker group {self._broker_group!r} ended the stream.")

    async def _write(self, call: RepliesStream) -> None:
        """Names what waits, then logs now and then how many replies came too late."""
        waiting = self._requests.waiting_at(self._broker_group)
        for first in range(0, len(waiting), IDS_MAX):
            ids = waiting[first : first + IDS_MAX]
            await write(call, broker_pb2.RepliesRequest(correlation_ids=ids))
        while True:
            await asyncio.sleep(TELL_LATE_S)
            if self._late_count:
                late, self._late_count = self._late_count, 0
                await write(call, broker_pb2.RepliesRequest(late_count=late))


def _ttl_ms(timeout_s: object) -> int:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if is_number and 0.001 <= timeout_s <= TTL_MS_MAX / 1000:  # type: ignore[operator]
        return round(timeout_s * 1000)  # type: ignore[operator]
    raise InvalidRequest(f"timeout_s is 0.001 to {TTL_MS_MAX // 1000} s, not {timeout_s!r}.")


def _check_request(message: object) -> None:
    if not isinstance(message, Message):
        raise InvalidRequest(f"A request is a Message, not {type(message).__name__}.")
    for name in ("delay_level", "delay_ms", "deliver_at_ms"):
        if getattr(message, name):
            raise InvalidRequest(f"A request has no {name}: its sender waits for the reply.")


def _copy(message: Message, properties: dict[str, str]) -> Message:
    return Message(
        message.topic,
        message.body,
        message.tag,
        message.keys,
        {**message.properties, **properties},
        message.flag,
        message.queue,
        0,
        message.sharding_key,
        message.wait_store,
    )


def _fail(future: Future[ReceivedMessage], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def check_callback(callback: object) -> None:
    """Raises InvalidRequest."""
    if not callable(callback) or inspect.iscoroutinefunction(callback):
        raise InvalidRequest(f"callback is a plain function (reply, error), not {callback!r:.100}.")


def call_back(callback: ReplyCallback, future: Future[ReceivedMessage]) -> None:
    """Tells an application's function how a request ended. What it raises is logged."""
    error = future.exception()
    try:
        if error is None:
            callback(future.result(), None)
        elif isinstance(error, CometError):
            callback(None, error)
        else:
            raise error
    except Exception as failure:  # the application's: no other request ends by it
        _log.error("reply callback failed", extra=fields(error=failure), exc_info=failure)

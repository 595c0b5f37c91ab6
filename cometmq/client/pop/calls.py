"""Calls of consumers whose group receives (POP): receive, acknowledge, change invisible times."""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

from cometmq.client.cluster.accumulator import Accumulator
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.cluster.routing import readable_queues
from cometmq.client.messages import ConsumeFrom
from cometmq.client.options import ConsumerOptions
from cometmq.client.reading.offsets import BrokerCalls, check_fits
from cometmq.client.reading.start_positions import NewTopics
from cometmq.client.received import ReceivedMessage, decode_received
from cometmq.client.remote.stacks import Caller
from cometmq.errors import ClientClosed, CometError, HandleInvalid, PeerUnavailable
from cometmq.model import RETRY_PREFIX, Filter, QueueRef
from cometmq.rpc.interceptors import from_proto
from cometmq.rpc.streams import ask
from cometmq.rpc.tasks import Tasks
from cometmq.v1 import broker_pb2, broker_pb2_grpc, common_pb2
from cometmq.v1.namesrv_pb2 import TopicRoute

Response = TypeVar("Response")

CALLS_MAX = 3  # for one receive, or change of invisible times, whose answer does not come
ITEMS_MAX = 1_024  # of a call
UNANSWERED_MAX = 64  # receives of a broker group that are made again later

_STARTS = {
    ConsumeFrom.FIRST: broker_pb2.RECEIVE_START_FIRST,
    ConsumeFrom.LAST: broker_pb2.RECEIVE_START_LAST,
    ConsumeFrom.TIMESTAMP: broker_pb2.RECEIVE_START_TIME,
}


class Lease:
    """Messages that one answer gave, and until when nobody else gets them. ``handle`` is replaced
    when that changes. Times are those of the loop.
    """

    __slots__ = (
        "caller",
        "changing_s",
        "handle",
        "invisible_s",
        "is_lost",
        "open_count",
        "queue",
        "received_s",
        "until_s",
    )

    def __init__(self, queue: QueueRef, handle: str, invisible_s: float, until_s: float) -> None:
        self.queue = queue
        self.handle = handle
        self.invisible_s = invisible_s
        self.until_s = until_s
        self.changing_s: float | None = None  # since when a change of its handle has no answer
        self.open_count = 0  # messages that are not done
        self.is_lost = False  # others may have them
        self.received_s = until_s - invisible_s
        self.caller: Caller | None = None  # of the receive, for operators

    def changed(self, handle: str, invisible_s: float, until_s: float) -> Lease:
        """The new lease of some of its messages."""
        lease = Lease(self.queue, handle, invisible_s, until_s)
        lease.received_s, lease.caller = self.received_s, self.caller
        return lease


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """Messages of one lease, in order of their queue."""

    lease: Lease
    messages: list[ReceivedMessage]


@dataclass(frozen=True, slots=True)
class _Receive:
    """A receive, and when it was asked first, by the loop's clock."""

    request: broker_pb2.ReceiveRequest
    asked_s: float

    @property
    def invisible_s(self) -> float:
        return self.request.invisible_ms / 1000


class _Ack(NamedTuple):
    item: broker_pb2.AckItem
    answer: asyncio.Future[CometError | None]


def _end(some: Iterable[_Ack]) -> None:
    for ack in some:
        if not ack.answer.done():
            ack.answer.set_exception(ClientClosed("The consumer was closed."))
            ack.answer.exception()  # maybe nobody waits for it


@dataclass(frozen=True, slots=True)
class PopAnswer:
    """The answer of a broker group. ``again_at_s``: when, by the loop's clock, to ask again without
    an arrival; None: no message of these queues is on its way. ``is_blocked``: messages wait for
    others of their message group.
    """

    runs: list[LeasedRun]
    has_more: bool
    again_at_s: float | None
    is_blocked: bool
    positions: Sequence[broker_pb2.ReceivePosition]


class PopCalls:
    """``subscriptions`` are those of the consumer, by topic. Belongs to the event loop."""

    def __init__(
        self,
        calls: BrokerCalls,
        routes: RouteWatcher,
        options: ConsumerOptions,
        subscriptions: Mapping[str, Filter],
    ) -> None:
        self._calls = calls
        self._routes = routes
        self._options = options
        self._subscriptions = subscriptions
        # Queues of a topic that appear later begin at their first message whatever others begin.
        waits_for_others = options.consume_from is not ConsumeFrom.FIRST
        self._new_topics = NewTopics(calls, calls.begun_at, is_shared=waits_for_others)
        self._tasks = Tasks("acknowledgements")
        self._acks = Accumulator(self._tasks, self._send_acks, size_max=ITEMS_MAX)
        # What is asked for at each broker group, made once for these routes and filters.
        self._asked: dict[str, list[broker_pb2.Subscription]] = {}
        self._asked_for: list[tuple[str, TopicRoute | None, Filter]] = []
        # Attempts without an answer, by broker group: it may have given messages.
        self._unanswered: defaultdict[str, deque[str]] = defaultdict(
            lambda: deque(maxlen=UNANSWERED_MAX)
        )

    def broker_groups(self) -> list[str]:
        """Those that have any of the topics, as the routes say now, by name."""
        return list(self._subscriptions_at())

    def _subscriptions_at(self) -> dict[str, list[broker_pb2.Subscription]]:
        """By broker group, in order of their names."""
        now = [(topic, self._routes.get(topic), one) for topic, one in self._subscriptions.items()]
        if not _are_same(now, self._asked_for):
            found: defaultdict[str, list[broker_pb2.Subscription]] = defaultdict(list)
            for topic, route, wanted in now:
                asked = broker_pb2.Subscription(
                    topic=self._calls.namespace.wire(topic), filter=filter_proto(wanted)
                )
                queues = readable_queues(route) if route is not None else []
                for broker_group in {queue.broker_group for queue in queues}:
                    found[broker_group].append(asked)
            self._asked_for, self._asked = now, dict(sorted(found.items()))
            self._unanswered.clear()
        return self._asked

    async def receive(self, broker_group: str, count_max: int, invisible_ms: int) -> PopAnswer:
        """At most so many messages that nobody else gets for a while. A call without an answer is
        made again, and gets the same: here, or by the next receive if this one fails or is
        cancelled, for the time that the next one asks for. Raises what brokers refuse it with.
        """
        subscriptions = self._subscriptions_at().get(broker_group)
        if not subscriptions:
            return PopAnswer([], False, None, False, ())
        begun = await self._begun_topics(subscriptions, broker_group)
        unanswered = self._unanswered[broker_group]
        attempt_id = unanswered.popleft() if unanswered else secrets.token_hex(8)
        receive = self._new_receive(subscriptions, begun, attempt_id, count_max, invisible_ms)
        try:
            response = await self._repeated(
                broker_group,
                lambda stub: ask(stub.Receive, receive.request, self._calls.timeout_s),
            )
        except asyncio.CancelledError:
            self._unanswered[broker_group].append(attempt_id)
            raise
        except CometError as error:
            if isinstance(error, PeerUnavailable):
                self._unanswered[broker_group].append(attempt_id)
            raise self._calls.namespace.strip(error) from None
        for one in subscriptions:
            if one.topic not in begun:
                self._new_topics.begun(self._calls.namespace.shown(one.topic), [broker_group])
        return self._answer(broker_group, response, receive)

    async def _begun_topics(
        self, subscriptions: Sequence[broker_pb2.Subscription], broker_group: str
    ) -> list[str]:
        """Those of the topics, as brokers know them, that the group has begun before they came to
        this broker group.
        """
        shown = self._calls.namespace.shown
        return [
            one.topic
            for one in subscriptions
            if broker_group not in await self._new_topics.new_at(shown(one.topic))
        ]

    async def _repeated(
        self,
        broker_group: str,
        call: Callable[[broker_pb2_grpc.BrokerServiceAsyncStub], Awaitable[Response]],
    ) -> Response:
        """A call that is made again while no answer comes: the broker gives the same one."""
        for calls_left in reversed(range(CALLS_MAX)):
            try:
                return await call(self._calls.broker(broker_group))
            except CometError as error:
                self._calls.doubt(broker_group, error)
                if not calls_left or not isinstance(error, PeerUnavailable):
                    raise
        raise AssertionError("the last call answers or raises")

    def _new_receive(
        self,
        subscriptions: Sequence[broker_pb2.Subscription],
        begun_topics: Sequence[str],
        attempt_id: str,
        count_max: int,
        invisible_ms: int,
    ) -> _Receive:
        options = self._options
        request = broker_pb2.ReceiveRequest(
            group=self._calls.wire_group,
            subscriptions=subscriptions,
            max_count=count_max,
            max_bytes=options.pull_bytes_max,
            invisible_ms=invisible_ms,
            attempt_id=attempt_id,
            start=_STARTS[options.consume_from],
            start_time_ms=options.consume_from_time_ms,
            begun_topics=begun_topics,
            client_id=self._calls.client_id,
        )
        return _Receive(request, asyncio.get_running_loop().time())

    def _answer(
        self,
        broker_group: str,
        response: broker_pb2.ReceiveResponse,
        receive: _Receive,
    ) -> PopAnswer:
        runs = [self._run(broker_group, run, receive) for run in response.runs]
        now_s = asyncio.get_running_loop().time()
        again_at_s = now_s + response.again_ms / 1000 if response.again_ms else None
        return PopAnswer(
            runs, response.has_more, again_at_s, response.is_blocked, response.positions
        )

    def _run(self, broker_group: str, run: broker_pb2.ReceivedRun, receive: _Receive) -> LeasedRun:
        namespace = self._calls.namespace
        shown = namespace.shown if namespace.name else None
        queue = QueueRef(namespace.shown(run.queue.topic), run.queue.queue_id, broker_group)
        messages = decode_received(run.records, queue, shown)
        if run.attempt > 1:
            for message in messages:
                message.attempt = run.attempt
        # Counted from before the first call: the broker began to count later.
        until_s = receive.asked_s + receive.invisible_s
        lease = Lease(queue, run.handle, receive.invisible_s, until_s)
        lease.open_count = len(messages)
        return LeasedRun(lease, messages)

    def kept(self, run: LeasedRun) -> list[ReceivedMessage]:
        """Those that the application wants; the others are done. Brokers compare hashes of tags."""
        messages, topic = run.messages, run.lease.queue.topic
        wanted = self._subscriptions.get(topic)
        if wanted is not None and wanted.tags and not topic.startswith(RETRY_PREFIX):
            messages = [one for one in messages if one.tag in wanted.tags]
        return self._calls.keep(messages) if self._calls.keep is not None else messages

    async def acknowledge(
        self, broker_group: str, items: Iterable[broker_pb2.AckItem]
    ) -> list[CometError | None]:
        """None for each that is acknowledged, as safely as messages of its topic. ClientClosed:
        the consumer was closed meanwhile.
        """
        return [await answer for answer in self.put_acks(broker_group, items)]

    def put_acks(
        self, broker_group: str, items: Iterable[broker_pb2.AckItem]
    ) -> list[asyncio.Future[CometError | None]]:
        """As :meth:`acknowledge`, for a caller that need not wait."""
        new_future = asyncio.get_running_loop().create_future
        asked = [_Ack(item, new_future()) for item in items]
        for one in asked:
            self._acks.put(broker_group, one)
        return [one.answer for one in asked]

    async def _send_acks(self, broker_group: str, some: list[_Ack]) -> None:
        try:
            answers = await self._acknowledge(broker_group, [one.item for one in some])
            for ack, answer in zip(some, answers, strict=True):
                if not ack.answer.done():  # its caller is there
                    ack.answer.set_result(answer)
        finally:
            _end(some)

    async def _acknowledge(
        self, broker_group: str, items: list[broker_pb2.AckItem]
    ) -> list[CometError | None]:
        request = broker_pb2.AckMessagesRequest(group=self._calls.wire_group, items=items)
        try:
            stub = self._calls.broker(broker_group)
            response = await ask(stub.AckMessages, request, self._calls.timeout_s)
            check_fits(len(response.results), len(items))
        except CometError as error:
            self._calls.doubt(broker_group, error)
            return [error] * len(items)
        return [
            from_proto(one.error) if one.HasField("error") else None for one in response.results
        ]

    async def close(self) -> None:
        """Ends acknowledgements that have no answer yet."""
        _end(self._acks.close())
        await self._tasks.stop()

    async def change(
        self, broker_group: str, items: Sequence[broker_pb2.ChangeInvisibleTimeItem]
    ) -> list[broker_pb2.ChangeInvisibleTimeResult | CometError]:
        """The new handle of each, or why it has not changed. A call without an answer is made
        again, and gets the same. PeerUnavailable: it may have changed; ask for the same again.
        """
        answers: list[broker_pb2.ChangeInvisibleTimeResult | CometError] = []
        for first in range(0, len(items), ITEMS_MAX):
            some = items[first : first + ITEMS_MAX]
            request = broker_pb2.ChangeInvisibleTimeRequest(
                group=self._calls.wire_group, items=some
            )
            try:
                response = await self._repeated(broker_group, partial(self._change, request))
            except CometError as error:
                answers += [error] * len(some)
            else:
                answers += [
                    from_proto(one.error) if one.HasField("error") else one
                    for one in response.results
                ]
        return answers

    async def _change(
        self,
        request: broker_pb2.ChangeInvisibleTimeRequest,
        stub: broker_pb2_grpc.BrokerServiceAsyncStub,
    ) -> broker_pb2.ChangeInvisibleTimeResponse:
        response = await ask(stub.ChangeInvisibleTime, request, self._calls.timeout_s)
        check_fits(len(response.results), len(request.items))
        return response


def _are_same(
    some: Sequence[tuple[str, TopicRoute | None, Filter]],
    others: Sequence[tuple[str, TopicRoute | None, Filter]],
) -> bool:
    """Whether they are the same topics with the same objects: nothing is looked into."""
    return len(some) == len(others) and all(
        one[0] == other[0] and one[1] is other[1] and one[2] is other[2]
        for one, other in zip(some, others, strict=True)
    )


def filter_proto(wanted: Filter) -> common_pb2.Filter:
    return common_pb2.Filter(tags=sorted(wanted.tags), sql=wanted.sql)


def ack_items(lease: Lease, offsets: Iterable[int]) -> list[broker_pb2.AckItem]:
    """Items for these messages of a lease: one for each run of neighbours."""
    places = sorted(offsets)
    starts = [n for n, offset in enumerate(places) if not n or places[n - 1] + 1 != offset]
    return [
        broker_pb2.AckItem(handle=lease.handle, first_offset=places[start], count=end - start)
        for start, end in zip(starts, [*starts[1:], len(places)], strict=True)
    ]


def not_held(message: ReceivedMessage) -> HandleInvalid:
    """The error for a message that this consumer has not, or no longer."""
    return HandleInvalid(f"{message} is not this consumer's, or is acknowledged")

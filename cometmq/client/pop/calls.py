"""Calls of consumers whose group receives (POP): receive, acknowledge, change the invisible time;
and how they wait for messages.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.cluster.routing import readable_queues
from cometmq.client.messages import ConsumeFrom
from cometmq.client.options import ConsumerOptions
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.received import ReceivedMessage, decode_received
from cometmq.errors import CometError, HandleInvalid, PeerUnavailable
from cometmq.model import RETRY_PREFIX, Filter, QueueRef
from cometmq.rpc.interceptors import from_proto
from cometmq.rpc.streams import ask
from cometmq.rpc.tasks import stop_all
from cometmq.v1 import broker_pb2, common_pb2
from cometmq.v1.namesrv_pb2 import TopicRoute

CALLS_MAX = 3  # for one receive, or change of invisible times, whose answer does not come
ITEMS_MAX = 1_024  # of a call
UNKNOWN_AGAIN_S = 1.0  # while no pull-hold answers

_STARTS = {
    ConsumeFrom.FIRST: broker_pb2.RECEIVE_START_FIRST,
    ConsumeFrom.LAST: broker_pb2.RECEIVE_START_LAST,
    ConsumeFrom.TIMESTAMP: broker_pb2.RECEIVE_START_TIME,
}


class Lease:
    """Messages that one answer gave, and until when nobody else gets them. ``handle`` is replaced
    when that changes. Times are those of the loop.
    """

    __slots__ = ("changing_s", "handle", "invisible_s", "is_lost", "open_count", "queue", "until_s")

    def __init__(self, queue: QueueRef, handle: str, invisible_s: float, until_s: float) -> None:
        self.queue = queue
        self.handle = handle
        self.invisible_s = invisible_s
        self.until_s = until_s
        self.changing_s: float | None = None  # since when a change of its handle has no answer
        self.open_count = 0  # messages that are not done
        self.is_lost = False  # others may have them


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """Messages of one lease, in order of their queue."""

    lease: Lease
    messages: list[ReceivedMessage]


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
    """``subscriptions`` are those of the consumer, by topic."""

    def __init__(
        self,
        calls: BrokerCalls,
        routes: RouteWatcher,
        options: ConsumerOptions,
        long_poller: LongPoller,
        subscriptions: Mapping[str, Filter],
    ) -> None:
        self._calls = calls
        self._routes = routes
        self._options = options
        self._long_poller = long_poller
        self._subscriptions = subscriptions
        # What is asked for at each broker group, made once for these routes and filters.
        self._asked: dict[str, list[broker_pb2.Subscription]] = {}
        self._asked_for: list[tuple[str, TopicRoute | None, Filter]] = []

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
                    topic=self._calls.namespace.wire(topic), filter=_filter(wanted)
                )
                queues = readable_queues(route) if route is not None else []
                for broker_group in {queue.broker_group for queue in queues}:
                    found[broker_group].append(asked)
            self._asked_for, self._asked = now, dict(sorted(found.items()))
        return self._asked

    async def receive(self, broker_group: str, count_max: int, invisible_ms: int) -> PopAnswer:
        """Messages that nobody else gets for a while. A call without an answer is made again, and
        gets the same. Raises what brokers refuse it with.
        """
        namespace, options = self._calls.namespace, self._options
        request = broker_pb2.ReceiveRequest(
            group=self._calls.wire_group,
            max_count=count_max,
            max_bytes=options.pull_bytes_max,
            invisible_ms=invisible_ms,
            attempt_id=secrets.token_hex(8),
            start=_STARTS[options.consume_from],
            start_time_ms=options.consume_from_time_ms,
            client_id=self._calls.client_id,
        )
        request.subscriptions.extend(self._subscriptions_at().get(broker_group, ()))
        if not request.subscriptions:
            return PopAnswer([], False, None, False, ())
        asked_s = asyncio.get_running_loop().time()  # an answer that comes again counts from then
        for calls_left in reversed(range(CALLS_MAX)):
            try:
                stub = self._calls.broker(broker_group)
                response = await ask(stub.Receive, request, self._calls.timeout_s)
            except CometError as error:
                self._calls.doubt(broker_group, error)
                if not calls_left or not isinstance(error, PeerUnavailable):
                    raise namespace.strip(error) from None
            else:
                return self._answer(broker_group, response, invisible_ms, asked_s)
        raise AssertionError("the last call answers or raises")

    def _answer(
        self,
        broker_group: str,
        response: broker_pb2.ReceiveResponse,
        invisible_ms: int,
        asked_s: float,
    ) -> PopAnswer:
        runs = [self._run(broker_group, run, invisible_ms, asked_s) for run in response.runs]
        now_s = asyncio.get_running_loop().time()
        again_at_s = now_s + response.again_ms / 1000 if response.again_ms else None
        return PopAnswer(
            runs, response.has_more, again_at_s, response.is_blocked, response.positions
        )

    def _run(
        self, broker_group: str, run: broker_pb2.ReceivedRun, invisible_ms: int, asked_s: float
    ) -> LeasedRun:
        namespace = self._calls.namespace
        shown = namespace.shown if namespace.name else None
        queue = QueueRef(namespace.shown(run.queue.topic), run.queue.queue_id, broker_group)
        messages = decode_received(run.records, queue, shown)
        if run.attempt > 1:
            for message in messages:
                message.attempt = run.attempt
        # Counted from before the call: the broker began to count later.
        invisible_s = invisible_ms / 1000
        lease = Lease(queue, run.handle, invisible_s, asked_s + invisible_s)
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
        self, broker_group: str, items: Sequence[broker_pb2.AckItem]
    ) -> list[CometError | None]:
        """None for each that is acknowledged, as safely as messages of its topic."""
        answers: list[CometError | None] = []
        for first in range(0, len(items), ITEMS_MAX):
            some = items[first : first + ITEMS_MAX]
            request = broker_pb2.AckMessagesRequest(group=self._calls.wire_group, items=some)
            try:
                stub = self._calls.broker(broker_group)
                response = await ask(stub.AckMessages, request, self._calls.timeout_s)
            except CometError as error:
                self._calls.doubt(broker_group, error)
                answers += [error] * len(some)
            else:
                answers += [
                    from_proto(one.error) if one.HasField("error") else None
                    for one in response.results
                ]
        return answers

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
                response = await self._change(broker_group, request)
            except CometError as error:
                answers += [error] * len(some)
            else:
                answers += [
                    from_proto(one.error) if one.HasField("error") else one
                    for one in response.results
                ]
        return answers

    async def _change(
        self, broker_group: str, request: broker_pb2.ChangeInvisibleTimeRequest
    ) -> broker_pb2.ChangeInvisibleTimeResponse:
        for calls_left in reversed(range(CALLS_MAX)):
            try:
                stub = self._calls.broker(broker_group)
                return await ask(stub.ChangeInvisibleTime, request, self._calls.timeout_s)
            except CometError as error:
                self._calls.doubt(broker_group, error)
                if not calls_left or not isinstance(error, PeerUnavailable):
                    raise
        raise AssertionError("the last call answers or raises")

    # --- waiting ----------------------------------------------------------------------------------

    async def arrival(
        self,
        answers: Mapping[str, PopAnswer],
        timeout_s: float,
        sooner: asyncio.Event,
    ) -> bool:
        """Whether to ask again: one of the queues that had nothing may have something, or
        ``sooner`` is set. False: the time is over, and nothing has come. ``answers``: the last one
        of each broker group; they may be old, for what came since is found at once.
        """
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + timeout_s
        again_at_s = min((a.again_at_s for a in answers.values() if a.again_at_s), default=inf)
        timeout_s = max(0.0, min(ends_s, again_at_s) - loop.time())
        waits: list[asyncio.Task[bool]] = [
            asyncio.create_task(self._park(broker_group, one, timeout_s))
            for broker_group, answer in answers.items()
            for one in answer.positions
        ]
        if not waits:
            waits.append(asyncio.create_task(self._route_change(timeout_s)))
        waits.append(asyncio.create_task(sooner.wait()))
        try:
            done, _ = await asyncio.wait(
                waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            await stop_all(waits)
        return any(task.result() for task in done) or again_at_s <= min(ends_s, loop.time())

    async def _route_change(self, timeout_s: float) -> bool:
        await self._calls.wait(min(timeout_s, UNKNOWN_AGAIN_S))
        return True

    async def _park(
        self, broker_group: str, one: broker_pb2.ReceivePosition, timeout_s: float
    ) -> bool:
        """Whether something may have come; False: the time is over. While no pull-hold answers, the
        broker is asked now and then.
        """
        topic = self._calls.namespace.shown(one.queue.topic)
        pull = broker_pb2.PullRequest(
            group=self._calls.wire_group,
            queue=one.queue,
            position=one.position,
            filter=_filter(self._subscriptions.get(topic, Filter())),
        )
        loop = asyncio.get_running_loop()
        deadline_s, number = loop.time() + timeout_s, one.return_number
        while (left_s := deadline_s - loop.time()) > 0:
            try:
                answer = await self._long_poller.park_for_arrival(
                    broker_group, pull, number, left_s
                )
            except CometError:  # the broker will say it, if it is of the same mind
                answer = None
            if answer is None:
                await asyncio.sleep(min(left_s, self._options.poll_backoff_max_ms / 1000))
                return True
            response, number = answer
            if response.status == broker_pb2.PULL_STATUS_FOUND:
                return True
            pull.position.CopyFrom(response.next_position)
        return False


def _are_same(
    some: Sequence[tuple[str, TopicRoute | None, Filter]],
    others: Sequence[tuple[str, TopicRoute | None, Filter]],
) -> bool:
    """Whether they are the same topics with the same objects: nothing is looked into."""
    return len(some) == len(others) and all(
        one[0] == other[0] and one[1] is other[1] and one[2] is other[2]
        for one, other in zip(some, others, strict=True)
    )


def _filter(wanted: Filter) -> common_pb2.Filter:
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

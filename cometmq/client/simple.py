"""A consumer that receives messages for a time and acknowledges each: :class:`SimpleConsumer`."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Collection
from types import TracebackType
from typing import Self

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.hooks import message_filter
from cometmq.client.messages import SendReceipt
from cometmq.client.names import check_group, check_topic, filter_of
from cometmq.client.namespaces import Namespace
from cometmq.client.options import (
    INVISIBLE_MS_MAX,
    INVISIBLE_MS_MIN,
    SimpleConsumerOptions,
    backoff_policy,
    options_of,
)
from cometmq.client.pop.calls import Lease, PopAnswer, PopCalls, ack_items, not_held
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.received import ReceivedMessage
from cometmq.client.requests.replier import Replier
from cometmq.client.tracing.consume_tracer import ConsumeTracer
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.errors import (
    ClientClosed,
    CometError,
    InvalidRequest,
    InvisibleTimeInvalid,
    Retry,
)
from cometmq.model import Filter, QueueRef
from cometmq.rpc.retry import Backoff
from cometmq.rpc.tasks import Tasks
from cometmq.v1 import broker_pb2

RECEIVE_COUNT_MAX = 1_024
WAIT_MS_MAX = 3_600_000
_FORGOTTEN_MIN = 1_024  # messages held before those whose time is over are looked for

_Place = tuple[QueueRef, int]  # of a message: queue, queue offset


class SimpleConsumer:
    """Use it inside ``async with``; one event loop. Any number of consumers of a group, and of
    calls of one consumer, share all queues. What is not acknowledged comes again, here or
    elsewhere, when its invisible time is over.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        *,
        options: SimpleConsumerOptions | None = None,
    ) -> None:
        """``namesrv``: ``host:port`` of the name servers, ``;`` between them; None = what
        COMETMQ_NAMESRV says. The group's mode is POP; a group that is not there is made so.
        ConfigInvalid, GroupNameInvalid.
        """
        self._options = options_of(SimpleConsumerOptions, options)
        self._tasks = Tasks(f"simple consumer {group}")
        self._connections = Connections(namesrv)
        self._tracing = TraceDispatcher(
            self._connections.namesrv, self._options.client_id, self._options
        )
        self._tracer = (
            ConsumeTracer(self._tracing, self._options) if self._options.trace_enable else None
        )
        self._replier = Replier(self._connections.namesrv, self._options.client_id)
        namespace = Namespace(self._options.namespace)
        self._routes = RouteWatcher(
            self._connections,
            Backoff(backoff_policy(self._options), random.Random()),
            lambda _topic: None,
            namespace=namespace,
        )
        self._calls = BrokerCalls(
            check_group(group),
            self._connections,
            self._routes,
            self._options.request_timeout_ms / 1000,
            message_filter(self._options.filter_hooks),
            namespace,
        )
        self._calls.client_id = self._options.client_id
        self._long_poller = LongPoller(
            self._options.client_id, self._connections, self._routes.cluster, self._options.hold_ms
        )
        self._subscriptions: dict[str, Filter] = {}
        self._pop = PopCalls(
            self._calls, self._routes, self._options, self._long_poller, self._subscriptions
        )
        self._failures = Backoff(backoff_policy(self._options), random.Random())
        self._held: dict[_Place, Lease] = {}
        self._rounds = 0  # says which broker group is asked first
        self._open = False
        self._closing = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._connections.begin()
        self._routes.start(self._tasks)
        self._long_poller.start(self._tasks)
        self._tracing.start(self._tasks)
        self._open = self._replier.is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._open = False
        self._closing.set()
        try:
            await self._replier.close()
            await self._tracing.close(flush=not isinstance(error, asyncio.CancelledError))
            await self._tasks.stop()
        finally:
            await self._connections.close()

    async def subscribe(
        self, topic: str, expression: str | Collection[str] = "*", *, sql: str | None = None
    ) -> None:
        """Receives from the topic from now on; ``expression`` and ``sql`` as of a push consumer.
        All members of the group have to subscribe to the same: what passes no filter of the member
        that meets it is done for the group. A second call for a topic replaces its filter. Raises
        TopicNameInvalid, FilterInvalid, ClientClosed, and TopicNotFound when no broker serves it
        within request_timeout_ms.
        """
        self._check_open()
        wanted = filter_of(expression, sql)
        await self._routes.wait_for(check_topic(topic), self._calls.timeout_s)
        self._subscriptions[topic] = wanted

    async def unsubscribe(self, topic: str) -> None:
        """Receives from the topic no more. A topic that is not subscribed to is no error. Raises
        TopicNameInvalid, ClientClosed.
        """
        self._check_open()
        self._subscriptions.pop(check_topic(topic), None)

    async def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received, as ``Producer.reply`` does."""
        return await self._replier.reply(message, body)

    @property
    def traces_lost(self) -> int:
        """Trace records that were dropped or not stored; the log has them, too."""
        return self._tracing.lost_count

    # --- receive ----------------------------------------------------------------------------------

    async def receive(
        self,
        count_max: int = 32,
        *,
        invisible_ms: int | None = None,
        wait_ms: int | None = None,
    ) -> list[ReceivedMessage]:
        """Up to so many messages, as soon as there are some; none when ``wait_ms`` (None =
        ``hold_ms`` of the options, 0 = do not wait) is over. Nobody else of the group gets them
        for ``invisible_ms`` (None = as the options say). ``attempt`` of a message counts its
        deliveries. Raises what no retry can mend: GroupModeMismatch, GroupNotFound, NoPermission.
        """
        self._check_open()
        if type(count_max) is not int or not 1 <= count_max <= RECEIVE_COUNT_MAX:
            raise InvalidRequest(f"count_max is 1 to {RECEIVE_COUNT_MAX}, not {count_max!r}.")
        invisible_ms = self._options.invisible_ms if invisible_ms is None else invisible_ms
        check_invisible_ms(invisible_ms)
        wait_ms = self._options.hold_ms if wait_ms is None else wait_ms
        if type(wait_ms) is not int or not 0 <= wait_ms <= WAIT_MS_MAX:
            raise InvalidRequest(f"wait_ms is 0 to {WAIT_MS_MAX}, not {wait_ms!r}.")
        if not self._subscriptions:
            raise InvalidRequest("Nothing is subscribed to.")
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_ms / 1000
        while True:
            answers: dict[str, PopAnswer] = {}
            found, error = await self._ask_all(count_max, invisible_ms, answers)
            left_s = deadline_s - loop.time()
            if found:
                return found
            if left_s <= 0:
                if error is not None and not answers:
                    raise error
                return []
            if any(answer.has_more for answer in answers.values()):
                continue
            if error is not None:
                await self._calls.wait(min(left_s, self._failures.next_s()))
            else:
                self._failures.reset()
                await self._pop.arrival(answers, left_s, self._closing)
            self._check_open()

    async def _ask_all(
        self, count_max: int, invisible_ms: int, answers: dict[str, PopAnswer]
    ) -> tuple[list[ReceivedMessage], CometError | None]:
        """What the first broker group that has something gives, each time beginning with another
        one: messages in hand wait for no other group, which may not answer. Raises an error that no
        retry can mend, unless another group has given something.
        """
        groups = self._pop.broker_groups()
        self._rounds += 1
        first = self._rounds % max(1, len(groups))
        found: list[ReceivedMessage] = []
        failed: CometError | None = None
        for broker_group in groups[first:] + groups[:first]:
            try:
                answer = await self._pop.receive(broker_group, count_max, invisible_ms)
            except CometError as error:
                failed = error
                continue
            answers[broker_group] = answer
            found = await self._taken(broker_group, answer)
            if found:
                break
        if failed is not None and failed.retry is Retry.NEVER and not found:
            raise failed
        return found, failed

    async def _taken(self, broker_group: str, answer: PopAnswer) -> list[ReceivedMessage]:
        """The messages that the application wants; the others are acknowledged."""
        taken: list[ReceivedMessage] = []
        passed: list[broker_pb2.AckItem] = []
        for run in answer.runs:
            kept = self._pop.kept(run.messages)
            if len(kept) < len(run.messages):
                keep = {one.queue_offset for one in kept}
                others = {one.queue_offset for one in run.messages} - keep
                passed += ack_items(run.lease, others)
            for message in kept:
                self._held[message.queue, message.queue_offset] = run.lease
            taken += kept
        if self._tracer is not None:
            self._tracer.received(self._calls.group, taken)
        if passed:
            await self._pop.acknowledge(broker_group, passed)
        self._forget()
        return taken

    def _forget(self) -> None:
        """Messages whose time is over: others may have them."""
        if len(self._held) < _FORGOTTEN_MIN:
            return
        now_s = asyncio.get_running_loop().time()
        over = [place for place, lease in self._held.items() if lease.until_s < now_s]
        if len(over) > len(self._held) // 2:
            for place in over:
                del self._held[place]

    # --- acknowledge ------------------------------------------------------------------------------

    async def ack(self, message: ReceivedMessage) -> None:
        """The message is done: it never comes again. Returns when that is as safe as a message of
        its topic. HandleInvalid: its time was over and it comes again, or is acknowledged.
        """
        await self.ack_many([message])

    async def ack_many(self, messages: Collection[ReceivedMessage]) -> None:
        """As :meth:`ack`, with one call for each broker group. Raises the first message's error;
        the others are acknowledged all the same.
        """
        self._check_open()
        first_error: CometError | None = None
        by_group: defaultdict[str, defaultdict[Lease, set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )
        for message in messages:
            lease = self._lease_of(message)
            if lease is None:
                first_error = first_error or not_held(message)
            else:
                by_group[message.queue.broker_group][lease].add(message.queue_offset)
        for broker_group, leases in by_group.items():
            first_error = await self._ack_at(broker_group, leases) or first_error
        if first_error is not None:
            raise self._calls.namespace.strip(first_error)
        if self._tracer is not None:
            self._tracer.acknowledged(self._calls.group, messages)

    async def _ack_at(self, broker_group: str, leases: dict[Lease, set[int]]) -> CometError | None:
        pairs = [(lease, one) for lease, some in leases.items() for one in ack_items(lease, some)]
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._calls.timeout_s
        refused: CometError | None = None
        while True:
            answers = await self._pop.acknowledge(broker_group, [item for _, item in pairs])
            again = []
            failed: CometError | None = None  # for now
            for (lease, item), error in zip(pairs, answers, strict=True):
                if error is not None and error.retry is not Retry.NEVER:
                    again.append((lease, item))
                    failed = failed or error
                    continue
                refused = refused or error
                for offset in range(item.first_offset, item.first_offset + item.count):
                    if self._held.get((lease.queue, offset)) is lease:  # not a newer one
                        del self._held[lease.queue, offset]
            if not again or loop.time() >= deadline_s:
                return refused or failed
            pairs = again
            await self._calls.wait(self._failures.next_s())

    async def change_invisible_time(self, message: ReceivedMessage, invisible_ms: int) -> None:
        """The message comes again so long from now, unless it is acknowledged before: later, while
        the work goes on, or sooner. HandleInvalid as of :meth:`ack`, InvisibleTimeInvalid.
        """
        self._check_open()
        check_invisible_ms(invisible_ms)
        lease = self._lease_of(message)
        if lease is None:
            raise not_held(message)
        [item] = ack_items(lease, [message.queue_offset])
        asked_s = asyncio.get_running_loop().time()
        change = broker_pb2.ChangeInvisibleTimeItem(messages=item, invisible_ms=invisible_ms)
        [answer] = await self._pop.change(message.queue.broker_group, [change])
        if isinstance(answer, CometError):
            raise self._calls.namespace.strip(answer)
        invisible_s = invisible_ms / 1000
        self._held[message.queue, message.queue_offset] = Lease(
            message.queue, answer.handle, invisible_s, asked_s + invisible_s
        )

    def _lease_of(self, message: object) -> Lease | None:
        """None: this consumer has not got it, or no longer. InvalidRequest: it is no message."""
        if not isinstance(message, ReceivedMessage):
            raise InvalidRequest(f"A received message is wanted, not {type(message).__name__}.")
        return self._held.get((message.queue, message.queue_offset))

    def _check_open(self) -> None:
        if not self._open:
            raise ClientClosed("The consumer is not open.")


def check_invisible_ms(invisible_ms: object) -> None:
    """Raises InvisibleTimeInvalid."""
    if type(invisible_ms) is not int or not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
        raise InvisibleTimeInvalid(
            f"invisible_ms is {INVISIBLE_MS_MIN} to {INVISIBLE_MS_MAX}, not {invisible_ms!r}."
        )

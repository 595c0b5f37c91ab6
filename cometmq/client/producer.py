"""Sends messages: one future per message or for many of them, batches on the wire, the same bytes
again until the broker has answered.
"""

from __future__ import annotations

import asyncio
import random
from asyncio import Future
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.cluster.routing import (
    AUTO_CREATE_TOPIC,
    auto_created_queues,
    is_ordered,
    queues_in_order,
    writable_queues,
    writers,
)
from cometmq.client.hooks import SendHooks
from cometmq.client.lifecycle import Lifecycle
from cometmq.client.messages import SendReceipt
from cometmq.client.names import check_topic
from cometmq.client.namespaces import Namespace
from cometmq.client.options import ProducerOptions, backoff_policy, options_of
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.answers import Answers
from cometmq.client.remote.description import Describer
from cometmq.client.requests.replier import Replier
from cometmq.client.requests.requester import (
    ReplyCallback,
    Requests,
    Sending,
    call_back,
    check_callback,
)
from cometmq.client.selectors import choose_by_hash
from cometmq.client.sending.batch import Waiter
from cometmq.client.sending.batcher import Buffer
from cometmq.client.sending.broker_sender import BrokerSender, QueueWriter
from cometmq.client.sending.partitioner import StickyPartitioner, has_key
from cometmq.client.sending.recalls import Recaller
from cometmq.client.sending.send_many import MessageRange, SendMany, SendReceipts, chunks
from cometmq.client.sending.send_tracer import SendTracer
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.clock import Clock, SystemClock
from cometmq.errors import (
    ClientClosed,
    CometError,
    InvalidRequest,
    NoPermission,
    PeerUnavailable,
    RouteNotFound,
    TopicNotFound,
)
from cometmq.format.recall import decode as decode_handle
from cometmq.model import Message, QueueRef, check_queue
from cometmq.native.interface import OpenRun
from cometmq.rpc.retry import Backoff
from cometmq.rpc.tasks import Tasks, race
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2, namesrv_pb2

TELL_LOST_S = 10.0

_log = logger(__name__)
_TICK_S = 0.05  # how often deadlines and routes are looked at


class Producer(Lifecycle):
    """Use it inside ``async with``; one event loop. Leaving the block sends what is buffered."""

    def __init__(
        self,
        namesrv: str | None = None,
        *,
        options: ProducerOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``namesrv``: ``host:port`` of the name servers, ``;`` between them; None = what
        COMETMQ_NAMESRV says. ConfigInvalid when it is not that.
        """
        self._options = options_of(ProducerOptions, options)
        super().__init__(self._options.loop_stall_ms)
        self._clock = clock or SystemClock()
        self._namespace = Namespace(self._options.namespace)
        self._connections = Connections(namesrv)
        self._tasks = Tasks("producer")
        self._routes = RouteWatcher(
            self._connections,
            Backoff(backoff_policy(self._options), random.Random()),
            self._route_changed,
            namespace=self._namespace,
        )
        self._selector = self._options.selector
        hooks = self._options.hooks
        self._hooks = SendHooks(hooks) if hooks else None
        self._requests = Requests(
            self._options,
            self._connections,
            self._routes,
            self._tasks,
            Sending(self._groups_of, self._queues_of, self.send, self._send_now, self._hindrance),
        )
        self._recaller = Recaller(self._options, self._connections, self._routes, self._clock)
        self._replier = Replier(self._connections.namesrv, self._options.client_id)
        self._tracing = TraceDispatcher(
            self._connections.namesrv, self._options.client_id, self._options
        )
        self._answers = Answers(
            self._options.client_id,
            lambda group: self._connections.broker(self._routes.require_writer(group).address),
            self._describe,
            is_enabled=self._options.remote_questions_enable,
        )
        self._describer = Describer(broker_pb2.CLIENT_ROLE_PRODUCER, self._options, self._namespace)
        self._tracer: SendTracer | None = None
        if self._options.trace_enable:
            timeout_s = self._options.delivery_timeout_ms / 1000
            self._tracer = SendTracer(self._tracing, self._options, timeout_s)
        self._senders: dict[str, BrokerSender] = {}
        self._partitioners: dict[str, StickyPartitioner] = {}
        # The same, while messages to them go by the rule: the producer is open, nothing selects,
        # no hook is called.
        self._rule: dict[str, StickyPartitioner] = {}
        self._lost_count = 0  # one-way messages that were not stored, since the last log line
        self._tell_lost_s = 0.0  # when to tell again
        self._runs: dict[str, OpenRun] = {}  # what takes messages by the rule at once; the buffer's
        self._is_cancelled = False  # the block was: nothing is waited for

    async def _enter(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._buffer = Buffer(self._options.buffer_bytes_max, self._options.buffer_count_max)
        self._runs = self._buffer.runs
        self._routes.start(self._tasks)
        self._tracing.start(self._tasks)
        self._answers.start(self._tasks)
        self._tasks.start(self._tick(), "tick")
        self._open = self._replier.is_open = True

    def _forked(self) -> None:
        super()._forked()
        self._rule.clear()
        self._buffer.forget_runs()

    async def _leave(self, error: BaseException | None) -> None:
        self._open = False
        self._answers.close()
        self._rule.clear()
        self._requests.close()
        self._buffer.forget_runs()
        try:
            await self._replier.close()
            if not isinstance(error, asyncio.CancelledError):
                await self.flush()
        finally:
            self._is_cancelled = isinstance(error, asyncio.CancelledError)
            await self._stop()

    def _describe(self, _with_stacks: bool) -> broker_pb2.ClientDescription:
        senders = [sender for _, sender in sorted(self._senders.items())]
        return self._describer.describe(
            self._answers.rates, sending=[sender.state() for sender in senders]
        )

    async def _stop(self) -> None:
        for sender in self._senders.values():
            sender.fail_all()
        self._buffer.room.set()
        try:
            await self._tracing.close(flush=not self._is_cancelled)
        finally:
            try:
                await self._tasks.stop()
            finally:
                await self._connections.close()

    @property
    def traces_lost(self) -> int:
        """Trace records that were dropped or not stored; the log has them, too."""
        return self._tracing.lost_count

    # --- sending ----------------------------------------------------------------------------------

    async def send(self, message: Message) -> Future[SendReceipt]:
        """Puts the message into the buffer; the future has the receipt, or the error, once the
        broker has answered. It does what an ``asyncio.Future`` does, but need not be one.

        Waits while the buffer is full, and for the first route to a topic. Raises at once what is
        wrong with the message itself, TopicNotFound, RouteNotFound and NoPermission (no broker
        takes the topic), PeerUnavailable (no broker of it answers, or no name server),
        ClientClosed. Cancelling the future does not take the message back.
        """
        try:
            topic = message.topic
            run = self._runs.get(topic)
            if run is not None:
                taken: Future[SendReceipt] | None = run.put(message)
                if taken is not None:
                    return taken
            partitioner = self._rule.get(topic)
        except AttributeError:  # it is no message: the error comes there
            return await self._send_with_care(message)
        # A producer that is not open has no partitioners, and no buffer.
        if partitioner is None or (buffer := self._buffer).used >= buffer.limit:
            return await self._send_with_care(message)
        future: Future[SendReceipt] = self._loop.create_future()
        batch_count = buffer.batch_count
        if message.queue is not None:
            if not partitioner.put_to(message.queue, message, future):
                return await self._send_with_care(message)
            return future
        if not partitioner.put(message, future):
            return await self._send_with_care(message)
        if buffer.batch_count > batch_count:  # let it go out while the next one fills
            await asyncio.sleep(0)
        elif not message.sharding_key:
            partitioner.begin_run()
        return future

    def _send_now(self, message: Message) -> Future[SendReceipt] | None:
        """As :meth:`send` where nothing has to be waited for; else None, and nothing is done."""
        run = self._runs.get(message.topic)
        if run is not None:
            taken: Future[SendReceipt] | None = run.put(message)
            if taken is not None:
                return taken
        partitioner, buffer = self._rule.get(message.topic), self._buffer
        if partitioner is None or buffer.used >= buffer.limit:
            return None
        future: Future[SendReceipt] = self._loop.create_future()
        batch_count = buffer.batch_count
        if message.queue is not None:
            return future if partitioner.put_to(message.queue, message, future) else None
        if not partitioner.put(message, future):
            return None
        if buffer.batch_count == batch_count and not message.sharding_key:
            partitioner.begin_run()
        return future

    async def send_and_wait(self, message: Message) -> SendReceipt:
        """Sends the message and waits for its receipt; raises why it was not stored."""
        return await (await self.send(message))

    async def send_many(self, messages: Iterable[Message]) -> Future[SendReceipts]:
        """As :meth:`send` for each of the messages, in their order, but that neighbours with
        sharding keys are sent queue by queue. One future has the receipts of all, once the brokers
        have answered; a message that was not stored has its error there, by its place, and keeps
        no other one back.

        Takes the messages as there is room in the buffer. Raises InvalidRequest for what is no
        iterable, ClientClosed, and what an iterator raises: the messages before it are sent. A
        cancelled call has sent the messages up to some place, of those with sharding keys the
        first ones of each queue; cancelling the future takes nothing back.
        """
        self._check_open()
        if not isinstance(messages, Iterable):
            raise InvalidRequest(f"send_many takes messages, not {type(messages).__name__}.")
        many = SendMany(self._loop)
        try:
            for chunk in chunks(messages):
                await self._put_all(chunk, many)
        finally:
            many.end()
        return asyncio.shield(many.decided)

    async def send_many_and_wait(self, messages: Iterable[Message]) -> SendReceipts:
        """Sends the messages and waits for their receipts. Raises the error of the first message
        that was not stored, when all are decided; :meth:`send_many` gives the receipts of the
        others.
        """
        receipts = await (await self.send_many(messages))
        receipts.raise_first_error()
        return receipts

    async def send_batch(self, messages: Sequence[Message]) -> list[SendReceipt]:
        """Sends messages as one unit to one queue: they are stored together and follow each other,
        or none of them is. RocketMQ's ``send(list)``. Waits for their receipts.

        All have the same topic, queue, sharding_key, delay and wait_store; together they are
        at most as large as the broker's batches (1,024 messages, 4 MiB). Raises InvalidRequest,
        BatchTooLarge, what :meth:`send` raises, and why none was stored. After SEND_TIMEOUT, and
        where a broker dies meanwhile and does not come back in time, all or some may be stored.
        """
        _check_unit(messages)
        if self._hooks is None:
            futures = await self._send_unit(messages)
        else:
            futures = await self._hooks.around_all(messages, self._send_unit)
        for future in futures:
            future.add_done_callback(_look_at)
        await asyncio.wait(futures)
        return [future.result() for future in futures]

    async def send_one_way(self, message: Message) -> None:
        """As :meth:`send`, for messages whose loss does not matter: nobody gets a receipt. What
        was not stored is logged with its count, at most each TELL_LOST_S.
        """
        (await self.send(message)).add_done_callback(self._one_way_decided)

    def _one_way_decided(self, future: Future[SendReceipt]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None:
            return
        self._lost_count += 1
        now_s = self._clock.monotonic_s()
        if now_s >= self._tell_lost_s:
            self._tell_lost_s = now_s + TELL_LOST_S
            _log.warning(
                "one-way messages not stored", extra=fields(count=self._lost_count, error=error)
            )
            self._lost_count = 0

    async def request(self, message: Message, timeout_s: float = 3.0) -> ReceivedMessage:
        """Sends a message to which a consumer replies, and waits for the reply: the first one that
        comes, by any consumer. Raises InvalidRequest, TooManyRequests (10,000 wait), RequestTimeout
        and what :meth:`send_and_wait` raises. A cancelled call waits for no reply.
        """
        return await (await self._requests.start(message, timeout_s))

    async def request_then(
        self, message: Message, callback: ReplyCallback, timeout_s: float = 3.0
    ) -> None:
        """As :meth:`request`, but ``callback(reply, error)`` is called in the event loop, with one
        of the two, when the request has ended. It must not block. Raises InvalidRequest: it is no
        function, or a coroutine function.
        """
        check_callback(callback)
        future = await self._requests.start(message, timeout_s)
        future.add_done_callback(partial(call_back, callback))

    async def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received; the receipt says that the reply is
        stored. Raises ReplyInvalid (the message is no request), RequestExpired, and what
        :meth:`send_and_wait` raises.
        """
        self._check_open()
        return await self._replier.reply(message, body)

    async def recall(self, handle: str) -> bool:
        """Takes back a message that waits for a time of its own, by the ``recall_handle`` of its
        receipt, in whichever process that is. True: no consumer ever gets it. False: it was too
        late. Raises RecallHandleInvalid, PositionFenced (a fail-over has
        taken the message back), MessageNotFound (its time is over, and the log does not tell any
        more whether it was recalled), SendTimeout (nothing is known; call it again).
        """
        its = decode_handle(handle)
        topic = self._namespace.shown(its.run.topic)
        await self._groups_of(topic)  # its route
        is_recalled = await self._recaller.recall(its.run.broker_group, handle)
        if self._tracer is not None:
            self._tracer.recalled(topic, its.unique_id, is_recalled=is_recalled)
        return is_recalled

    async def flush(self) -> None:
        """Waits until every message sent so far is decided, one way or the other."""
        pending = [batch for sender in self._senders.values() for batch in sender.batches()]
        for batch in pending:
            await asyncio.wait(
                {w.many.decided if isinstance(w, MessageRange) else w for w in batch.waiters}
            )

    async def _put_all(self, messages: list[Message], many: SendMany) -> None:
        """Puts messages of a ``send_many`` into the buffer."""
        unreachable: dict[object, CometError] = {}
        at = 0
        ends: deque[int] = deque()  # of the groups of messages with keys that come next
        version = 0  # of the queues that they were made for
        buffer = self._buffer
        while at < len(messages):
            batch_count = buffer.batch_count
            partitioner = self._rule_for(messages[at])
            count = 0
            if partitioner is not None and buffer.used < buffer.limit:
                if ends and version != partitioner.version:  # their queues may be others
                    ends = deque(range(at + 1, ends[-1] + 1))
                elif not ends and has_key(messages[at]):
                    ends.extend(partitioner.group(messages, at, many))
                version = partitioner.version
                if ends:
                    count = partitioner.extend_keyed(messages, at, many, end=ends[0])
                else:
                    count = partitioner.extend(messages, at, many)
                count = count or self._put_at_once(messages[at], partitioner, many)
            message = messages[at]
            if not count:
                await self._put_one(message, many, unreachable)
                count = 1
            if buffer.batch_count > batch_count:
                await asyncio.sleep(0)  # as send() does
            at += count
            while ends and ends[0] <= at:
                ends.popleft()

    @staticmethod
    def _put_at_once(message: Message, partitioner: StickyPartitioner, many: SendMany) -> int:
        """One message of a ``send_many`` by the rule; what is wrong is its own error. 0 for one
        that has to wait for its queue.
        """
        if message.__class__ is not Message or message.queue is not None:
            return 0
        waiter = many.take(1)
        try:
            if not partitioner.put(message, waiter):
                many.give_back()
                return 0
        except CometError as error:
            waiter.set_exception(error)
        return 1

    def _rule_for(self, message: Message) -> StickyPartitioner | None:
        try:
            return self._rule.get(message.topic)
        except (AttributeError, TypeError):  # it is no message: the error comes later
            return None

    async def _put_one(
        self, message: Message, many: SendMany, unreachable: dict[object, CometError]
    ) -> None:
        """One message of a ``send_many``; what is wrong is its own error. ``unreachable``: where
        messages cannot go, so that those behind do not wait for it again.
        """
        waiter = many.take(1)
        try:
            if unreachable and (known := unreachable.get(_destination(message))) is not None:
                waiter.set_exception(known)
            elif self._hooks is not None and isinstance(message, Message):
                waiter.follow(await self._hooks.around(message, self._send_to_queue))
            else:
                await self._put_to_queue(message, waiter)
        except (ClientClosed, asyncio.CancelledError):
            many.give_back()
            raise
        except CometError as error:
            waiter.set_exception(error)
            if isinstance(error, RouteNotFound | TopicNotFound | NoPermission | PeerUnavailable):
                unreachable[_destination(message)] = error

    async def _send_with_care(self, message: Message) -> Future[SendReceipt]:
        """Everything that is not the rule: first message of a topic, full buffer, a queue that was
        chosen, hooks.
        """
        if self._hooks is not None and isinstance(message, Message):
            return await self._hooks.around(message, self._send_to_queue)
        return await self._send_to_queue(message)

    async def _send_to_queue(self, message: Message) -> Future[SendReceipt]:
        self._check_open()
        future: Future[SendReceipt] = self._loop.create_future()
        await self._put_to_queue(message, future)
        return future

    async def _put_to_queue(self, message: Message, waiter: Waiter) -> None:
        self._check_open()
        if not isinstance(message, Message):
            raise InvalidRequest(
                f"One Message(topic, body) at a time is sent, not {type(message).__name__}."
            )
        if message.topic.__class__ is not str:
            message.check()
        partitioner = await self._room_for(message.topic)
        try:
            queue = self._choose(message, partitioner)
        except Exception as error:  # the selector's: whatever it raises is the message's
            waiter.set_exception(error)
            return
        deadline_s = self._clock.monotonic_s() + self._options.delivery_timeout_ms / 1000
        if queue is None:
            while not partitioner.put(message, waiter):
                await self._wait_ready(
                    message.topic, partitioner, partitioner.queue_writers, deadline_s
                )
            return
        while not (writer := partitioner.named(queue)).ready():
            await self._wait_ready(message.topic, partitioner, [writer], deadline_s)
        writer.sender.batcher.put(message, writer, waiter)

    async def _send_unit(self, messages: Sequence[Message]) -> list[Future[SendReceipt]]:
        self._check_open()
        first = messages[0]
        partitioner = await self._room_for(first.topic)
        queue = self._choose(first, partitioner)
        deadline_s = self._clock.monotonic_s() + self._options.delivery_timeout_ms / 1000
        while True:
            writer = partitioner.choose() if queue is None else partitioner.named(queue)
            if writer is not None and writer.ready():
                return writer.sender.batcher.put_unit(messages, writer)
            waiting = partitioner.queue_writers if writer is None else [writer]
            await self._wait_ready(first.topic, partitioner, waiting, deadline_s)

    async def _room_for(self, topic: str) -> StickyPartitioner:
        """The topic's queues, when there is room in the buffer."""
        partitioner = self._partitioners.get(topic) or await self._new_target(topic)
        while self._buffer.used >= self._buffer.limit:
            self._buffer.room.clear()
            await self._buffer.room.wait()
            self._check_open()
        self._check_queues(topic, partitioner)
        return partitioner

    def _choose(self, message: Message, partitioner: StickyPartitioner) -> QueueRef | None:
        """The queue that the message, its key or the selector names; None: any. Raises what the
        selector raises.
        """
        queue = message.queue
        if queue is None and self._selector is not None:
            queue = self._selector(message, partitioner.selectable)
            check_queue(queue)
            partitioner.named(queue)
        elif queue is None and message.sharding_key:
            # Also of a group without a writer: its messages wait, else their order would be lost.
            queue = choose_by_hash(message.sharding_key, partitioner.queues)
        return queue

    async def _groups_of(self, topic: str) -> set[str]:
        """The broker groups that take the topic's messages."""
        self._check_open()
        partitioner = self._partitioners.get(topic) or await self._new_target(topic)
        return {queue.broker_group for queue in partitioner.queues}

    def _queues_of(self, topic: str) -> tuple[QueueRef, ...]:
        """The topic's queues, as they are known."""
        partitioner = self._partitioners.get(topic)
        return () if partitioner is None else partitioner.queues

    def _hindrance(self, topic: str | None = None) -> CometError | None:
        """Why messages of the topic, or of any, are not stored now; None: nothing is known."""
        groups = None if topic is None else {q.broker_group for q in self._queues_of(topic)}
        senders = [s for s in self._senders.values() if groups is None or s.broker_group in groups]
        return next((s.hindrance for s in senders if s.hindrance is not None), None)

    def _check_queues(self, topic: str, partitioner: StickyPartitioner) -> None:
        if partitioner.queue_writers:
            return
        route = self._route(topic)
        if route is None or not writers(route):
            raise RouteNotFound(f"No broker that takes messages for topic {topic!r} is alive.")
        raise NoPermission(f"Topic {topic!r} is closed for writing.")

    async def _wait_ready(
        self,
        topic: str,
        partitioner: StickyPartitioner,
        queue_writers: list[QueueWriter],
        deadline_s: float,
    ) -> None:
        """Waits until one of the senders has opened its first stream. PeerUnavailable."""
        senders = {writer.sender for writer in queue_writers}
        timeout_s = max(0.0, deadline_s - self._clock.monotonic_s())
        if not await race(*(sender.opened.wait() for sender in senders), timeout_s=timeout_s):
            groups = ", ".join(sorted(sender.broker_group for sender in senders))
            raise PeerUnavailable(f"No broker answers: {groups}. The message is not stored.").after(
                self._hindrance(topic)
            )
        self._check_open()
        self._check_queues(topic, partitioner)  # the route may have changed meanwhile

    # --- routes -----------------------------------------------------------------------------------

    async def _new_target(self, topic: str) -> StickyPartitioner:
        check_topic(topic)
        timeout_s = self._options.route_timeout_ms / 1000
        await self._routes.wait_for(topic, timeout_s, or_auto_create=True)
        self._check_open()
        partitioner = self._partitioners.setdefault(topic, StickyPartitioner())
        self._fill(topic, partitioner)
        if self._selector is None and self._hooks is None:
            self._rule[topic] = partitioner
        return partitioner

    def _fill(self, topic: str, partitioner: StickyPartitioner) -> None:
        """The topic's queues by its present route. Without any writer the old ones stay: it may
        come back in time.
        """
        route = self._route(topic)
        if route is None or (partitioner.queue_writers and not writers(route)):
            return
        queues, in_order = writable_queues(route), queues_in_order(route)
        if route.topic != topic:
            queues = auto_created_queues(topic, queues)
            in_order = auto_created_queues(topic, in_order)
        self._buffer.forget_runs()
        partitioner.use(
            [QueueWriter(self._sender(queue.broker_group), queue) for queue in queues],
            [QueueWriter(self._sender(q.broker_group), q, pinned=True) for q in in_order],
            is_ordered=is_ordered(route),
        )

    def _route(self, topic: str) -> namesrv_pb2.TopicRoute | None:
        route = self._routes.get(topic)
        if route is not None and not route.groups and not route.order:
            route = self._routes.get(AUTO_CREATE_TOPIC)
        return route

    def _route_changed(self, topic: str) -> None:
        for name in self._partitioners if topic == AUTO_CREATE_TOPIC else (topic,):
            partitioner = self._partitioners.get(name)
            if partitioner is not None:
                self._fill(name, partitioner)

    def _sender(self, broker_group: str) -> BrokerSender:
        sender = self._senders.get(broker_group)
        if sender is None:
            sender = self._senders[broker_group] = BrokerSender(
                broker_group,
                self._options,
                self._connections,
                self._routes,
                self._buffer,
                self._clock,
                self._answers,
            )
            sender.tracer = self._tracer
            sender.start(self._tasks)
        return sender

    # --- deadlines, moving ------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = self._clock.monotonic_s()
            for sender in self._senders.values():
                sender.expire(now_s)
                if not sender.connected and self._routes.writer(sender.broker_group) is None:
                    self._move_from(sender)
                self._house(sender)

    def _house(self, sender: BrokerSender) -> None:
        """Sends batches that lost their queue to another one of the topic, as soon as the route has
        it.
        """
        for batch in sender.take_homeless():
            gone = {segment.queue for segment in batch.segments}
            writer = self._partitioners[next(iter(gone)).topic].choose()
            if writer is None or writer.queue in gone:
                sender.homeless.append(batch)
            else:
                writer.sender.batcher.adopt(batch, writer)

    def _move_from(self, sender: BrokerSender) -> None:
        """The sender's broker group has no writer: what waits there goes to other groups, if the
        topic has any. A batch is split only for what moves: the parts of one with many topics are
        small, and each would travel alone.
        """
        for batch in sender.evacuate(self._clock.monotonic_s()):
            free = {segment.queue.topic for segment in batch.segments if not segment.pinned}
            writers = {topic: self._partitioners[topic].choose() for topic in free}
            moving: dict[str, QueueWriter] = {
                topic: writer
                for topic, writer in writers.items()
                if writer is not None and writer.sender is not sender
            }
            if not moving:
                sender.window.push(batch)
                continue
            for topic, writer in moving.items():
                parts, _ = batch.split(
                    {
                        n
                        for n, s in enumerate(batch.segments)
                        if not s.pinned and s.queue.topic == topic
                    }
                )
                for part in parts:
                    writer.sender.batcher.adopt(part, writer)
            staying, _ = batch.split(
                {n for n, s in enumerate(batch.segments) if s.pinned or s.queue.topic not in moving}
            )
            for part in staying:
                sender.window.push(part)


def _destination(message: Message) -> tuple[str, QueueRef | None, str]:
    """Where it goes: messages that have the same one do not differ in whether they get there."""
    return message.topic, message.queue, message.sharding_key


def _look_at(future: Future[SendReceipt]) -> None:
    """Its error counts as seen: that of one message of a batch is raised for all."""
    if not future.cancelled():
        future.exception()


def _check_unit(messages: object) -> None:
    """InvalidRequest for messages that are no unit."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequest(f"A batch is a list of messages, at least one, not {messages!r:.80}.")
    for message in messages:
        if not isinstance(message, Message):
            raise InvalidRequest(f"A batch has messages only, not {type(message).__name__}.")
    first = messages[0]
    for name in (
        *("topic", "queue", "sharding_key", "delay_level", "wait_store"),
        *("deliver_at_ms", "delay_ms"),
    ):
        if any(getattr(message, name) != getattr(first, name) for message in messages):
            raise InvalidRequest(f"All messages of a batch have the same {name}.")

"""A consumer that receives messages for a time and acknowledges each: :class:`SimpleConsumer`."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.hooks import message_filter
from cometmq.client.lifecycle import Lifecycle
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
from cometmq.client.pop.arrivals import PopArrivals
from cometmq.client.pop.calls import Lease, PopAnswer, PopCalls, ack_items, not_held
from cometmq.client.pop.held import HeldMessages
from cometmq.client.pop.member import PopMember
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.answers import Answers
from cometmq.client.remote.description import CALLS_MAX, CallState, Describer, LeaseState
from cometmq.client.remote.stacks import Caller
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
from cometmq.rpc.tasks import ShieldedTasks, Tasks, is_cancelled, stop_all
from cometmq.v1 import broker_pb2

RECEIVE_COUNT_MAX = 1_024
WAIT_MS_MAX = 3_600_000
PATIENCE_S = 0.25  # for a broker group's answer, before another one is asked


class SimpleConsumer(Lifecycle):
    """Use it inside ``async with``; one event loop. Any number of consumers of a group, and of
    calls of one consumer, share all queues. What is not acknowledged is delivered again, here or
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
        super().__init__(self._options.loop_stall_ms)
        self._tasks = Tasks(f"simple consumer {group}")
        self._changes = ShieldedTasks()
        self._connections = Connections(namesrv)
        self._tracing = TraceDispatcher(
            self._connections.namesrv, self._options.client_id, self._options
        )
        self._tracer = ConsumeTracer(self._tracing) if self._options.trace_enable else None
        self._replier = Replier(self._connections.namesrv, self._options.client_id)
        namespace = Namespace(self._options.namespace)
        self._routes = RouteWatcher(
            self._connections,
            Backoff(backoff_policy(self._options), random.Random()),
            lambda _topic: self._queues_changed(),
            namespace=namespace,
        )
        self._calls = BrokerCalls(
            check_group(group, namespace),
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
        self._pop = PopCalls(self._calls, self._routes, self._options, self._subscriptions)
        self._arrivals = PopArrivals(
            self._calls, self._options, self._long_poller, self._subscriptions
        )
        self._member = PopMember(self._options, self._calls, self._pop, self._subscriptions)
        self._answers = Answers(
            self._options.client_id,
            self._calls.broker,
            self._describe,
            is_enabled=self._options.remote_questions_enable,
        )
        self._describer = Describer(broker_pb2.CLIENT_ROLE_SIMPLE, self._options, namespace)
        self._received_s: dict[str, float] = {}  # by broker group, when it has answered last
        self._member.answer(self._answers)
        self._failures = Backoff(backoff_policy(self._options), random.Random())
        self._held = HeldMessages()
        self._rounds = 0  # says which broker group is asked first
        # Calls that had no answer in time, by broker group, and what such calls brought.
        self._late: defaultdict[str, list[asyncio.Task[PopAnswer]]] = defaultdict(list)
        self._left: deque[ReceivedMessage] = deque()
        # After these answers nothing has come: who waits next begins there and asks no broker.
        self._idle: dict[str, PopAnswer] | None = None
        self._sooner = asyncio.Event()  # a late answer has come, or the consumer is closed

    async def _enter(self) -> None:
        self._routes.start(self._tasks)
        self._long_poller.start(self._tasks)
        self._tracing.start(self._tasks)
        self._member.start(self._tasks)
        self._answers.start(self._tasks)
        self._open = self._replier.is_open = True

    async def _leave(self, error: BaseException | None) -> None:
        self._open = False
        self._answers.close()
        self._sooner.set()
        try:
            await stop_all([task for some in self._late.values() for task in some])
            await self._pop.close()
            await self._replier.close()
            await self._member.leave()
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
        self._queues_changed()

    async def unsubscribe(self, topic: str) -> None:
        """Receives from the topic no more. A topic that is not subscribed to is no error. Raises
        TopicNameInvalid, ClientClosed.
        """
        self._check_open()
        self._subscriptions.pop(check_topic(topic), None)
        self._left = deque(one for one in self._left if one.queue.topic != topic)
        self._queues_changed()

    def _describe(self, with_stacks: bool) -> broker_pb2.ClientDescription:
        """Leases stand in the place of listener calls, each with the stack of the task or thread
        that received its messages: the application mostly works on them there.
        """
        now_s = asyncio.get_running_loop().time()
        parts = sorted(self._held.parts(now_s), key=lambda part: part.lease.received_s)
        held, counts = Counter[str](), Counter[str]()
        for lease, _, count in parts:
            held[lease.queue.broker_group] += count
            counts[lease.queue.broker_group] += 1
        calls = []
        for lease, first, count in parts[:CALLS_MAX]:
            stack = lease.caller.stack() if with_stacks and lease.caller is not None else ""
            age_s = now_s - lease.received_s
            calls.append(CallState(lease.queue, first, count, age_s, is_late=False, stack=stack))
        return self._describer.describe(
            self._answers.rates,
            subscriptions=self._subscriptions,
            leases=[
                LeaseState(broker_group, held[broker_group], 0, counts[broker_group], at_s)
                for broker_group, at_s in sorted(self._received_s.items())
            ],
            calls=calls,
            call_count=len(parts),
        )

    def _queues_changed(self) -> None:
        self._idle = None
        self._sooner.set()
        self._member.look_again()

    async def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received, as ``Producer.reply`` does."""
        self._check_open()
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
        try:
            return await self._receive(count_max, invisible_ms, wait_ms / 1000)
        except (asyncio.CancelledError, CometError) as error:
            if self._open or is_cancelled(error):
                raise
            raise ClientClosed("The consumer was closed.") from None  # with its connections

    async def _receive(
        self, count_max: int, invisible_ms: int, wait_s: float
    ) -> list[ReceivedMessage]:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        self._sooner.clear()
        if wait_s and not await self._has_come(wait_s):
            return []
        while True:
            self._sooner.clear()
            self._check_open()
            answers: dict[str, PopAnswer] = {}
            found, error = await self._ask_all(count_max, invisible_ms, answers)
            left_s = deadline_s - loop.time()
            if found or left_s <= 0:
                if error is not None and not found and not answers:
                    raise error
                return found
            if any(answer.has_more for answer in answers.values()):
                continue
            if not await self._wait(answers, error, left_s):
                return []

    async def _has_come(self, wait_s: float) -> bool:
        """Whether something may have come since the last receive that waited to its end."""
        if self._idle is not None and not self._left:
            if not await self._arrivals.wait(self._idle, wait_s, self._sooner):
                return False
            self._idle = None
        return True

    async def _wait(
        self, answers: dict[str, PopAnswer], error: CometError | None, left_s: float
    ) -> bool:
        """Whether to ask again; False: the time is over, and nothing has come."""
        if error is not None:
            left_s = min(left_s, self._failures.next_s())
        else:
            self._failures.reset()
        if not self._open or await self._arrivals.wait(answers, left_s, self._sooner):
            return True
        if error is not None or any(self._late.values()):
            return True
        self._idle = answers
        return False

    async def _ask_all(
        self, count_max: int, invisible_ms: int, answers: dict[str, PopAnswer]
    ) -> tuple[list[ReceivedMessage], CometError | None]:
        """The messages of the first broker group that has some, each time beginning with another
        one: messages in hand wait for no other group, which may not answer. Raises an error that no
        retry can mend, unless another group has given something.
        """
        failed = self._take_late()
        if left := await self._take_left(count_max, invisible_ms):
            return left, None
        groups = self._pop.broker_groups()
        self._rounds += 1
        first = self._rounds % max(1, len(groups))
        found: list[ReceivedMessage] = []
        for broker_group in groups[first:] + groups[:first]:
            try:
                answer = await self._ask(broker_group, count_max, invisible_ms, len(groups))
            except CometError as error:
                failed = error
                continue
            if answer is None:
                continue
            answers[broker_group] = answer
            found = self._taken(broker_group, answer)
            if found:  # brokers of the release before gave an attempt that came again in full
                self._left.extend(found[count_max:])
                found = found[:count_max]
                break
        if failed is not None and failed.retry is Retry.NEVER and not found:
            raise failed
        return found, failed

    async def _ask(
        self, broker_group: str, count_max: int, invisible_ms: int, group_count: int
    ) -> PopAnswer | None:
        """None: it is late. Its answer is taken when it has come; nobody asks it meanwhile."""
        late = self._late[broker_group]
        if group_count == 1:
            return await self._pop.receive(broker_group, count_max, invisible_ms)
        if late:
            return None
        task = asyncio.create_task(self._pop.receive(broker_group, count_max, invisible_ms))
        is_in_time = False
        try:
            done, _ = await asyncio.wait([task], timeout=PATIENCE_S)
            is_in_time = bool(done)
        finally:
            if not is_in_time:  # or cancelled, although its answer may have come in the same turn
                late.append(task)
                task.add_done_callback(lambda _: self._sooner.set())
        return task.result() if is_in_time else None

    def _take_late(self) -> CometError | None:
        """Takes what late answers have brought; the error of one that brought none."""
        failed: CometError | None = None
        for broker_group, late in self._late.items():
            for task in [task for task in late if task.done()]:
                late.remove(task)
                try:
                    self._left.extend(self._taken(broker_group, task.result()))
                except CometError as error:
                    failed = error
        return failed

    async def _take_left(self, count_max: int, invisible_ms: int) -> list[ReceivedMessage]:
        """Messages that came late. They are this consumer's for the time that it asks for now."""
        now_s = asyncio.get_running_loop().time()
        taken: list[ReceivedMessage] = []
        while self._left and len(taken) < count_max:
            message = self._left.popleft()
            lease = self._held.find(message)
            if lease is not None and now_s < lease.until_s:
                taken.append(message)
        if not taken:
            return []
        try:
            # A call that is cancelled on its way has changed the handles as well.
            await self._changes.run(self._renew(taken, invisible_ms))
        except BaseException:
            self._left.extendleft(reversed(taken))
            raise
        found = [message for message in taken if self._held.find(message) is not None]
        caller = Caller()
        for message in found:
            self._held.of_queue(message.queue)[message.queue_offset].caller = caller
        return found

    async def _renew(self, messages: Sequence[ReceivedMessage], invisible_ms: int) -> None:
        """Asks for so much time from now; messages that others may have are held no more."""
        leases: defaultdict[Lease, list[ReceivedMessage]] = defaultdict(list)
        for message in messages:
            leases[self._held.of_queue(message.queue)[message.queue_offset]].append(message)
        parts: defaultdict[str, list[tuple[Lease, broker_pb2.AckItem]]] = defaultdict(list)
        for lease, some in leases.items():
            for item in ack_items(lease, [one.queue_offset for one in some]):
                parts[lease.queue.broker_group].append((lease, item))
        for broker_group, pairs in parts.items():
            asked_s, invisible_s = asyncio.get_running_loop().time(), invisible_ms / 1000
            answers = await self._pop.change(
                broker_group,
                [
                    broker_pb2.ChangeInvisibleTimeItem(messages=item, invisible_ms=invisible_ms)
                    for _, item in pairs
                ],
            )
            for (lease, item), answer in zip(pairs, answers, strict=True):
                if not isinstance(answer, CometError):
                    changed = lease.changed(answer.handle, invisible_s, asked_s + invisible_s)
                    self._held.move(lease, changed, item)
                elif answer.retry is Retry.NEVER:
                    self._held.remove(lease, item)
                else:
                    raise self._calls.namespace.strip(answer)

    def _taken(self, broker_group: str, answer: PopAnswer) -> list[ReceivedMessage]:
        """The messages that the application wants; the others are acknowledged."""
        now_s, caller = asyncio.get_running_loop().time(), Caller()
        self._received_s[broker_group] = now_s
        taken: list[ReceivedMessage] = []
        passed: list[broker_pb2.AckItem] = []
        for run in answer.runs:
            kept = self._pop.kept(run)
            if len(kept) < len(run.messages):
                keep = {one.queue_offset for one in kept}
                others = {one.queue_offset for one in run.messages} - keep
                passed += ack_items(run.lease, others)
            run.lease.caller = caller
            self._held.add(run.lease, kept)
            self._answers.rates.of(run.lease.queue.topic).pulled += len(kept)
            taken += kept
        if self._tracer is not None:
            self._tracer.received(self._calls.group, taken)
        if passed:
            self._pop.put_acks(broker_group, passed)
        self._held.forget_old(now_s)
        return taken

    # --- acknowledge ------------------------------------------------------------------------------

    async def ack(self, message: ReceivedMessage) -> None:
        """The message is done: it is never delivered again. Returns when that is as safe as a
        message of its topic. HandleInvalid: its time was over and it is delivered again, or is
        acknowledged.
        """
        await self.ack_many([message])

    async def ack_many(self, messages: Collection[ReceivedMessage]) -> None:
        """As :meth:`ack`, with one call for each broker group. Raises the first message's error;
        the others are acknowledged all the same. InvalidRequest: what is no received message.
        """
        self._check_open()
        if not isinstance(messages, Collection):
            raise InvalidRequest(f"ack_many takes messages, not {type(messages).__name__}.")
        first_error: CometError | None = None
        by_group: defaultdict[str, defaultdict[Lease, set[int]]] = defaultdict(
            lambda: defaultdict(set)
        )
        queue: QueueRef | None = None
        held: Mapping[int, Lease] = {}
        leases: defaultdict[Lease, set[int]] = defaultdict(set)
        for message in messages:
            _check_received(message)
            if message.queue is not queue:  # neighbours are mostly of one queue
                queue = message.queue
                held, leases = self._held.of_queue(queue), by_group[queue.broker_group]
            offset = message.queue_offset
            lease = held.get(offset)
            if lease is None:
                first_error = first_error or not_held(message)
            else:
                leases[lease].add(offset)
        calls = (self._ack_at(broker_group, leases) for broker_group, leases in by_group.items())
        for error in await asyncio.gather(*calls):
            first_error = first_error or error
        if first_error is not None:
            raise self._calls.namespace.strip(first_error)
        if self._tracer is not None:
            self._tracer.acknowledged(self._calls.group, messages)

    async def _ack_at(self, broker_group: str, leases: dict[Lease, set[int]]) -> CometError | None:
        """Tries again what failed for now, as long as a request may take; the first error."""
        pairs = [(lease, one) for lease, some in leases.items() for one in ack_items(lease, some)]
        failures = Backoff(backoff_policy(self._options), random.Random())
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._calls.timeout_s
        refused: CometError | None = None
        while True:
            again: list[tuple[Lease, broker_pb2.AckItem]] = []
            failed: CometError | None = None
            errors = await self._pop.acknowledge(broker_group, [item for _, item in pairs])
            for pair, error in zip(pairs, errors, strict=True):
                if error is None or error.retry is Retry.NEVER:
                    self._end(*pair, is_done=error is None)
                    refused = refused or error
                else:
                    again.append(pair)
                    failed = failed or error
            if failed is None or loop.time() >= deadline_s:
                return refused or failed
            pairs = again
            await self._calls.wait(failures.next_s())

    def _end(self, lease: Lease, item: broker_pb2.AckItem, *, is_done: bool) -> None:
        """These messages are acknowledged, or cannot be."""
        if is_done:
            self._answers.rates.of(lease.queue.topic).done += item.count
        self._held.remove(lease, item)

    async def change_invisible_time(self, message: ReceivedMessage, invisible_ms: int) -> None:
        """The message is delivered again so long from now, unless it is acknowledged before: later,
        while the work goes on, or sooner. HandleInvalid as of :meth:`ack`, InvisibleTimeInvalid.
        """
        self._check_open()
        check_invisible_ms(invisible_ms)
        _check_received(message)
        lease = self._held.find(message)
        if lease is None:
            raise not_held(message)
        # A call that is cancelled on its way has changed the handle as well.
        await self._changes.run(self._change(message, lease, invisible_ms))

    async def _change(self, message: ReceivedMessage, lease: Lease, invisible_ms: int) -> None:
        [item] = ack_items(lease, [message.queue_offset])
        asked_s = asyncio.get_running_loop().time()
        change = broker_pb2.ChangeInvisibleTimeItem(messages=item, invisible_ms=invisible_ms)
        [answer] = await self._pop.change(message.queue.broker_group, [change])
        if isinstance(answer, CometError):
            raise self._calls.namespace.strip(answer)
        invisible_s = invisible_ms / 1000
        changed = lease.changed(answer.handle, invisible_s, asked_s + invisible_s)
        self._held.move(lease, changed, item)


def _check_received(message: object) -> None:
    """Raises InvalidRequest."""
    if not isinstance(message, ReceivedMessage):
        raise InvalidRequest(f"A received message is wanted, not {type(message).__name__}.")


def check_invisible_ms(invisible_ms: object) -> None:
    """Raises InvisibleTimeInvalid."""
    if type(invisible_ms) is not int or not INVISIBLE_MS_MIN <= invisible_ms <= INVISIBLE_MS_MAX:
        raise InvisibleTimeInvalid(
            f"invisible_ms is {INVISIBLE_MS_MIN} to {INVISIBLE_MS_MAX}, not {invisible_ms!r}."
        )

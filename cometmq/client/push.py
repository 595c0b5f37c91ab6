"""A consumer that calls the application: it divides the queues with the group's other members and
reads its own.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.consuming.listener import Listener, Work, Workers, check_listener, in_listener
from cometmq.client.consuming.orderly import leave_to_lane, orderly_in_place, orderly_not_done
from cometmq.client.consuming.push_queues import PushQueues
from cometmq.client.consuming.send_backs import SendBacks
from cometmq.client.group.share import GroupShare
from cometmq.client.hooks import ConsumeHook, ListenerWrapper, message_filter
from cometmq.client.lifecycle import Lifecycle
from cometmq.client.messages import ConsumeMode, Later, MessageModel, OrderBy, SendReceipt
from cometmq.client.names import check_group, check_topic, filter_of, of, own_group
from cometmq.client.namespaces import Namespace
from cometmq.client.options import PushConsumerOptions, backoff_policy, check_named, options_of
from cometmq.client.pop.share import PopShare
from cometmq.client.reading.long_poller import LongPoller
from cometmq.client.reading.offset_file import OffsetFile
from cometmq.client.reading.offsets import BrokerCalls
from cometmq.client.reading.positions import OffsetStore, check_store
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.answers import Answers
from cometmq.client.remote.description import CALLS_MAX, Describer
from cometmq.client.requests.replier import Replier
from cometmq.client.tracing.consume_tracer import ConsumeTracer
from cometmq.client.tracing.dispatcher import TraceDispatcher
from cometmq.errors import ConfigInvalid, InvalidRequest, TopicNotSubscribed
from cometmq.model import RETRY_PREFIX, Filter, QueueRef
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.tasks import Tasks
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2

_log = logger(__name__)


class PushConsumer(Lifecycle):
    """Use it inside ``async with``; one event loop. Leaving the block lets running listener calls
    end, commits, leaves the group.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        listener: Listener | None = None,
        *,
        options: PushConsumerOptions | None = None,
        offset_store: OffsetStore | None = None,
    ) -> None:
        """``namesrv``: ``host:port`` of the name servers, ``;`` between them; None = what
        COMETMQ_NAMESRV says. ``listener`` gets messages of one queue, in the queue's order, at most
        ``options.batch_count``. It is an async function, or a plain one, which is called in a
        thread. None or SUCCESS = done. LATER, a :class:`Later` or any exception = they come again:
        the broker takes them back, and delivers them after 10 s to 2 h; after 16 tries they are
        dead letters. ``offset_store`` keeps how far the consumer is, instead of the brokers.
        Raises ConfigInvalid, GroupNameInvalid, InvalidRequest.
        """
        self._options = options_of(PushConsumerOptions, options)
        super().__init__(self._options.loop_stall_ms)
        self._is_broadcasting = self._options.message_model is MessageModel.BROADCASTING
        if self._is_broadcasting and self._options.orderly:
            raise ConfigInvalid("orderly: a queue has no lock when all members read it.")
        if self._options.order_by != OrderBy.QUEUE and not self._options.orderly:
            raise ConfigInvalid("order_by: it is for a consumer with orderly=True.")
        namespace = Namespace(self._options.namespace)
        self._connections = Connections(namesrv)
        self._tasks = Tasks(f"push consumer {group}")
        self._tracing = TraceDispatcher(
            self._connections.namesrv, self._options.client_id, self._options
        )
        self._replier = Replier(self._connections.namesrv, self._options.client_id)
        self._routes = RouteWatcher(
            self._connections,
            Backoff(backoff_policy(self._options), random.Random()),
            lambda topic: self._share.route_changed(topic),
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
            self._options.client_id,
            self._connections,
            self._routes.cluster,
            self._options.hold_ms,
        )
        self._answers = Answers(
            self._options.client_id,
            self._calls.broker,
            self._describe,
            self._consume_now,
            is_enabled=self._options.remote_questions_enable,
            may_consume=self._options.remote_verify_enable,
        )
        self._workers = Workers(
            check_listener(listener),
            self._options.concurrency,
            self._options.batch_count,
            _redelivery(self._options),
            self._options.consume_timeout_ms / 1000,
            self._hooks(),
            group,
            self._answers.rates,
        )
        self._workers.tries_max = self._tries_max
        self._is_pop = self._options.consume_mode is ConsumeMode.POP
        self._describer = Describer(_role(self._options), self._options, namespace)
        goes_back = not (self._options.retry_in_place or self._is_broadcasting or self._is_pop)
        self._retries = RETRY_PREFIX + group if goes_back else None
        store = check_store(offset_store)
        own_calls = self._own_calls() if self._options.broadcast_offsets_at_broker else None
        self._offset_file = (
            OffsetFile(self._options.offset_file, group)
            if self._is_broadcasting and store is None and own_calls is None
            else None
        )
        self._queues: PushQueues
        self._share: GroupShare
        if self._is_pop:
            _check_pop(self._options, store)
            pop = PopShare(
                self._options, self._calls, self._routes, self._workers, self._long_poller
            )
            # It has the methods of both that are called here.
            self._queues = self._share = cast(Any, pop)
        else:
            self._divide_queues(store, own_calls)

    def _divide_queues(self, store: OffsetStore | None, own_calls: BrokerCalls | None) -> None:
        """The members of the group divide the queues."""
        subscriptions: dict[str, Filter] = {}
        instance_id = secrets.token_hex(8)
        queues = PushQueues(
            self._options,
            self._calls,
            subscriptions,
            instance_id,
            self._workers,
            self._long_poller,
            self._offset_file if store is None else store,
            own_calls,
            lambda: share.look_again(),
        )
        share = GroupShare(
            self._options,
            self._calls,
            self._routes,
            queues,
            subscriptions,
            instance_id,
            is_broadcasting=self._is_broadcasting,
            follows_resets=store is None,
        )
        share.limit_tries(self._options.retry_times_max)
        self._queues, self._share = queues, share

    def _describe(self, with_stacks: bool) -> broker_pb2.ClientDescription:
        calls, call_count = self._workers.calls(CALLS_MAX, with_stacks=with_stacks)
        return self._describer.describe(
            self._answers.rates,
            subscriptions=self._share.subscriptions,
            queues=() if self._is_pop else self._queues.states(),
            leases=cast(PopShare, self._share).states() if self._is_pop else (),
            calls=calls,
            call_count=call_count,
            is_suspended=self._workers.is_suspended,
        )

    async def _consume_now(
        self, broker_group: str, asked: broker_pb2.ConsumeQuestion
    ) -> broker_pb2.ListenerResult:
        namespace = self._calls.namespace
        queue = QueueRef(namespace.shown(asked.queue.topic), asked.queue.queue_id, broker_group)
        if queue.topic not in self._share.subscriptions:
            raise TopicNotSubscribed(f"This client does not read topic {queue.topic}.")
        try:
            shown = namespace.shown if namespace.name else None
            message = ReceivedMessage(asked.record, queue, shown)
        except ValueError as error:
            raise InvalidRequest(f"record: it is {error}") from None
        result = await self._workers.consume_now(message)
        result.is_orderly = self._options.orderly
        return result

    def _hooks(self) -> tuple[ConsumeHook | ListenerWrapper, ...]:
        hooks = self._options.consume_hooks
        if not self._options.trace_enable:
            return hooks
        return *hooks, ConsumeTracer(self._tracing)

    def _own_calls(self) -> BrokerCalls:
        """Calls for the group that is this consumer's alone, and has its offsets."""
        if not self._is_broadcasting:
            raise ConfigInvalid("broadcast_offsets_at_broker: it is for BROADCASTING.")
        check_named(self._options, "broadcast_offsets_at_broker")
        calls = BrokerCalls(
            self._calls.group,
            self._connections,
            self._routes,
            self._calls.timeout_s,
            namespace=self._calls.namespace,
        )
        calls.wire_group = own_group(self._calls.wire_group, self._options.client_id)
        return calls

    async def _enter(self) -> None:
        if self._offset_file is not None:
            self._offset_file.read()
        if self._is_broadcasting and not self._options.retry_in_place:
            self._workers.not_done = _pass_by
        self._routes.start(self._tasks)
        self._long_poller.start(self._tasks)
        self._workers.start(self._tasks)
        self._tracing.start(self._tasks)
        self._answers.start(self._tasks)
        self._share.answer(self._answers)
        if self._retries is not None:
            self._send_failed_back()
            self._share.subscribe_early(self._retries, Filter())
        elif self._options.orderly and not self._is_pop:
            self._workers.not_done = orderly_in_place
        self._queues.start(self._tasks)
        if not self._is_pop:
            self._share.start(self._tasks)
        self._open = self._replier.is_open = True

    async def _leave(self, error: BaseException | None) -> None:
        self._open = False
        self._answers.close()
        try:
            await self._share.stop()
            if not self._is_pop:
                await self._queues.stop()
            await self._replier.close()
            await self._share.leave()
        finally:
            self._workers.close()
            try:
                await self._tracing.close(flush=not isinstance(error, asyncio.CancelledError))
                await self._tasks.stop()
            finally:
                await self._connections.close()

    def _tries_max(self) -> int | None:
        """How often a message is tried in all; None: it is not known, or there is no end."""
        options = self._options
        own = options.retry_times_max
        if own < 0 and (options.orderly or options.retry_in_place) and not self._is_pop:
            return None
        known = own if own >= 0 else self._share.retry_times_max
        return None if known is None else 1 + known

    def _send_failed_back(self) -> None:
        workers, options = self._workers, self._options
        redeliver = leave_to_lane if options.orderly else workers.redeliver
        send_backs = SendBacks(
            self._calls, self._tasks, options.retry_times_max, redeliver, workers.wake
        )
        if options.orderly:
            # A call that takes long goes on: the queue cannot pass it by.
            workers.not_done = orderly_not_done(send_backs.put, options)
        else:
            workers.send_back = send_backs.put
            workers.not_done = lambda work, start, stop, later: send_backs.put(
                work, start, stop, later.delay_level, later.delay_ms
            )

    async def subscribe(
        self, topic: str, expression: str | Collection[str] = "*", *, sql: str | None = None
    ) -> None:
        """Reads the topic from now on; ``expression`` is ``*`` or tags with ``||`` between them, or
        a collection of tags. ``sql``, instead of tags, is an SQL92 expression over properties:
        ``"price > 5 AND region = 'eu'"``. A second call for a topic replaces its filter. Raises
        TopicNameInvalid, FilterInvalid, ClientClosed. A topic that is not there is no error:
        reading begins when it is, and until then the log has a WARNING.
        """
        self._check_open()
        await self._share.subscribe(
            check_topic(topic), filter_of(expression, sql), waits=not in_listener.get()
        )

    async def unsubscribe(self, topic: str) -> None:
        """Reads the topic no more: listener calls with its messages end, what they did is
        committed, and other members get its queues. A listener does not wait for that: its own call
        is one of them. A topic that is not read is no error. Raises TopicNameInvalid, ClientClosed.
        """
        self._check_open()
        if check_topic(topic) != self._retries:
            await self._share.unsubscribe(topic, waits=not in_listener.get())

    def suspend(self) -> None:
        """No listener call begins before :meth:`resume`; those that run go on. Queues are kept, and
        read until they have as many unfinished messages as the options allow.
        """
        self._check_loop()
        self._workers.suspend()

    def resume(self) -> None:
        """Listener calls begin again."""
        self._check_loop()
        self._workers.resume()

    def set_concurrency(self, concurrency: int) -> None:
        """So many listener calls at a time from now on (RocketMQ's updateCorePoolSize). Raises
        ConfigInvalid, ClientClosed.
        """
        self._check_open()
        self._options = replace(self._options, concurrency=concurrency)
        self._workers.resize(concurrency)

    async def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received, as ``Producer.reply`` does."""
        self._check_open()
        return await self._replier.reply(message, body)

    async def leave_for_good(self) -> None:
        """The other members get this one's queues when the block ends, whatever ``session_ms``
        says.
        """
        self._check_open()
        await self._share.end_session()

    @property
    def assigned(self) -> list[QueueRef]:
        """The queues that this consumer reads now."""
        return sorted(self._queues.reading)

    @property
    def traces_lost(self) -> int:
        """Trace records that were dropped or not stored; the log has them, too."""
        return self._tracing.lost_count

    @property
    def pullhold(self) -> str | None:
        """Address of the pullhold where queues without messages wait; None: they are polled."""
        return self._long_poller.address


def _role(options: PushConsumerOptions) -> broker_pb2.ClientRole.ValueType:
    if options.consume_mode is ConsumeMode.POP:
        return broker_pb2.CLIENT_ROLE_PUSH_POP
    if options.orderly:
        return broker_pb2.CLIENT_ROLE_PUSH_ORDERLY
    return broker_pb2.CLIENT_ROLE_PUSH


def _check_pop(options: PushConsumerOptions, store: OffsetStore | None) -> None:
    """ConfigInvalid for what a consumer of a group that receives cannot have."""
    wrong = {
        "orderly": options.orderly,
        "retry_in_place": options.retry_in_place,
        "message_model": options.message_model is not MessageModel.CLUSTERING,
        "retry_times_max": options.retry_times_max >= 0,
        "session_ms": options.session_ms > 0,
        "offset_store": store is not None,
    }
    for name, is_given in wrong.items():
        if is_given:
            raise ConfigInvalid(
                f"{name}: not with consume_mode=POP, where brokers know what each member has, and "
                "order and tries are the group's settings."
            )


def _pass_by(work: Work, start: int, stop: int, _: Later) -> None:
    """Logs messages that a broadcasting consumer cannot do: they do not come again."""
    for message in work.messages[start:stop]:
        _log.error(
            "message failed, passed by",
            extra=fields(**of(message.queue), offset=message.queue_offset, id=message.message_id),
        )
    work.queue.finish(work.run, start, stop)


def _redelivery(options: PushConsumerOptions) -> BackoffPolicy:
    first_s = options.redeliver_backoff_ms / 1000
    return BackoffPolicy(first_s, max(first_s, options.redeliver_backoff_max_ms / 1000))

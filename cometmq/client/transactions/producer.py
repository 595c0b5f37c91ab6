"""Transactions: messages that consumers get when the application's own work has succeeded, and not
otherwise. RocketMQ's half messages and checks.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Protocol, Self

from cometmq.client.messages import SendReceipt, place_of
from cometmq.client.names import check_producer_group, check_topic
from cometmq.client.options import ProducerOptions, backoff_policy
from cometmq.client.producer import Producer
from cometmq.client.received import ReceivedMessage
from cometmq.client.sending.broker_sender import QueueWriter
from cometmq.client.sending.partitioner import StickyPartitioner
from cometmq.client.sending.send_many import SendMany, SendReceipts
from cometmq.client.transactions.checks import (
    ROCKETMQ_STATES,
    Check,
    ListenerCalls,
    TransactionChecks,
    TransactionState,
    state_of,
)
from cometmq.client.transactions.ends import TransactionEnds
from cometmq.client.transactions.receipts import CommitReceipt, CommitReceipts, Ended, Halves
from cometmq.clock import Clock
from cometmq.errors import (
    ClientClosed,
    CometError,
    ConfigInvalid,
    InvalidRequest,
    QueueNotFound,
)
from cometmq.format.halves import HalfForm
from cometmq.model import IMMUNITY_S_MAX, Message, QueueRef, check_texts
from cometmq.native.interface import OpenRun
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2

MESSAGES_MAX = 1_024  # of one transaction: one call ends them

_log = logger(__name__)


class TransactionListener(Protocol):
    """RocketMQ's TransactionListener; coroutine functions, or plain ones that may block."""

    def execute(self, message: Message, argument: Any) -> Any:
        """Do the application's work for a message that is stored; a TransactionState."""
        ...

    def check(self, message: Any) -> Any:
        """The state of the work for a :class:`ReceivedMessage`, maybe of another process of the
        group: a TransactionState.
        """
        ...


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """The outcome of one :meth:`TransactionProducer.send_in_transaction`.
    ``committed`` None: consumers do not see it, or not yet (``UNKNOWN``).
    """

    receipt: SendReceipt
    state: TransactionState
    committed: CommitReceipt | None = None


class Transaction:
    """Messages that are committed together, or rolled back. Use it inside ``async with``: leaving
    the block commits; an exception rolls back. All messages go to one broker group.
    """

    __slots__ = (
        "_broker_group",
        "_count",
        "_failed",
        "_form",
        "_producer",
        "_sent",
        "_sent_count",
        "_state",
        "committed",
    )

    def __init__(self, producer: TransactionProducer, form: HalfForm) -> None:
        # In the order of sending, once it is committed.
        self.committed: Sequence[CommitReceipt] = ()
        self._producer = producer
        self._form = form
        self._broker_group = ""  # "" until the first message has one
        self._sent: list[Halves] = []
        self._sent_count = 0
        self._count = 0
        self._failed: BaseException | None = None  # why a message was not stored
        self._state: TransactionState | None = None  # as it has ended

    async def send(self, message: Message) -> SendReceipt:
        """Stores a message of the transaction; nobody sees it before the commit. Raises what
        ``Producer.send`` raises, and why it was not stored: then the transaction can only be rolled
        back. InvalidRequest: it has ended, the message has a delay or does not wait to be stored,
        or the transaction has 1,024 messages.
        """
        self._check_room(1)
        self._count += 1
        try:
            future = self._producer._half_at_once(message, self)
            if future is None:
                future = await self._producer._send_half(message, self)
            receipt = await future
        except BaseException as error:  # a cancellation, too: it may be stored
            self._failed = self._failed or error
            raise
        self._sent.append(Halves(*place_of(receipt), 1))
        self._sent_count += 1
        return receipt

    async def send_many(self, messages: Iterable[Message]) -> SendReceipts:
        """As :meth:`send` for each of the messages, at most 1,024 with those before, and faster.
        Raises the first error, and sends none behind it. InvalidRequest, before any is sent: what
        is no iterable, too many. The messages with sharding keys go where :meth:`send` sends them.
        """
        if not isinstance(messages, Iterable):
            raise InvalidRequest(f"send_many takes messages, not {type(messages).__name__}.")
        some = list(islice(messages, MESSAGES_MAX + 1))
        self._check_room(len(some))
        self._count += len(some)
        try:
            receipts = await (await self._producer._send_halves(some, self))
            pieces = [Halves(*piece) for piece in receipts._pieces()]
            self._sent += pieces  # also beside a failed one: they are rolled back
            self._sent_count += sum([piece.size for piece in pieces])
            receipts.raise_first_error()
        except BaseException as error:
            self._failed = self._failed or error
            raise
        return receipts

    def _check_room(self, count: int) -> None:
        if self._state is not None:
            raise InvalidRequest("The transaction has ended.")
        if self._count + count > MESSAGES_MAX:
            raise InvalidRequest(f"A transaction has at most {MESSAGES_MAX} messages.")

    async def commit(self) -> Sequence[CommitReceipt]:
        """Consumers get all messages. Raises what a failed :meth:`send` raised, after a rollback;
        InvalidRequest, after a rollback: a send has not ended; SendTimeout: no broker has answered,
        and the checks decide; TransactionEnded.
        """
        self._check_open()
        if self._failed is None and self._sent_count < self._count:
            self._failed = InvalidRequest(
                "A message of the transaction is still being sent: wait for it before the commit."
            )
        if self._failed is not None:
            await self.rollback()
            if isinstance(self._failed, CometError):
                raise self._failed
            raise InvalidRequest(
                f"A message of the transaction was not stored: {self._failed!r:.500}"
            ) from self._failed
        self._state = TransactionState.COMMIT
        ended = await self._end(broker_pb2.TRANSACTION_RESOLUTION_COMMIT)
        self.committed = CommitReceipts(ended, self._broker_group, self._producer._namespace.shown)
        return self.committed

    async def rollback(self) -> None:
        """Nobody ever sees the messages. SendTimeout: no broker has answered, and the checks
        decide.
        """
        self._check_open()
        self._state = TransactionState.ROLLBACK
        await self._end(broker_pb2.TRANSACTION_RESOLUTION_ROLLBACK)

    def leave_open(self) -> None:
        """It is not known yet how it ends (UNKNOWN): the broker asks the listener's ``check``."""
        self._check_open()
        self._state = TransactionState.UNKNOWN

    def _check_open(self) -> None:
        if self._state is not None:
            raise InvalidRequest("The transaction has ended.")

    async def _end(self, resolution: broker_pb2.TransactionResolution.ValueType) -> list[Ended]:
        """Raises the first error; the broker has decided about all messages then."""
        if not self._sent:
            return []
        outcomes = await self._producer._ends.end(self._broker_group, self._sent, resolution)
        assert self._state is not None
        self._producer._trace_ends(self._sent, self._state)
        good = [one for one in outcomes if not isinstance(one, CometError)]
        if len(good) < len(outcomes):
            raise next(one for one in outcomes if isinstance(one, CometError))
        return good

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._state is not None:
            return
        if error is None:
            await self.commit()
            return
        try:
            await self.rollback()
        except CometError as why:  # the application's error comes first; checks end it
            _log.warning("a transaction is not rolled back yet", extra=fields(error=why))


class TransactionProducer(Producer):
    """A producer of a producer group, whose members know how their transactions end. Use it inside
    ``async with``.
    """

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        listener: TransactionListener | Check | None = None,
        *,
        topics: Collection[str] = (),
        options: ProducerOptions | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``listener``: an object with ``check`` and, for ``send_in_transaction``, ``execute``; or
        a function that checks. ``topics``: their broker groups may ask from the start, all others
        once a transaction was sent to them. Raises ConfigInvalid, also without a listener: nobody
        would end what a crash leaves. GroupNameInvalid, TopicNameInvalid.
        """
        super().__init__(namesrv, options=options, clock=clock)
        self.group = check_producer_group(group, self._namespace)
        self._execute, self._check = _functions(listener)
        check_texts("topics", topics)
        self._checked_topics = tuple(map(check_topic, topics))
        self._calls = ListenerCalls()
        policy = backoff_policy(self._options)
        wire_group = self._wire_group = self._namespace.wire(group)
        self._ends = TransactionEnds(
            wire_group,
            self._connections,
            self._routes,
            self._tasks,
            policy,
            self._namespace,
            self._clock,
            timeout_s=self._options.request_timeout_ms / 1000,
            patience_s=self._options.delivery_timeout_ms / 1000,
        )
        self._checks = TransactionChecks(
            wire_group,
            self._options.client_id,
            self._check,
            self._calls,
            self._connections,
            self._routes,
            self._tasks,
            policy,
            self._namespace,
        )
        self._checks.on_answer = self._trace_check
        self._form = HalfForm(self._wire_group)  # of transactions that name no immunity
        self._half_runs: dict[tuple[str, HalfForm], tuple[OpenRun, str]] = {}  # the buffer's

    async def _enter(self) -> None:
        await super()._enter()
        self._half_runs = self._buffer.half_runs
        for topic in self._checked_topics:
            self._routes.watch(topic)

    async def _stop(self) -> None:
        self._ends.close()
        try:
            await super()._stop()
        finally:
            self._calls.close()

    def transaction(self, *, check_immunity_s: int = 0) -> Transaction:
        """A new transaction. ``check_immunity_s``: nobody is asked about its messages before they
        are so old, at most 3,600; 0 = as long as the broker's option says. InvalidRequest.
        """
        if type(check_immunity_s) is not int or not 0 <= check_immunity_s <= IMMUNITY_S_MAX:
            raise InvalidRequest(
                f"check_immunity_s is 0 to {IMMUNITY_S_MAX} s, not {check_immunity_s!r}."
            )
        form = self._form
        if check_immunity_s:
            form = HalfForm(self._wire_group, check_immunity_s)
        return Transaction(self, form)

    async def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_immunity_s: int = 0
    ) -> TransactionResult:
        """Stores a message, lets the listener ``execute``, and ends the transaction as that says;
        UNKNOWN, or an exception of the listener, leaves it to the checks. RocketMQ's
        sendMessageInTransaction. Raises ConfigInvalid (the listener has no ``execute``), and what
        :class:`Transaction` raises.
        """
        if self._execute is None:
            raise ConfigInvalid("The listener has no method execute.")
        one = self.transaction(check_immunity_s=check_immunity_s)
        receipt = await one.send(message)
        state = await state_of(self._calls, self._execute, message, argument)
        if state is TransactionState.COMMIT:
            [committed] = await one.commit()
            return TransactionResult(receipt, state, committed)
        if state is TransactionState.ROLLBACK:
            await one.rollback()
        else:
            one.leave_open()
        return TransactionResult(receipt, state)

    # --- halves -----------------------------------------------------------------------------------

    def _half_at_once(self, message: Message, one: Transaction) -> Future[SendReceipt] | None:
        """Into the open run of its topic, if it can go there; else :meth:`_send_half` sends it."""
        try:
            found = self._half_runs.get((message.topic, one._form))
        except (AttributeError, TypeError):  # it is no message: the error comes there
            return None
        if found is None:
            return None
        run, broker_group = found
        if one._broker_group not in ("", broker_group):
            return None
        future: Future[SendReceipt] | None = run.put(message)
        if future is not None:
            one._broker_group = broker_group
        return future

    async def _send_halves(self, messages: list[Message], one: Transaction) -> Future[SendReceipts]:
        """The receipts of the messages up to the first that cannot be sent."""
        self._check_open()
        many = SendMany(self._loop)
        at = 0
        try:
            while at < len(messages):
                batch_count = self._buffer.batch_count
                count = self._extend_halves(messages, at, one, many)
                if not count:
                    waiter = many.take(1)
                    try:
                        waiter.follow(await self._send_half(messages[at], one))
                    except (ClientClosed, asyncio.CancelledError):
                        many.give_back()
                        raise
                    except CometError as error:
                        waiter.set_exception(error)
                        break
                    count = 1
                if self._buffer.batch_count > batch_count:
                    await asyncio.sleep(0)  # let it go out while the next one fills
                at += count
        finally:
            many.end()
        return asyncio.shield(many.decided)

    async def _send_half(self, message: Message, one: Transaction) -> Future[SendReceipt]:
        if self._hooks is None or not isinstance(message, Message):
            return await self._put_half(message, one)
        return await self._hooks.around(message, partial(self._put_half, one=one))

    async def _put_half(self, message: Message, one: Transaction) -> Future[SendReceipt]:
        self._check_open()
        if not isinstance(message, Message):
            raise InvalidRequest(
                f"One Message(topic, body) at a time is sent, not {type(message).__name__}."
            )
        message.check()
        if message.delay_level or message.delay_ms or message.deliver_at_ms:
            raise InvalidRequest("A message of a transaction has no delay.")
        if not message.wait_store:
            raise InvalidRequest("A message of a transaction waits until it is stored.")
        partitioner = await self._room_for(message.topic)
        queue = self._choose(message, partitioner)
        deadline_s = self._clock.monotonic_s() + self._options.delivery_timeout_ms / 1000
        while not (writer := self._half_writer(partitioner, queue, one)).ready():
            await self._wait_ready(message.topic, partitioner, [writer], deadline_s)
        one._broker_group = writer.queue.broker_group
        self._checks.hold(one._broker_group)
        slot = writer.of_half(one._form)
        writer.sender.batcher.ready(slot)
        future: Future[SendReceipt] = self._loop.create_future()
        partitioner.put_by(writer, slot, message, future)
        if queue is None and self._rule.get(message.topic) is partitioner:
            partitioner.now = writer  # the next ones may go the same way
            writer.sender.batcher.begin_run()
        return future

    def _extend_halves(
        self, messages: list[Message], at: int, one: Transaction, many: SendMany
    ) -> int:
        """Behind the half before, as long as the messages go the same way without another look; how
        many. The next one is for :meth:`_send_half`.
        """
        partitioner = self._rule_for(messages[at])
        if partitioner is None or self._buffer.used >= self._buffer.limit:
            return 0
        return partitioner.extend(messages, at, many, half=(one._form, one._broker_group))

    def _trace_ends(self, sent: Iterable[Halves], state: TransactionState) -> None:
        if self._tracer is None:
            return
        for run, first, count in sent:
            for index in range(first, first + count):
                unique_id = SendReceipt(run, index).unique_id
                self._tracer.ended(self.group, run.queue.topic, unique_id, ROCKETMQ_STATES[state])

    def _trace_check(self, message: ReceivedMessage, state: TransactionState) -> None:
        if self._tracer is not None:
            self._tracer.ended(
                self.group,
                message.queue.topic,
                message.unique_id,
                ROCKETMQ_STATES[state],
                from_check=True,
            )

    def _half_writer(
        self, partitioner: StickyPartitioner, queue: QueueRef | None, one: Transaction
    ) -> QueueWriter:
        """The queue that a half goes to: of the broker group that has the transaction's first
        message. Raises InvalidRequest, QueueNotFound.
        """
        broker_group = one._broker_group
        if queue is not None:
            writer = partitioner.named(queue)
            if broker_group not in ("", writer.queue.broker_group):
                raise InvalidRequest(
                    f"The transaction is at broker group {broker_group!r}, {queue} is not."
                )
            return writer
        sticky = partitioner.sticky() or partitioner.queue_writers[0]
        if broker_group in ("", sticky.queue.broker_group):
            return sticky
        there = [w for w in partitioner.queue_writers if w.queue.broker_group == broker_group]
        if not there:
            raise QueueNotFound(
                f"The topic has no queue at {broker_group!r}, where the transaction is."
            )
        return there[one._count % len(there)]

    def _route_changed(self, topic: str) -> None:
        super()._route_changed(topic)
        route = self._routes.get(topic) if topic in self._checked_topics else None
        for group in route.groups if route is not None else ():
            self._checks.hold(group.broker_group)


def _functions(
    listener: TransactionListener | Check | None,
) -> tuple[Callable[..., object] | None, Check]:
    """The functions that execute and that check. ConfigInvalid."""
    check = getattr(listener, "check", listener)
    if not callable(check):
        raise ConfigInvalid(
            "A TransactionProducer needs a listener: an object with a method check(message), or a "
            "function. Brokers ask it about transactions that a crash has left."
        )
    execute = getattr(listener, "execute", None)
    return (execute if callable(execute) else None), check

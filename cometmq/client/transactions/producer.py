"""Transactions: messages that consumers get when the application's own work has succeeded, and not
otherwise. RocketMQ's half messages and checks.
"""

from __future__ import annotations

import asyncio
from asyncio import Future
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from cometmq.client.messages import SendReceipt, place_of
from cometmq.client.names import check_group, check_topic
from cometmq.client.options import ProducerOptions, backoff_policy
from cometmq.client.producer import Producer
from cometmq.client.received import ReceivedMessage
from cometmq.client.sending.broker_sender import QueueWriter
from cometmq.client.sending.partitioner import StickyPartitioner
from cometmq.client.transactions.checks import (
    ROCKETMQ_STATES,
    Check,
    ListenerCalls,
    TransactionChecks,
    TransactionState,
    state_of,
)
from cometmq.client.transactions.ends import TransactionEnds
from cometmq.clock import Clock
from cometmq.errors import (
    CometError,
    ConfigInvalid,
    InvalidRequest,
    QueueNotFound,
)
from cometmq.format.halves import HalfForm
from cometmq.model import IMMUNITY_S_MAX, Message, QueueRef, check_texts
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
        """What became of the work for a :class:`ReceivedMessage`, maybe of another process of the
        group; a TransactionState.
        """
        ...


@dataclass(frozen=True, slots=True)
class CommitReceipt:
    """The place where consumers find a committed message."""

    message_id: str
    queue: QueueRef
    queue_offset: int


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

    def __init__(self, producer: TransactionProducer, form: HalfForm) -> None:
        self.committed: list[CommitReceipt] = []  # in the order of sending, once it is committed
        self._producer = producer
        self._form = form
        self._broker_group = ""  # "" until the first message has one
        self._sent: list[SendReceipt] = []
        self._count = 0
        self._failed: BaseException | None = None  # why a message was not stored
        self._state: TransactionState | None = None  # as it has ended

    async def send(self, message: Message) -> SendReceipt:
        """Stores a message of the transaction; nobody sees it before the commit. Raises what
        ``Producer.send`` raises, and why it was not stored: then the transaction can only be rolled
        back. InvalidRequest: it has ended, the message has a delay or does not wait to be stored,
        or the transaction has 1,024 messages.
        """
        if self._state is not None:
            raise InvalidRequest("The transaction has ended.")
        if self._count >= MESSAGES_MAX:
            raise InvalidRequest(f"A transaction has at most {MESSAGES_MAX} messages.")
        self._count += 1
        try:
            receipt = await (await self._producer._send_half(message, self))
        except BaseException as error:  # a cancellation, too: it may be stored
            self._failed = self._failed or error
            raise
        self._sent.append(receipt)
        return receipt

    async def commit(self) -> list[CommitReceipt]:
        """Consumers get all messages. Raises what a failed :meth:`send` raised, after a rollback;
        InvalidRequest, after a rollback: a send has not ended; SendTimeout: no broker has answered,
        and the checks decide; TransactionEnded.
        """
        self._check_open()
        if self._failed is None and len(self._sent) < self._count:
            self._failed = InvalidRequest(
                "A message of the transaction is still being sent: wait for it before the commit."
            )
        if self._failed is not None:
            await self.rollback()
            if isinstance(self._failed, CometError):
                raise self._failed
            raise InvalidRequest("A message of the transaction was not stored.") from self._failed
        self._state = TransactionState.COMMIT
        results = await self._end(broker_pb2.TRANSACTION_RESOLUTION_COMMIT)
        shown = self._producer._shown_queue
        self.committed = [
            CommitReceipt(one.message_id, shown(one, self._broker_group), one.position.offset)
            for one in results
        ]
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

    async def _end(
        self, resolution: broker_pb2.TransactionResolution.ValueType
    ) -> list[broker_pb2.TransactionResult]:
        """Raises the first error; the broker has decided about all messages then."""
        if not self._sent:
            return []
        halves = [_half_of(receipt) for receipt in self._sent]
        results = await self._producer._ends.end(self._broker_group, halves, resolution)
        assert self._state is not None
        self._producer._trace_ends(self._sent, self._state)
        good = [one for one in results if not isinstance(one, CometError)]
        if len(good) < len(results):
            raise next(one for one in results if isinstance(one, CometError))
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
        self.group = check_group(group)
        self._execute, self._check = _functions(listener)
        check_texts("topics", topics)
        self._checked_topics = tuple(map(check_topic, topics))
        self._calls = ListenerCalls()
        policy = backoff_policy(self._options)
        wire_group = self._namespace.wire(group)
        self._wire_group = check_group(wire_group)
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

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        for topic in self._checked_topics:
            self._routes.watch(topic)
        return self

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
        return Transaction(self, HalfForm(self._wire_group, check_immunity_s))

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
        future: Future[SendReceipt] = asyncio.get_running_loop().create_future()
        partitioner.put_by(writer, slot, message, future)
        return future

    def _trace_ends(self, sent: Collection[SendReceipt], state: TransactionState) -> None:
        if self._tracer is not None:
            for receipt in sent:
                self._tracer.ended(
                    self.group, receipt.queue.topic, receipt.unique_id, ROCKETMQ_STATES[state]
                )

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

    def _shown_queue(self, result: broker_pb2.TransactionResult, broker_group: str) -> QueueRef:
        queue = result.queue
        return QueueRef(self._namespace.shown(queue.topic), queue.queue_id, broker_group)

    def _route_changed(self, topic: str) -> None:
        super()._route_changed(topic)
        route = self._routes.get(topic) if topic in self._checked_topics else None
        for group in route.groups if route is not None else ():
            self._checks.hold(group.broker_group)


def _functions(
    listener: TransactionListener | Check | None,
) -> tuple[Callable[..., object] | None, Check]:
    """What executes, and what checks. ConfigInvalid."""
    check = getattr(listener, "check", listener)
    if not callable(check):
        raise ConfigInvalid(
            "A TransactionProducer needs a listener: an object with a method check(message), or a "
            "function. Brokers ask it about transactions that a crash has left."
        )
    execute = getattr(listener, "execute", None)
    return (execute if callable(execute) else None), check


def _half_of(receipt: SendReceipt) -> broker_pb2.HalfRef:
    run, index = place_of(receipt)
    return broker_pb2.HalfRef(
        half_offset=run.queue_offset + index,
        log_offset=run.log_offset + run.starts[run.first + index],
        transaction_id=receipt.unique_id,
    )

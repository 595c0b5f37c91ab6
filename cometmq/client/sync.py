"""The clients without asyncio: each has an event loop in a thread of its own, and its methods wait
there. Errors, options and guarantees are those of ``cometmq.client``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

import uvloop

from cometmq.client import producer, pull, push, simple
from cometmq.client.consuming.listener import Listener
from cometmq.client.consuming.queue_listener import QueueListener
from cometmq.client.messages import PullBatch, SendReceipt
from cometmq.client.options import (
    ProducerOptions,
    PullConsumerOptions,
    PushConsumerOptions,
    SimpleConsumerOptions,
)
from cometmq.client.reading.offsets import Bounds
from cometmq.client.reading.positions import OffsetStore
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.stacks import calling_thread
from cometmq.client.requests.requester import ReplyCallback
from cometmq.client.sending.send_many import SendReceipts
from cometmq.client.transactions import producer as transactions
from cometmq.client.transactions.checks import Check
from cometmq.client.transactions.receipts import CommitReceipt
from cometmq.errors import ClientClosed, ClientForked, CometError, InvalidRequest
from cometmq.model import Message, Position, QueueRef
from cometmq.rpc.forks import FORKS
from cometmq.telemetry import hand_over_lines, wait_for_lines

INTERRUPTED_S_MAX = 1.0  # until the call has ended that an interrupted one waited for
LINES_S_MAX = 1.0  # at the end of a client, for its last log lines

Client = TypeVar("Client", bound=AbstractAsyncContextManager[Any])
Answer = TypeVar("Answer")


class _Decided(concurrent.futures.Future[Answer]):
    """What becomes of a message, for any thread of the process that has sent it."""

    def __init__(self, client: _Sync[Any]) -> None:
        super().__init__()
        self._client = client

    def result(self, timeout: float | None = None) -> Answer:
        self._check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._check()
        return super().exception(timeout)

    def _check(self) -> None:
        """ClientForked: it was not decided before the fork, and nobody will decide it here."""
        if not self.done():
            self._client._check_process()


class _Sync(Generic[Client]):
    """A client, from the beginning of a ``with`` block to its end, or from :meth:`start` to
    :meth:`close`. Any thread of the process may call it.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._loop: asyncio.AbstractEventLoop | None = None  # while the block lasts
        self._is_forked = False
        self._waiting: set[concurrent.futures.Future[Any]] = set()  # calls of all threads

    def start(self) -> Self:
        """Opens the client, as entering its block does; :meth:`close` ends it."""
        if self._loop is not None:
            raise InvalidRequest("The client is open: make another one for another block.")
        self._check_process()
        started = threading.Event()
        run = partial(uvloop.run, self._serve(started))
        self._thread = threading.Thread(target=run, name="cometmq", daemon=True)
        self._thread.start()
        started.wait()
        FORKS.watch(self, self._forked)
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self._end()
            raise
        return self

    def close(self) -> None:
        """Ends the client, as leaving its block without an error does. Does nothing where it is not
        open.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._loop is None or self._is_forked:  # what a child has inherited stays as it is
            return
        try:
            self._wait(self._client.__aexit__(kind, error, traceback))
        finally:
            self._end()

    def _forked(self) -> None:
        """This process is a child of the one that opened the client."""
        self._is_forked = True

    async def _serve(self, started: threading.Event) -> None:
        """The thread: its loop runs until the block ends."""
        hand_over_lines()
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        started.set()
        await self._ended.wait()

    def _end(self) -> None:
        loop, self._loop = self._loop, None
        if loop is None:  # another thread has closed it
            return
        loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        wait_for_lines(LINES_S_MAX)
        for answer in list(self._waiting):  # its loop has gone
            answer.cancel()

    def _check_process(self) -> None:
        """ClientForked."""
        if self._is_forked:
            raise ClientForked("Another process has opened this client.")

    def _wait(self, call: Coroutine[Any, Any, Answer]) -> Answer:
        try:
            self._check_process()
            if (loop := self._loop) is None:
                raise ClientClosed("The client is not open: use it inside `with`.")
            if self._thread is threading.current_thread():
                raise InvalidRequest(
                    "The client would wait for itself: what its own thread calls, as hooks and "
                    "async listeners, cannot use it."
                )
            try:
                answer = asyncio.run_coroutine_threadsafe(call, loop)
            except RuntimeError:  # another thread has left the block meanwhile
                raise ClientClosed("The client was closed.") from None
        except CometError:
            call.close()
            raise
        self._waiting.add(answer)
        try:
            if self._loop is not loop:
                answer.cancel()
            return answer.result()
        except concurrent.futures.CancelledError:
            if self._loop is loop:
                raise
            raise ClientClosed("The client was closed.") from None
        except BaseException:  # Ctrl-C while it waits, for one
            answer.cancel()
            raise
        finally:
            self._waiting.discard(answer)

    def __reduce__(self) -> NoReturn:
        raise ClientForked("A client cannot be sent to another process.")


class Producer(_Sync[producer.Producer]):
    """Use it inside ``with``. Leaving the block sends what is buffered."""

    def __init__(
        self, namesrv: str | None = None, *, options: ProducerOptions | None = None
    ) -> None:
        """As of :class:`cometmq.client.Producer`."""
        super().__init__(producer.Producer(namesrv, options=options))

    def send(self, message: Message) -> concurrent.futures.Future[SendReceipt]:
        """Puts the message into the buffer; the future has the receipt, or the error."""
        return self._wait(self._handed(self._client.send(message)))

    def send_and_wait(self, message: Message) -> SendReceipt:
        """Sends the message and waits for its receipt; raises why it was not stored."""
        return self._wait(self._client.send_and_wait(message))

    def send_many(self, messages: Iterable[Message]) -> concurrent.futures.Future[SendReceipts]:
        """Puts the messages into the buffer; the future has the receipts of all. An iterator runs
        in the client's thread.
        """
        return self._wait(self._handed(self._client.send_many(messages)))

    def send_many_and_wait(self, messages: Iterable[Message]) -> SendReceipts:
        """Sends the messages and waits for their receipts."""
        return self._wait(self._client.send_many_and_wait(messages))

    def send_batch(self, messages: Sequence[Message]) -> list[SendReceipt]:
        """Sends messages as one unit to one queue and waits for their receipts."""
        return self._wait(self._client.send_batch(messages))

    def send_one_way(self, message: Message) -> None:
        """Sends without a receipt; what was not stored is logged."""
        self._wait(self._client.send_one_way(message))

    def request(self, message: Message, timeout_s: float = 3.0) -> ReceivedMessage:
        """Sends a message to which a consumer replies, and waits for the reply."""
        return self._wait(self._client.request(message, timeout_s))

    def request_then(
        self, message: Message, callback: ReplyCallback, timeout_s: float = 3.0
    ) -> None:
        """As :meth:`request`, but ``callback(reply, error)`` is called when the request has ended:
        in the client's thread, where it must not block.
        """
        self._wait(self._client.request_then(message, callback, timeout_s))

    def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received."""
        return self._wait(self._client.reply(message, body))

    @property
    def traces_lost(self) -> int:
        """Trace records that were dropped or not stored."""
        return self._client.traces_lost

    def recall(self, handle: str) -> bool:
        """Takes back a message that waits for a time of its own; whether it was in time."""
        return self._wait(self._client.recall(handle))

    def flush(self) -> None:
        """Waits until every message sent so far is decided."""
        self._wait(self._client.flush())

    async def _handed(
        self, call: Coroutine[Any, Any, asyncio.Future[Answer]]
    ) -> concurrent.futures.Future[Answer]:
        """The future that the call gives, for other threads."""
        decided = _Decided[Answer](self)
        decided.set_running_or_notify_cancel()  # cancelling it would not take the message back

        def decide(future: asyncio.Future[Answer]) -> None:
            error = future.exception()
            if error is None:
                decided.set_result(future.result())
            else:
                decided.set_exception(error)

        (await call).add_done_callback(decide)
        return decided


class Transaction:
    """Messages that are committed together, or rolled back. Use it inside ``with``: leaving the
    block commits; an exception rolls back.
    """

    def __init__(self, producer: TransactionProducer, one: transactions.Transaction) -> None:
        self._producer = producer
        self._one = one

    @property
    def committed(self) -> Sequence[CommitReceipt]:
        """In the order of sending, once it is committed."""
        return self._one.committed

    def send(self, message: Message) -> SendReceipt:
        """Stores a message of the transaction; nobody sees it before the commit."""
        return self._producer._wait(self._one.send(message))

    def send_many(self, messages: Iterable[Message]) -> SendReceipts:
        """As :meth:`send` for each of the messages, at most 1,024 with those before, and faster."""
        return self._producer._wait(self._one.send_many(messages))

    def commit(self) -> Sequence[CommitReceipt]:
        """Consumers get all messages."""
        return self._producer._wait(self._one.commit())

    def rollback(self) -> None:
        """Nobody ever sees the messages."""
        self._producer._wait(self._one.rollback())

    def leave_open(self) -> None:
        """It is not known yet how it ends: the broker asks the listener's ``check``."""
        self._producer._wait(_call(self._one.leave_open))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._producer._wait(self._one.__aexit__(kind, error, traceback))


class TransactionProducer(Producer):
    """Use it inside ``with``; also sends as :class:`Producer` does."""

    _client: transactions.TransactionProducer

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        listener: transactions.TransactionListener | Check | None = None,
        *,
        topics: Collection[str] = (),
        options: ProducerOptions | None = None,
    ) -> None:
        """As of :class:`cometmq.client.TransactionProducer`; a plain listener is called in other
        threads.
        """
        _Sync.__init__(
            self,
            transactions.TransactionProducer(
                namesrv, group, listener, topics=topics, options=options
            ),
        )

    def transaction(self, *, check_immunity_s: int = 0) -> Transaction:
        """A new transaction."""
        return Transaction(self, self._client.transaction(check_immunity_s=check_immunity_s))

    def send_in_transaction(
        self, message: Message, argument: Any = None, *, check_immunity_s: int = 0
    ) -> transactions.TransactionResult:
        """Stores a message, lets the listener ``execute``, and ends the transaction as that
        says.
        """
        return self._wait(
            self._client.send_in_transaction(message, argument, check_immunity_s=check_immunity_s)
        )


class PushConsumer(_Sync[push.PushConsumer]):
    """Use it inside ``with``. Leaving the block lets running listener calls end, commits, leaves
    the group.
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
        """As of :class:`cometmq.client.PushConsumer`; the listener is called in other threads."""
        super().__init__(
            push.PushConsumer(namesrv, group, listener, options=options, offset_store=offset_store)
        )

    def subscribe(
        self, topic: str, expression: str | Collection[str] = "*", *, sql: str | None = None
    ) -> None:
        """Reads the topic from now on; a second call for a topic replaces its filter."""
        self._wait(self._client.subscribe(topic, expression, sql=sql))

    def unsubscribe(self, topic: str) -> None:
        """Reads the topic no more."""
        self._wait(self._client.unsubscribe(topic))

    def suspend(self) -> None:
        """No listener call begins before :meth:`resume`."""
        self._wait(_call(self._client.suspend))

    def resume(self) -> None:
        """Listener calls begin again."""
        self._wait(_call(self._client.resume))

    def set_concurrency(self, concurrency: int) -> None:
        """So many listener calls at a time from now on."""
        self._wait(_call(partial(self._client.set_concurrency, concurrency)))

    def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received."""
        return self._wait(self._client.reply(message, body))

    def leave_for_good(self) -> None:
        """The other members get this one's queues when the block ends, whatever ``session_ms``
        says.
        """
        self._wait(self._client.leave_for_good())

    @property
    def traces_lost(self) -> int:
        """Trace records that were dropped or not stored."""
        return self._client.traces_lost

    @property
    def assigned(self) -> list[QueueRef]:
        """The queues that this consumer reads now."""
        return self._wait(_call(lambda: self._client.assigned))

    @property
    def pullhold(self) -> str | None:
        """Address of the pullhold where queues without messages wait; None: they are polled."""
        return self._wait(_call(lambda: self._client.pullhold))


class SimpleConsumer(_Sync[simple.SimpleConsumer]):
    """Use it inside ``with``."""

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        *,
        options: SimpleConsumerOptions | None = None,
    ) -> None:
        """As of :class:`cometmq.client.SimpleConsumer`."""
        super().__init__(simple.SimpleConsumer(namesrv, group, options=options))

    def subscribe(
        self, topic: str, expression: str | Collection[str] = "*", *, sql: str | None = None
    ) -> None:
        """Receives from the topic from now on."""
        self._wait(self._client.subscribe(topic, expression, sql=sql))

    def unsubscribe(self, topic: str) -> None:
        """Receives from the topic no more."""
        self._wait(self._client.unsubscribe(topic))

    def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received."""
        return self._wait(self._client.reply(message, body))

    @property
    def traces_lost(self) -> int:
        """Trace records that were dropped or not stored."""
        return self._client.traces_lost

    def receive(
        self,
        count_max: int = 32,
        *,
        invisible_ms: int | None = None,
        wait_ms: int | None = None,
    ) -> list[ReceivedMessage]:
        """Messages that nobody else of the group gets for a while, as soon as there are some."""
        caller = calling_thread.set(threading.current_thread())
        try:
            return self._wait(
                self._client.receive(count_max, invisible_ms=invisible_ms, wait_ms=wait_ms)
            )
        finally:
            calling_thread.reset(caller)

    def ack(self, message: ReceivedMessage) -> None:
        """The message is done."""
        self._wait(self._client.ack(message))

    def ack_many(self, messages: Collection[ReceivedMessage]) -> None:
        """The messages are done."""
        self._wait(self._client.ack_many(messages))

    def change_invisible_time(self, message: ReceivedMessage, invisible_ms: int) -> None:
        """The message is delivered again so long from now, unless it is acknowledged before."""
        self._wait(self._client.change_invisible_time(message, invisible_ms))


class PullConsumer(_Sync[pull.PullConsumer]):
    """Use it inside ``with``."""

    def __init__(
        self,
        namesrv: str | None = None,
        group: str = "",
        *,
        options: PullConsumerOptions | None = None,
        offset_store: OffsetStore | None = None,
        queue_listener: QueueListener | None = None,
    ) -> None:
        """As of :class:`cometmq.client.PullConsumer`."""
        super().__init__(
            pull.PullConsumer(
                namesrv,
                group,
                options=options,
                offset_store=offset_store,
                queue_listener=queue_listener,
            )
        )

    def queues(self, topic: str) -> list[QueueRef]:
        """The topic's readable queues, sorted."""
        return self._wait(self._client.queues(topic))

    def assign(
        self, queues: Iterable[QueueRef], *, tags: Collection[str] = (), sql: str | None = None
    ) -> None:
        """Reads exactly these queues from now on."""
        self._wait(self._client.assign(queues, tags=tags, sql=sql))

    def subscribe(
        self, topic: str, expression: str | Collection[str] = "*", *, sql: str | None = None
    ) -> None:
        """Becomes a member of the group and reads its share of the topic's queues."""
        self._wait(self._client.subscribe(topic, expression, sql=sql))

    def unsubscribe(self, topic: str) -> None:
        """Reads the topic no more."""
        self._wait(self._client.unsubscribe(topic))

    def reply(self, message: ReceivedMessage, body: bytes) -> SendReceipt:
        """Replies to a request that a consumer has received."""
        return self._wait(self._client.reply(message, body))

    def leave_for_good(self) -> None:
        """The other members get this one's queues when the block ends, whatever ``session_ms``
        says.
        """
        self._wait(self._client.leave_for_good())

    @property
    def traces_lost(self) -> int:
        """Trace records that were dropped or not stored."""
        return self._client.traces_lost

    @property
    def assigned(self) -> list[QueueRef]:
        """The queues that this consumer reads now."""
        return self._wait(_call(lambda: self._client.assigned))

    def pull(
        self,
        queue: QueueRef,
        position: Position,
        *,
        count_max: int | None = None,
        bytes_max: int | None = None,
        tags: Collection[str] = (),
        sql: str | None = None,
    ) -> PullBatch:
        """One pull, answered at once."""
        return self._wait(
            self._client.pull(
                queue, position, count_max=count_max, bytes_max=bytes_max, tags=tags, sql=sql
            )
        )

    def poll(self, timeout_ms: int = 5_000) -> list[ReceivedMessage]:
        """Messages of one assigned queue as soon as there are some; none when the time is over.
        What an interrupted call (Ctrl-C) has found is found again by the next one.
        """
        found: list[list[ReceivedMessage]] = []
        ended = threading.Event()

        async def poll() -> None:
            try:
                found.append(await self._client.poll(timeout_ms))
            finally:
                ended.set()

        try:
            self._wait(poll())
        except CometError:
            raise
        except BaseException:
            ended.wait(INTERRUPTED_S_MAX)
            if found and found[0]:
                self._wait(self._client._unpoll(found[0]))
            raise
        return found[0]

    def commit(
        self, positions: Mapping[QueueRef, Position] | None = None
    ) -> dict[QueueRef, Position | None]:
        """Commits; without ``positions`` everything that :meth:`poll` has handed out."""
        return self._wait(self._client.commit(positions))

    def committed(self, queues: Collection[QueueRef]) -> dict[QueueRef, Position | None]:
        """The group's committed positions; None = never committed."""
        return self._wait(self._client.committed(queues))

    def bounds(self, queues: Collection[QueueRef]) -> dict[QueueRef, Bounds]:
        """Generation and readable offsets of each queue."""
        return self._wait(self._client.bounds(queues))

    def seek(self, queue: QueueRef, position: Position) -> None:
        """The next poll of an assigned queue begins there."""
        self._wait(self._client.seek(queue, position))

    def seek_to_begin(self, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these queues, or of all, begin at the first message."""
        self._wait(self._client.seek_to_begin(queues))

    def seek_to_end(self, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these queues, or of all, begin behind the last message."""
        self._wait(self._client.seek_to_end(queues))

    def seek_to_time(self, time_ms: int, queues: Collection[QueueRef] | None = None) -> None:
        """The next polls of these queues, or of all, begin as :meth:`positions_at` says."""
        self._wait(self._client.seek_to_time(time_ms, queues))

    def pause(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out nothing of these queues before :meth:`resume`."""
        self._wait(_call(lambda: self._client.pause(queues)))

    def resume(self, queues: Collection[QueueRef]) -> None:
        """Polls hand out messages of these queues again."""
        self._wait(_call(lambda: self._client.resume(queues)))

    def position(self, queue: QueueRef) -> Position:
        """The position that the next poll of an assigned queue begins at."""
        return self._wait(self._client.position(queue))

    def positions_at(self, queues: Collection[QueueRef], time_ms: int) -> dict[QueueRef, Position]:
        """The first message of each queue that was stored at the time or later."""
        return self._wait(self._client.positions_at(queues, time_ms))

    def send_back(
        self, messages: Collection[ReceivedMessage], delay_level: int = 0, *, delay_ms: int = 0
    ) -> None:
        """They come again in the group's retry topic, or are dead letters (-1)."""
        self._wait(self._client.send_back(messages, delay_level, delay_ms=delay_ms))


async def _call(function: Callable[[], Answer]) -> Answer:
    """In the thread of the event loop."""
    return function()

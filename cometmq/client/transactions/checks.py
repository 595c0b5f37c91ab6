"""Answers the brokers' questions about transactions: one stream to each broker group."""

from __future__ import annotations

import asyncio
import inspect
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from enum import Enum

from cometmq.client.cluster.connections import Connections
from cometmq.client.cluster.routes import RouteWatcher
from cometmq.client.namespaces import Namespace
from cometmq.client.received import ReceivedMessage
from cometmq.errors import CometError, PeerUnavailable
from cometmq.format import halves, record
from cometmq.model import QueueRef
from cometmq.rpc.interceptors import from_proto
from cometmq.rpc.retry import Backoff, BackoffPolicy
from cometmq.rpc.streams import Stream, read, write
from cometmq.rpc.tasks import Tasks, apart, is_cancelled, race, stop_all
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2

CALLS_MAX = 32  # of the listener at a time
ANSWERS_MAX = 1_024  # of one message

_log = logger(__name__)


class TransactionState(Enum):
    """The state of a transaction as its producer knows it."""

    COMMIT = 1  # consumers get the messages
    ROLLBACK = 2  # nobody ever sees them
    UNKNOWN = 3  # not yet: the broker asks again


# LocalTransactionState, as traces have it.
ROCKETMQ_STATES = {
    TransactionState.COMMIT: "COMMIT_MESSAGE",
    TransactionState.ROLLBACK: "ROLLBACK_MESSAGE",
    TransactionState.UNKNOWN: "UNKNOW",
}
_RESOLUTIONS = {
    TransactionState.COMMIT: broker_pb2.TRANSACTION_RESOLUTION_COMMIT,
    TransactionState.ROLLBACK: broker_pb2.TRANSACTION_RESOLUTION_ROLLBACK,
    TransactionState.UNKNOWN: broker_pb2.TRANSACTION_RESOLUTION_UNKNOWN,
}

Check = Callable[[ReceivedMessage], TransactionState | Awaitable[TransactionState]]


class ListenerCalls:
    """Calls an application's functions: coroutine functions here, others in threads."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(CALLS_MAX, "transactions")

    async def __call__(self, function: Callable[..., object], *arguments: object) -> object:
        """Calls the function; returns or raises what it does."""
        if inspect.iscoroutinefunction(function):
            return await apart(function(*arguments))
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(self._pool, _guarded, function, *arguments)
        return await apart(answer) if inspect.isawaitable(answer) else answer

    def close(self) -> None:
        """No call begins any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _guarded(function: Callable[..., object], *arguments: object) -> object:
    try:
        return function(*arguments)
    except (StopIteration, SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the listener raised {type(error).__name__}") from error


class TransactionChecks:
    """Of one producer. ``check`` is the application's."""

    def __init__(
        self,
        wire_group: str,
        client_id: str,
        check: Check,
        calls: ListenerCalls,
        connections: Connections,
        routes: RouteWatcher,
        tasks: Tasks,
        policy: BackoffPolicy,
        namespace: Namespace,
    ) -> None:
        self._join = broker_pb2.CheckTransactionsJoin(
            producer_group=wire_group, client_id=client_id
        )
        self._check = check
        self._calls = calls
        self._connections = connections
        self._routes = routes
        self._tasks = tasks
        self._policy = policy
        self._namespace = namespace
        self._held: set[str] = set()
        # Hears of each check that the application has answered.
        self.on_answer: Callable[[ReceivedMessage, TransactionState], None] | None = None
        self._room = asyncio.Semaphore(CALLS_MAX)

    def hold(self, broker_group: str) -> None:
        """Answer the broker group's checks from now on."""
        if broker_group not in self._held:
            self._held.add(broker_group)
            self._tasks.start(self._stay(broker_group), f"checks of {broker_group}")

    async def _stay(self, broker_group: str) -> None:
        backoff = Backoff(self._policy, random.Random())
        while True:
            try:
                await self._stream(broker_group, backoff)
            except CometError as error:
                _log.info(
                    "checks are not heard for now",
                    extra=fields(broker_group=broker_group, error=error),
                )
                self._routes.doubt(broker_group)
            await self._routes.wait_change(backoff.next_s())

    async def _stream(self, broker_group: str, backoff: Backoff) -> None:
        writer = self._routes.require_writer(broker_group)
        call = self._connections.broker(writer.address).CheckTransactions()
        answers = _Answers()
        checking: set[asyncio.Task[None]] = set()
        try:
            await write(call, broker_pb2.CheckTransactionsRequest(join=self._join))
            await race(
                self._hear(broker_group, call, answers, checking, backoff),
                _tell(call, answers),
                self._routes.until_deposed(writer),
                name=f"checks of {broker_group}",
            )
        finally:
            call.cancel()
            await stop_all(checking)  # the broker asks another producer, or again

    async def _hear(
        self,
        broker_group: str,
        call: CheckStream,
        answers: _Answers,
        checking: set[asyncio.Task[None]],
        backoff: Backoff,
    ) -> None:
        while (response := await read(call)) is not None:
            backoff.reset()
            for refused in response.refused:
                error = self._namespace.strip(from_proto(refused.error))
                _log.warning(
                    "an answer did not count",
                    extra=fields(broker_group=broker_group, half=refused.half, error=error),
                )
            for check in response.checks:
                await self._room.acquire()
                task = asyncio.create_task(self._answer(broker_group, check, answers))
                checking.add(task)
                task.add_done_callback(checking.discard)
        raise PeerUnavailable("The broker ended the stream.")

    async def _answer(
        self, broker_group: str, check: broker_pb2.TransactionCheck, answers: _Answers
    ) -> None:
        try:
            message = self._message(broker_group, check.record)
            state = TransactionState.UNKNOWN
            if message is not None:
                state = await state_of(self._calls, self._check, message)
                if self.on_answer is not None:
                    self.on_answer(message, state)
            answers.put(broker_pb2.TransactionEnd(half=check.half, resolution=_RESOLUTIONS[state]))
        finally:
            self._room.release()

    def _message(self, broker_group: str, raw: bytes) -> ReceivedMessage | None:
        its = halves.read(record.decode(raw).raw_properties)
        if its is None:
            return None
        queue = QueueRef(self._namespace.shown(its.topic), its.queue_id, broker_group)
        shown = self._namespace.shown if self._namespace.name else None
        return ReceivedMessage(raw, queue, shown)


class _Answers:
    """Answers that wait to be written to one stream."""

    def __init__(self) -> None:
        self.waiting: list[broker_pb2.TransactionEnd] = []
        self.more = asyncio.Event()

    def put(self, answer: broker_pb2.TransactionEnd) -> None:
        self.waiting.append(answer)
        self.more.set()


CheckStream = Stream[broker_pb2.CheckTransactionsRequest, broker_pb2.CheckTransactionsResponse]


async def _tell(call: CheckStream, answers: _Answers) -> None:
    try:
        while True:
            await answers.more.wait()
            some, answers.waiting = answers.waiting[:ANSWERS_MAX], answers.waiting[ANSWERS_MAX:]
            if not answers.waiting:
                answers.more.clear()
            await write(call, broker_pb2.CheckTransactionsRequest(answers=some))
    except CometError:  # the reader gets the error
        await asyncio.Event().wait()


async def state_of(
    calls: ListenerCalls, function: Callable[..., object], *arguments: object
) -> TransactionState:
    """The application's answer; UNKNOWN where it raises, or answers something else."""
    try:
        state = await calls(function, *arguments)
    except (Exception, asyncio.CancelledError) as error:
        if is_cancelled(error):
            raise
        _log.warning("a transaction listener failed", extra=fields(error=error), exc_info=error)
        return TransactionState.UNKNOWN
    if not isinstance(state, TransactionState):
        _log.warning(
            "a transaction listener has to return a TransactionState",
            extra=fields(returned=repr(state)[:100]),
        )
        return TransactionState.UNKNOWN
    return state

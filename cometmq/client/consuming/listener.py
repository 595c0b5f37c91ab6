"""The listener's workers: they take messages of all queues in the order of arrival and hand them to
the application.

A worker is a task that lives as long as the consumer; there is no task for a message. Work lies in
one list of :class:`Work`: what one pull found, taken piece by piece.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from asyncio import Future, TimerHandle
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Protocol, TypeGuard, cast

from cometmq.client.hooks import ConsumeHook, ListenerWrapper, with_consume_hooks
from cometmq.client.messages import ConsumeResult, Later
from cometmq.client.names import of
from cometmq.client.reading.progress import AnyRun
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.description import CallState
from cometmq.client.remote.rates import Rates, Tally
from cometmq.client.remote.stacks import exception_text, task_stack
from cometmq.client.threads import ListenerThreads
from cometmq.clock import monotonic_ns
from cometmq.errors import InvalidRequest, MessageIdInvalid
from cometmq.format.ids import message_id, parse_message_id
from cometmq.format.properties import ORIGIN_MESSAGE_ID
from cometmq.model import DELAY_LEVEL_MAX, DELAY_MS_MAX
from cometmq.rpc.retry import BackoffPolicy
from cometmq.rpc.tasks import Tasks, apart, awaited, is_cancelled
from cometmq.telemetry import fields, logger
from cometmq.v1 import broker_pb2

Verdict = ConsumeResult | Later | None
Listener = Callable[[list[ReceivedMessage]], Awaitable[Verdict] | Verdict]
AsyncListener = Callable[[list[ReceivedMessage]], Awaitable[object]]
# Sends messages `start` to `stop` of a work back to the broker, for a delay level.
SendBack = Callable[["Work", int, int, int], None]
# Sees to messages `start` to `stop` of a work that the listener has not done.
NotDone = Callable[["Work", int, int, Later], None]

# A call of the listener: with messages `start` to `stop` of a work.
Call = tuple["Work", int, int]

LOOKS_PER_TIMEOUT = 10  # at the calls that run, to find those that take too long

# Of a turn of the loop, for calls that never wait. Between two turns requests leave and answers
# come: with longer turns brokers would wait for the client, and then the client for brokers.
_TURN_NS_MAX = 1_000_000
_CALLS_PER_LOOK = 8  # at the clock, whether the turn is over

ANSWER_LENGTH_MAX = 1_000  # characters of what a listener has returned
TRACEBACK_EVERY_S = 60.0
KINDS_MAX = 256
KEYS_LENGTH_MAX = 200  # characters of a message's keys in a log line

# Whether a listener call runs here, or what it has started.
in_listener: ContextVar[bool] = ContextVar("in_listener", default=False)

_log = logger(__name__)


def check_listener(listener: object) -> Listener:
    """The listener itself; InvalidRequest when it cannot be one."""
    if not callable(listener) or inspect.isclass(listener):
        raise InvalidRequest(f"The listener must be a function, not {listener!r}.")
    function = inspect.unwrap(listener)
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        name = getattr(function, "__name__", repr(function))
        raise InvalidRequest(
            f"The listener {name} is a generator: its body would never run. Use "
            "`return` instead of `yield`."
        )
    try:
        inspect.signature(listener).bind([])
    except TypeError:
        raise InvalidRequest(
            f"The listener gets one argument, the list of messages; {listener!r} wants others."
        ) from None
    return cast(Listener, listener)


def _is_async(listener: Listener) -> bool:
    function = inspect.unwrap(listener)
    method = type(function).__call__  # of an object that can be called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(method)


class Queue(Protocol):
    """Where work comes from."""

    running: int  # listener calls with its messages

    @property
    def tally(self) -> Tally:
        """The counts of its topic."""

    @property
    def closed(self) -> bool:
        """Whether the queue is no longer ours: its work is dropped."""

    def finish(self, run: AnyRun, start: int, stop: int) -> None:
        """A listener call has ended; it is done with these messages (none if start == stop)."""


class Work:
    """Messages ``cursor`` to ``stop`` of a run."""

    __slots__ = ("attempt", "cursor", "messages", "queue", "run", "stop", "tally")

    def __init__(self, queue: Queue, run: AnyRun, messages: list[ReceivedMessage]) -> None:
        self.queue = queue
        self.tally = queue.tally
        self.run = run
        self.messages = messages
        self.cursor = 0
        self.stop = len(messages)
        self.attempt = 1


class _Worker:
    """``call``: the one that runs, None when none does. ``late``: the one that took too long, and
    does not count any more.
    """

    __slots__ = ("call", "late", "started_ns", "task")

    def __init__(self, task: asyncio.Task[object]) -> None:
        self.call: Call | None = None
        self.late: Call | None = None
        self.started_ns = 0
        self.task = task


class Workers:
    """``concurrency`` listener calls at a time, each with at most ``batch_count`` messages of one
    queue. Calls of a plain function have a thread each.

    The messages of a call that takes longer than ``timeout_s`` are sent back; what it answers later
    does not count.
    """

    def __init__(
        self,
        listener: Listener,
        concurrency: int,
        batch_count: int,
        redelivery: BackoffPolicy,
        timeout_s: float,
        hooks: Sequence[ConsumeHook | ListenerWrapper] = (),
        group: str = "",
        rates: Rates | None = None,
    ) -> None:
        self.rates = rates or Rates()
        self._threads = None if _is_async(listener) else ListenerThreads(listener)
        self._without_hooks = self._threads or cast(AsyncListener, listener)
        self._listener = with_consume_hooks(self._without_hooks, hooks, group)
        self._group = group
        self._tasks: Tasks  # since the start
        self._concurrency = concurrency
        self._count = 0  # running workers; above `concurrency` until the surplus has ended
        self._is_suspended = False
        self._batch_count = batch_count
        self._redelivery = redelivery
        self._timeout_s = timeout_s
        self._workers: set[_Worker] = set()
        self._turn = 0  # of the loop, counted while calls run
        self._counts_turn = False
        self._turn_ends_ns = 0  # when calls that never wait leave the loop to others
        # What a call that takes too long has in work; None: the call goes on.
        self.send_back: SendBack | None = None
        # How often a message is tried in all; None: it is not known, or there is no end.
        self.tries_max: Callable[[], int | None] = lambda: None
        # None: what failed is delivered here again, in its place.
        self.not_done: NotDone | None = None
        self._work: deque[Work] = deque()
        self._idle: list[Future[None]] = []  # of workers that wait for work, or for a turn
        self._delayed: dict[Work, TimerHandle] = {}  # what is delivered again
        self._traced_s: dict[str, float] = {}  # kinds of failures, when their traceback was logged

    def start(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.resize(self._concurrency)
        tasks.start(self._watch_calls(), "consume timeout")

    def resize(self, concurrency: int) -> None:
        """So many calls at a time from now on. Calls that run go on to their end."""
        self._concurrency = concurrency
        while self._count < concurrency and not self._tasks.is_stopping:
            self._tasks.start(self._run(), f"listener {self._count}")
            self._count += 1
        self.wake(len(self._idle))  # those that are too many end

    @property
    def is_suspended(self) -> bool:
        """Whether no call begins."""
        return self._is_suspended

    def suspend(self) -> None:
        """No call begins before :meth:`resume`."""
        self._is_suspended = True

    def resume(self) -> None:
        self._is_suspended = False
        self.wake(len(self._idle))

    def close(self) -> None:
        """Nothing is delivered again."""
        if self._threads is not None:
            self._threads.close()
        for timer in self._delayed.values():
            timer.cancel()
        self._delayed.clear()
        self._work.clear()

    def append(self, work: Work) -> None:
        """Takes work and wakes nobody: the worker that has just ended a call looks anyway."""
        self._work.append(work)

    def push(self, work: Work) -> None:
        """Takes work; wakes as many workers as it can feed."""
        self._work.append(work)
        self.wake(-(-(work.stop - work.cursor) // self._batch_count))

    def wake(self, count: int) -> None:
        """Let so many idle workers look for work."""
        while count > 0 and self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)
                count -= 1

    async def _run(self) -> None:
        listener, batch_count, calls = self._listener, self._batch_count, 0
        task = asyncio.current_task()
        assert task is not None
        worker = _Worker(task)
        self._workers.add(worker)
        in_listener.set(True)
        turn, timed, tally = self._begin(worker), 0, Tally()
        while self._count <= self._concurrency:
            work = None
            if calls % _CALLS_PER_LOOK or not self._is_turn_over():
                work = self._next()
            if work is None:
                worker.call = None
                self._take_time(worker, tally, calls - timed)
                if task.cancelling():  # by the listener, or from outside: another one follows
                    break
                await self._wait()
                calls = timed = 0
                turn = self._begin(worker)
                continue
            queue, start = work.queue, work.cursor
            work.cursor = stop = min(start + batch_count, work.stop)
            queue.running += 1
            worker.call = call = work, start, stop
            try:
                answer: object = await listener(work.messages[start:stop])
            # The application's: whatever it raises means "not done". So does a cancellation of what
            # it waited for, or of its own task.
            except BaseException as error:
                if self._is_end(error):
                    raise
                self._failed(work, start, stop, error)
                answer = _LATER
            finally:
                queue.running -= 1
            tally = work.tally
            calls += 1
            if self._turn != turn:
                self._take_time(worker, tally, calls - timed)
                turn, timed = self._begin(worker), calls
            if worker.late is call:
                queue.finish(work.run, start, start)  # it took too long; who waits looks again
                continue
            if answer is not None and answer is not ConsumeResult.SUCCESS:
                first = self._not_done(work, start, stop, answer)
                tally.failed += stop - first
                stop = first
            tally.done += stop - start
            queue.finish(work.run, start, stop)
        self._count -= 1
        self._workers.remove(worker)
        self.resize(self._concurrency)

    def _is_end(self, error: BaseException) -> bool:
        """Whether it ends the program, or the consumer."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            return True
        return self._tasks.is_stopping and is_cancelled(error)

    # The time is not taken at each call: that costs more than a call that does nothing. A call that
    # waits lets the loop turn, and only then the next one begins at another time.

    def _begin(self, worker: _Worker) -> int:
        """The worker's next call begins now, and so do those after it until the loop has turned:
        the number of the turn.
        """
        worker.started_ns = monotonic_ns()
        if not self._counts_turn:
            self._counts_turn = True
            self._turn_ends_ns = worker.started_ns + _TURN_NS_MAX
            asyncio.get_running_loop().call_soon(self._turned)
        return self._turn

    def _turned(self) -> None:
        """Lets one of the workers go on that found the turn over. If its calls wait, another one
        follows a turn later; if not, more would only find the turn over again.
        """
        self._turn += 1
        self._counts_turn = False
        if self._work and not self._is_suspended:
            self.wake(1)

    def _is_turn_over(self) -> bool:
        """Whether calls have used up their part of it; then workers wait for the next one."""
        return self._counts_turn and monotonic_ns() >= self._turn_ends_ns

    def _take_time(self, worker: _Worker, tally: Tally, calls: int) -> None:
        """So many calls have ended since the worker's last beginning."""
        tally.calls += calls
        tally.busy_ns += monotonic_ns() - worker.started_ns if calls else 0

    async def _watch_calls(self) -> None:
        """A call whose messages were seen to be in work at so many looks takes too long. No timer
        is set for a call: most are over before the next look.
        """
        seen: dict[_Worker, tuple[Call, int]] = {}
        while True:
            await asyncio.sleep(self._timeout_s / LOOKS_PER_TIMEOUT)
            before, seen = seen, {}
            for worker in self._workers:
                if worker.call is None or worker.call is worker.late:
                    continue
                last, looks = before.get(worker, (worker.call, 0))
                looks = looks + 1 if last is worker.call else 1
                seen[worker] = worker.call, looks
                if looks == LOOKS_PER_TIMEOUT + 1:
                    self._too_long(worker, worker.call)

    def _too_long(self, worker: _Worker, call: Call) -> None:
        """Tells where the call is; where that is possible, its messages are sent back."""
        work, start, stop = call
        _log.warning(
            "listener call takes too long",
            extra=fields(
                group=self._group,
                **self._call(work, start, stop),
                after_s=self._timeout_s,
                stack=self._stack(worker),
            ),
        )
        if self.send_back is None:
            return
        worker.late = call  # it goes on, and its result does not count
        work.tally.failed += stop - start
        if not work.queue.closed:
            self.send_back(work, start, stop, 0)

    def _stack(self, worker: _Worker) -> str:
        """Where the application is in the worker's call."""
        stack = self._threads.stack(worker.task) if self._threads is not None else ""
        return stack or task_stack(worker.task, *CALLERS)

    def calls(self, count_max: int, *, with_stacks: bool) -> tuple[list[CallState], int]:
        """So many of the calls that run, the oldest first, and how many run."""
        running = sorted(
            (worker for worker in self._workers if worker.call is not None),
            key=lambda worker: worker.started_ns,
        )
        states = [self._state(worker, with_stacks) for worker in running[:count_max]]
        return states, len(running)

    def _state(self, worker: _Worker, with_stack: bool) -> CallState:
        assert worker.call is not None
        work, start, stop = worker.call
        first = work.messages[start]
        age_s = (monotonic_ns() - worker.started_ns) / 1e9
        return CallState(
            first.queue,
            first.queue_offset,
            stop - start,
            age_s,
            is_late=age_s > self._timeout_s,
            stack=self._stack(worker) if with_stack else "",
        )

    async def consume_now(self, message: ReceivedMessage) -> broker_pb2.ListenerResult:
        """Lets the listener have one message beside the workers' calls, without hooks: nothing is
        counted, traced or finished.
        """
        loop = asyncio.get_running_loop()
        in_listener.set(True)
        started_s = loop.time()
        try:
            answer = await apart(self._without_hooks([message]))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # as of any other call
            if is_cancelled(error):
                raise
            verdict, text = broker_pb2.LISTENER_VERDICT_EXCEPTION, exception_text(error, *CALLERS)
        else:
            if answer is None or answer is ConsumeResult.SUCCESS:
                verdict, text = broker_pb2.LISTENER_VERDICT_SUCCESS, ""
            else:
                verdict, text = broker_pb2.LISTENER_VERDICT_LATER, repr(answer)[:ANSWER_LENGTH_MAX]
        spent_ms = round((loop.time() - started_s) * 1000)
        return broker_pb2.ListenerResult(verdict=verdict, text=text, spent_ms=spent_ms)

    def _not_done(self, work: Work, start: int, stop: int, answer: object) -> int:
        """Lets messages come again that the listener has not done; index of the first of them."""
        later = _LATER if answer is ConsumeResult.LATER else answer
        if not _is_later(later, stop - start):
            self._misanswered(work, start, stop, answer)
            later = _LATER
        first = start + later.done
        stop = min(stop, work.run.limit)  # behind it the queue has gone on elsewhere
        if work.queue.closed or first >= stop:
            return first
        if self.not_done is None:
            self.redeliver(work, first, stop)
        else:
            self.not_done(work, first, stop, later)
        return first

    def _failed(self, work: Work, start: int, stop: int, error: BaseException) -> None:
        """Tells it, each kind of failure with its traceback once a minute: a mistake in a listener
        meets every message.
        """
        now_s = asyncio.get_running_loop().time()
        kind = _kind(error)
        traced = now_s - self._traced_s.get(kind, -TRACEBACK_EVERY_S) >= TRACEBACK_EVERY_S
        if traced:
            if len(self._traced_s) >= KINDS_MAX:
                self._traced_s.clear()
            self._traced_s[kind] = now_s
        _log.error(
            "listener failed",
            extra=fields(group=self._group, **self._call(work, start, stop), error=error),
            exc_info=error if traced else None,
        )

    def _call(self, work: Work, start: int, stop: int) -> dict[str, object]:
        """The fields that name a listener's call: its first message, and how many there are. The
        topic is the one that it was sent to; a retry is read from another one.
        """
        first = work.messages[start]
        names = {**of(first.queue), "topic": first.topic}
        if first.topic != first.queue.topic:
            names["read_from"] = first.queue.topic
        call: dict[str, object] = {**names, "offset": first.queue_offset}
        if stop - start > 1:
            call["to_offset"] = work.messages[stop - 1].queue_offset
        tries_max = self.tries_max()
        tried = first.reconsume_times + first.attempt
        return {
            **call,
            "message_id": _first_id(first),
            "unique_id": first.unique_id or "none",
            "keys": " ".join(first.keys)[:KEYS_LENGTH_MAX] or "none",
            "attempt": work.attempt,
            "try": tried if tries_max is None else f"{tried} of {tries_max}",
        }

    def _misanswered(self, work: Work, start: int, stop: int, answer: object) -> None:
        _log.error(
            "listener answered neither None nor a verdict: the messages come again",
            extra=fields(
                group=self._group, **self._call(work, start, stop), answer=repr(answer)[:100]
            ),
        )

    async def _wait(self) -> None:
        waiter: Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        await waiter

    def _next(self) -> Work | None:
        """The oldest work that has something left to do."""
        queued = self._work
        while queued and not self._is_suspended:
            work = queued[0]
            if work.stop > work.run.limit:
                work.stop = work.run.limit  # a rewind has cut the run
            if work.cursor < work.stop and not work.queue.closed:
                return work
            queued.popleft()
        return None

    def redeliver(self, work: Work, start: int, stop: int, delay_s: float | None = None) -> None:
        """The same messages once more, here, after this time, None = after a back-off; until then
        the queue's committed offset stays below them.
        """
        if work.queue.closed:
            return
        again = Work(work.queue, work.run, work.messages)
        again.cursor, again.stop, again.attempt = start, stop, work.attempt + 1
        for message in work.messages[start:stop]:
            message.attempt = again.attempt
        if delay_s is None:
            delay_s = self._redelivery.ceiling_s(work.attempt - 1)
        loop = asyncio.get_running_loop()
        self._delayed[again] = loop.call_later(delay_s, self._due, again)

    def _due(self, work: Work) -> None:
        del self._delayed[work]
        self.push(work)


# What calls the listener: where a stack that is shown ends.
CALLERS = (
    Workers._run.__code__,
    Workers.consume_now.__code__,
    awaited.__code__,
    *ListenerThreads.CALLERS,
)
_LATER = Later()


def _is_later(answer: object, count: int) -> TypeGuard[Later]:
    """Whether a listener may say so of so many messages."""
    return (
        isinstance(answer, Later)
        and 0 <= answer.done <= count
        and -1 <= answer.delay_level <= DELAY_LEVEL_MAX
        and 0 <= answer.delay_ms <= DELAY_MS_MAX
        and not (answer.delay_level and answer.delay_ms)
        and answer.suspend_ms >= 0
    )


def _first_id(message: ReceivedMessage) -> str:
    """The message id that its receipt has: a retry, and the message that it was made of, lie in the
    log of one broker group.
    """
    origin = message.properties.get(ORIGIN_MESSAGE_ID, "")
    try:
        place = parse_message_id(origin)
    except MessageIdInvalid:
        return message.message_id
    return message_id(message.queue.broker_group, place.log_offset)


def _kind(error: BaseException) -> str:
    """The error's type and place: the same for every message that meets the same mistake."""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{type(error).__name__} {frames}"

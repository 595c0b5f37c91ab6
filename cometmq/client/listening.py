"""The listener's workers: they take messages of all queues in the order of arrival and hand them to
the application.

A worker is a task that lives as long as the consumer; there is no task for a message. Work lies in
one list of :class:`Work`: what one pull found, taken piece by piece.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Future, TimerHandle
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from cometmq.client.messages import ConsumeResult, ReceivedMessage
from cometmq.client.progress import Run
from cometmq.client.tasks import Tasks
from cometmq.rpc.retry import BackoffPolicy
from cometmq.telemetry import fields

Listener = Callable[[list[ReceivedMessage]], Awaitable[ConsumeResult | None]]

_CALLS_PER_TURN_MAX = 32  # by one worker, when the listener never waits: others want the loop too

_log = logging.getLogger(__name__)


class Queue(Protocol):
    """Where work comes from."""

    closed: bool  # the queue is no longer ours: its work is dropped
    running: int  # listener calls with its messages

    def finish(self, run: Run, start: int, stop: int) -> None:
        """A listener call has ended; it is done with these messages (none if start == stop)."""


class Work:
    """Messages ``cursor`` to ``stop`` of a run."""

    __slots__ = ("attempt", "cursor", "messages", "queue", "run", "stop")

    def __init__(self, queue: Queue, run: Run, messages: list[ReceivedMessage]) -> None:
        self.queue = queue
        self.run = run
        self.messages = messages
        self.cursor = 0
        self.stop = len(messages)
        self.attempt = 1


class Workers:
    """``concurrency`` listener calls at a time, each with at most ``batch_count`` messages of one
    queue.
    """

    def __init__(
        self, listener: Listener, concurrency: int, batch_count: int, redelivery: BackoffPolicy
    ) -> None:
        self._listener = listener
        self._concurrency = concurrency
        self._batch_count = batch_count
        self._redelivery = redelivery
        self._work: deque[Work] = deque()
        self._idle: list[Future[None]] = []  # of workers that wait for work
        self._delayed: dict[Work, TimerHandle] = {}  # what comes again

    def start(self, tasks: Tasks) -> None:
        for number in range(self._concurrency):
            tasks.start(self._run(), f"listener {number}")

    def close(self) -> None:
        """Nothing comes again."""
        for timer in self._delayed.values():
            timer.cancel()
        self._delayed.clear()
        self._work.clear()

    def push(self, work: Work) -> None:
        """Takes work; wakes as many workers as it can feed."""
        self._work.append(work)
        calls = -(-(work.stop - work.cursor) // self._batch_count)
        while calls > 0 and self._idle:
            waiter = self._idle.pop()
            if not waiter.done():
                waiter.set_result(None)
                calls -= 1

    async def _run(self) -> None:
        listener, batch_count, calls = self._listener, self._batch_count, 0
        while True:
            work = self._next()
            if work is None:
                await self._wait()
                calls = 0
                continue
            queue, start = work.queue, work.cursor
            work.cursor = stop = min(start + batch_count, work.stop)
            queue.running += 1
            try:
                result = await listener(work.messages[start:stop])
            except Exception:  # the application's code: whatever it raises means "not done"
                _log.exception("listener failed", extra=fields(queue=work.messages[start].queue))
                result = ConsumeResult.LATER
            finally:
                queue.running -= 1
            if result is ConsumeResult.LATER:
                self._again(work, start, stop)
                stop = start
            queue.finish(work.run, start, stop)
            calls += 1
            if calls >= _CALLS_PER_TURN_MAX:
                calls = 0
                await asyncio.sleep(0)

    async def _wait(self) -> None:
        waiter: Future[None] = asyncio.get_running_loop().create_future()
        self._idle.append(waiter)
        await waiter

    def _next(self) -> Work | None:
        """The oldest work that has something left to do."""
        queued = self._work
        while queued:
            work = queued[0]
            if work.stop > work.run.limit:
                work.stop = work.run.limit  # a rewind has cut the run
            if work.cursor < work.stop and not work.queue.closed:
                return work
            queued.popleft()
        return None

    def _again(self, work: Work, start: int, stop: int) -> None:
        """The same messages once more after a back-off; until then the queue's committed offset
        stays below them.
        """
        if work.queue.closed:
            return
        again = Work(work.queue, work.run, work.messages)
        again.cursor, again.stop, again.attempt = start, stop, work.attempt + 1
        for message in work.messages[start:stop]:
            message.attempt = again.attempt
        delay_s = self._redelivery.ceiling_s(work.attempt - 1)
        loop = asyncio.get_running_loop()
        self._delayed[again] = loop.call_later(delay_s, self._due, again)

    def _due(self, work: Work) -> None:
        del self._delayed[work]
        self.push(work)

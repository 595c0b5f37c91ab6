"""Background tasks with an owner: none is lost, none outlives its owner, none fails in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from cometmq.telemetry import fields, logger

_log = logger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class Tasks:
    """The background tasks of one owner."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._running: set[asyncio.Task[None]] = set()
        self.is_stopping = False  # who is cancelled now is to end

    def __len__(self) -> int:
        return len(self._running)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Runs ``work`` until it ends or the owner stops."""
        task = asyncio.create_task(work, name=f"{self._owner}: {name}")
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error(
                "task failed", extra=fields(task=task.get_name(), error=error), exc_info=error
            )

    async def stop(self) -> None:
        """Cancels all tasks and waits until they are gone; also when the caller is cancelled
        meanwhile.
        """
        self.is_stopping = True
        await stop_all(list(self._running))


class ShieldedTasks:
    """Work that comes to its end, even if its caller goes away."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` returns or raises. A cancelled caller leaves it running."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # the caller has got it, or has gone


async def stop_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits until they are gone. A cancelled caller waits all the same, then is
    cancelled.
    """
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for task in tasks:
        if not task.cancelled():
            task.exception()  # the caller has stopped the task and does not want its error
    if cancelled is not None:
        raise cancelled


def is_cancelled(error: BaseException) -> bool:
    """Whether the present task was cancelled. Else the error is of something that it waited for:
    code of an application may raise a CancelledError of its own.
    """
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def apart(work: Awaitable[T]) -> T:
    """What ``work`` of an application returns or raises, in a task of its own: if it cancels its
    task, that is not the caller's. A cancelled caller cancels the work.
    """
    try:
        return await asyncio.create_task(awaited(work))
    finally:
        if asyncio.iscoroutine(work):  # a task that was cancelled at once has not begun it
            work.close()


async def awaited(work: Awaitable[T]) -> T:
    """A coroutine of what can be awaited."""
    return await work


async def race(
    *work: Coroutine[Any, Any, object], name: str | None = None, timeout_s: float | None = None
) -> bool:
    """Runs ``work`` side by side until one part ends, then stops the others and waits until they
    are gone. Raises what the first one raised. False: the time is over first.
    """
    tasks = [asyncio.create_task(part, name=name) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await stop_all(tasks)
    for task in done:
        task.result()
    return bool(done)


async def map_bounded(
    work: Callable[[T], Coroutine[Any, Any, R]], items: Iterable[T], at_a_time: int
) -> list[R]:
    """What ``work`` returns for each item, in their order; at most so many run at a time. Raises
    the first error, and stops the others then.
    """
    results: dict[int, R] = {}
    rest = enumerate(items)

    async def work_off() -> None:
        for place, item in rest:
            results[place] = await work(item)

    workers = [asyncio.create_task(work_off()) for _ in range(at_a_time)]
    try:
        await asyncio.gather(*workers)
    finally:
        await stop_all(workers)
    return [results[place] for place in sorted(results)]


async def wait_at_most(event: asyncio.Event, timeout_s: float) -> bool:
    """Waits for the event; False when the time is over first."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True

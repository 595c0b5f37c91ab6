"""Listeners that are plain functions: each call runs in a thread, so that it may block."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cometmq.client.options import CONCURRENCY_MAX
from cometmq.client.received import ReceivedMessage
from cometmq.client.remote.stacks import thread_stack


class ListenerThreads:
    """Each call runs the function in a thread of the pool. The pool makes a thread when none is
    idle, so that there are as many threads as calls at a time.
    """

    def __init__(self, function: Callable[[list[ReceivedMessage]], object]) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(CONCURRENCY_MAX, "listener")
        self._threads: dict[asyncio.Task[object] | None, int] = {}  # of calls that run, by task

    async def __call__(self, messages: list[ReceivedMessage]) -> object:
        task = asyncio.current_task()
        call = partial(contextvars.copy_context().run, self._call, messages, task)
        answer = await asyncio.get_running_loop().run_in_executor(self._pool, call)
        # A lambda around an async function is a plain function.
        return await answer if inspect.isawaitable(answer) else answer

    def stack(self, task: asyncio.Task[object]) -> str:
        """Where the function is that the task has called; empty: it calls none now."""
        thread_id = self._threads.get(task)
        return "" if thread_id is None else thread_stack(thread_id, *self.CALLERS)

    def _call(self, messages: list[ReceivedMessage], task: asyncio.Task[object] | None) -> object:
        self._threads[task] = threading.get_ident()
        try:
            return self._function(messages)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # A future cannot hold the first one. The others end a thread, and not the event loop.
            raise RuntimeError(f"the listener raised {type(error).__name__}") from error
        finally:
            del self._threads[task]

    CALLERS = (__call__.__code__, _call.__code__)  # of the function, and of what it returns

    def close(self) -> None:
        """No call begins any more. A call that runs goes on to its end; its result is forgotten."""
        self._pool.shutdown(wait=False, cancel_futures=True)

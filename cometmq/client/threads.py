"""Listeners that are plain functions: each call runs in a thread, so that it may block."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cometmq.client.options import CONCURRENCY_MAX
from cometmq.client.received import ReceivedMessage


class ListenerThreads:
    """Each call runs the function in a thread of the pool. The pool makes a thread when none is
    idle, so that there are as many threads as calls at a time.
    """

    def __init__(self, function: Callable[[list[ReceivedMessage]], object]) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(CONCURRENCY_MAX, "listener")

    async def __call__(self, messages: list[ReceivedMessage]) -> object:
        call = partial(contextvars.copy_context().run, self._call, messages)
        answer = await asyncio.get_running_loop().run_in_executor(self._pool, call)
        # A lambda around an async function is a plain function.
        return await answer if inspect.isawaitable(answer) else answer

    def _call(self, messages: list[ReceivedMessage]) -> object:
        try:
            return self._function(messages)
        except (StopIteration, SystemExit, KeyboardInterrupt) as error:
            # A future cannot hold the first one. The others end a thread, and not the event loop.
            raise RuntimeError(f"the listener raised {type(error).__name__}") from error

    def close(self) -> None:
        """No call begins any more. A call that runs goes on to its end; its result is forgotten."""
        self._pool.shutdown(wait=False, cancel_futures=True)

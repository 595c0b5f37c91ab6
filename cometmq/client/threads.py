"""Listeners that are plain functions: each call runs in a thread, so that it may block."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from cometmq.client.messages import ReceivedMessage


class ListenerThreads:
    """Awaiting it calls the function in a thread. A thread is made when no other is free: there are
    as many as calls at a time, at most ``threads_max``.
    """

    def __init__(
        self, function: Callable[[list[ReceivedMessage]], object], threads_max: int
    ) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(threads_max, "listener")

    async def __call__(self, messages: list[ReceivedMessage]) -> object:
        call = partial(contextvars.copy_context().run, self._call, messages)
        answer = await asyncio.get_running_loop().run_in_executor(self._pool, call)
        # A lambda around an async function is a plain function.
        return await answer if inspect.isawaitable(answer) else answer

    def _call(self, messages: list[ReceivedMessage]) -> object:
        try:
            return self._function(messages)
        except StopIteration as error:
            # A future cannot hold it: nobody would learn that the call has ended.
            raise RuntimeError("the listener raised StopIteration") from error

    def close(self) -> None:
        """No call begins any more. A call that runs goes on to its end; its result is forgotten."""
        self._pool.shutdown(wait=False, cancel_futures=True)

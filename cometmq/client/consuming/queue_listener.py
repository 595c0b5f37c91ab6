"""How an application learns which queues come to a pull consumer and go from it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from cometmq.errors import InvalidRequest
from cometmq.model import QueueRef
from cometmq.rpc.tasks import apart, is_cancelled
from cometmq.telemetry import fields, logger

_log = logger(__name__)


class QueueListener:
    """Override what you need, with ``async def``, or with a plain ``def``, which runs in a thread.
    A call may take ``drain_timeout_ms``; then, or when it raises, the consumer goes on and logs it.
    """

    def on_assigned(self, queues: Sequence[QueueRef]) -> Any:
        """Polls will hand out messages of these queues when it returns: seek, if you want."""

    def on_revoked(self, queues: Sequence[QueueRef]) -> Any:
        """These queues go to other members when it returns: commit, if you do so by hand. The
        application has come back from its work on them, unless that took too long.
        """


class QueueEvents:
    """Calls the listener, if there is one."""

    def __init__(self, listener: QueueListener | None, timeout_s: float) -> None:
        if listener is not None and not isinstance(listener, QueueListener):
            raise InvalidRequest(f"queue_listener must be a QueueListener, not {listener!r:.80}.")
        self._listener = listener
        self._timeout_s = timeout_s

    async def assigned(self, queues: Sequence[QueueRef]) -> None:
        if self._listener is not None and queues:
            await self._call(self._listener.on_assigned, queues)

    async def revoked(self, queues: Sequence[QueueRef]) -> None:
        if self._listener is not None and queues:
            await self._call(self._listener.on_revoked, queues)

    async def _call(self, method: Callable[[Sequence[QueueRef]], Any], queues: Any) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if inspect.iscoroutinefunction(method):
                    await apart(method(queues))
                else:
                    await asyncio.to_thread(method, queues)
        except (Exception, asyncio.CancelledError) as error:  # whatever the application's raises
            if is_cancelled(error):
                raise
            _log.error(
                "queue listener failed",
                extra=fields(method=method.__name__, queue_count=len(queues), error=repr(error)),
                exc_info=error,
            )

"""Background work of a member: which task has failed, and whether its neighbours go on.

Work that others can do without for a while begins again, with a growing pause. Work that keeps the
log, the state, the lease or an index in step ends the process: the next one begins from the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Counter

from cometmq.clock import Clock
from cometmq.errors import StoreFailed
from cometmq.member.lease.lease_holder import Deposed
from cometmq.telemetry import fields, logger

AGAIN_S_MIN, AGAIN_S_MAX = 1.0, 60.0

_ENDS_THE_ROLE = (StoreFailed, Deposed)
_log = logger(__name__)


def ends_the_role(error: Exception) -> bool:
    """Whether no work of this role may go on: the disk has failed, or another member writes."""
    if isinstance(error, ExceptionGroup):
        return error.subgroup(_ENDS_THE_ROLE) is not None
    return isinstance(error, _ENDS_THE_ROLE)


class Restarts:
    """Begins work again that has failed. ``failures`` counts them by task."""

    def __init__(self, broker_group: str, failures: Counter, clock: Clock) -> None:
        self._broker_group = broker_group
        self._failures = failures
        self._clock = clock

    async def keep(self, task: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs ``work`` to its end. After an unexpected error it begins again, after 1 s to 60 s;
        the pause is short again when it ran for longer than that. Raises what ends the role.
        """
        again_s = AGAIN_S_MIN
        failures = self._failures.labels(task)  # from here on 0 is served
        while True:
            begun_s = self._clock.monotonic_s()
            try:
                return await work()
            except Exception as error:
                if ends_the_role(error):
                    raise
                if self._clock.monotonic_s() - begun_s > AGAIN_S_MAX:
                    again_s = AGAIN_S_MIN
                failures.inc()
                _log.error(
                    "background work failed and begins again",
                    extra=fields(task=task, broker_group=self._broker_group, again_s=again_s),
                    exc_info=error,
                )
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_S_MAX)


def log_end(task: str, broker_group: str, error: Exception) -> None:
    """Work has failed that ends the process."""
    _log.error(
        "background work failed and ends the process",
        extra=fields(task=task, broker_group=broker_group),
        exc_info=error,
    )

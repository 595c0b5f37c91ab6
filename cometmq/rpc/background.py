"""Background work of a process: which task has failed, and whether its neighbours go on.

Work that others can do without for a while begins again, with a growing pause. Other work ends the
process. In both cases the log names the task and has the traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import CollectorRegistry, Counter

from cometmq.clock import Clock, SystemClock
from cometmq.telemetry import fields, logger

AGAIN_S_MIN, AGAIN_S_MAX = 1.0, 60.0

_log = logger(__name__)


def failures_of(registry: CollectorRegistry) -> Counter:
    """How often work began again, by task."""
    return Counter(
        "cometmq_background_failures",
        "How often background work met an unexpected error and began again.",
        ["task"],
        registry=registry,
    )


def _nothing_ends(_: Exception) -> bool:
    return False


class Restarts:
    """Begins work again that has failed. ``failures`` counts them by task. ``ends``: which errors
    end the process nevertheless. ``about``: what the log says of the process.
    """

    def __init__(
        self,
        failures: Counter | None = None,
        clock: Clock | None = None,
        *,
        ends: Callable[[Exception], bool] = _nothing_ends,
        **about: object,
    ) -> None:
        self._failures = failures
        self._clock = clock or SystemClock()
        self._ends = ends
        self._about = about

    async def keep(self, task: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs ``work`` to its end. After an unexpected error it begins again, after 1 s to 60 s;
        the pause is short again when it ran for longer than that. Raises what ends the process.
        """
        again_s = AGAIN_S_MIN
        # From here on 0 is served.
        failures = self._failures.labels(task) if self._failures is not None else None
        while True:
            begun_s = self._clock.monotonic_s()
            try:
                return await work()
            except Exception as error:
                if self._ends(error):
                    raise
                if self._clock.monotonic_s() - begun_s > AGAIN_S_MAX:
                    again_s = AGAIN_S_MIN
                if failures is not None:
                    failures.inc()
                _log.error(
                    "background work failed and begins again",
                    extra=fields(task=task, **self._about, again_s=again_s),
                    exc_info=error,
                )
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, AGAIN_S_MAX)

    async def name(self, task: str, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work``. The log says what an unexpected error of it ends."""
        try:
            await work
        except Exception as error:
            if not self._ends(error):
                _log.error(
                    "background work failed and ends the process",
                    extra=fields(task=task, **self._about),
                    exc_info=error,
                )
            raise

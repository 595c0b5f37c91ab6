"""A real cluster in the test's own loop for groups that receive (POP), with a clock that the test
moves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cometmq.clock import SystemClock
from tests.support.cluster.broker import LiveBroker, running_broker, running_namesrv
from tests.support.cluster.pullhold import LivePullhold, running_pullhold


class Ahead(SystemClock):
    """The machine's clock, and what a test adds to it."""

    def __init__(self) -> None:
        self.later_s = 0.0

    def wall_ms(self) -> int:
        return super().wall_ms() + round(self.later_s * 1000)

    def boottime_s(self) -> float:
        return super().boottime_s() + self.later_s


@asynccontextmanager
async def pop_cluster(
    tmp_path: Path, clock: Ahead, queues: int = 2, **options: Any
) -> AsyncIterator[tuple[str, LiveBroker, LivePullhold]]:
    """Name server, broker with topic T, pull-hold."""
    async with (
        running_namesrv(tmp_path) as namesrv,
        running_broker(tmp_path, namesrv=(namesrv,), clock=clock, **options) as broker,
        running_pullhold(namesrv) as pullhold,
    ):
        await broker.put_topic("T", queues)
        yield namesrv, broker, pullhold

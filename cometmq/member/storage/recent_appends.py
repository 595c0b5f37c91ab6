"""The newest appended batches of queues whose arrivals carry their messages: an arrival need not
read them from the files.

Only the newest small batches are kept. The reader of an arrival reads the others.
"""

from __future__ import annotations

from typing import NamedTuple

from cometmq.format.queueunit import UNIT_BYTES
from cometmq.messaging.inline_messages import BYTES_MAX, COUNT_MAX
from cometmq.messaging.pull import sizes_and_codes
from cometmq.model import QueueKey

QUEUES_MAX = 64  # 1 MiB in all


class Run(NamedTuple):
    """Messages of a queue that follow each other: their units, and their records end to end."""

    first_offset: int
    units: bytes
    records: bytes

    @property
    def end_offset(self) -> int:
        return self.first_offset + len(self.units) // UNIT_BYTES

    @property
    def is_small(self) -> bool:
        """Whether an arrival may carry them."""
        return len(self.units) <= COUNT_MAX * UNIT_BYTES and len(self.records) <= BYTES_MAX

    def split(self, offset: int) -> tuple[Run, Run]:
        """The messages below ``offset``, and the others."""
        at = UNIT_BYTES * (offset - self.first_offset)
        sizes, _ = sizes_and_codes(self.units[:at])
        start = sum(sizes)
        below = Run(self.first_offset, self.units[:at], self.records[:start])
        return below, Run(offset, self.units[at:], self.records[start:])


class RecentAppends:
    """One run of each queue. Belongs to the event loop."""

    def __init__(self) -> None:
        self._runs: dict[QueueKey, Run] = {}

    def add(self, key: QueueKey, run: Run) -> None:
        """``run`` was appended to the queue."""
        before = self._runs.pop(key, None)
        if before is not None and before.end_offset == run.first_offset:
            joined = Run(
                before.first_offset, before.units + run.units, before.records + run.records
            )
            run = joined if joined.is_small else run
        if run.is_small:
            if len(self._runs) >= QUEUES_MAX:
                self._runs.clear()
            self._runs[key] = run

    def take(self, key: QueueKey, first: int, end: int) -> Run | None:
        """The queue's messages from ``first`` up to ``end``, which are kept no longer; None: not
        all of them are here.
        """
        run = self._runs.get(key)
        if run is None or first < run.first_offset or end > run.end_offset:
            return None
        if first > run.first_offset:
            _, run = run.split(first)
        if end == run.end_offset:
            del self._runs[key]
        else:
            run, self._runs[key] = run.split(end)
        return run

    def forget_topic(self, topic: str) -> None:
        """The topic was deleted: another one of the same name has other messages."""
        for key in [key for key in self._runs if key[0] == topic]:
            del self._runs[key]

"""What a writer lets be acknowledged and seen: as ``MemberStorage`` of the broker, without files.

One queue for each topic; a batch has one record for each of its topics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from cometmq.replication.watermarks import (
    REPLICATED,
    DurabilityClass,
    HighWatermarks,
    ReadableMaxima,
    Watermarks,
    union,
)
from tests.sim.disk import Disk, Histories, Record

TOPIC = "T"


class Batch(NamedTuple):
    """What a producer waits for."""

    records: tuple[Record, ...]
    demands: DurabilityClass

    @property
    def end(self) -> int:
        return self.records[-1].end


class Storage:
    """``is_only_writer`` is asked whenever something would be acknowledged or shown."""

    def __init__(
        self, disk: Disk, epoch: int, demands: list[DurabilityClass], before: HighWatermarks
    ) -> None:
        """``before``: by these marks consumers have seen what is there."""
        self.disk = disk
        self.epoch = epoch
        self.watermarks = Watermarks(disk.end, disk.flushed)
        self.maxima = _readable_at_start(disk, demands, before)
        self.shown = HighWatermarks()
        self.copies_wanted = 0
        self.sealed = False
        self.flush_wanted = 0
        self.is_only_writer: Callable[[], bool] = lambda: True
        self.on_ack: Callable[[Batch], None] = lambda _batch: None
        self.on_show: Callable[[], None] = lambda: None
        self.on_move: Callable[[], None] = lambda: None
        self._demands = demands
        self._alone = False
        self._acks: dict[DurabilityClass, deque[Batch]] = {}

    def append(self, queues: list[int], first_uid: int, sizes: list[int]) -> Batch:
        """A batch with a record for each of these queues."""
        assert not self.sealed
        records = []
        for uid, (queue, size) in enumerate(zip(queues, sizes, strict=True), first_uid):
            units = self.disk.queues[queue]
            number, chain = (units[-1].number, units[-1].chain) if units else (0, 0)
            start = self.disk.end
            demands = self._demands[queue]
            next_chain = hash((chain, uid))
            record = Record(
                start, start + size, uid, self.epoch, queue, number + 1, next_chain, demands
            )
            self.disk.append([record])
            records.append(record)
        batch = Batch(tuple(records), union(record.demands for record in records))
        self._appended(batch)
        return batch

    def _appended(self, batch: Batch) -> None:
        self.watermarks.append_to(batch.end)
        for record in batch.records:
            self.maxima.push(record.demands, batch.end, (TOPIC, record.queue), record.number)
        self.on_move()
        if self.watermarks.ack(batch.demands) >= batch.end and self.is_only_writer():
            self.on_ack(batch)
            return
        if batch.demands & _ON_DISK or (batch.demands and self._alone):
            self.flush_wanted = batch.end
        if batch.demands & DurabilityClass.REPLICATED_FLUSHED:
            self.copies_wanted = batch.end
        self._acks.setdefault(batch.demands, deque()).append(batch)

    def advance_replicated(self, replicated: int, replicated_flushed: int, *, alone: bool) -> None:
        if alone and not self._alone:
            self.flush_wanted = self.watermarks.appended
        self._alone = alone
        self.watermarks.advance_replicated(replicated, replicated_flushed)

    def stand_still(self) -> None:
        """Too few are in sync: nothing more counts as copied."""
        self._alone = False

    def flushed(self, position: int) -> None:
        self.disk.flushed = max(self.disk.flushed, position)
        self.watermarks.flush_to(position)
        if self._alone:
            self.watermarks.advance_replicated(position, position)
        self.settle()
        self.on_move()

    def settle(self) -> None:
        """Acknowledge and show what may be."""
        if not self.is_only_writer():
            return
        for demands, waiting in self._acks.items():
            position = self.watermarks.ack(demands)
            while waiting and waiting[0].end <= position:
                self.on_ack(waiting.popleft())
        moved = self.maxima.advance(self.watermarks)
        if self.shown != self.watermarks.marks:
            self.shown = self.watermarks.marks
            self.on_show()
            self.on_move()
        elif moved:
            self.on_show()

    def depose(self) -> None:
        self.sealed = True
        self._acks.clear()


def histories_of(disk: Disk) -> Histories:
    """The generations that the log tells of; empty: no writer was ever here."""
    return disk.copies[-1].histories if disk.copies else ()


def newest_generation(histories: Histories) -> int:
    """The highest that they tell of; 0 = none."""
    return max((history.current for history in histories), default=0)


def _readable_at_start(
    disk: Disk, demands: list[DurabilityClass], before: HighWatermarks
) -> ReadableMaxima:
    maxima = ReadableMaxima()
    for queue, units in enumerate(disk.queues):
        copies, key = demands[queue] & REPLICATED, (TOPIC, queue)
        seen = before.visible(demands[queue]) if copies else disk.end
        count = sum(unit.start < seen for unit in units)
        if count:
            maxima.push(DurabilityClass.ASYNC, disk.end, key, count)
        if len(units) > count:
            maxima.push(copies, disk.end, key, len(units))
    maxima.advance(HighWatermarks(flushed=disk.flushed))
    return maxima


_ON_DISK = DurabilityClass.FLUSHED | DurabilityClass.REPLICATED_FLUSHED

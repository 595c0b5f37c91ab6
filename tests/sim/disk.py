"""A member's data folder: a log of records with epochs, queues and an identity.

What stands in the page cache survives the process, only what was synced survives the machine. The
rules of identity are those of ``cometmq/store/recovery/opening.py``.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from cometmq.messaging.generations import History
from cometmq.replication.follower import LogView, owned
from cometmq.replication.lease import ReplicaId
from cometmq.replication.watermarks import DurabilityClass
from cometmq.store.metadata import epochs
from tests.sim.world import Violation

Histories = tuple[History, ...]  # the generations of all queues, one queue for each topic


class Record(NamedTuple):
    """``queue`` is -1 for a record of the state; a snapshot begins an epoch. ``histories``: the
    generations since the newest of these. ``data``: the bytes of the record as the product writes
    it, ``tags`` what its unit holds.
    """

    start: int
    end: int
    uid: int  # no two records have the same: the CRC
    epoch: int
    queue: int
    number: int  # in its queue, of the next record
    chain: int  # says which records the queue has up to this one
    demands: DurabilityClass = DurabilityClass.ASYNC
    histories: Histories = ()
    data: bytes = b""
    tags: int = 0


class Disk:
    """``name`` is the store's: a new folder has a new one."""

    _names = itertools.count()

    def __init__(self, member_id: int, queue_count: int, name: str) -> None:
        self.member_id = member_id
        self.store_id = name
        self.former_store_id = ""
        self.epochs: list[epochs.Epoch] = []
        self.flushed = 0
        self.clean = True  # as of the last stop
        self.recovered = False  # from an unclean stop, of which no writer has taken notice
        self.boot = 0  # of the machine when the store was opened last
        self.open = False
        self.records: list[Record] = []
        self.queues: list[list[Record]] = [[] for _ in range(queue_count)]
        self.states: list[Record] = []  # of the state topic
        self._ends: list[int] = []
        self._renamed = 0

    @property
    def replica_id(self) -> ReplicaId:
        return ReplicaId(self.member_id, self.store_id)

    @property
    def end(self) -> int:
        """Of the log in the page cache."""
        return self._ends[-1] if self._ends else 0

    @property
    def epoch(self) -> int:
        """The highest that is known."""
        return epochs.next_number(self.epochs, 0) - 1

    # --- starting and stopping --------------------------------------------------------------------

    def start(self, boot: int) -> None:
        """A process opens the store; recovery leaves everything on the disk."""
        assert not self.open, self.replica_id
        if not self.clean and self.boot != boot:
            self.former_store_id = self.former_store_id or self.store_id
            self._rename()
        self.recovered = self.recovered or not self.clean
        self.clean, self.open, self.boot = False, True, boot
        self.flushed = self.end

    def close(self) -> None:
        self.flushed = self.end
        self.clean, self.open = True, False

    def kill(self) -> None:
        """The process died."""
        self.open = False

    def lose_power(self, rng: random.Random) -> int:
        """Some of what was not synced is gone: how many records."""
        self.open = False
        synced = bisect_left(self._ends, self.flushed) + 1 if self.flushed else 0
        kept = rng.randint(min(synced, len(self._ends)), len(self._ends))
        lost = len(self.records) - kept
        self._keep(kept)
        return lost

    def _rename(self) -> None:
        self._renamed += 1
        self.store_id = f"{self.store_id.split('.')[0]}.{self._renamed}"

    # --- the log ----------------------------------------------------------------------------------

    def append(self, records: Sequence[Record]) -> None:
        for record in records:
            assert record.start == self.end, (record, self.end)
            self.records.append(record)
            self._ends.append(record.end)
            (self.states if record.queue < 0 else self.queues[record.queue]).append(record)

    def at(self, offset: int) -> Record | None:
        """The record that begins there."""
        index = bisect_right(self._ends, offset)
        found = self.records[index] if index < len(self.records) else None
        return found if found is not None and found.start == offset else None

    def ending_at(self, offset: int) -> Record | None:
        """The record that ends there."""
        index = bisect_left(self._ends, offset)
        there = index < len(self._ends) and self._ends[index] == offset
        return self.records[index] if there else None

    def up_to(self, start: int, size: int) -> list[Record]:
        """Whole records from ``start`` on, so many bytes, but at least one."""
        first = bisect_right(self._ends, start)
        return self.records[first : max(first + 1, bisect_right(self._ends, start + size))]

    def between(self, start: int, end: int) -> list[Record]:
        """Whole records from ``start`` on that end at or below ``end``."""
        return self.records[bisect_right(self._ends, start) : bisect_right(self._ends, end)]

    def begin_epoch(self, floor: int) -> int:
        """For a writer: its number."""
        number = epochs.next_number(self.epochs, floor)
        self.epochs = [*epochs.trim(self.epochs, 0, self.end), epochs.Epoch(number, self.end)]
        self.former_store_id = ""
        return number

    def adopt_epochs(self, known: Sequence[tuple[int, int]]) -> None:
        """For a follower."""
        self.epochs = [epochs.Epoch(*epoch) for epoch in known]
        self.former_store_id = ""

    def cut(self, offset: int) -> None:
        if self.at(offset) is None and offset != self.end:
            raise Violation(f"a cut at {offset} of {self.replica_id}: no record begins there")
        self._keep(bisect_right(self._ends, offset))
        self.flushed = self.end

    def begin_anew(self) -> None:
        self._rename()
        self.former_store_id = ""
        self._keep(0)

    def _keep(self, count: int) -> None:
        for record in reversed(self.records[count:]):
            (self.states if record.queue < 0 else self.queues[record.queue]).pop()
        del self.records[count:], self._ends[count:]
        self.flushed = min(self.flushed, self.end)

    def epoch_pairs(self) -> list[tuple[int, int]]:
        return [(epoch.number, epoch.start) for epoch in self.epochs]

    def view(self, *, writes: bool = False) -> LogView:
        """As it is told in a handshake."""
        pairs = tuple(self.epoch_pairs())
        last = self.records[-1] if self.records else None
        return LogView(
            pairs if writes else owned(pairs, self.end),
            0,
            self.end,
            -1 if last is None else last.start,
            0 if last is None else last.uid,
        )

    def crc_at(self, offset: int) -> int | None:
        found = self.at(offset)
        return None if found is None else found.uid

"""A member's log as the parts of the product read it that work on a store: the real functions for
the state, the tail, stored batches and delayed messages run on the simulated disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cometmq.errors import MessageNotFound
from cometmq.format import queueunit
from cometmq.format.belonging import first_strange
from cometmq.messaging.state import STATE_QUEUE_ID, STATE_TOPIC
from cometmq.model import QueueKey
from cometmq.store.log.commitlog import Chunk
from cometmq.store.timers.index import TimerIndex
from tests.sim.disk import Disk, Record

STATE = (STATE_TOPIC, STATE_QUEUE_ID)


class NoFiles:
    """A disk without files: the timer index is in memory, and made again from the queue."""

    def read(self, path: Path) -> None:
        return None

    def entries(self, folder: Path) -> list[Any]:
        return []


class Log:
    """``indexes``: the queue of each key, but for the state topic's."""

    adoption = None
    state_lost = None
    min_offset = 0
    log_file_bytes = 1 << 30

    def __init__(self, disk: Disk, indexes: Mapping[QueueKey, int]) -> None:
        self.disk = disk
        self._indexes = indexes

    @property
    def epoch(self) -> int:
        return self.disk.epoch

    @property
    def appended_offset(self) -> int:
        return self.disk.end

    def new_timer_index(self) -> TimerIndex:
        files: Any = NoFiles()
        return TimerIndex(Path("timers"), files, self.epoch)

    def _queue(self, topic: str, queue_id: int) -> Sequence[Record]:
        if (topic, queue_id) == STATE:
            return self.disk.states
        index = self._indexes.get((topic, queue_id))
        return () if index is None else self.disk.queues[index]

    def queue_bounds(self, topic: str, queue_id: int) -> tuple[int, int]:
        return 0, len(self._queue(topic, queue_id))

    def read_units(
        self, topic: str, queue_id: int, offset: int, count: int, *, nowait: bool = False
    ) -> bytes:
        some = self._queue(topic, queue_id)[offset : offset + count]
        return b"".join(queueunit.pack(one.start, len(one.data), one.tags) for one in some)

    def read_records(self, spans: Sequence[tuple[int, int]], *, nowait: bool = False) -> bytes:
        return b"".join(self._read(*span) for span in spans)

    def read_messages(
        self,
        queue: QueueKey,
        offset: int,
        units: bytes,
        spans: Sequence[tuple[int, int]],
        *,
        nowait: bool = False,
    ) -> bytes:
        found = self.read_records(spans)
        assert first_strange(found, units, offset, queue) is None, "queues name their own messages"
        return found

    def _read(self, offset: int, size: int) -> bytes:
        """A record, or several end to end."""
        data = b"".join(one.data for one in self.disk.between(offset, offset + size))
        if len(data) != size:
            raise MessageNotFound(f"no records of {size} bytes at {offset}")
        return data

    def read_record(self, log_offset: int) -> bytes:
        found = self.disk.at(log_offset)
        if found is None:
            raise MessageNotFound(f"no record at {log_offset}")
        return found.data

    def read_chunk(self, offset: int, bytes_max: int) -> Chunk | None:
        found = self.disk.up_to(offset, bytes_max)
        if not found:
            return None
        return Chunk(b"".join(one.data for one in found), found[-1].end)

    def good_records(self, bytes_max: int, start: int) -> Iterator[tuple[int, bytes]]:
        found = self.disk.between(start, self.disk.end)
        if found:
            yield found[0].start, b"".join(one.data for one in found)

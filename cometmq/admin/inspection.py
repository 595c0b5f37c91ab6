"""Looking into a store's folder without a broker: :mod:`cometmq.store.dump` as views."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from cometmq.admin.views import RecordView, StoreQueueView, StoreView, UnitView
from cometmq.format.record import Record
from cometmq.store import dump


def store(directory: Path, *, scan: bool = False) -> StoreView:
    """What lies in the folder; with ``scan`` every record is read and counted."""
    said: dict[str, Any] = dump.describe(directory, scan=scan)
    queues = [StoreQueueView(**queue) for queue in said.pop("queues")]
    queues.sort(key=lambda queue: (queue.topic, queue.queue_id))
    return StoreView(**said, queues=queues)


def records(directory: Path, *, start: int | None, count: int) -> list[RecordView]:
    """At most ``count`` records of the log, from the one at ``start`` on or the oldest."""
    return [_record_view(found) for found in islice(dump.records(directory, start=start), count)]


def _record_view(found: Record) -> RecordView:
    return RecordView(
        log_offset=found.log_offset,
        size_bytes=found.size,
        topic=found.topic,
        queue_id=found.queue_id,
        queue_offset=found.queue_offset,
        store_time_ms=found.store_time_ms,
        tag=found.tag,
        keys=list(found.keys),
        body_bytes=found.body_bytes,
    )


def units(directory: Path, topic: str, queue_id: int, *, start: int, count: int) -> list[UnitView]:
    """At most ``count`` units of a queue, from queue offset ``start`` on."""
    found = dump.units(directory, topic, queue_id, start=start)
    return [UnitView(*unit) for unit in islice(found, count)]

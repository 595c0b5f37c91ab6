"""A store's folder without a broker, as views: :mod:`cometmq.store` dumps, verifies, repairs."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from cometmq.admin.views import (
    FaultView,
    LogFileView,
    LossView,
    PlaceView,
    RecordView,
    RepairedView,
    StoreQueueView,
    StoreView,
    UnitView,
    VerifiedView,
)
from cometmq.clock import SystemClock
from cometmq.format.indexfile import Sizes
from cometmq.format.record import Record
from cometmq.messaging.queuechanges import QueueChanges
from cometmq.store.repair import dump
from cometmq.store.repair import repair as repairing
from cometmq.store.repair import verify as verification
from cometmq.store.repair.repair import Accepted

_CLOCK = SystemClock()


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


def files(directory: Path) -> list[LogFileView]:
    """The log's files."""
    return [LogFileView(*found) for found in dump.files_of_log(directory)]


def place(directory: Path, log_offset: int) -> PlaceView:
    """What is at a place of the log."""
    path, offset, found, goes_on = dump.place(directory, log_offset)
    view = None if found.record is None else _record_view(found.record)
    return PlaceView(path, offset, found.kind.value, found.size, found.reason, goes_on, view)


def verify(directory: Path, index_sizes: Sizes | None) -> VerifiedView:
    """Everything read and compared. ``index_sizes`` None: those that the store was opened with."""
    began_s = _CLOCK.monotonic_s()
    report = verification.verify(directory, index_sizes=index_sizes, observer=QueueChanges())
    fields = {name: getattr(report, name) for name in report.__slots__}
    faults = [FaultView(*fault) for fault in fields.pop("faults")]
    return VerifiedView(**fields, faults=faults, seconds=_CLOCK.monotonic_s() - began_s)


def repair(
    directory: Path,
    accepted: Accepted,
    *,
    index_sizes: Sizes | None,
    queue_file_bytes: int | None,
) -> RepairedView:
    """Mend a store that no process has open."""
    began_s = _CLOCK.monotonic_s()
    done = repairing.repair(
        directory,
        accepted,
        observer=QueueChanges(),
        index_sizes=index_sizes,
        queue_file_bytes=queue_file_bytes,
    )
    fields = {name: getattr(done, name) for name in done.__slots__}
    losses = [LossView(*loss) for loss in fields.pop("losses")]
    return RepairedView(**fields, losses=losses, seconds=_CLOCK.monotonic_s() - began_s)

"""What stands in a data folder, for people: read only, without the lock, of an open store too.

``cometmq store dump`` prints what :func:`describe` returns; :func:`records` and :func:`units` list
what is inside. Nothing is repaired: what a recovery would cut is told as ``end_reason``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from cometmq.errors import QueueNotFound, StoreForeignFile
from cometmq.format import queueunit, record
from cometmq.store import checkpoint, epochs, identity, layout
from cometmq.store.consumequeue import ConsumeQueue
from cometmq.store.files import Files, OsFiles
from cometmq.store.recovery import LogFileScan
from cometmq.store.segments import Segments

OPEN_FILES_MAX = 64
LOG_END_MAX = 2**63 - 1


class DumpedUnit(NamedTuple):
    """One unit of a queue."""

    queue_offset: int
    log_offset: int
    size: int
    tags_code: int


def describe(directory: Path, *, scan: bool = False) -> dict[str, object]:
    """A store's state as plain JSON values; with ``scan`` all records are read and counted.

    Raises StoreForeignFile when the folder has no log, StoreDamaged when one of the small files
    does not read.
    """
    paths, files = layout.StorePaths(directory), OsFiles(OPEN_FILES_MAX)
    known = identity.load(files, paths.identity)
    log = _files_of(files, paths.commit_log)
    try:
        return {
            "directory": str(directory),
            "identity": None if known is None else asdict(known),
            "in_use_or_crashed": files.exists(paths.abort),
            "checkpoint": asdict(checkpoint.load(files, paths.checkpoint)),
            "epochs": [asdict(epoch) for epoch in epochs.load(files, paths.epochs)],
            "log": {"file_bytes": log.file_bytes, "start": log.start, "files": len(log)}
            | (_scanned(log) if scan else {}),
            "queues": list(_described_queues(files, paths)),
        }
    finally:
        log.close()


def records(directory: Path, *, start: int | None = None) -> Iterator[record.Record]:
    """The log's records in order, to the first byte that is none.

    ``start``: the log offset of a record to begin with; None begins at the oldest.
    """
    log = _files_of(OsFiles(OPEN_FILES_MAX), layout.StorePaths(directory).commit_log)
    try:
        for segment in log:
            if start is not None and segment.end <= start:
                continue
            scan = LogFileScan(segment, start)
            yield from (found for _, found in scan)
            if scan.reason:
                return
            start = None
    finally:
        log.close()


def units(directory: Path, topic: str, queue_id: int, *, start: int = 0) -> Iterator[DumpedUnit]:
    """A queue's units from ``start`` on, to the first that was never written."""
    folder = layout.StorePaths(directory).queue(topic, queue_id)
    if not folder.is_dir():
        raise QueueNotFound(f"{folder} is not there")
    queue = _files_of(OsFiles(OPEN_FILES_MAX), folder)
    try:
        for segment in queue:
            first = segment.start // queueunit.UNIT_BYTES
            content = segment.pread(segment.start, queue.file_bytes)
            for offset, unit in enumerate(queueunit.iterate(content), first):
                if unit[1] <= 0:
                    return
                if offset >= start and queueunit.is_message(unit[0], unit[1]):
                    yield DumpedUnit(offset, *unit)
    finally:
        queue.close()


def _files_of(files: Files, directory: Path) -> Segments:
    """The files of a folder, whatever size they have, as long as it is one."""
    sizes = {entry.size for entry in files.entries(directory) if entry.size}
    if len(sizes) != 1:
        raise StoreForeignFile(f"{directory} does not hold files of one size")
    found = Segments(directory, sizes.pop())
    for entry in files.entries(directory):
        if entry.size:
            found.add(files, layout.parse_offset_name(entry.name, directory))
    return found


def _scanned(log: Segments) -> dict[str, object]:
    count, end, reason, last_time_ms = 0, log.start, "", 0
    for segment in log:
        scan = LogFileScan(segment)
        for _, found in scan:
            count += 1
            last_time_ms = found.store_time_ms
        end, reason = scan.end, scan.reason
        if reason:
            break
    return {
        "records": count,
        "end": end,
        "end_reason": reason,
        "last_store_time_ms": last_time_ms,
    }


def _described_queues(files: Files, paths: layout.StorePaths) -> Iterator[dict[str, object]]:
    for topic in files.entries(paths.consume_queue):
        for queue in files.entries(paths.consume_queue / topic.name):
            folder = paths.consume_queue / topic.name / queue.name
            if files.entries(folder):
                number = layout.parse_queue_id(queue.name, folder)
                yield _described_queue(files, folder, topic.name, number)


def _described_queue(files: Files, folder: Path, topic: str, queue_id: int) -> dict[str, object]:
    segments = _files_of(files, folder)
    queue = ConsumeQueue(topic, queue_id, folder, segments.file_bytes)
    queue.segments = segments
    queue.measure(0, LOG_END_MAX)
    segments.close()
    return {
        "topic": topic,
        "queue_id": queue_id,
        "min_offset": queue.min_offset,
        "next_offset": queue.next_offset,
    }

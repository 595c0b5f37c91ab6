"""The content of a data folder, for people: read only, without the lock, of an open store too.

``cometmq store dump`` prints what :func:`describe` returns; :func:`records` and :func:`units` list
what is inside. Nothing is repaired: what a recovery would cut is given as ``end_reason``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from cometmq.errors import MessageNotFound, QueueNotFound, StoreDamaged
from cometmq.format import indexfile, queueunit, record
from cometmq.store import layout
from cometmq.store.disk.files import Files, OsFiles
from cometmq.store.disk.segments import Segments
from cometmq.store.log.scan import LogScan, find_good, found_at
from cometmq.store.metadata import checkpoint, epochs, identity
from cometmq.store.queues.consumequeue import ConsumeQueue
from cometmq.store.repair.survey import open_queue_row, open_row

OPEN_FILES_MAX = 64
LOG_END_MAX = 2**63 - 1


class DumpedUnit(NamedTuple):
    """One unit of a queue."""

    queue_offset: int
    log_offset: int
    size: int
    tags_code: int


class DumpedFile(NamedTuple):
    """One file of the log."""

    path: str
    start: int
    size: int
    disk_bytes: int  # that are not holes
    first_store_time_ms: int  # 0: there is no record at its start


class DumpedPlace(NamedTuple):
    """A place of the log."""

    path: str
    log_offset: int
    found: record.Found
    goes_on: int  # log offset of what comes next; -1: nothing good does


def describe(directory: Path, *, scan: bool = False) -> dict[str, object]:
    """A store's state as plain JSON values; with ``scan`` all records are read and counted.

    Raises StoreForeignFile when the folder has no log, StoreDamaged when one of the small files
    does not read.
    """
    paths, files = layout.StorePaths(directory), OsFiles(OPEN_FILES_MAX, writable=False)
    known = identity.load(files, paths.identity)
    log, complaints = open_row(files, paths.commit_log)
    try:
        return {
            "directory": str(directory),
            "identity": None if known is None else asdict(known),
            "in_use_or_crashed": files.exists(paths.abort),
            "checkpoint": asdict(checkpoint.load(files, paths.checkpoint)),
            "epochs": [asdict(epoch) for epoch in epochs.load(files, paths.epochs)],
            "log": {"file_bytes": log.file_bytes, "start": log.start, "files": len(log)}
            | (_scanned(log) if scan else {}),
            "index": _described_index(files, paths.index),
            "complaints": complaints,
            "queues": list(_described_queues(files, paths)),
        }
    finally:
        log.close()


def records(directory: Path, *, start: int | None = None) -> Iterator[record.Record]:
    """The log's records in order.

    ``start``: the log offset of a record to begin with; None begins at the oldest. Raises
    MessageNotFound when none starts there, StoreDamaged where the log is damaged and continues.
    """
    log, _ = open_row(_reading(), layout.StorePaths(directory).commit_log)
    try:
        scan = LogScan(log, log.start if start is None else start)
        for stretch in scan:
            yield from record.decode_all(scan.raw(stretch.start, stretch.end))
        if scan.kind is record.Kind.BAD:
            _refuse_to_pass_over(log, scan, start)
    finally:
        log.close()


def _refuse_to_pass_over(log: Segments, scan: LogScan, start: int | None) -> None:
    if scan.end == start:
        raise MessageNotFound(f"no record starts at {start} of the log: see --at {start}")
    behind = find_good(log, scan.end, log.end)
    if behind is not None:
        raise StoreDamaged(
            f"the log is damaged at {scan.end} ({scan.reason}) and continues at {behind}: ask for "
            f"fewer records, with --count, or for those behind it, with --from {behind}"
        )


def units(directory: Path, topic: str, queue_id: int, *, start: int = 0) -> Iterator[DumpedUnit]:
    """A queue's units from ``start`` on, to the first that was never written."""
    folder = layout.StorePaths(directory).queue(topic, queue_id)
    if not folder.is_dir():
        raise QueueNotFound(f"{folder} is not there")
    queue, _ = open_queue_row(_reading(), folder)
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


def place(directory: Path, log_offset: int) -> DumpedPlace:
    """What is at a place of the log, good or not, and where the log continues behind it.

    Raises StoreForeignFile without a log, MessageNotFound outside of it.
    """
    log, _ = open_row(_reading(), layout.StorePaths(directory).commit_log)
    try:
        segment = log.find(log_offset)
        if segment is None:
            raise MessageNotFound(f"the log's files go from {log.start} to {log.end}")
        found = found_at(segment, log_offset)
        goes_on = log_offset + found.size
        if found.kind not in (record.Kind.RECORD, record.Kind.BLANK):
            good = find_good(log, log_offset, log.end)
            goes_on = -1 if good is None else good
        return DumpedPlace(segment.file.path, log_offset, found, goes_on)
    finally:
        log.close()


def files_of_log(directory: Path) -> Iterator[DumpedFile]:
    """The log's files, oldest first."""
    log, _ = open_row(_reading(), layout.StorePaths(directory).commit_log)
    try:
        for segment in log:
            first = found_at(segment, segment.start)
            time_ms = first.record.store_time_ms if first.record is not None else 0
            written = sum(
                end - start for start, end in segment.file.data_extents(0, log.file_bytes)
            )
            yield DumpedFile(segment.file.path, segment.start, log.file_bytes, written, time_ms)
    finally:
        log.close()


def _reading() -> Files:
    return OsFiles(OPEN_FILES_MAX, writable=False)


def _described_index(files: Files, directory: Path) -> dict[str, object]:
    """Counts from the headers of the files, which need no knowledge of their sizes."""
    heads = []
    for entry in files.entries(directory):
        if layout.INDEX_NAME.fullmatch(entry.name) and entry.size:
            file = files.open(directory / entry.name)
            heads.append(indexfile.decode_header(file.pread(indexfile.HEADER_BYTES, 0)))
            file.close()
    used = [head for head in heads if not head.is_empty]
    return {
        "files": len(heads),
        "entries": sum(head.next_entry - 1 for head in used),
        "begin_offset": used[0].begin_offset if used else -1,
        "end_offset": used[-1].end_offset if used else -1,
    }


def _scanned(log: Segments) -> dict[str, object]:
    count, last_time_ms = 0, 0
    scan = LogScan(log, log.start)
    for stretch in scan:
        count += stretch.run.record_count
        last_time_ms = stretch.run.last_time_ms
    return {
        "records": count,
        "end": scan.end,
        "end_reason": scan.reason,
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
    segments, _ = open_queue_row(files, folder)
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

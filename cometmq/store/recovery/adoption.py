"""Was Apache RocketMQ in the folder since we left it, and what did it leave? And our own leftovers.

Its bytes are taken over, and its tables: docs/compatibility.md, docs/format/store-layout.md §4.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import fastjson, record
from cometmq.store import layout
from cometmq.store.disk.files import Files
from cometmq.store.log.commitlog import CommitLog
from cometmq.store.log.scan import found_at
from cometmq.store.metadata.checkpoint import Checkpoint
from cometmq.store.metadata.identity import Identity
from cometmq.store.metadata.recovery_point import RecoveryPoint
from cometmq.store.queues.agreement import Verdict, compare
from cometmq.store.queues.dispatch import Dispatcher

logger = logging.getLogger(__name__)

# A snapshot's mark, docs/format/snapshots.md. Matched, not parsed: the files may be long. A topic
# that is called cometmq has other fields than these two.
OUR_MARK = re.compile(rb'"cometmq"\s*:\s*\{\s*"epoch"\s*:\s*\d+\s*,\s*"position"\s*:\s*\d+\s*\}')
# Queues in another form, which RocketMQ's own queue files then only point to, or miss.
OTHER_QUEUES = ("consumequeue_ext", "consumequeue_r")
BATCH_QUEUES = "batchconsumequeue"
LIGHT_PREFIX = "%LMQ%"


@dataclass(frozen=True, slots=True)
class Adoption:
    """What another program left, until a writer has settled it."""

    verified: int  # the log is as we left it up to here
    log_changed: bool  # False: only the tables
    # Its files under config/ by name: the file, then what it was before, as far as they are its.
    tables: Mapping[str, Sequence[bytes]]


def find_adoption(
    files: Files,
    paths: layout.StorePaths,
    known: Identity | None,
    log: CommitLog,
    saved: Checkpoint,
) -> Adoption | None:
    """What has to be taken over; None: no other program wrote here. Changes nothing.

    Raises :class:`StoreForeignFile` for what only RocketMQ can read.
    """
    found = _tables(files, paths.config)
    tables = {name: table for name, table in found.items() if any(map(_reads, table))}
    crashed = known is not None and known.clean is None
    orderly = not files.exists(paths.abort)  # another program was here last if we crashed
    verified = _verified(log, known, saved, maybe_foreign=crashed and (orderly or bool(tables)))
    pending = None if known is None else known.foreign
    if verified is None and pending is None and known is not None:
        for name in found.keys() - tables.keys():
            logger.warning("%s does not read: our log's state counts", paths.config / name)
    else:
        tables = found  # it may be another program's, and nothing else shows what was in it
    if verified is None and pending is None and not tables:
        return None
    _refuse_unreadable(files, paths)
    changed = verified is not None or pending is not None
    end = known.clean.end if known is not None and known.clean is not None else log.segments.start
    places = [place for place in (verified, pending) if place is not None]
    start = max(log.segments.start, min(places, default=end))
    return Adoption(start, changed, tables | _older(files, paths.config, tables, changed))


def _verified(
    log: CommitLog, known: Identity | None, saved: Checkpoint, *, maybe_foreign: bool
) -> int | None:
    """Up to where the log is ours, when another program wrote to it; None: it did not."""
    segments = log.segments
    if known is None:
        return segments.start if len(segments) else None
    if known.clean is not None:
        return _first_change(log, known.clean)
    if not maybe_foreign:
        return None
    mark = saved.mark
    return mark.end if mark is not None and mark.holds(segments) else segments.start


def _first_change(log: CommitLog, mark: RecoveryPoint) -> int | None:
    """Up to where the log is as it was at our clean close; None: no program wrote to it since,
    though it may be damaged.
    """
    segments = log.segments
    if mark.last_bytes and mark.last_offset < segments.start:
        # Removed since, and not by us: by the program that wrote what the log begins with now, or
        # by hand.
        goes_on = _kind_at(log, segments.start) in (record.Kind.RECORD, record.Kind.BLANK)
        return segments.start if goes_on else None
    if mark.holds(segments):
        behind = any(segments.pread(mark.end, record.BLANK_BYTES))
        return mark.end if behind else None
    if _kind_at(log, mark.end) in (record.Kind.RECORD, record.Kind.BLANK):
        return mark.end
    segment = segments.find(mark.last_offset)
    instead = None if segment is None else found_at(segment, mark.last_offset).record
    # A field of ours without a checksum may be damaged; a record of another size is another.
    is_another = instead is not None and instead.size != mark.last_bytes
    return segments.start if is_another else None


def _kind_at(log: CommitLog, offset: int) -> record.Kind | None:
    segment = log.segments.find(offset)
    return None if segment is None else found_at(segment, offset).kind


def _tables(files: Files, config: Path) -> dict[str, Sequence[bytes]]:
    """RocketMQ's tables. As it does itself, we fall back on the copy beside a file that does not
    read.
    """
    found: dict[str, Sequence[bytes]] = {}
    for name in layout.SNAPSHOTS:
        content = files.read(config / name)
        if content and OUR_MARK.search(content) is None:
            found[name] = [content, *_backup(files, config, name)]
    return found


def _reads(table: bytes) -> bool:
    try:
        return isinstance(fastjson.loads(table), dict)
    except StoreDamaged:
        return False


def _older(
    files: Files, config: Path, tables: Mapping[str, object], changed: bool
) -> dict[str, Sequence[bytes]]:
    """The copies beside files that are not there, or empty: RocketMQ died between two renames."""
    missing = [name for name in layout.SNAPSHOTS if changed and not files.read(config / name)]
    copies: dict[str, Sequence[bytes]] = {
        name: _backup(files, config, name) for name in missing if name not in tables
    }
    return {name: copy for name, copy in copies.items() if copy}


def _backup(files: Files, config: Path, name: str) -> list[bytes]:
    content = files.read(config / f"{name}.bak")
    return [content] if content and OUR_MARK.search(content) is None else []


def _refuse_unreadable(files: Files, paths: layout.StorePaths) -> None:
    if files.entries(paths.root / BATCH_QUEUES):
        raise StoreForeignFile(
            f"{paths.root / BATCH_QUEUES} has queues of topics with queue.type BatchCQ, whose "
            "records hold many messages each, which cannot be read here. Nothing was changed: the "
            "folder is Apache RocketMQ's as before, which alone can read it; begin here with an "
            "empty folder"
        )
    for entry in files.entries(paths.consume_queue):
        if entry.name.startswith(LIGHT_PREFIX):
            raise StoreForeignFile(
                f"{paths.consume_queue / entry.name} is a light queue of Apache RocketMQ "
                "(enableLmq), which cannot be kept here. Nothing was changed: the folder is Apache "
                "RocketMQ's as before, which alone can read it; begin here with an empty folder"
            )


def disagreement(
    files: Files, paths: layout.StorePaths, log: CommitLog, dispatcher: Dispatcher
) -> str:
    """Why the queues that another program wrote cannot be taken as they are; empty: they can."""
    for name in OTHER_QUEUES:
        if files.entries(paths.root / name):
            return f"some or all of them are in {name}"
    for queue in dispatcher.queues():
        last = queue.last_unit()
        if last is None:
            continue
        if log.segments.find(last[0]) is None:
            continue  # all that the queue had went with older log files
        if compare(queue, log.segments, queue.next_offset - 1) is not Verdict.MESSAGE:
            return f"queue {queue.queue_id} of {queue.topic} points to something else"
    return ""


def remove_leftovers(files: Files, paths: layout.StorePaths) -> None:
    """Remove what a crash left of files in the making and of topics in deletion."""
    for entry in files.entries(paths.root):
        if entry.name.startswith(layout.TRASH_PREFIX) and entry.is_directory:
            files.remove_tree(paths.root / entry.name)
        elif entry.name == layout.NEXT_LOG_FILE:
            files.unlink(paths.root / entry.name)

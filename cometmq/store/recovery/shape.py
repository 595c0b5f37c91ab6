"""Is everything in a store's folder what its name says: files where files belong, folders where
folders do, and of this user? Asked before anything is opened: a pipe would be waited for, and a
start that is refused later may have changed something.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from cometmq.errors import StoreForeignFile
from cometmq.store import layout
from cometmq.store.disk.files import Files, Kind

logger = logging.getLogger(__name__)

FILES = (
    layout.CHECKPOINT,
    layout.ABORT,
    layout.LOCK,
    layout.IDENTITY,
    layout.EPOCHS,
    layout.HEADS,
    layout.NEXT_LOG_FILE,
    layout.RESERVE,
    layout.SPARE,
    layout.TIMER_WHEEL,
)
FOLDERS = (
    layout.COMMIT_LOG,
    layout.CONSUME_QUEUE,
    layout.INDEX,
    layout.CONFIG,
    layout.TIMERS,
    layout.TIMER_LOG,
    layout.CUT_OFF,
)
OF_FILES = (layout.COMMIT_LOG, layout.INDEX, layout.TIMERS, layout.TIMER_LOG)  # and nothing else
TABLES = (*layout.SNAPSHOTS, layout.TIMER_CHECK)  # in ``config/``
DRAFTS = ("", ".new", ".tmp", ".bak", ".bak.tmp")  # behind a name


def check(files: Files, paths: layout.StorePaths, *, queues: bool = False) -> None:
    """Raises StoreForeignFile for what is of another kind, and StoreForbidden for what this process
    may not read and write. ``queues``: look into their folders too, which a start does itself.
    """
    wanted_ones = _wanted(files, paths)
    for path, wanted in chain(wanted_ones, _of_queues(files, paths)) if queues else wanted_ones:
        found = files.kind(path)
        if found is None:
            continue
        if found is not wanted:
            raise StoreForeignFile(
                f"{path} is a {found.value} where a {wanted.value} of the store is expected: move "
                "it out of the store"
            )
        files.check_allowed(path)


def warn_if_public(files: Files, paths: layout.StorePaths) -> None:
    """A store that an earlier release made may be readable by every user of the machine."""
    if files.is_public(paths.root) and files.is_public(paths.commit_log):
        logger.warning(
            "%s can be read by every user of the machine: it holds messages, and keys that sign "
            "handles. Close it: chmod -R go-rwx %s",
            paths.root,
            shlex.quote(str(paths.root)),
        )


def _wanted(files: Files, paths: layout.StorePaths) -> Iterator[tuple[Path, Kind]]:
    """The folders come before what is in them."""
    yield paths.root, Kind.FOLDER
    for name in FILES:
        yield from ((paths.root / f"{name}{draft}", Kind.FILE) for draft in ("", ".new"))
    for name in FOLDERS:
        yield paths.root / name, Kind.FOLDER
    for table in TABLES:
        yield from ((paths.config / f"{table}{draft}", Kind.FILE) for draft in DRAFTS)
    for name in OF_FILES:
        yield from _inside(files, paths.root / name, Kind.FILE)
    for topic in files.entries(paths.consume_queue):
        if topic.is_directory:
            yield paths.consume_queue / topic.name, Kind.FOLDER


def _of_queues(files: Files, paths: layout.StorePaths) -> Iterator[tuple[Path, Kind]]:
    for topic, _ in _inside(files, paths.consume_queue, Kind.FOLDER):
        yield topic, Kind.FOLDER
        for queue, _ in _inside(files, topic, Kind.FOLDER):
            yield queue, Kind.FOLDER
            yield from _inside(files, queue, Kind.FILE)


def _inside(files: Files, folder: Path, wanted: Kind) -> Iterator[tuple[Path, Kind]]:
    """What a folder holds. A link that leads somewhere is named by the room that reads the folder,
    as a wrong name is.
    """
    for entry in files.entries(folder):
        path = folder / entry.name
        is_good_link = entry.is_link and files.kind(path) is not Kind.LINK
        if not is_good_link and not layout.is_ignored(entry.name):
            yield path, wanted

"""Is the folder ours? What Apache RocketMQ left is refused (taking it over comes later); our own
leftovers are removed.
"""

from __future__ import annotations

import re
from pathlib import Path

from cometmq.errors import StoreForeignFile
from cometmq.store import layout
from cometmq.store.files import Files
from cometmq.store.identity import Identity

# A snapshot's mark, docs/format/snapshots.md. Matched, not parsed: maps with numbers as keys, which
# RocketMQ writes, are not JSON. A topic that is called cometmq has other fields than these two.
OUR_MARK = re.compile(rb'"cometmq"\s*:\s*\{\s*"epoch"\s*:\s*\d+\s*,\s*"position"\s*:\s*\d+\s*\}')
NOT_YET = "taking over a store of Apache RocketMQ is not possible yet"


def refuse_foreign_store(files: Files, paths: layout.StorePaths, known: Identity | None) -> None:
    """:class:`StoreForeignFile` when another program made the store, or opened it after us."""
    if known is None:
        _refuse_unknown_store(files, paths)
    elif known.clean is None and not files.exists(paths.abort):
        # We make `abort` before we open our mark and remove it after we close it: somebody else
        # came and left in order.
        raise StoreForeignFile(
            f"another program opened and closed {paths.root} since our last stop: {NOT_YET}"
        )
    for name in layout.SNAPSHOTS:
        _refuse_foreign_snapshot(files, paths.config / name)


def _refuse_unknown_store(files: Files, paths: layout.StorePaths) -> None:
    for path in (paths.commit_log, paths.consume_queue):
        if files.entries(path):
            raise StoreForeignFile(
                f"{path} has files, but {paths.identity.name} is not there: {NOT_YET}"
            )


def _refuse_foreign_snapshot(files: Files, path: Path) -> None:
    content = files.read(path)
    if content is None:
        return
    if OUR_MARK.search(content) is None:
        raise StoreForeignFile(f"{path} was not written by CometMQ: {NOT_YET}")


def remove_leftovers(files: Files, paths: layout.StorePaths) -> None:
    """Remove what a crash left of files in the making and of topics in deletion."""
    for entry in files.entries(paths.root):
        if entry.name.startswith(layout.TRASH_PREFIX):
            files.remove_tree(paths.root / entry.name)
        elif entry.name == layout.NEXT_LOG_FILE:
            files.unlink(paths.root / entry.name)

"""The small files of a store that is to be mended: their content, and a substitute for one that
cannot be read.
"""

from __future__ import annotations

import re
import uuid

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.model import EPOCH_MAX
from cometmq.store import layout
from cometmq.store.disk.files import Files, replace
from cometmq.store.metadata import checkpoint, epochs, identity
from cometmq.store.metadata.checkpoint import Checkpoint
from cometmq.store.metadata.identity import Identity

NEW_STORE_ID = "new"
STORE_ID = re.compile(r"[0-9a-f]{32}")
SNAPSHOT_EPOCH = re.compile(rb'"cometmq"\s*:\s*\{\s*"epoch"\s*:\s*(\d{1,18})\b')
EPOCH_LINE = re.compile(rb"^(\d{1,18}) \d+$", re.MULTILINE)
IDENTITY_FIELD = re.compile(rb'"store_id"\s*:\s*"([0-9a-f]{32})"')


# --- cometmq.json ---------------------------------------------------------------------------------


def known_identity(files: Files, paths: layout.StorePaths, store_id: str | None) -> Identity:
    """Whose store it is; with ``store_id`` (or :data:`NEW_STORE_ID`) if the file does not say.

    Raises StoreForeignFile when it is not ours, StoreDamaged when the file has to be mended and
    ``store_id`` is not given, or is and nothing has to be.
    """
    try:
        found, complaint = identity.load(files, paths.identity), f"{paths.identity} is missing"
    except StoreDamaged:
        found, complaint = None, f"{paths.identity} does not read"
    else:
        if found is None and not files.exists(paths.epochs):
            raise StoreForeignFile(
                f"{paths.root} is no store of CometMQ. One of Apache RocketMQ is taken over by a "
                "broker that is started on it; cometmq store verify reads both"
            )
    if found is not None and store_id is not None:
        raise StoreDamaged(f"{paths.identity} is there: --store-id would lose what it says")
    if found is not None:
        return found
    if store_id is None:
        raise StoreDamaged(_what_an_identity_is(files, paths, complaint))
    number = uuid.uuid4().hex if store_id == NEW_STORE_ID else store_id
    return Identity(number, "", None, recovered=True)


def _what_an_identity_is(files: Files, paths: layout.StorePaths, complaint: str) -> str:
    said = IDENTITY_FIELD.search(files.read(paths.identity) or b"")
    hint = f"What is left of it names {said[1].decode()}. " if said else ""
    return (
        f"{complaint}. Nothing was changed. It holds no message, but the store's id, by which a "
        "group's lease knows its writer, and how the store was left. With the id all is as after a "
        "crash: generations rise, so consumers may get some messages again. The lease has it "
        f"(holder_store_id). {hint}Repair with --store-id ID; or with --store-id "
        f"{NEW_STORE_ID}, where no lease names the old one: a lease that does would wait for it "
        "for ever"
    )


# --- cometmq.epochs -------------------------------------------------------------------------------


def check_epoch(files: Files, paths: layout.StorePaths, number: int | None) -> None:
    """Refuse a missing ``number`` when the epochs are gone, one that is too small, and any when
    they are there. Raises StoreDamaged.
    """
    complaint = _complaint_of_epochs(files, paths)
    if not complaint and number is not None:
        raise StoreDamaged(f"{paths.epochs} is there: --epoch would lose what it says")
    seen = highest_epoch(files, paths) if complaint else 0
    if complaint and number is None:
        so_far = f", {seen} at the least by what else the folder has" if seen else ""
        raise StoreDamaged(
            f"{complaint}. Nothing was changed. Put it back from a copy; or give --epoch a number "
            f"above every epoch that the group ever had{so_far} (cometmq broker status)"
        )
    if number is not None and number > EPOCH_MAX:
        raise StoreDamaged(f"--epoch {number} is above {EPOCH_MAX}: nothing was changed")
    if number is not None and number <= seen:
        raise StoreDamaged(
            f"--epoch {number} is not above {seen}, which the folder's files name: nothing was "
            "changed"
        )


def _complaint_of_epochs(files: Files, paths: layout.StorePaths) -> str:
    if not files.exists(paths.epochs):
        return f"{paths.epochs} is missing"
    try:
        epochs.load(files, paths.epochs)
    except StoreDamaged:
        return f"{paths.epochs} does not read"
    return ""


def highest_epoch(files: Files, paths: layout.StorePaths) -> int:
    """The highest number that the snapshots name, and what can be read of the epochs' own file; 0:
    none.
    """
    numbers = EPOCH_LINE.findall(files.read(paths.epochs) or b"")
    for name in layout.SNAPSHOTS:
        numbers += SNAPSHOT_EPOCH.findall(files.read(paths.config / name) or b"")
    return max(map(int, numbers), default=0)


# --- checkpoint -----------------------------------------------------------------------------------


def known_checkpoint(files: Files, paths: layout.StorePaths) -> Checkpoint | None:
    """None: it does not read, and the log has to do without."""
    try:
        return checkpoint.load(files, paths.checkpoint)
    except StoreDamaged:
        return None


def write_empty_checkpoint(files: Files, paths: layout.StorePaths) -> None:
    """One that knows of nothing."""
    replace(files, paths.checkpoint, Checkpoint().encode())

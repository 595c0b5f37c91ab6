"""``cometmq.json``: whose store it is, whether it was closed in order, and whether another program
wrote into it since.

``docs/format/store-layout.md`` describes the fields.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cometmq.errors import StoreDamaged
from cometmq.format.indexfile import Sizes
from cometmq.store import layout
from cometmq.store.disk import files as disk
from cometmq.store.disk.files import Files
from cometmq.store.layout import OFFSET_MAX
from cometmq.store.metadata.recovery_point import UNKNOWN, RecoveryPoint

VERSION = 1


@dataclass(frozen=True, slots=True)
class LastOptions:
    """What the store was opened with last, as far as its files alone do not show it."""

    log_file_bytes: int
    queue_file_bytes: int
    hash_slots: int  # of an index file
    index_entries: int
    transient_bytes_max: int  # that were acknowledged and in memory alone; 0: none ever were

    @property
    def index_sizes(self) -> Sizes:
        """The shape of the index files."""
        return Sizes(self.hash_slots, self.index_entries)


@dataclass(frozen=True, slots=True)
class Identity:
    """``clean`` is None while the store is open, and after a stop that was not clean."""

    # 32 hexadecimal digits: the name of an unbroken history. A new one is drawn when the end of the
    # log may have been lost, so that no member counts on this store for what it had acknowledged.
    store_id: str
    boot_id: str  # the kernel's, when the store was opened last
    clean: RecoveryPoint | None
    # A follower has recovered from an unclean stop, and no writer has opened the store since: the
    # next one learns it, however clean the stops in between.
    recovered: bool = False
    # Another program wrote to the log, which is ours up to this log offset; no writer has settled
    # it since. None: no other program.
    foreign: int | None = None
    options: LastOptions | None = None  # None: last opened by a version without
    # What the store was called before it lost the end of its log; until it follows a writer, or
    # writes, it may still be the best that there is.
    former_store_id: str = ""
    # A repair gave up a part of the state in the log: the next writer rebuilds it from what is
    # left, and from these topics that had queues then, with how many. None: nothing was given up.
    state_lost: Mapping[str, int] | None = None
    # The log has held a copy of the state, on the disk: without one it has lost its beginning.
    has_state: bool = False

    def encode(self) -> bytes:
        fields = {"version": VERSION, **asdict(self)}
        return (json.dumps(fields | {"crc32": _seal(fields)}, indent=2) + "\n").encode("utf-8")


def _seal(fields: Mapping[str, Any]) -> int:
    """CRC-32 of the fields, however they are laid out in the file."""
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode("utf-8"))


def _check_seal(fields: dict[str, Any]) -> None:
    """Versions before wrote none."""
    found = fields.pop("crc32", None)
    if found is not None and found != _seal(fields):
        raise ValueError(f"its crc32 should be {_seal(fields)}")


def decode(content: bytes, path: Path) -> Identity:
    try:
        fields = json.loads(content)
        if fields["version"] != VERSION:
            raise StoreDamaged(
                f"{path} is of version {fields['version']}, this program knows {VERSION}"
            )
        _check_seal(fields)
        clean, foreign, options = fields["clean"], fields.get("foreign"), fields.get("options")
        return Identity(
            str(fields["store_id"]),
            str(fields["boot_id"]),
            None if clean is None else _checked_mark(clean),
            bool(fields.get("recovered", False)),
            None if foreign is None else _checked(foreign),
            None if options is None else _checked_options(options),
            str(fields.get("former_store_id", "")),
            _checked_topics(fields.get("state_lost")),
            bool(fields.get("has_state", False)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreDamaged(
            f"{path} does not read as a store's identity ({error!r}). Put it back from a copy; "
            f"{layout.repair_command(path.parent)} says what it held and how to do without"
        ) from error


def _checked_topics(counts: Mapping[str, Any] | None) -> Mapping[str, int] | None:
    return None if counts is None else {str(name): _checked(n) for name, n in counts.items()}


def _checked_mark(fields: Mapping[str, Any]) -> RecoveryPoint:
    for name, value in fields.items():
        _checked(value, UNKNOWN if name in ("queue_count", "unit_count") else 0)
    return RecoveryPoint(**fields)


def _checked_options(fields: Mapping[str, Any]) -> LastOptions:
    for name, value in fields.items():
        _checked(value, 0 if name == "transient_bytes_max" else 1)
    return LastOptions(**fields)


def _checked(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= OFFSET_MAX:
        raise ValueError(f"{value!r} is no number from {least} to {OFFSET_MAX}")
    return value


def load(files: Files, path: Path) -> Identity | None:
    """The identity at ``path``; None when there is none."""
    content = files.read(path)
    return None if content is None else decode(content, path)


def save(files: Files, path: Path, identity: Identity) -> None:
    disk.replace(files, path, identity.encode(), spare=path.with_name(layout.SPARE))


def new_store_id() -> str:
    return uuid.uuid4().hex


class IdentityFile:
    """The identity of a store that is being opened, or is open, and its file. ``current`` is what
    the file says, together with what the next :meth:`write` takes along; without a file it has no
    ``store_id``.
    """

    def __init__(self, files: Files, path: Path) -> None:
        self.current = Identity("", "", None)
        self._files = files
        self._path = path

    def load(self) -> Identity | None:
        """What the file says; None when there is none. StoreDamaged."""
        found = load(self._files, self._path)
        if found is not None:
            self.current = found
        return found

    def note(self, **changes: Any) -> None:
        """Fields that the next :meth:`write` takes along."""
        self.current = replace(self.current, **changes)

    def write(self, *, boot_id: str | None = None, **changes: Any) -> None:
        """Change fields, on the disk at return. ``boot_id``: the kernel's, unless it is given."""
        boot_id = self._files.boot_id() if boot_id is None else boot_id
        self.current = replace(self.current, boot_id=boot_id, **changes)
        assert self.current.store_id
        save(self._files, self._path, self.current)

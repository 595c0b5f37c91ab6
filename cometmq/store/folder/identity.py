"""``cometmq.json``: whose store it is, whether it was closed in order, and whether somebody else
wrote into it since.

``docs/format/store-layout.md`` describes the fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cometmq.errors import StoreDamaged
from cometmq.format.indexfile import Sizes
from cometmq.store.disk.files import Files, replace
from cometmq.store.folder.logmark import LogMark

VERSION = 1


@dataclass(frozen=True, slots=True)
class LastOptions:
    """What the store was opened with last, as far as its files alone do not tell."""

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

    # 32 hexadecimal digits: the name of an unbroken history. Drawn anew when the end of the log may
    # have been lost, so that nobody counts on this store for what it had acknowledged.
    store_id: str
    boot_id: str  # the kernel's, when the store was opened last
    clean: LogMark | None
    # A follower has recovered from an unclean stop, and no writer has opened the store since: the
    # next one is told, however clean the stops in between.
    recovered: bool = False
    # Another program wrote to the log, which is ours up to this log offset; no writer has settled
    # it since. None: nobody but us.
    foreign: int | None = None
    options: LastOptions | None = None  # None: a version that did not tell opened the store last
    # What the store was called before it lost the end of its log; until it follows a writer, or
    # writes, it may still be the best that there is.
    former_store_id: str = ""

    def encode(self) -> bytes:
        return (json.dumps({"version": VERSION, **asdict(self)}, indent=2) + "\n").encode("utf-8")


def decode(content: bytes, path: Path) -> Identity:
    try:
        fields = json.loads(content)
        if fields["version"] != VERSION:
            raise StoreDamaged(
                f"{path} is of version {fields['version']}, this program knows {VERSION}"
            )
        clean = fields["clean"]
        mark = None if clean is None else LogMark(**clean)
        recovered = bool(fields.get("recovered", False))
        foreign, options = fields.get("foreign"), fields.get("options")
        return Identity(
            str(fields["store_id"]),
            str(fields["boot_id"]),
            mark,
            recovered,
            None if foreign is None else int(foreign),
            None if options is None else LastOptions(**options),
            str(fields.get("former_store_id", "")),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(
            f"{path} does not read as a store's identity ({error!r}). Put it back from a copy; "
            "cometmq store repair DIRECTORY says what it held and how to do without"
        ) from error


def load(files: Files, path: Path) -> Identity | None:
    """The identity at ``path``; None when there is none."""
    content = files.read(path)
    return None if content is None else decode(content, path)


def save(files: Files, path: Path, identity: Identity) -> None:
    replace(files, path, identity.encode())

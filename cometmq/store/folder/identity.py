"""``cometmq.json``: whose store it is, whether it was closed in order, and whether somebody else
wrote into it since.

``docs/format/store-layout.md`` describes the fields.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from cometmq.errors import StoreDamaged
from cometmq.store.disk.files import Files, replace
from cometmq.store.folder.logmark import LogMark

VERSION = 1


@dataclass(frozen=True, slots=True)
class Identity:
    """``clean`` is None while the store is open, and after a stop that was not clean."""

    store_id: str  # 32 hexadecimal digits, drawn once
    boot_id: str  # the kernel's, when the store was opened last
    clean: LogMark | None
    # A follower has recovered from an unclean stop, and no writer has opened the store since: the
    # next one is told, however clean the stops in between.
    recovered: bool = False
    # Another program wrote to the log, which is ours up to this log offset; no writer has settled
    # it since. None: nobody but us.
    foreign: int | None = None

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
        foreign = fields.get("foreign")
        return Identity(
            str(fields["store_id"]),
            str(fields["boot_id"]),
            mark,
            recovered,
            None if foreign is None else int(foreign),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path} does not read as a store's identity: {error!r}") from error


def load(files: Files, path: Path) -> Identity | None:
    """The identity at ``path``; None when there is none."""
    content = files.read(path)
    return None if content is None else decode(content, path)


def save(files: Files, path: Path, identity: Identity) -> None:
    replace(files, path, identity.encode())

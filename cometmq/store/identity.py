"""``cometmq.json``: whose store it is, whether it was closed in order, and whether somebody else
wrote into it since.

``docs/format/store-layout.md`` describes the fields.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

from cometmq.errors import StoreDamaged
from cometmq.store.files import Files, replace

VERSION = 1


@dataclass(frozen=True, slots=True)
class CleanMark:
    """What a clean close left behind. An empty log has ``end`` == ``last_offset`` and
    ``last_bytes`` 0.
    """

    end: int  # the log's appended position
    last_offset: int  # where its last record starts
    last_bytes: int  # that record's size
    last_crc32: int  # CRC-32 of that record's bytes

    @classmethod
    def of(cls, end: int, last_offset: int, last_record: bytes) -> CleanMark:
        return cls(end, last_offset, len(last_record), zlib.crc32(last_record))


@dataclass(frozen=True, slots=True)
class Identity:
    """``clean`` is None while the store is open, and after a stop that was not clean."""

    store_id: str  # 32 hexadecimal digits, drawn once
    boot_id: str  # the kernel's, when the store was opened last
    clean: CleanMark | None
    # A follower has recovered from an unclean stop, and no writer has opened the store since: the
    # next one is told, however clean the stops in between.
    recovered: bool = False

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
        mark = None if clean is None else CleanMark(**clean)
        recovered = bool(fields.get("recovered", False))
        return Identity(str(fields["store_id"]), str(fields["boot_id"]), mark, recovered)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreDamaged(f"{path} does not read as a store's identity: {error!r}") from error


def load(files: Files, path: Path) -> Identity | None:
    """The identity at ``path``; None when there is none."""
    content = files.read(path)
    return None if content is None else decode(content, path)


def save(files: Files, path: Path, identity: Identity) -> None:
    replace(files, path, identity.encode())

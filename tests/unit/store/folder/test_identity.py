from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.errors import StoreDamaged
from cometmq.store.disk.files import OsFiles
from cometmq.store.folder import identity
from cometmq.store.folder.identity import Identity
from cometmq.store.folder.logmark import LogMark, Tally

PATH = Path("cometmq.json")
OPEN = Identity("ab" * 16, "boot", None)
CLOSED = Identity("ab" * 16, "boot", LogMark.of(100, 0, b"record", Tally(2, 7)))


@pytest.mark.parametrize("known", [OPEN, CLOSED, replace(OPEN, foreign=7)])
def test_what_is_encoded_is_decoded(known: Identity) -> None:
    assert identity.decode(known.encode(), PATH) == known


def test_the_fields_are_the_documents() -> None:
    assert json.loads(CLOSED.encode()) == {
        "version": 1,
        "store_id": "ab" * 16,
        "boot_id": "boot",
        "clean": {
            "end": 100,
            "last_offset": 0,
            "last_bytes": 6,
            "last_crc32": zlib.crc32(b"record"),
            "queue_count": 2,
            "unit_count": 7,
        },
        "recovered": False,
        "foreign": None,
    }


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"version": 2}', b'{"version": 1}', b"\xff", b"null"]
)
def test_anything_else_is_damage(content: bytes) -> None:
    with pytest.raises(StoreDamaged):
        identity.decode(content, PATH)


def test_the_file(tmp_path: Path) -> None:
    files, path = OsFiles(), tmp_path / "cometmq.json"
    assert identity.load(files, path) is None
    identity.save(files, path, OPEN)
    identity.save(files, path, CLOSED)
    assert identity.load(files, path) == CLOSED

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.errors import StoreDamaged
from cometmq.store.disk.files import OsFiles
from cometmq.store.metadata import identity
from cometmq.store.metadata.identity import Identity, LastOptions
from cometmq.store.metadata.recovery_point import QueueTotals, RecoveryPoint

PATH = Path("cometmq.json")
OPEN = Identity("ab" * 16, "boot", None)
CLOSED = Identity("ab" * 16, "boot", RecoveryPoint.of(100, 0, b"record", QueueTotals(2, 7)))
RENAMED = replace(OPEN, former_store_id="cd" * 16)
LOST = replace(OPEN, state_lost={"orders": 3})
WHOLE = replace(OPEN, has_state=True)
TOLD = replace(OPEN, options=LastOptions(1, 2, 3, 4, 5))


@pytest.mark.parametrize(
    "known", [OPEN, CLOSED, TOLD, replace(OPEN, foreign=7), RENAMED, LOST, WHOLE]
)
def test_what_is_encoded_is_decoded(known: Identity) -> None:
    assert identity.decode(known.encode(), PATH) == known


def test_the_fields_are_the_documents() -> None:
    fields = json.loads(CLOSED.encode())
    assert fields.pop("crc32") == zlib.crc32(
        b'{"boot_id":"boot","clean":{"end":100,"last_bytes":6,"last_crc32":%d,"last_offset":0,'
        b'"queue_count":2,"unit_count":7},"foreign":null,"former_store_id":"",'
        b'"has_state":false,"options":null,"recovered":false,"state_lost":null,"store_id":"%s","version":1}'
        % (zlib.crc32(b"record"), b"ab" * 16)
    )
    assert fields == {
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
        "options": None,
        "former_store_id": "",
        "state_lost": None,
        "has_state": False,
    }


def test_the_options_are_the_documents() -> None:
    assert json.loads(TOLD.encode())["options"] == {
        "log_file_bytes": 1,
        "queue_file_bytes": 2,
        "hash_slots": 3,
        "index_entries": 4,
        "transient_bytes_max": 5,
    }


def test_a_file_of_before_them_is_read() -> None:
    fields = json.loads(OPEN.encode())
    for later in ("recovered", "foreign", "options", "crc32"):
        del fields[later]
    assert identity.decode(json.dumps(fields).encode(), PATH) == OPEN


STRANGE = (b'{"version": 2}', b'{"version": 1}', b'{"version": 1, "clean": 5}')


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", *STRANGE, b"\xff", b"null", b"[" * 100_000]
)
def test_anything_else_is_damage(content: bytes) -> None:
    with pytest.raises(StoreDamaged):
        identity.decode(content, PATH)


def test_no_flipped_bit_changes_what_is_read() -> None:
    content = replace(CLOSED, options=TOLD.options, foreign=7).encode()
    expected = identity.decode(content, PATH)
    refused = 0
    for at in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            try:
                assert identity.decode(bytes(flipped), PATH) == expected
            except StoreDamaged:
                refused += 1
    assert refused > 4 * len(content)


@pytest.mark.parametrize(
    ("field", "value"),
    [("last_bytes", -5), ("end", "x"), ("end", 2**63), ("end", True), ("end", 1.5), ("odd", 0)],
)
@pytest.mark.parametrize("part", ["clean", "options"])
def test_numbers_that_none_of_ours_could_be_are_damage(
    part: str, field: str, value: object
) -> None:
    """A version that wrote no checksum, or a hand, left them."""
    fields = json.loads(replace(CLOSED, options=TOLD.options).encode())
    del fields["crc32"]
    name = field if part == "clean" else "hash_slots"
    identity.decode(json.dumps(fields).encode(), PATH)
    fields[part][name] = value
    with pytest.raises(StoreDamaged, match="store repair"):
        identity.decode(json.dumps(fields).encode(), PATH)


def test_the_file(tmp_path: Path) -> None:
    files, path = OsFiles(), tmp_path / "cometmq.json"
    assert identity.load(files, path) is None
    identity.save(files, path, OPEN)
    identity.save(files, path, CLOSED)
    assert identity.load(files, path) == CLOSED

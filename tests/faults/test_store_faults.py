"""What may happen to the files of a store: torn and partial writes, full disks, foreign files."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from cometmq.errors import CometError, DiskFull, StoreDamaged, StoreForeignFile
from cometmq.format import record
from cometmq.store.disk.files import Buffer
from cometmq.store.layout import offset_name
from tests.support.stores.small_stores import (
    LOG_FILE_BYTES,
    FaultyFiles,
    append,
    bodies,
    open_store,
)

# --- torn writes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["zeros", "garbage"])
def test_a_record_torn_at_any_byte_is_cut(tmp_path: Path, rest: str) -> None:
    """The machine stopped; the last append reached the disk up to some byte, its queue wholly.
    Behind that byte are zeros or anything else.

    The format has no checksum over properties: only zeros (what a log file is made of) are noticed
    in their place, so garbage is tried up to where they begin.
    """
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"first"]))
    start = store.appended_offset
    append(store, ("A", 0, [b"the last message"]), tag="blue")
    end = store.appended_offset
    store.abandon()
    path = tmp_path / "commitlog" / offset_name(0)
    whole = path.read_bytes()
    garbage = bytes(end - start) if rest == "zeros" else b"\xa5" * (end - start)
    for torn in range(start, end if rest == "zeros" else end - len(b"TAGS\1blue\2")):
        path.write_bytes(whole[:torn] + garbage[: end - torn] + whole[end:])
        store = open_store(tmp_path, files=FaultyFiles(boot=f"boot {torn}"))
        assert store.appended_offset == start, torn - start
        append(store, ("A", 0, [b"next"]))
        assert bodies(store, "A", 0) == [b"first", b"next"]
        store.abandon()
        # The place of the cut: what stands behind the new record are zeros.
        assert not any(path.read_bytes()[start + 95 :])


@pytest.mark.parametrize("kept", range(8))
def test_a_torn_end_mark_is_cut(tmp_path: Path, kept: int) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [bytes(LOG_FILE_BYTES - 1000)]))
    end = store.appended_offset
    append(store, ("A", 0, [bytes(2000)]))
    store.abandon()
    path = tmp_path / "commitlog" / offset_name(0)
    whole = path.read_bytes()
    path.write_bytes(whole[: end + kept] + bytes(8 - kept) + whole[end + 8 :])
    store = open_store(tmp_path, files=FaultyFiles(boot="another"))
    assert store.appended_offset == end
    append(store, ("A", 0, [b"small"]))
    assert [len(body) for body in bodies(store, "A", 0)] == [LOG_FILE_BYTES - 1000, 5]
    store.close()


def test_every_write_writes_a_part(
    tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_write = os.pwrite

    def write_some(fd: int, data: Buffer, offset: int) -> int:
        return really_write(fd, memoryview(data)[: rng.randint(1, len(data))], offset)

    monkeypatch.setattr(os, "pwrite", write_some)
    sent = [bytes([number]) * rng.randint(0, 2000) for number in range(60)]
    store = open_store(tmp_path)
    for body in sent:
        append(store, ("A", 0, [body]))
    store.abandon()
    for clean in (False, True):
        store = open_store(tmp_path)
        assert store.clean_start == clean
        assert bodies(store, "A", 0) == sent
        store.close()


# --- a full disk ----------------------------------------------------------------------------------


def test_nothing_is_appended_while_units_wait_for_room(tmp_path: Path) -> None:
    """What waits in memory is bounded by one batch."""
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    files.full_for = "/consumequeue/"
    append(store, ("A", 0, [b"1", b"2"]))
    end = store.appended_offset
    assert store.dispatched_offset == 0
    with pytest.raises(DiskFull):
        append(store, ("A", 0, [b"3"]))
    assert store.appended_offset == end
    assert bodies(store, "A", 0) == [b"1", b"2"]
    files.full_for = None
    store.close()
    store = open_store(tmp_path)
    assert store.clean_start, "closing wrote the units"
    assert bodies(store, "A", 0) == [b"1", b"2"]
    store.close()


# --- foreign and damaged files --------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    ("place", "size"),
    [
        ("commitlog/" + offset_name(0) + "~", 10),
        ("commitlog/" + offset_name(LOG_FILE_BYTES), LOG_FILE_BYTES + 1),
        ("commitlog/" + offset_name(7 * LOG_FILE_BYTES), LOG_FILE_BYTES),
        ("commitlog/" + offset_name(7), 13),
        ("consumequeue/A/0/" + offset_name(320), 321),
        ("consumequeue/A/0/" + offset_name(7), 13),
        ("consumequeue/A/0/notes.txt", 3),
        ("consumequeue/A/notes.txt", 3),
        ("consumequeue/A/old/x", 3),
        ("consumequeue/README", 3),
        ("checkpoint", 24),
    ],
)
def test_a_foreign_file_is_named_and_nothing_is_lost(
    tmp_path: Path, place: str, size: int, clean: bool
) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"kept"]))
    if clean:
        store.close()
    else:
        store.abandon()
    path = tmp_path / place
    saved = path.read_bytes() if path.exists() else None
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"x" * size)
    refusal = StoreDamaged if place == "checkpoint" else StoreForeignFile
    with pytest.raises(refusal) as refused:
        open_store(tmp_path)
    assert any(part in str(refused.value) for part in (path.name, path.parent.name))
    path.unlink()
    if saved is not None:
        path.write_bytes(saved)
    if path.parent.name == "old":
        path.parent.rmdir()
    store = open_store(tmp_path)
    assert bodies(store, "A", 0) == [b"kept"]
    store.close()


def test_a_damaged_body_is_served_to_nobody_by_id(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = append(store, ("A", 0, [b"one"]))
    second = append(store, ("A", 0, [b"two"]))
    store.close()
    path = tmp_path / "commitlog" / offset_name(0)
    content = bytearray(path.read_bytes())
    content[first.log_offset + 88] ^= 1
    path.write_bytes(content)
    store = open_store(tmp_path)
    with pytest.raises(CometError):
        store.read_record(first.log_offset)
    assert record.decode(store.read_record(second.log_offset)).body == b"two"
    store.close()

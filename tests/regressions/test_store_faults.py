"""Faults that the fault harness found, each as small as it can be made (docs/bugs.md)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cometmq.errors import DiskFull, StoreDamaged, StoreFailed, StoreForeignFile
from cometmq.format import queueunit, record
from cometmq.store.disk.files import OsFiles
from cometmq.store.layout import offset_name
from cometmq.store.queues.consumequeue import ConsumeQueue
from cometmq.store.repair.verify import verify
from cometmq.store.writer import MessageStore
from tests.support.stores.disk_model import DiskModel
from tests.support.stores.simulated_files import Fault, Kind, SimulatedFiles
from tests.support.stores.small_stores import (
    LOG_FILE_BYTES,
    QUEUE_FILE_BYTES,
    SMALL,
    FaultyFiles,
    WallClock,
    append,
    append_keyed,
    bodies,
    open_store,
)

STORE_TIME_AT = record.LAYOUTS[0].offsets["store_time_ms"]
UNITS = QUEUE_FILE_BYTES // queueunit.UNIT_BYTES


def queue_with(directory: Path, **files: bytes) -> ConsumeQueue:
    """A queue of the given files, by the number of the first message in each."""
    queue = ConsumeQueue("A", 0, directory, QUEUE_FILE_BYTES)
    for name, units in files.items():
        start = int(name.removeprefix("from_")) * queueunit.UNIT_BYTES
        path = directory / offset_name(start)
        path.write_bytes(units.ljust(QUEUE_FILE_BYTES, b"\0"))
    return queue


def test_too_little_filler_is_no_filler(tmp_path: Path) -> None:
    """A crash left a part of it; the message that it was for was then refused as out of order."""
    queue = queue_with(tmp_path, from_0=queueunit.PREFILL * 5)
    queue.load(OsFiles())
    queue.cut(OsFiles(), 0, 1 << 40)
    assert queue.next_offset == 0
    queue.start_at(7)
    assert (queue.min_offset, queue.next_offset) == (7, 7)


def test_a_queue_that_begins_anew_begins_at_0(tmp_path: Path) -> None:
    """A power cut left its second file without its first, and its minimum stayed behind that."""
    queue = queue_with(tmp_path, **{f"from_{UNITS}": queueunit.pack(5000, 100, 0)})
    queue.load(OsFiles())
    queue.cut(OsFiles(), 0, 0)
    assert (queue.min_offset, queue.next_offset) == (0, 0)


def test_a_queue_file_without_its_length_is_made_anew(tmp_path: Path) -> None:
    """A power cut took the length of one file and left a later one: refused as foreign."""
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"%d" % n for n in range(UNITS + 1)]))
    store.abandon()
    (tmp_path / "consumequeue/A/0" / offset_name(0)).write_bytes(b"")
    store = open_store(tmp_path, files=FaultyFiles(boot="another"))
    assert bodies(store, "A", 0) == [b"%d" % n for n in range(UNITS + 1)]
    store.close()


def open_simulated(root: Path, disk: DiskModel, fault: Fault, boot: str = "boot-1") -> MessageStore:
    files = SimulatedFiles(root, disk, boot=boot, fault=fault)
    return MessageStore.open(root, SMALL, clock=WallClock(), files=files)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_full_disk_refused_does_not_come_back_after_a_crash(
    tmp_path: Path, seed: int
) -> None:
    """Its bytes, or a part of them, stood behind the end of the log until the next append."""
    disk, fault = DiskModel(random.Random(seed)), Fault(Kind.ENOSPC)
    store = open_simulated(tmp_path, disk, fault)
    fault.at = fault.calls + 1
    with pytest.raises(DiskFull):
        append(store, ("A", 0, [b"refused"] * 20))
    store.abandon()
    store = open_simulated(tmp_path, disk, fault)
    assert store.appended_offset == 0
    store.abandon()


@pytest.mark.parametrize("place", ["commitlog", "cometmq.next"])
def test_a_log_file_that_cannot_be_synced_ends_all_writing(tmp_path: Path, place: str) -> None:
    """Making the next file was tried again and again, and the sync of its folder with it."""
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    append(store, ("A", 0, [bytes(LOG_FILE_BYTES * 3 // 4)]))
    files.sync_fails_for = place
    with pytest.raises(StoreFailed):
        store.prepare_next_file() if place == "cometmq.next" else store.flush_log()
    files.sync_fails_for = None
    with pytest.raises(StoreFailed):
        append(store, ("A", 0, [b"in vain"]))
    store.abandon()


def test_units_that_cannot_be_written_end_all_writing(tmp_path: Path) -> None:
    """A full disk kept them in memory; when it failed after that, the next append tried again."""
    disk, fault = DiskModel(random.Random(0)), Fault(Kind.ENOSPC)
    store = open_simulated(tmp_path, disk, fault)
    fault.at = fault.calls + 3  # the log has room, and for zeros behind it; the queue has none
    append(store, ("A", 0, [b"1"]))
    assert store.dispatched_offset == 0
    fault.kind, fault.at = Kind.EIO, fault.calls + 1
    for _ in range(2):
        with pytest.raises(StoreFailed):
            append(store, ("A", 0, [b"2"]))
    store.abandon()


def test_what_a_failed_sync_lost_is_written_again_after_a_restart(tmp_path: Path) -> None:
    """The page cache had it, the disk had not, and the sync of the next process said nothing."""
    disk, fault = DiskModel(random.Random(3)), Fault(Kind.EIO)
    store = open_simulated(tmp_path, disk, fault)
    append(store, ("A", 0, [bytes(3000)] * 4))
    fault.at = fault.calls + 1
    with pytest.raises(StoreFailed):
        store.flush_log()
    store.abandon()
    for boot in ("boot-1", "boot-2"):
        store = open_simulated(tmp_path, disk, fault, boot)
        assert bodies(store, "A", 0) == [bytes(3000)] * 4, boot
        store.abandon()
        disk.cut()


def test_an_index_file_that_says_too_much_is_built_again(tmp_path: Path) -> None:
    """A bit flipped in the end that a header tells of: opening failed with an assertion."""
    store = open_store(tmp_path)
    for number in range(40):
        append_keyed(store, "A", 0, f"k{number}")
    store.close()
    first, *others = sorted((tmp_path / "index").iterdir())
    assert others
    content = bytearray(first.read_bytes())
    content[24] ^= 1  # of the end's log offset, at 24
    first.write_bytes(content)
    store = open_store(tmp_path)
    while store.index_some():
        pass
    assert store.index.status.entry_count == 40
    store.close()


def test_a_span_of_a_few_bytes_is_damage(tmp_path: Path) -> None:
    """Such as the unit of a lost message names: an error of struct came instead."""
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"1"]))
    with pytest.raises(StoreDamaged):
        store.read_records([(0, 1)])
    store.close()


@pytest.mark.parametrize("bit", [62, 60, 48])
def test_a_store_time_that_no_clock_gave_ends_nobody(
    tmp_path: Path, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A bit flipped in a store time, which no checksum covers: when the next file of the index was
    to be named after it, the process ended, and so it did at every start.
    """
    store = open_store(tmp_path)
    keys = [f"k{number}" for number in range(20)]
    at = append_keyed(store, "A", 0, "first").log_offset
    store.abandon()
    log = tmp_path / "commitlog" / offset_name(0)
    content = bytearray(log.read_bytes())
    content[at + STORE_TIME_AT + 7 - bit // 8] ^= 1 << bit % 8
    log.write_bytes(content)
    for start in range(2):
        store = open_store(tmp_path)
        assert "after this machine's clock" in caplog.text
        append_keyed(store, "A", 0, *keys)
        store.flush_log()
        while store.index_some():
            pass
        assert store.index.status.entry_count == 1 + 20 * (start + 1)
        assert len(list((tmp_path / "index").iterdir())) > 1
        store.close()
    complaints = [fault.what for fault in verify(tmp_path, index_sizes=SMALL.index_sizes).faults]
    assert "impossible store time" in complaints[0]


@pytest.mark.parametrize("start", [2**63, 10**20 - 1, 2**63 - LOG_FILE_BYTES])
@pytest.mark.parametrize("name", ["", "cometmq.json"])
def test_a_log_file_behind_all_offsets_is_refused_before_anything_is_changed(
    tmp_path: Path, start: int, name: str
) -> None:
    """It was an error of struct, after an adoption had been noted in the folder."""
    open_store(tmp_path).close()
    log = tmp_path / "commitlog"
    (log / offset_name(0)).rename(log / offset_name(start - start % LOG_FILE_BYTES))
    if name:
        (tmp_path / name).unlink()
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(StoreForeignFile, match="behind the last offset"):
        open_store(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before

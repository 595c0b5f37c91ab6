from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from cometmq.errors import StoreForeignFile
from cometmq.format.indexfile import Sizes
from cometmq.store.engine import MessageStore
from cometmq.store.layout import offset_name
from cometmq.store.opening import StoreOptions
from cometmq.store.tools.verify import Report, by_area, verify
from tests.support.stores import (
    LOG_FILE_BYTES,
    QUEUE_FILE_BYTES,
    Deletions,
    WallClock,
    append,
    open_store,
)

SIZES = Sizes(64, 128)
OPTIONS = StoreOptions(
    commit_log_file_bytes=LOG_FILE_BYTES,
    consume_queue_file_bytes=QUEUE_FILE_BYTES,
    index_sizes=SIZES,
)
MESSAGES = 50
BODY = bytes(1000)


def filled(root: Path) -> tuple[MessageStore, list[int]]:
    """An open store with messages in three queues, and where their records start."""
    clock = WallClock()
    store = open_store(root, OPTIONS, clock=clock)
    starts = []
    for number in range(MESSAGES):
        clock.now_ms += 5
        run = ("A", number % 3, [b"%d " % number + BODY])
        starts.append(append(store, run, tag="x", keys=f"k{number}").log_offset)
    store.flush_log()
    return store, starts


@pytest.fixture
def store(tmp_path: Path) -> Path:
    closing, _ = filled(tmp_path)
    closing.close()
    return tmp_path


def report_of(root: Path) -> Report:
    return verify(root, index_sizes=SIZES)


def faults_of(root: Path) -> dict[str, int]:
    return {area: count for area, count in by_area(report_of(root)) if count}


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_whole_store_has_no_faults_and_is_not_touched(store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*")}
    report = report_of(store)
    assert report.faults == []
    assert report.notes == []
    assert (report.record_count, report.queue_count, report.unit_count) == (MESSAGES, 3, MESSAGES)
    assert report.index_entry_count == MESSAGES
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*")} == before


def test_an_open_store_has_no_faults(tmp_path: Path) -> None:
    open_one, _ = filled(tmp_path)
    assert report_of(tmp_path).faults == []
    open_one.flush_queues()
    append(open_one, ("A", 0, [b"behind the mark"]))
    assert report_of(tmp_path).faults == []
    open_one.abandon()
    assert report_of(tmp_path).faults == []


def test_deleted_topics_are_no_faults(tmp_path: Path) -> None:
    store, _ = filled(tmp_path)
    append(store, ("B", 0, [b"old", b"older"]), ("C", 0, [b"x"]))
    append(store, ("S", 0, [b"B"]))
    store.drop_topic("B")
    append(store, ("B", 0, [b"new"]))
    store.drop_topic("C")
    store.close()
    report = report_of(tmp_path)
    assert report.faults == []
    assert report.notes == []
    open_store(tmp_path, OPTIONS, observer=Deletions()).close()


@pytest.mark.parametrize("at", [0, 4, 30, 200])
def test_a_damaged_record_is_named_and_all_behind_it_is_read(store: Path, at: int) -> None:
    log_file = store / "commitlog" / offset_name(0)
    size = int.from_bytes(log_file.read_bytes()[:4], "big")
    flip(log_file, 5 * size + at)
    report = report_of(store)
    [fault] = [fault for fault in report.faults if fault.area == "log"]
    assert fault.position == 5 * size
    assert fault.what.startswith(f"damaged up to {6 * size}")
    assert report.record_count == MESSAGES - 1
    assert all(fault.area in ("log", "queue", "index") for fault in report.faults)


def test_several_damaged_places_are_all_named(store: Path) -> None:
    log_file = store / "commitlog" / offset_name(LOG_FILE_BYTES)
    size = int.from_bytes(log_file.read_bytes()[:4], "big")
    for number in (0, 1, 7):
        flip(log_file, number * size + 300)
    damaged = [f.position for f in report_of(store).faults if f.area == "log"]
    assert damaged == [LOG_FILE_BYTES, LOG_FILE_BYTES + 7 * size]


def test_a_log_that_ends_too_early_is_told(store: Path) -> None:
    newest = max(p for p in (store / "commitlog").iterdir() if any(p.read_bytes()))
    newest.write_bytes(bytes(LOG_FILE_BYTES))
    report = report_of(store)
    assert any("ends here" in fault.what for fault in report.faults)
    assert any("marks" in fault.what for fault in report.faults)


@pytest.mark.parametrize("field", [3, 10, 15])
def test_a_wrong_unit_is_named(store: Path, field: int) -> None:
    flip(store / "consumequeue/A/1" / offset_name(0), 5 * 20 + field)
    [fault] = report_of(store).faults
    assert (fault.area, fault.position) == ("queue", 5)
    assert fault.path.endswith("A/1")


def test_missing_and_surplus_units_are_named(store: Path) -> None:
    last = store / "consumequeue/A/1" / offset_name(QUEUE_FILE_BYTES)
    count = len([u for u in range(16) if any(last.read_bytes()[u * 20 : u * 20 + 20])])
    with last.open("r+b") as file:
        file.seek((count - 1) * 20)
        unit = file.read(20)
        file.seek(count * 20)
        file.write(unit)
    assert any(
        "1 messages from here on are not in the log" in f.what for f in report_of(store).faults
    )
    with last.open("r+b") as file:
        file.seek((count - 1) * 20)
        file.write(bytes(40))
    assert faults_of(store) == {"queue": 2}, "the queue's, and the tally's"


@pytest.mark.parametrize("missing", ["consumequeue", "consumequeue/A/2"])
def test_missing_queues_are_told(store: Path, missing: str) -> None:
    shutil.rmtree(store / missing)
    report = report_of(store)
    assert [fault.area for fault in report.faults] == ["queue"]
    assert "should be there" in report.faults[0].what
    assert "A/2" in report.notes[0]


def test_the_index_is_compared_with_the_log(store: Path) -> None:
    file = next((store / "index").iterdir())
    flip(file, SIZES.entries_at + 9 * 20 + 3)
    [fault] = report_of(store).faults
    assert fault.area == "index"
    flip(file, SIZES.entries_at + 9 * 20 + 3)
    flip(file, 35)  # the count of slots in use
    [fault] = report_of(store).faults
    assert "slots are used" in fault.what


@pytest.mark.parametrize(
    ("name", "content", "area"),
    [
        ("cometmq.epochs", None, "file"),
        ("cometmq.epochs", b"cometmq-epochs 1\n", "file"),
        ("commitlog/notes.txt", b"x", "file"),
        ("consumequeue/A/0/notes.txt", b"x", "queue"),
        ("consumequeue/A/notes.txt", b"x", "queue"),
        ("index/notes.txt", b"x", "index"),
    ],
)
def test_what_is_wrong_with_files_is_told(
    store: Path, name: str, content: bytes | None, area: str
) -> None:
    path = store / name
    path.unlink() if content is None else path.write_bytes(content)
    assert faults_of(store) == {area: 1}


def test_a_queue_file_without_whole_units_is_a_fault(store: Path) -> None:
    for file in (store / "consumequeue/A/0").iterdir():
        file.write_bytes(file.read_bytes()[: QUEUE_FILE_BYTES - 7])
    [fault, _] = report_of(store).faults  # and the mark counts one queue more
    assert (fault.area, "no whole units" in fault.what) == ("queue", True)


def test_keys_whose_messages_retention_took_are_no_faults(tmp_path: Path) -> None:
    opened, _ = filled(tmp_path)
    opened.flush_queues()
    while opened.index_some():
        pass
    opened.cleaner.forget_before(opened.cleaner.log_files()[0].end)
    opened.cleaner.remove_first()
    opened.cleaner.remove_spare_files()
    assert report_of(tmp_path).log_start > 0
    assert not report_of(tmp_path).faults
    opened.close()
    assert not report_of(tmp_path).faults


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreForeignFile):
        verify(tmp_path)


def test_no_flipped_bit_of_the_log_and_the_queues_goes_unnoticed(
    store: Path, rng: random.Random
) -> None:
    """But for fields that the format has no checksum for: flag, SYSFLAG's bits of compression, born
    host and time, store host, reconsume times, and letters of topics and properties that stay so.
    """
    log_file = store / "commitlog" / offset_name(0)
    size = int.from_bytes(log_file.read_bytes()[:4], "big")
    covered = [*range(16), *range(20, 36), *range(84, 88 + len(BODY))]
    for _ in range(25):
        at = rng.randrange(10) * size + rng.choice(covered)
        flip(log_file, at)
        assert faults_of(store), at
        flip(log_file, at)
    queue_file = store / "consumequeue/A/0" / offset_name(0)
    for at in rng.sample(range(16 * 20), 25):
        flip(queue_file, at)
        assert faults_of(store), at
        flip(queue_file, at)
    assert not faults_of(store)

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

from cometmq.errors import StoreForeignFile
from cometmq.format.indexfile import Sizes
from cometmq.store.disk.files import OsFile
from cometmq.store.layout import offset_name
from cometmq.store.recovery.opening import StoreOptions
from cometmq.store.repair import verify as verify_module
from cometmq.store.repair.repair import Accepted, repair
from cometmq.store.repair.verify import Report, verify
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import (
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
    return Counter(fault.area for fault in report_of(root).faults)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_a_checkpoint_that_is_ahead_of_the_log_is_told(store: Path) -> None:
    flip(store / "checkpoint", 1)  # of the log time
    [fault] = report_of(store).faults
    assert (fault.area, fault.path) == ("file", str(store / "checkpoint"))


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


# --- queues with holes, files of other sizes, missing index files ---------------------------------


def test_a_hole_in_a_queue_is_named_and_the_advice_helps(store: Path) -> None:
    path = store / "consumequeue/A/0" / offset_name(0)
    content = bytearray(path.read_bytes())
    content[3 * 20 : 5 * 20] = bytes(40)
    path.write_bytes(content)
    report = report_of(store)
    assert [(f.area, f.position) for f in report.faults] == [("queue", 3)]
    assert "the unit is zeros" in report.faults[0].what
    assert f"cometmq store repair {store}" in report.notes[-1]
    repair(store, Accepted())
    assert not report_of(store).faults


@pytest.mark.parametrize("size", [4 * 20, QUEUE_FILE_BYTES - 20, QUEUE_FILE_BYTES + 20])
def test_the_only_file_of_a_queue_with_another_length(tmp_path: Path, size: int) -> None:
    opened = open_store(tmp_path, OPTIONS)
    append(opened, ("A", 0, [b"x"] * 3))
    opened.close()
    path = tmp_path / "consumequeue/A/0" / offset_name(0)
    path.write_bytes(path.read_bytes()[:size].ljust(size, b"\0"))
    with pytest.raises(StoreForeignFile):
        open_store(tmp_path, OPTIONS)
    [fault] = report_of(tmp_path).faults
    assert fault.area == "queue"
    assert f"{size} bytes, the store was opened with files of {QUEUE_FILE_BYTES}" in fault.what


def test_an_index_file_of_another_length_is_a_fault(store: Path) -> None:
    path = next((store / "index").iterdir())
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StoreForeignFile):
        open_store(store, OPTIONS)
    assert "not looked at" in report_of(store).faults[0].what


def test_the_sizes_of_the_index_are_those_that_the_store_was_opened_with(store: Path) -> None:
    report = verify(store)
    assert not report.faults
    assert report.index_entry_count == MESSAGES
    assert any("not looked at" in f.what for f in verify(store, index_sizes=Sizes()).faults)


def test_without_our_identity_a_full_index_file_tells_its_sizes(tmp_path: Path) -> None:
    opened = open_store(tmp_path)
    append(opened, ("A", 0, [b"x"] * 10), keys="k")
    opened.close()
    (tmp_path / "cometmq.json").unlink()
    report = verify(tmp_path)
    assert (report.index_entry_count, report.faults) == (10, [])
    newest = max((tmp_path / "index").iterdir())
    min((tmp_path / "index").iterdir()).unlink()
    assert newest.exists()
    assert "not looked at" in verify(tmp_path).faults[0].what


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("zeros", [False, True])
def test_a_missing_index_file_is_a_fault(tmp_path: Path, number: int, zeros: bool) -> None:
    clock = WallClock()
    opened = open_store(tmp_path, clock=clock)
    for _ in range(20):
        clock.now_ms += 5
        append(opened, ("A", 0, [b"x"]), keys="k")
    opened.close()
    path = sorted((tmp_path / "index").iterdir())[number]
    path.write_bytes(bytes(path.stat().st_size)) if zeros else path.unlink()
    assert {fault.area for fault in verify(tmp_path).faults} == {"index"}


# --- beside a broker ------------------------------------------------------------------------------


def deleted_topic(root: Path) -> MessageStore:
    """An open store whose checkpoint counts the queues of a topic that has been deleted since."""
    opened, _ = filled(root)
    append(opened, ("B", 0, [b"old", b"older"]))
    opened.flush_log()
    opened.flush_queues()
    append(opened, ("S", 0, [b"B"]))
    opened.drop_topic("B")
    return opened


def test_a_topic_that_has_just_been_deleted_is_no_fault(tmp_path: Path) -> None:
    opened = deleted_topic(tmp_path)
    assert not verify(tmp_path, observer=Deletions()).faults
    opened.abandon()
    assert not verify(tmp_path, observer=Deletions()).faults
    shutil.rmtree(tmp_path / "consumequeue/A/2")
    assert verify(tmp_path).faults, "nobody has understood that it was deleted"


def test_a_deletion_before_the_mark_hides_no_missing_queue(tmp_path: Path) -> None:
    opened = deleted_topic(tmp_path)
    opened.close()
    assert not verify(tmp_path, observer=Deletions()).faults
    shutil.rmtree(tmp_path / "consumequeue/A/2")
    assert [fault.area for fault in verify(tmp_path, observer=Deletions()).faults] == ["queue"]


@pytest.mark.parametrize("when", range(6))
def test_what_retention_removes_meanwhile_is_no_fault(
    tmp_path: Path, when: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of the first reads of a log file, an index file, a queue's file."""
    monkeypatch.setattr(verify_module, "OPEN_FILES_MAX", 16)
    opened = open_store(tmp_path, clock=WallClock())
    for number in range(MESSAGES):
        append(opened, ("A", number % 3, [BODY]), keys=f"k{number}")
    opened.flush_log()
    opened.flush_queues()
    while opened.index_some():
        pass
    calls = 0

    def removing() -> None:
        nonlocal calls
        calls += 1
        if calls == 1 + when:
            opened.cleaner.forget_before(opened.cleaner.log_files()[-1].end)
            while opened.min_offset > opened._log.segments.start:
                opened.cleaner.remove_first()
            opened.cleaner.remove_spare_files()
            opened.index_some()

    read = OsFile.pread

    def pread(file: OsFile, size: int, offset: int, *, nowait: bool = False) -> bytes:
        if file._pool is not opened._opened.files:
            removing()
        return read(file, size, offset, nowait=nowait)

    monkeypatch.setattr(OsFile, "pread", pread)
    report = verify(tmp_path)
    assert report.faults == []
    assert report.log_start > 0 or report.record_count == MESSAGES
    assert calls > when
    opened.abandon()


def test_a_queue_without_a_folder_does_not_end_it_where_the_log_is_damaged(tmp_path: Path) -> None:
    closing, starts = filled(tmp_path)
    closing.close()
    shutil.rmtree(tmp_path / "consumequeue" / "A" / "1")
    flip(tmp_path / "commitlog" / "0".zfill(20), starts[4] + 300)  # a message of that queue
    assert faults_of(tmp_path)["log"] == 1


def test_an_empty_file_before_others_is_told(store: Path) -> None:
    path = store / "commitlog" / "0".zfill(20)
    path.write_bytes(b"")
    assert f"{path} is empty and files follow it" in [
        fault.what for fault in report_of(store).faults
    ]

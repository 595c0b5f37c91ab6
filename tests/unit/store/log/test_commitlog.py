from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import DiskFull, MessageNotFound, StoreDamaged, StoreFailed
from cometmq.format import record
from cometmq.store.layout import StorePaths, offset_name
from cometmq.store.log import commitlog
from cometmq.store.log.commitlog import CommitLog
from tests.support.stores.small_stores import FaultyFile, FaultyFiles, append, open_store

SIZE = 4096
LARGE = 1024 * 1024
PAGE_BYTES = 4096


def opened(root: Path, files: FaultyFiles | None = None, file_bytes: int = SIZE) -> CommitLog:
    (root / "commitlog").mkdir(exist_ok=True)
    return CommitLog(StorePaths(root), files or FaultyFiles(), file_bytes)


def batch(size: int, fill: bytes = b"x") -> bytes:
    """Bytes that pass for one record of that size where only the size is looked at."""
    return size.to_bytes(4, "big") + fill * (size - 4)


def put(log: CommitLog, size: int, fill: bytes = b"x") -> int:
    offset = log.place(size)
    log.append(offset, batch(size, fill), 1)
    return offset


def test_batches_follow_each_other(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert [put(log, 100), put(log, 200), log.end] == [0, 100, (300, 1)]
    assert log.read(100, 200, nowait=True) == batch(200)


def test_a_batch_that_leaves_less_than_an_end_mark_goes_to_the_next_file(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, 3000)
    assert log.place(SIZE - 3000 - 8) == 3000, "exactly enough"
    assert log.place(SIZE - 3000 - 7) == SIZE
    assert put(log, SIZE - 3000 - 7) == SIZE
    mark = log.segments.pread(3000, 8)
    assert mark == record.blank(SIZE - 3000)
    assert len(log.segments) == 2
    assert (tmp_path / "commitlog" / "00000000000000004096").stat().st_size == SIZE


def test_a_batch_may_fill_a_file_up_to_the_end_mark(tmp_path: Path) -> None:
    log = opened(tmp_path)
    assert put(log, SIZE - 8) == 0
    assert put(log, SIZE - 8) == SIZE


def chunk_ends(log: CommitLog, bytes_max: int) -> list[int]:
    at, found = 0, []
    while chunk := log.read_chunk(at, bytes_max, nowait=True):
        at = chunk.next_offset
        found.append(at)
    return found


def test_what_was_appended_is_copied_by_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commitlog, "BATCH_ENDS_MAX", 4)
    log = opened(tmp_path)
    for _ in range(4):
        put(log, 500)
    assert chunk_ends(log, 1100) == [1000, 2000], "these bytes are no records"
    log.truncate(600, 1)
    put(log, 700)
    assert chunk_ends(log, 1300) == [1300], "1000 is no end any more"
    assert chunk_ends(log, 1200)[0] == 500
    for _ in range(4):
        put(log, 500)
    assert len(log._batch_ends) <= 4


def test_the_next_file_is_prepared_once_half_a_file_is_left(tmp_path: Path) -> None:
    log = opened(tmp_path)
    log.prepare_next_file()
    put(log, SIZE // 2 - 1)
    log.prepare_next_file()
    assert len(log.segments) == 1
    assert not log.next_file_wanted
    put(log, 1 + 4)
    log.prepare_next_file()
    assert len(log.segments) == 2
    assert not (tmp_path / "cometmq.next").exists()


def test_a_full_disk_while_preparing_leaves_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    log = opened(tmp_path, files)
    put(log, SIZE - 8)
    files.room = 100
    with pytest.raises(DiskFull):
        log.prepare_next_file()
    with pytest.raises(DiskFull):
        put(log, 100)
    assert [path.name for path in tmp_path.iterdir()] == ["commitlog"]
    assert log.end == (SIZE - 8, 1)
    files.room = None
    assert put(log, 100) == SIZE


def test_a_disk_without_room_for_a_files_name_takes_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    log = opened(tmp_path, files)

    def full(*_: object) -> None:
        raise DiskFull("the folder cannot grow")

    with monkeypatch.context() as patch:
        patch.setattr(files, "rename", full)
        with pytest.raises(DiskFull):
            put(log, 100)
    assert [path.name for path in tmp_path.iterdir()] == ["commitlog"]
    assert put(log, 100) == 0


def test_a_file_has_its_room_before_it_is_written_to(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, 10)
    found = (tmp_path / "commitlog" / offset_name(0)).stat()
    assert found.st_blocks * 512 >= found.st_size == SIZE


def test_on_a_full_disk_a_file_that_is_due_takes_what_is_left(tmp_path: Path) -> None:
    files = FaultyFiles()
    log = opened(tmp_path, files)
    put(log, SIZE - 8)
    files.room = 8 + 100  # for the end mark and the batch
    assert put(log, 100) == SIZE
    assert (tmp_path / "commitlog" / offset_name(SIZE)).stat().st_size == SIZE


def written_to(log: CommitLog) -> int:
    """How far the log's first file was written to."""
    log.flush()
    return max(end for _, end in log.segments.find(0).file.data_extents(0, LARGE))  # type: ignore[union-attr]


def test_ahead_of_small_syncs_zeros_are_written_once_for_many(tmp_path: Path) -> None:
    log = opened(tmp_path, file_bytes=LARGE)
    put(log, 5000)
    ahead = written_to(log)
    assert ahead >= 5000 + commitlog.AHEAD_BYTES_MIN
    while log.end[0] + 5000 <= 5000 + commitlog.AHEAD_BYTES_MIN:
        put(log, 5000)
        assert written_to(log) == ahead
    put(log, 5000)
    assert written_to(log) > ahead
    assert not any(log.segments.pread(log.end[0], 1000))
    put(log, 100)
    assert log.read(log.end[0] - 100, 100, nowait=True) == batch(100)


def test_ahead_of_large_syncs_no_zeros_are_written(tmp_path: Path) -> None:
    log = opened(tmp_path, file_bytes=LARGE)
    put(log, commitlog.SMALL_SYNC_BYTES + 1)
    assert written_to(log) <= commitlog.SMALL_SYNC_BYTES + PAGE_BYTES


def test_what_a_failed_append_did_not_reach_needs_no_room(tmp_path: Path) -> None:
    files = FaultyFiles()
    log = opened(tmp_path, files)
    put(log, 100)
    files.room = 0
    with pytest.raises(DiskFull):
        put(log, 300)
    log.zero_dirty_tail()
    assert log.end == (100, 1)


def test_what_a_failed_append_wrote_is_cleared_by_the_next(tmp_path: Path) -> None:
    files = FaultyFiles()
    log = opened(tmp_path, files)
    put(log, 100)
    files.room = 250
    with pytest.raises(DiskFull):
        put(log, 300, b"y")
    assert log.segments.pread(396 - 50, 4) == b"y" * 4, "the disk took a part"
    files.room = None
    put(log, 60)
    assert log.segments.pread(160, 400) == bytes(400)


def test_an_end_mark_before_a_failed_append_is_taken_back(tmp_path: Path) -> None:
    files = FaultyFiles()
    log = opened(tmp_path, files)
    put(log, 3000)
    log.prepare_next_file()
    files.room = 8 + 10
    with pytest.raises(DiskFull):
        put(log, 2000)
    assert log.segments.pread(3000, 8) == record.blank(SIZE - 3000)
    files.room = None
    log.zero_dirty_tail()
    assert log.segments.pread(3000, 8) == bytes(8)
    assert log.segments.pread(SIZE, 2000) == bytes(2000)
    assert put(log, 50) == 3000


def test_flush_syncs_only_files_with_new_bytes(tmp_path: Path) -> None:
    files = FaultyFiles()
    log = opened(tmp_path, files)
    for _ in range(3):
        put(log, SIZE - 8)
    files.synced.clear()
    assert log.flush() == log.end[0]
    assert [Path(path).name[-5:] for path in files.synced] == ["00000", "04096", "08192"]
    assert log.flushed == log.end
    put(log, SIZE - 8)
    files.synced.clear()
    log.flush()
    names = [Path(path).name[-5:] for path in files.synced]
    assert names == ["08192", "12288"], "the older file got its end mark since"


def test_what_comes_during_a_flush_waits_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = opened(tmp_path)
    put(log, 100)
    sync = FaultyFile.sync

    def sync_and_append(file: FaultyFile) -> None:
        sync(file)
        put(log, 50)

    monkeypatch.setattr(FaultyFile, "sync", sync_and_append)
    assert (log.flush(), log.flushed, log.end) == (100, (100, 1), (150, 1))


def test_reading_outside_is_not_found(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, SIZE - 8)
    put(log, 100)
    for offset, size in ((SIZE + 50, 51), (-1, 5), (10**9, 1), (SIZE - 4, 8), (0, 0), (0, -1)):
        with pytest.raises(MessageNotFound):
            log.read(offset, size, nowait=False)


def test_neighbours_are_read_with_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened(tmp_path)
    spans = [(put(log, size, bytes([size % 251])), size) for size in [400] * 30]
    calls: list[tuple[int, int]] = []
    read = log.read

    def counted(offset: int, size: int, *, nowait: bool) -> bytes:
        calls.append((offset, size))
        return read(offset, size, nowait=nowait)

    monkeypatch.setattr(log, "read", counted)
    assert log.read_records(spans, nowait=True) == batch(400, bytes([400 % 251])) * 30
    assert len(calls) == 3, "one for each file"
    calls.clear()
    assert len(log.read_records(spans[::2], nowait=True)) == 15 * 400
    assert len(calls) == 3, "small gaps are read over"
    calls.clear()
    assert len(log.read_records(spans[::-1], nowait=True)) == 30 * 400
    assert len(calls) == 30, "what goes backwards is read one by one"
    assert log.read_records([], nowait=True) == b""


def test_reading_old_messages_makes_no_newer_ones_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commitlog, "READ_AHEAD_BYTES_MAX", 1_000)
    store = open_store(tmp_path)
    spans: list[commitlog.Span] = []
    for _ in range(8):
        appended = append(store, ("T", 0, [bytes(1_000)]))
        spans.append((appended.log_offset, appended.end_offset - appended.log_offset))
    store.close()
    store = open_store(tmp_path)  # what is on the disk was not looked at
    damaged, size = spans[5]
    with (tmp_path / "commitlog" / offset_name(0)).open("r+b") as file:
        file.seek(damaged + size // 2)
        file.write(b"!")
    assert store.read_records(spans[:1])
    with pytest.raises(StoreDamaged):
        store.read_records([spans[5]], nowait=True)
    store.abandon()


def test_a_span_that_is_no_record_is_damage(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, 100)
    put(log, 100)
    for wrong in ([(0, 99)], [(0, 100), (101, 99)], [(4, 96)]):
        with pytest.raises(StoreDamaged):
            log.read_records(wrong, nowait=False)


def test_after_close_nothing_grows(tmp_path: Path) -> None:
    log = opened(tmp_path)
    put(log, SIZE - 8)
    log.close()
    with pytest.raises(StoreFailed):
        log.prepare_next_file()
    with pytest.raises(MessageNotFound):
        log.read(0, 100, nowait=False)

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.errors import DiskFull, StoreFailed
from cometmq.format.batch import BatchLimits
from cometmq.store.disk.files import File, OsFiles, StrPath
from cometmq.store.metadata import checkpoint
from cometmq.store.metadata.reserve import COPIES, RESERVE_BYTES
from cometmq.store.recovery import checkpointer
from cometmq.store.recovery.opening import StoreOptions
from cometmq.store.writer import MessageStore, RecordRun
from tests.support.stores.small_stores import (
    LOG_FILE_BYTES,
    QUEUE_FILE_BYTES,
    SMALL,
    FaultyFile,
    FaultyFiles,
    append,
    bodies,
    open_store,
)

# --- what stands on the disk, read with nothing but docs/format ---------------------------------


def log_records(root: Path) -> list[tuple[int, bytes]]:
    """(log offset, record) by docs/format/store-layout.md §2."""
    found = []
    for path in sorted((root / "commitlog").iterdir()):
        content, at = path.read_bytes(), 0
        while True:
            size, magic = struct.unpack_from(">iI", content, at)
            if magic == 0xCBD43194:
                assert size == len(content) - at
                break
            if magic == 0:
                assert not any(content[at:])
                break
            assert magic == 0xDAA320A7
            found.append((int(path.name) + at, content[at : at + size]))
            at += size
    return found


def queue_units(root: Path, queue: str) -> list[tuple[int, int]]:
    """(log offset, size) by docs/format/store-layout.md §3."""
    folder = sorted((root / "consumequeue" / queue).iterdir())
    row = b"".join(path.read_bytes() for path in folder)
    units = [unit[:2] for unit in struct.iter_unpack(">qiq", row)]
    written = [unit for unit in units if unit[1] > 0]
    assert units[: len(written)] == written, "what was not written stands behind"
    return written


def test_the_files_are_as_the_documents_say(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(50):
        append(store, ("A", number % 2, [b"%d" % number + bytes(1500)]), ("B", 0, [b"x"]))
    end = store.appended_offset
    store.close()
    records = log_records(tmp_path)
    assert len(records) == 100
    assert sum(records[-1][0:1]) + len(records[-1][1]) == end
    for queue, topic, queue_id in (("A/0", b"A", 0), ("A/1", b"A", 1), ("B/0", b"B", 0)):
        expected: list[tuple[int, int]] = []
        for offset, content in records:
            named = struct.unpack_from(">i", content, 12)[0]
            body = struct.unpack_from(">i", content, 84)[0]
            if (named, content[89 + body : 89 + body + content[88 + body]]) == (queue_id, topic):
                assert struct.unpack_from(">qq", content, 20) == (len(expected), offset)
                expected.append((offset, len(content)))
        assert queue_units(tmp_path, queue) == expected
    sizes = {path.stat().st_size for path in (tmp_path / "commitlog").iterdir()}
    assert sizes == {LOG_FILE_BYTES}
    assert (tmp_path / "consumequeue/A/0/00000000000000000320").stat().st_size == QUEUE_FILE_BYTES


# --- the order of the steps -----------------------------------------------------------------------


@pytest.mark.parametrize("syncs", range(1, 14))
def test_a_crash_at_any_sync_of_an_opening_is_harmless(tmp_path: Path, syncs: int) -> None:
    """The first opening, one after a clean close and one after a crash, each cut short."""
    for ending in (None, "close", "abandon"):
        if ending is not None:
            store = open_store(tmp_path)
            append(store, ("A", 0, [b"x"]))
            getattr(store, ending)()
        files = FailingSoon(syncs)
        try:
            open_store(tmp_path, files=files).abandon()
        except StoreFailed:
            assert files.left == 0
    store = open_store(tmp_path)
    assert store.queue_bounds("A", 0) == (0, 2)
    store.close()


class FailingSoon(FaultyFiles):
    """The disk stops taking anything at the n-th sync of a folder."""

    def __init__(self, left: int) -> None:
        super().__init__(boot="another")
        self.left = left

    def sync_directory(self, path: object) -> None:
        self.left -= 1
        if self.left <= 0:
            self.left, self.sync_fails = 0, True
            raise StoreFailed(f"cannot sync {path}")
        super().sync_directory(str(path))


def test_letting_go_twice_does_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.close()
    store.abandon()
    store.abandon()
    with pytest.raises(StoreFailed, match="closed"):
        append(store, ("A", 0, [b"x"]))


def test_a_clean_mark_tells_the_last_record(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    last = append(store, ("A", 0, [b"x", b"y"]))
    store.close()
    for _ in range(2):  # the second opening appends nothing and keeps the mark
        clean = json.loads((tmp_path / "cometmq.json").read_bytes())["clean"]
        assert clean["end"] == last.end_offset
        assert clean["last_offset"] + clean["last_bytes"] == last.end_offset
        open_store(tmp_path).close()


def test_a_mark_speaks_of_no_unit_that_came_after_the_queues_were_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is flushed up to a batch whose units are written just behind the queues' sync."""
    store = open_store(tmp_path)
    before = append(store, ("A", 0, [b"x"])).end_offset
    store.flush_log()
    store.flush_queues()
    flush, dispatch = store._dispatcher.flush, store._dispatch

    def late(segments: Sequence[RecordRun], units: list[bytes]) -> None:
        def flush_then_dispatch(*, at_once: bool) -> tuple[int, int]:
            done = flush(at_once=at_once)
            dispatch(segments, units)
            return done

        monkeypatch.setattr(store._dispatcher, "flush", flush_then_dispatch)
        store.flush_log()
        store.flush_queues()

    monkeypatch.setattr(store, "_dispatch", late)
    append(store, ("A", 0, [b"y"]))
    mark = checkpoint.load(OsFiles(), tmp_path / "checkpoint").mark
    assert mark is not None
    assert mark.end == before
    assert store.dispatched_offset == store.flushed_offset > before
    store.abandon()


def test_the_file_abort_stays_until_the_clean_mark_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"x"]))
    files = store._opened.files
    unlink, marks = files.unlink, list[object]()

    def looking(path: StrPath) -> None:
        if Path(path).name == "abort":
            marks.append(json.loads((tmp_path / "cometmq.json").read_bytes())["clean"])
        unlink(path)

    monkeypatch.setattr(files, "unlink", looking)
    store.close()
    assert len(marks) == 1
    assert marks[0] is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"commit_log_file_bytes": 0},
        {"consume_queue_file_bytes": 30},
        {"consume_queue_file_bytes": 0},
        {"batch_limits": BatchLimits(batch_bytes_max=1 << 30)},
    ],
)
def test_options_have_bounds(wrong: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        StoreOptions(**wrong)  # type: ignore[arg-type]


def test_after_a_crash_with_the_transient_pool_a_warning_says_what_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pooled = replace(SMALL, transient_bytes_max=4_000)
    store = open_store(tmp_path, pooled)
    kept = append(store, ("A", 0, [b"written"]))
    store.commit_log()
    append(store, ("A", 0, [b"in memory alone"]))
    store.abandon()
    store = open_store(tmp_path)  # as a follower's: every member is born one
    [told] = [r for r in caplog.records if "transient store pool" in r.getMessage()]
    assert told.levelno == logging.WARNING
    assert "up to 4000 bytes" in told.getMessage()
    assert f"up to {kept.end_offset} of the log" in told.getMessage()
    assert bodies(store, "A", 0) == [b"written"]
    caplog.clear()
    store.abandon()
    open_store(tmp_path, pooled).close()
    open_store(tmp_path, pooled).close()
    assert "transient" not in caplog.text, "neither without the pool nor after an orderly stop"


# --- a full volume ------------------------------------------------------------------------------


def left_behind(root: Path, *, in_order: bool) -> None:
    store = open_store(root)
    append(store, ("T", 0, [b"a", b"b"]))
    if in_order:
        store.close()
    else:
        store.abandon()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_full_volume_is_opened_with_what_was_reserved(tmp_path: Path, in_order: bool) -> None:
    left_behind(tmp_path, in_order=in_order)
    reserve = tmp_path / "cometmq.reserve"
    assert reserve.read_bytes() == bytes(RESERVE_BYTES)
    files = FaultyFiles(room=0)
    store = open_store(tmp_path, files=files)
    assert bodies(store, "T", 0) == [b"a", b"b"]
    assert not reserve.exists()
    files.room = None
    append(store, ("T", 0, [b"c"]))
    store.close()
    assert reserve.exists(), "for the next time"


def test_leftovers_go_before_anything_is_written(tmp_path: Path) -> None:
    left_behind(tmp_path, in_order=True)
    (tmp_path / "cometmq.reserve").unlink()
    with pytest.raises(DiskFull, match="abort"):
        open_store(tmp_path, files=FaultyFiles(room=0))
    (tmp_path / "cometmq.next").write_bytes(bytes(LOG_FILE_BYTES))
    store = open_store(tmp_path, files=FaultyFiles(room=0))
    assert bodies(store, "T", 0) == [b"a", b"b"]
    store.close()


def test_what_a_crash_left_of_a_reserve_is_made_whole(tmp_path: Path) -> None:
    left_behind(tmp_path, in_order=True)
    (tmp_path / "cometmq.reserve").write_bytes(b"")
    left_behind(tmp_path, in_order=True)
    assert (tmp_path / "cometmq.reserve").read_bytes() == bytes(RESERVE_BYTES)


def test_nothing_is_reserved_where_there_is_little(tmp_path: Path) -> None:
    store = open_store(tmp_path, files=FaultyFiles(room=3 * RESERVE_BYTES))
    store.close()
    assert not (tmp_path / "cometmq.reserve").exists()


def test_what_is_reserved_grows_with_the_state(tmp_path: Path) -> None:
    reserve = tmp_path / "cometmq.reserve"
    store = open_store(tmp_path)
    store.keep_room(100_000)
    assert reserve.read_bytes() == bytes(RESERVE_BYTES + COPIES * 100_000)
    store.keep_room(1_000)
    store.close()
    assert reserve.stat().st_size == RESERVE_BYTES + COPIES * 100_000
    store = open_store(tmp_path, files=FaultyFiles(room=100_000))
    assert not reserve.exists(), "it may be needed"
    store.close()


def test_a_log_file_that_is_due_has_no_zeros_where_there_is_no_room(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    append(store, ("T", 0, [bytes(LOG_FILE_BYTES - 1000)]))
    files.room = LOG_FILE_BYTES - 1
    with pytest.raises(DiskFull):
        store.prepare_next_file()  # it is not due yet
    files.room = LOG_FILE_BYTES - 1
    append(store, ("T", 0, [bytes(2000)]))
    assert [len(body) for body in bodies(store, "T", 0)] == [LOG_FILE_BYTES - 1000, 2000]
    files.room = None
    store.close()


# --- how far the log's files were written ---------------------------------------------------------


class CountedFiles(FaultyFiles):
    """Counts the bytes that are read of log files."""

    log_bytes_read = 0

    def open(self, path: StrPath) -> File:
        return CountedFile(super().open(path), self)


class CountedFile(FaultyFile):
    def __init__(self, file: File, files: CountedFiles) -> None:
        super().__init__(file, files)
        self._files = files

    def pread(self, size: int, offset: int, *, nowait: bool = False) -> bytes:
        found = super().pread(size, offset, nowait=nowait)
        if "/commitlog/" in self.path:
            self._files.log_bytes_read += len(found)
        return found


@pytest.mark.parametrize("boot", ["boot-1", "boot-2"])
def test_a_start_after_a_crash_reads_what_may_have_been_written_not_whole_files(
    tmp_path: Path, boot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_bytes = 48 * 1024 * 1024
    monkeypatch.setattr(checkpointer, "REACH_BYTES", 256 * 1024)
    options = replace(SMALL, commit_log_file_bytes=file_bytes)
    store = open_store(tmp_path, options, files=FaultyFiles(boot="boot-1"))
    append(store, ("A", 0, [b"1", b"2", b"3"]))
    store.flush_log()
    store.abandon()
    with (tmp_path / "commitlog" / "0".zfill(20)).open("r+b") as log:
        log.seek(200_000)
        log.write(b"torn")  # of a write that was never synced
    files = CountedFiles(boot=boot)
    store = open_store(tmp_path, options, files=files)
    assert bodies(store, "A", 0) == [b"1", b"2", b"3"]
    assert files.log_bytes_read < file_bytes // 8  # one piece of the scan, and what was written
    assert not any(store._log.segments.pread(store.appended_offset, 300_000))
    store.abandon()


def test_no_append_writes_a_checkpoint_between_two_that_are_near(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    for _ in range(3):
        store.flush_queues()
        files.synced.clear()
        start = store.appended_offset
        while store.appended_offset < start + 3 * LOG_FILE_BYTES:
            append(store, ("A", 0, [bytes(900)]))
        assert not any(path.endswith("checkpoint") for path in files.synced)
    store.abandon()


def test_the_checkpoint_says_how_far_before_the_log_is_written(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    for number in range(3 * LOG_FILE_BYTES // 1000):
        append(store, ("A", 0, [b"%d" % number + bytes(900)]))
        assert checkpoint.load(files, tmp_path / "checkpoint").reach >= store.appended_offset
    files.sync_fails_for = str(tmp_path / "checkpoint")
    end = store._log.reach
    with pytest.raises(StoreFailed):
        append_for_ever(store)
    assert store.appended_offset <= end
    store.abandon()
    row = b"".join(path.read_bytes() for path in sorted((tmp_path / "commitlog").iterdir()))
    assert not any(row[end:])


def append_for_ever(store: MessageStore) -> None:
    """Further than any promise of the checkpoint."""
    for _ in range(16 * LOG_FILE_BYTES // 1000):
        append(store, ("A", 0, [bytes(900)]))


def test_a_reach_that_nobody_knows_is_all_of_the_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"1"]))
    end = store.appended_offset
    store.abandon()
    path = tmp_path / "checkpoint"
    saved = checkpoint.load(OsFiles(), path)
    path.write_bytes(replace(saved, reach=0).encode())  # as a version before wrote it
    with (tmp_path / "commitlog" / "0".zfill(20)).open("r+b") as log:
        log.seek(LOG_FILE_BYTES - 10)
        log.write(b"old")
    store = open_store(tmp_path, files=FaultyFiles(boot="boot-2"))
    assert not any(store._log.segments.pread(end, LOG_FILE_BYTES - end))
    store.abandon()

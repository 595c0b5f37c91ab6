from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.format import record
from cometmq.format.indexfile import TIME_MS_MAX, Sizes, key_hash
from cometmq.store.base import BaseStore
from cometmq.store.disk.files import File, StrPath
from cometmq.store.index import indexer
from cometmq.store.writer import MessageStore
from tests.support.stores.copies import copy_all, open_copy
from tests.support.stores.small_stores import (
    SMALL,
    START_MS,
    FaultyFile,
    FaultyFiles,
    WallClock,
    append,
    append_keyed,
    open_store,
)

DISABLED = replace(SMALL, index_enabled=False)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    store = open_store(tmp_path)
    yield store
    store.abandon()


def index_all(store: MessageStore) -> None:
    """Sync the log and index all of it."""
    store.flush_log()
    while store.index_some():
        pass


def places(store: BaseStore, key: str, topic: str = "T") -> list[int]:
    """Where the index says that messages with the key lie."""
    entries = store.index.find(key_hash(topic, key), 0, TIME_MS_MAX)
    return [log_offset for log_offset in entries if log_offset is not None]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "index").iterdir())


def test_only_what_is_on_the_disk_is_indexed(store: MessageStore) -> None:
    first = append_keyed(store, "T", 0, "k")
    assert not store.index_some()
    assert store.index.status.position == 0
    store.flush_log()
    second = append_keyed(store, "T", 0, "k")
    assert store.index_some()
    assert not store.index_some()
    assert places(store, "k") == [first.log_offset]
    index_all(store)
    assert places(store, "k") == [second.log_offset, first.log_offset]
    assert store.index.status == (second.end_offset, 1, 2, "")


def test_a_step_takes_a_bounded_piece_of_the_log(
    store: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    appended = append_keyed(store, "T", 0, *["k"] * 10)
    size = (appended.end_offset - appended.log_offset) // 10
    monkeypatch.setattr(indexer, "STEP_BYTES", 3 * size)
    store.flush_log()
    positions = []
    while store.index_some():
        positions.append(store.index.status.position // size)
    assert positions == [3, 6, 9, 10]


def test_records_without_keys_and_ends_of_files_are_passed(store: MessageStore) -> None:
    last = 0
    while store.appended_offset < 40_000:  # three files
        append(store, ("T", 0, [b"x" * 900]))
        last = append_keyed(store, "T", 0, "k").log_offset
    index_all(store)
    assert store.index.status.position == store.appended_offset
    assert places(store, "k")[0] == last
    assert len(places(store, "k")) == store.queue_bounds("T", 0)[1] // 2


def test_a_clean_close_indexes_the_rest_and_says_so_in_the_checkpoint(tmp_path: Path) -> None:
    clock = WallClock()
    store = open_store(tmp_path, clock=clock)
    offsets = [append_keyed(store, "T", 0, "k").log_offset for _ in range(10)]
    clock.now_ms += 60_000
    last = append_keyed(store, "T", 0, "k")
    store.close()
    content = (tmp_path / "checkpoint").read_bytes()
    assert int.from_bytes(content[16:24], "big") == START_MS + 60_000
    store = open_store(tmp_path, clock=clock)
    assert places(store, "k") == [last.log_offset, *reversed(offsets)]
    index_all(store)  # the last record is looked at again, and found to be there
    assert store.index.status.entry_count == 11
    store.abandon()


def test_what_a_clean_close_leaves_is_done_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    offsets = [append_keyed(store, "T", 0, "k").log_offset for _ in range(10)]
    monkeypatch.setattr(indexer, "CLOSE_STEPS_MAX", 1)
    monkeypatch.setattr(indexer, "STEP_BYTES", 300)
    store.close()
    store = open_store(tmp_path)
    assert 0 < len(places(store, "k")) < 10
    index_all(store)
    assert places(store, "k") == offsets[::-1]
    assert store.index.status.entry_count == 10
    store.abandon()


def test_after_a_crash_the_index_is_built_again_without_anybody_waiting(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    offsets = [append_keyed(store, "T", 0, "k").log_offset for _ in range(20)]
    index_all(store)
    store.flush_queues()
    kept = names(tmp_path)[:2]
    store.abandon()
    store = open_store(tmp_path)
    assert names(tmp_path) == kept
    assert places(store, "k") == offsets[13::-1]
    index_all(store)
    assert places(store, "k") == offsets[::-1]
    assert store.index.status.entry_count == 20
    store.abandon()


def test_an_index_that_was_removed_is_built_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    offsets = [append_keyed(store, "T", 0, "k").log_offset for _ in range(10)]
    store.close()
    shutil.rmtree(tmp_path / "index")
    store = open_store(tmp_path)
    index_all(store)
    assert places(store, "k") == offsets[::-1]
    store.abandon()


def zeroed(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("harm", [Path.unlink, zeroed])
@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_an_index_file_that_is_gone_or_zeros_is_noticed_and_built_again(
    tmp_path: Path,
    number: int,
    harm: Callable[[Path], None],
    crashed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = WallClock()
    store = open_store(tmp_path, clock=clock)
    offsets = []
    for _ in range(25):
        clock.now_ms += 5
        offsets.append(append_keyed(store, "T", 0, "k").log_offset)
    index_all(store)
    store.flush_queues()
    store.abandon() if crashed else store.close()
    before = names(tmp_path)
    harm(tmp_path / "index" / before[number])
    with caplog.at_level(logging.INFO):
        store = open_store(tmp_path, clock=clock)
        index_all(store)
    assert places(store, "k") == offsets[::-1]
    assert store.index.status.entry_count == 25
    assert names(tmp_path) == before
    # The newest of a crashed store is built again whatever has become of it.
    assert "built again" in caplog.text or (crashed and number == 3)
    store.close()


def test_several_missing_files_and_a_record_between_two(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append_keyed(store, "T", 0, *["x"] * 6)
    record = append_keyed(store, "T", 0, "a b c").log_offset
    offsets = [append_keyed(store, "T", 0, "k").log_offset for _ in range(25)]
    store.close()
    for number in (1, 3):
        (tmp_path / "index" / names(tmp_path)[number]).unlink()
    store = open_store(tmp_path)
    index_all(store)
    assert [places(store, key) for key in "abc"] == [[record]] * 3
    assert places(store, "k") == offsets[::-1]
    assert store.index.status.entry_count == 34
    store.abandon()


def test_where_records_have_no_keys_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexer, "STEP_BYTES", 300)
    store = open_store(tmp_path)
    for _ in range(4):
        append(store, ("T", 0, [b"no key"] * 5))
        append_keyed(store, "T", 0, *["k"] * 7)
    store.close()
    made = [path.stat().st_ino for path in sorted((tmp_path / "index").iterdir())]
    assert len(made) == 4
    store = open_store(tmp_path)
    index_all(store)
    assert store.index.status.position == store.appended_offset
    assert [path.stat().st_ino for path in sorted((tmp_path / "index").iterdir())] == made
    store.abandon()


class CountingFiles(FaultyFiles):
    """Counts the reads of index files."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def open(self, path: StrPath) -> File:
        return CountedFile(super().open(path), self) if "index" in str(path) else super().open(path)


class CountedFile(FaultyFile):
    def __init__(self, file: File, disk: CountingFiles) -> None:
        super().__init__(file, disk)
        self._counts = disk

    def pread(self, size: int, offset: int, *, nowait: bool = False) -> bytes:
        self._counts.reads += 1
        return super().pread(size, offset, nowait=nowait)


def test_what_a_start_looks_into_does_not_grow_with_the_messages_of_a_key(tmp_path: Path) -> None:
    options = replace(SMALL, index_sizes=Sizes(hash_slots=4, entries=101))
    store = open_store(tmp_path, options)
    for _ in range(100):
        append_keyed(store, "T", 0, *["tenant"] * 10)
    index_all(store)
    store.close()
    files = CountingFiles()
    store = open_store(tmp_path, options, files=files)
    index_all(store)
    assert (store.index.status.file_count, store.index.status.entry_count) == (10, 1000)
    assert files.reads < 10 * 10
    store.close()


def test_gaps_that_a_clean_close_leaves_are_looked_into_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    offsets = [append_keyed(store, "T", 0, "k").log_offset for _ in range(25)]
    store.close()
    (tmp_path / "index" / names(tmp_path)[2]).unlink()
    monkeypatch.setattr(indexer, "CLOSE_STEPS_MAX", 1)
    for _ in range(2):
        open_store(tmp_path).close()
        assert len(names(tmp_path)) == 3
    store = open_store(tmp_path)
    index_all(store)
    assert places(store, "k") == offsets[::-1]
    store.abandon()


def test_a_record_whose_keys_lie_in_two_files_is_whole_after_a_crash(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append_keyed(store, "T", 0, *["x"] * 6)
    record = append_keyed(store, "T", 0, "a b c").log_offset
    index_all(store)
    store.flush_queues()
    store.abandon()
    store = open_store(tmp_path)
    assert (places(store, "a"), places(store, "b")) == ([record], [])
    index_all(store)
    assert places(store, "a") == places(store, "b") == places(store, "c") == [record]
    assert store.index.status.entry_count == 9
    store.abandon()


def test_a_full_disk_stops_the_index_alone_and_not_for_good(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    store.prepare_next_file()
    offsets = [append_keyed(store, "T", 0, "k", "k k").log_offset for _ in range(4)]
    files.room = 0
    index_all(store)
    assert "no room" in store.index.status.stalled
    assert store.index.status.position == 0
    index_all(store)
    assert len(caplog.records) == 1  # said once
    files.room = None
    append_keyed(store, "T", 0, "other")  # messaging goes on
    index_all(store)
    assert store.index.status.stalled == ""
    assert places(store, "k")[2::3] == offsets[::-1]
    assert store.index.status.entry_count == 13
    store.abandon()


def test_a_disk_that_is_full_in_the_middle_of_a_record(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    append_keyed(store, "T", 0, *["x"] * 6)
    index_all(store)
    record = append_keyed(store, "T", 0, "a b c").log_offset
    files.room = 0
    index_all(store)
    assert store.index.status[:3] == (record, 1, 7)
    assert (places(store, "a"), places(store, "b")) == ([record], [])
    files.room = None
    index_all(store)
    assert places(store, "a") == places(store, "b") == places(store, "c") == [record]
    assert store.index.status[:3] == (store.appended_offset, 2, 9)
    store.abandon()


def test_a_damaged_log_stops_the_index_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    append_keyed(store, "T", 0, "k")
    damaged = append_keyed(store, "T", 0, "k")
    with (tmp_path / "commitlog" / f"{0:020d}").open("r+b") as log:
        log.seek(damaged.log_offset)
        log.write(b"\xff" * 8)
    index_all(store)
    index_all(store)
    assert str(damaged.log_offset) in store.index.status.stalled
    assert store.index.status.position == damaged.log_offset
    assert len(caplog.records) == 1
    store.abandon()


def test_without_an_index_nothing_is_added_but_what_is_there_is_kept_in_step(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path)
    append_keyed(store, "T", 0, "k")
    store.close()
    store = open_store(tmp_path, DISABLED)
    append_keyed(store, "T", 0, "k")
    index_all(store)
    assert len(places(store, "k")) == 1
    store.close()
    store = open_store(tmp_path)
    index_all(store)
    assert len(places(store, "k")) == 2
    store.abandon()


def test_a_copy_has_the_same_index(tmp_path: Path) -> None:
    writer = open_store(tmp_path / "writer")
    offsets = [append_keyed(writer, "T", 0, "k").log_offset for _ in range(10)]
    copy = open_copy(tmp_path)
    copy_all(writer, copy)
    copy.flush_log()
    while copy.index_some():
        pass
    assert places(copy, "k") == offsets[::-1]
    writer.close()
    copy.close()
    for name in names(tmp_path / "writer"):
        theirs, ours = (tmp_path / member / "index" / name for member in ("writer", "copy"))
        assert theirs.read_bytes() == ours.read_bytes()


@pytest.mark.parametrize("kept", [0, 1, 6, 7, 8, 13, 14, 19])
def test_a_cut_takes_what_was_behind_it_and_keeps_the_rest(tmp_path: Path, kept: int) -> None:
    writer = open_store(tmp_path / "writer")
    offsets = [append_keyed(writer, "T", 0, "k").log_offset for _ in range(20)]
    copy = open_copy(tmp_path)
    copy_all(writer, copy)
    copy.flush_log()
    while copy.index_some():
        pass
    copy.truncate(offsets[kept])
    whole_files = kept // 7 * 7
    assert places(copy, "k") == offsets[:whole_files][::-1]
    copy_all(writer, copy)
    copy.flush_log()
    while copy.index_some():
        pass
    assert places(copy, "k") == offsets[::-1]
    assert copy.index.status.entry_count == 20
    copy.abandon()
    writer.abandon()


def test_a_copy_that_begins_anew_has_an_empty_index(tmp_path: Path) -> None:
    writer = open_store(tmp_path / "writer")
    append_keyed(writer, "T", 0, *["k"] * 10)
    copy = open_copy(tmp_path)
    copy_all(writer, copy)
    copy.flush_log()
    assert copy.index_some()
    copy.reset_to(0)
    assert copy.index.status == (0, 0, 0, "")
    assert names(tmp_path / "copy") == []
    copy.abandon()
    writer.abandon()


def test_damage_within_a_record_that_was_on_the_disk_stops_it_too(tmp_path: Path) -> None:
    """The record's length is right, that of its body is not."""
    store = open_store(tmp_path)
    first = append_keyed(store, "T", 0, "k")
    damaged = append_keyed(store, "T", 0, "k")
    append_keyed(store, "T", 0, "k")
    store.close()
    shutil.rmtree(tmp_path / "index")
    body_bytes_at = damaged.log_offset + record.LAYOUTS[0].head_bytes - 4
    with (tmp_path / "commitlog" / "0".zfill(20)).open("r+b") as log:
        log.seek(body_bytes_at)
        log.write(b"\x00\xff\xff\xff")
    store = open_store(tmp_path)
    index_all(store)
    assert store.index.status.position == damaged.log_offset
    assert str(damaged.log_offset) in store.index.status.stalled
    assert places(store, "k") == [first.log_offset]
    store.abandon()

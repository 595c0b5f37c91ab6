from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import DiskFull, MessageNotFound
from cometmq.store.disk.files import OsFiles
from cometmq.store.disk.segments import Segment
from cometmq.store.log.transient import TransientBuffer
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import SMALL, FaultyFiles, append, bodies, open_store

POOLED = replace(SMALL, transient_bytes_max=4096)
FILE_BYTES = 1024


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> Iterator[MessageStore]:
    store = open_store(tmp_path, POOLED, files=files)
    store.flush_log()
    yield store
    store.abandon()


def segment(path: Path, start: int = 0) -> Segment:
    files = OsFiles()
    return Segment(files.create(path / str(start), FILE_BYTES), start, FILE_BYTES)


# --- the buffer -----------------------------------------------------------------------------------


def test_it_holds_what_it_was_given_until_it_is_written(tmp_path: Path) -> None:
    first, second = segment(tmp_path), segment(tmp_path, FILE_BYTES)
    buffer = TransientBuffer(100)
    assert (buffer.size_bytes, buffer.written(0)) == (0, 0)
    buffer.put(0, b"ab", first)
    buffer.put(2, b"cd", first)
    buffer.put(FILE_BYTES, b"ef", second)
    assert (buffer.size_bytes, buffer.written(FILE_BYTES + 2)) == (6, 0)
    buffer.write_out()
    assert (buffer.size_bytes, buffer.written(FILE_BYTES + 2)) == (0, FILE_BYTES + 2)
    assert first.pread(0, 6) == b"abcd\0\0"
    assert second.pread(FILE_BYTES, 3) == b"ef\0"


def test_pieces_end_to_end_go_to_their_own_files(tmp_path: Path) -> None:
    first, second = segment(tmp_path), segment(tmp_path, FILE_BYTES)
    buffer = TransientBuffer(10_000)
    buffer.put(FILE_BYTES - 2, b"ab", first)
    buffer.put(FILE_BYTES, b"cd", second)
    buffer.write_out()
    assert first.pread(FILE_BYTES - 2, 2) + second.pread(FILE_BYTES, 2) == b"abcd"


def test_a_single_batch_always_has_room(tmp_path: Path) -> None:
    buffer = TransientBuffer(10)
    assert buffer.has_room(1_000)
    buffer.put(0, bytes(6), segment(tmp_path))
    assert buffer.has_room(4)
    assert not buffer.has_room(5)


@given(st.lists(st.integers(1, 200), max_size=30), st.data())
def test_everything_is_in_its_place_however_often_it_is_written_out(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("files")
    files = [segment(folder, FILE_BYTES * n) for n in range(7)]
    buffer, end, wanted = TransientBuffer(10_000), 0, bytearray(7 * FILE_BYTES)
    for number, size in enumerate(sizes):
        if end // FILE_BYTES != (end + size - 1) // FILE_BYTES:  # a batch lies in one file
            end = (end // FILE_BYTES + 1) * FILE_BYTES
        piece = bytes([number + 1]) * size
        buffer.put(end, piece, files[end // FILE_BYTES])
        wanted[end : end + size] = piece
        end += size
        if data.draw(st.booleans()):
            buffer.write_out()
            assert buffer.written(end) == end
    buffer.write_out()
    assert b"".join(f.pread(f.start, FILE_BYTES) for f in files) == bytes(wanted)


# --- a store that uses it -------------------------------------------------------------------------


def test_what_waits_cannot_be_read_and_is_there_after_a_commit(store: MessageStore) -> None:
    before = store.written_offset
    appended = append(store, ("T", 0, [b"1", b"2"]))
    assert store.written_offset == before < store.appended_offset == appended.end_offset
    assert store.read_chunk(before, 1000) is None
    with pytest.raises(MessageNotFound):
        store.read_record(appended.log_offset)
    store.commit_log()
    assert store.written_offset == store.appended_offset
    assert bodies(store, "T", 0) == [b"1", b"2"]


def test_a_flush_writes_it_too(store: MessageStore) -> None:
    end = append(store, ("T", 0, [b"1"])).end_offset
    assert store.flush_log() == store.flushed_offset == store.written_offset == end


def test_a_process_that_dies_loses_what_waits_and_nothing_else(
    tmp_path: Path, store: MessageStore
) -> None:
    append(store, ("T", 0, [b"kept"]))
    store.commit_log()
    append(store, ("T", 0, [b"lost"]))
    store.abandon()
    again = open_store(tmp_path, POOLED)
    assert bodies(again, "T", 0) == [b"kept"]
    append(again, ("T", 0, [b"next"]))
    again.close()
    once_more = open_store(tmp_path, POOLED)
    assert once_more.clean_start
    assert bodies(once_more, "T", 0) == [b"kept", b"next"]
    once_more.abandon()


def test_a_full_buffer_is_written_by_the_append_that_finds_it_full(store: MessageStore) -> None:
    ends = [append(store, ("T", 0, [bytes(1500)])).end_offset for _ in range(4)]
    assert store.written_offset == ends[1]


def test_files_roll_over_in_memory(tmp_path: Path, store: MessageStore) -> None:
    large = replace(POOLED, transient_bytes_max=1 << 20)
    store.close()
    store = open_store(tmp_path, large)
    sent = [b"%d" % n * 700 for n in range(60)]
    for body in sent:
        append(store, ("T", 0, [body]))
    assert store.written_offset == 0
    store.commit_log()
    assert bodies(store, "T", 0) == sent
    store.close()


def test_a_full_disk_keeps_everything_in_memory_and_refuses_the_next(
    store: MessageStore, files: FaultyFiles
) -> None:
    sent = [b"a" * 1500, b"b" * 1500]
    for body in sent:
        append(store, ("T", 0, [body]))
    files.room = 100
    with pytest.raises(DiskFull):
        store.commit_log()
    end = store.appended_offset
    with pytest.raises(DiskFull):
        append(store, ("T", 0, [b"c" * 1500]))
    assert store.appended_offset == end
    files.room = None
    store.commit_log()
    assert bodies(store, "T", 0) == sent


def test_one_thread_writes_out_while_the_writer_appends(store: MessageStore) -> None:
    done = threading.Event()

    def commit() -> None:
        while not done.is_set():
            store.commit_log()

    thread = threading.Thread(target=commit)
    thread.start()
    try:
        for number in range(500):
            append(store, ("T", 0, [b"%d" % number]))
            assert store.written_offset <= store.appended_offset
    finally:
        done.set()
        thread.join()
    store.commit_log()
    assert bodies(store, "T", 0) == [b"%d" % n for n in range(500)]

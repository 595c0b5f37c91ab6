from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cometmq.errors import DiskFull, ReplicationBroken, StoreFailed
from cometmq.format import record
from cometmq.store.disk.files import OsFiles
from cometmq.store.follower import FollowerStore
from cometmq.store.log.commitlog import CommitLog
from cometmq.store.metadata import identity
from cometmq.store.writer import MessageStore
from tests.support.stores.copies import (
    Watcher,
    assert_copied,
    copy_all,
    open_copy,
    places,
    two_epochs,
    whole_log,
)
from tests.support.stores.small_stores import (
    LOG_FILE_BYTES,
    SMALL,
    FaultyFiles,
    WallClock,
    append,
    bodies,
    open_store,
    read_queue,
)

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.fixture
def writer(tmp_path: Path, rng: random.Random) -> Iterator[MessageStore]:
    store = two_epochs(tmp_path / "writer", rng)
    yield store
    store.abandon()


@pytest.mark.parametrize("chunk_bytes", [1, 100, 2000, 1_000_000])
def test_a_copy_is_the_same_bytes_and_the_same_queues(
    tmp_path: Path, writer: MessageStore, chunk_bytes: int
) -> None:
    copy = open_copy(tmp_path)
    copy_all(writer, copy, chunk_bytes)
    assert_copied(writer, copy)
    assert copy.epochs == writer.epochs
    copy.close()
    again = open_copy(tmp_path)
    assert again.clean_start
    assert again.epoch == writer.epoch, "following opens no epoch"
    assert_copied(writer, again)
    again.abandon()


def test_a_copy_survives_a_crash(tmp_path: Path, writer: MessageStore) -> None:
    copy = open_copy(tmp_path)
    copy_all(writer, copy)
    copy.abandon()
    again = open_copy(tmp_path)
    assert not again.clean_start
    assert_copied(writer, again)
    again.abandon()


def test_a_copy_becomes_a_writer_that_goes_on(tmp_path: Path, writer: MessageStore) -> None:
    copy = open_copy(tmp_path)
    copy_all(writer, copy)
    copy.close()
    grown = open_store(tmp_path / "copy")
    assert grown.epoch == writer.epoch + 1
    assert grown.epochs == [*writer.epochs, (writer.epoch + 1, writer.appended_offset)]
    assert append(grown, ("A", 0, [b"more"])).queue_offsets == [writer.queue_bounds("A", 0)[1]]
    grown.abandon()


def test_what_is_copied_is_told_in_the_order_of_the_log(tmp_path: Path) -> None:
    writer = open_store(tmp_path / "writer")
    first = append(writer, ("A", 0, [b"1", b"2"]), ("S", 0, [b"s"]), ("B", 0, [b"3"]))
    copy, watcher = open_copy(tmp_path), Watcher()
    copy_all(writer, copy, 1_000_000, watcher)
    at = [found.log_offset for topic in "ASB" for found in read_queue(copy, topic, 0)]
    assert watcher.heard == [
        ("A", 0, at[2], 2),
        ("S", 0, at[3], 1),
        ("S", at[2], b"s"),
        ("B", 0, first.end_offset, 1),
    ]
    copy.abandon()
    writer.abandon()


def test_an_end_mark_alone_is_dispatched_too(tmp_path: Path, writer: MessageStore) -> None:
    copy = open_copy(tmp_path)
    while copy.appended_offset < LOG_FILE_BYTES:
        chunk = writer.read_chunk(copy.appended_offset, 3000)
        assert chunk is not None
        copy.append(copy.appended_offset, chunk.data, Watcher())
    assert copy.dispatched_offset == copy.appended_offset == LOG_FILE_BYTES
    copy.abandon()


def test_a_copy_knows_every_epoch_that_it_has_seen(tmp_path: Path) -> None:
    open_store(tmp_path / "copy", epoch_floor=9).close()
    copy = open_copy(tmp_path)
    copy.adopt_epochs([(7, 0)])
    assert (copy.epochs, copy.epoch) == ([(7, 0)], 10)
    copy.abandon()


def test_chunks_are_whole_records_or_an_end_mark(writer: MessageStore) -> None:
    at, marks = 0, 0
    while chunk := writer.read_chunk(at, 1500):
        if chunk.data == record.blank(LOG_FILE_BYTES - at % LOG_FILE_BYTES):
            marks += 1
            assert chunk.next_offset % LOG_FILE_BYTES == 0
        else:
            sizes = [found.size for found in record.decode_all(chunk.data)]
            assert sum(sizes) == len(chunk.data) == chunk.next_offset - at
            assert len(chunk.data) <= 1500 or len(sizes) == 1
        at = chunk.next_offset
    assert at == writer.appended_offset
    assert marks == writer.appended_offset // LOG_FILE_BYTES


# --- what is refused ------------------------------------------------------------------------------


def test_what_does_not_come_next_is_refused(tmp_path: Path, writer: MessageStore) -> None:
    copy, watcher = open_copy(tmp_path), Watcher()
    copy.adopt_epochs(writer.epochs)
    first = writer.read_chunk(0, 3000)
    assert first is not None
    second = writer.read_chunk(first.next_offset, 3000)
    assert second is not None
    for offset, data in [
        (first.next_offset, second.data),  # a gap
        (0, second.data),  # of another place
        (0, first.data[:-1]),
        (0, b""),
        (0, record.blank(100)),  # no end mark of this place
        (0, first.data + b"\0"),
    ]:
        with pytest.raises(ReplicationBroken):
            copy.append(offset, data, watcher)
        assert copy.appended_offset == 0
    assert copy.append(0, first.data, watcher) == first.next_offset
    copy.abandon()


@pytest.mark.parametrize("at", [4, 8, 20, 28, 100, -1])
def test_a_changed_byte_is_refused(tmp_path: Path, writer: MessageStore, at: int) -> None:
    copy = open_copy(tmp_path)
    copy.adopt_epochs(writer.epochs)
    chunk = writer.read_chunk(0, 5000)
    assert chunk is not None
    data = bytearray(chunk.data)
    data[at] ^= 0x55
    if at == 20:  # of the queue offset: only the queue notices
        with pytest.raises(StoreFailed):
            copy.append(0, bytes(data), Watcher())
    else:
        with pytest.raises(ReplicationBroken):
            copy.append(0, bytes(data), Watcher())
    copy.abandon()


def test_store_times_that_go_back_are_refused(tmp_path: Path) -> None:
    clock = WallClock()
    writer = open_store(tmp_path / "writer", clock=clock)
    end = append(writer, ("A", 0, [b"later"])).end_offset
    earlier = record.encode(
        b"A", 0, b"x", b"", born_time_ms=1, born_host=bytes(8), store_host=bytes(8),
        queue_offset=1, log_offset=end, store_time_ms=clock.now_ms - 1,
    )  # fmt: skip
    copy = open_copy(tmp_path)
    copy_all(writer, copy)
    with pytest.raises(ReplicationBroken):
        copy.append(end, earlier, Watcher())
    copy.abandon()
    writer.abandon()


def test_a_full_disk_changes_nothing(tmp_path: Path, writer: MessageStore) -> None:
    files = FaultyFiles()
    copy = open_copy(tmp_path, files)
    copy_all(writer, copy, 3000)
    copy.truncate(read_queue(writer, "A", 0)[10].log_offset)
    end = copy.appended_offset
    chunk = writer.read_chunk(end, 3000)
    assert chunk is not None
    files.room = 100
    with pytest.raises(DiskFull):
        copy.append(end, chunk.data, Watcher())
    assert copy.appended_offset == end
    files.room = None
    copy_all(writer, copy)
    assert_copied(writer, copy)
    copy.abandon()


# --- cutting --------------------------------------------------------------------------------------


def test_a_log_can_be_cut_anywhere_and_grows_again(
    tmp_path: Path, writer: MessageStore, rng: random.Random
) -> None:
    copy = open_copy(tmp_path)
    for place in [*rng.sample(places(writer), 6), LOG_FILE_BYTES]:
        copy_all(writer, copy)
        copy.flush_log()
        copy.flush_queues()
        copy.truncate(place)
        assert copy.appended_offset == copy.flushed_offset == copy.dispatched_offset == place
        offset, data = copy.last_record()
        assert (offset == -1) == (place == 0)
        assert place == 0 or whole_log(writer)[offset : offset + len(data)] == data
        copy.close()
        copy = open_copy(tmp_path)
        assert copy.clean_start
    copy_all(writer, copy)
    assert_copied(writer, copy)
    copy.abandon()


def test_a_log_that_was_emptied_in_part_is_not_taken_for_one_that_lost_its_state(
    tmp_path: Path, writer: MessageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever opens an empty log to write refuses it where it had a state."""
    writer.settle_state()
    writer.close()
    follower = FollowerStore.open(tmp_path / "writer", SMALL)

    class Killed(BaseException):
        pass

    def killed_behind_it(log: CommitLog, offset: int, time_ms: int) -> None:
        truncate(log, offset, time_ms)
        raise Killed

    truncate = CommitLog.truncate
    monkeypatch.setattr(CommitLog, "truncate", killed_behind_it)
    with pytest.raises(Killed):
        follower.truncate(follower.min_offset)
    follower.abandon()
    known = identity.load(OsFiles(8), tmp_path / "writer" / "cometmq.json")
    assert known is not None
    assert not known.has_state


def test_everything_can_be_forgotten(tmp_path: Path, writer: MessageStore) -> None:
    copy = open_copy(tmp_path)
    copy_all(writer, copy)
    copy.flush_queues()
    copy.reset_to(0)
    assert (copy.min_offset, copy.appended_offset, list(copy.queues())) == (0, 0, [])
    copy.abandon()
    again = open_copy(tmp_path)
    assert again.appended_offset == 0
    assert again.epoch == writer.epoch, "what was known of epochs stays"
    copy_all(writer, again)
    assert_copied(writer, again)
    again.abandon()


@pytest.mark.parametrize("log_files", [0, 2])
def test_a_log_can_begin_anew_behind_its_old_end(
    tmp_path: Path, writer: MessageStore, log_files: int
) -> None:
    copy = open_copy(tmp_path)
    while copy.appended_offset < log_files * LOG_FILE_BYTES:
        chunk = writer.read_chunk(copy.appended_offset, 3000)
        assert chunk is not None
        copy.append(copy.appended_offset, chunk.data, Watcher())
    start = writer.appended_offset // LOG_FILE_BYTES * LOG_FILE_BYTES
    copy.reset_to(start)
    copy.close()
    copy = open_copy(tmp_path)
    assert (copy.min_offset, copy.appended_offset) == (start, start)
    copy.adopt_epochs(writer.epochs)
    copy_all(writer, copy)
    assert whole_log(copy) == whole_log(writer)[start:]
    low, high = copy.queue_bounds("A", 0)
    assert low > 0, "older messages are not there"
    assert high == writer.queue_bounds("A", 0)[1]
    assert bodies(copy, "A", 0) == bodies(writer, "A", 0)[low:]
    copy.abandon()

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.errors import (
    BatchMalformed,
    BatchTooLarge,
    BodyChecksumMismatch,
    CometError,
    MessageNotFound,
    StoreFailed,
    TopicNameInvalid,
)
from cometmq.format import record
from cometmq.format.taghash import java_hash
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import (
    HOST,
    LOG_FILE_BYTES,
    SMALL,
    START_MS,
    FaultyFiles,
    WallClock,
    append,
    bodies,
    encoded,
    open_store,
    read_queue,
)

pytestmark = pytest.mark.usefixtures("implementation")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    store = open_store(tmp_path)
    yield store
    store.abandon()


def test_a_new_store_is_empty(store: MessageStore) -> None:
    assert (store.epoch, store.clean_start, len(store.store_id)) == (1, True, 32)
    assert store.min_offset == store.appended_offset == store.flushed_offset == 0
    assert list(store.queues()) == []
    assert store.queue_bounds("T", 0) == (0, 0)
    assert store.read_units("T", 0, 0, 10) == b""


def test_a_batch_may_span_queues_and_topics_and_name_a_queue_twice(store: MessageStore) -> None:
    first = append(store, ("A", 0, [b"1", b"2"]), ("B", 7, [b"3"]), ("A", 0, [b"4"]))
    second = append(store, ("A", 0, [b"5"]))
    assert first.queue_offsets == [0, 0, 2]
    assert first.segment_bytes == [2 * 93, 93, 93]
    assert second.queue_offsets == [3]
    assert second.log_offset == first.end_offset == store.appended_offset - 93
    assert bodies(store, "A", 0) == [b"1", b"2", b"4", b"5"]
    assert bodies(store, "B", 7) == [b"3"]
    assert sorted(store.queues()) == [("A", 0), ("B", 7)]


def test_what_only_the_broker_knows_is_filled_in(store: MessageStore) -> None:
    append(store, ("A", 0, [b"1"]))
    appended = append(store, ("A", 0, [b"2"]), tag="blue")
    found = read_queue(store, "A", 0)[1]
    assert (found.queue_offset, found.log_offset) == (1, appended.log_offset)
    assert found.store_time_ms == appended.store_time_ms == START_MS
    assert store.read_units("A", 0, 1, 1)[12:] == java_hash("blue").to_bytes(8, "big", signed=True)


def test_store_times_never_decrease(tmp_path: Path) -> None:
    clock = WallClock()
    store = open_store(tmp_path, clock=clock)
    append(store, ("A", 0, [b"1"]))
    clock.now_ms -= 60_000
    append(store, ("A", 0, [b"2"]))
    store.close()
    store = open_store(tmp_path, clock=clock)
    assert store.last_store_time_ms == START_MS
    append(store, ("A", 0, [b"3"]))
    times = [found.store_time_ms for found in read_queue(store, "A", 0)]
    store.close()
    assert times == [START_MS] * 3


def test_the_log_rolls_over_files(store: MessageStore) -> None:
    for number in range(40):
        append(store, ("A", number % 2, [bytes([number]) * 1500]))
    assert store.appended_offset > 3 * LOG_FILE_BYTES
    for queue in (0, 1):
        expected = [bytes([number]) * 1500 for number in range(queue, 40, 2)]
        assert bodies(store, "A", queue) == expected


def forged(body: bytes = b"x") -> bytes:
    good = bytearray(encoded("A", 0, body))
    good[8] ^= 1
    return bytes(good)


@pytest.mark.parametrize(
    ("records", "segments", "error", "segment"),
    [
        (forged(), [("A", 0, 1)], BodyChecksumMismatch, 0),
        (encoded("A", 0, b"x") + forged(), [("A", 0, 1), ("A", 0, 1)], BodyChecksumMismatch, 1),
        (encoded("A", 0, b"x"), [("A", 1, 1)], CometError, 0),
        (encoded("A", 0, b"x"), [("A", 0, 2)], BatchMalformed, None),
        (encoded("A", 0, b"x"), [("A", 0, -1), ("A", 0, 1)], CometError, 0),
        (encoded("A", 0, b"x"), [("A", -1, 1)], BatchMalformed, 0),
        (encoded("A", 0, b"x"), [("../A", 0, 1)], TopicNameInvalid, 0),
        (encoded("A", 0, b"x"), [("Ä", 0, 1)], TopicNameInvalid, 0),
        (b"", [("A", 0, 1)], BatchMalformed, None),
        (encoded("A", 0, b"x"), [], BatchMalformed, None),
        (b"x" * (LOG_FILE_BYTES - 7), [("A", 0, 1)], BatchTooLarge, None),
    ],
)
def test_a_refused_batch_changes_nothing(
    store: MessageStore,
    records: bytes,
    segments: list[tuple[str, int, int]],
    error: type[CometError],
    segment: int | None,
) -> None:
    append(store, ("A", 0, [b"before"]))
    end = store.appended_offset
    with pytest.raises(error) as refused:
        store.append(records, segments, born_host=HOST, store_host=HOST)
    if segment is not None:
        assert refused.value.segment == segment
    assert store.appended_offset == store.dispatched_offset == end
    assert list(store.queues()) == [("A", 0)]
    append(store, ("A", 0, [b"after"]))
    assert bodies(store, "A", 0) == [b"before", b"after"]


def test_a_message_is_found_at_its_offset_only(store: MessageStore) -> None:
    at = append(store, ("A", 0, [b"s", b"x" * 9000])).log_offset
    small = store.read_record(at)
    assert record.decode(small).body == b"s"
    assert record.decode(store.read_record(at + len(small))).body == b"x" * 9000
    for wrong in (-1, at + 1, at + len(small) + 4, store.appended_offset, 10**18):
        with pytest.raises(MessageNotFound):
            store.read_record(wrong)


def test_a_record_inside_a_body_is_not_a_message(store: MessageStore) -> None:
    inner = encoded("A", 0, b"trick")
    at = append(store, ("A", 0, [inner])).log_offset
    with pytest.raises(MessageNotFound):
        store.read_record(at + 88)


def test_flushing_moves_the_flushed_offset(store: MessageStore) -> None:
    end = append(store, ("A", 0, [b"1"])).end_offset
    assert store.flushed_offset == 0
    assert store.flush_log() == store.flushed_offset == end
    store.flush_queues()
    assert store.dispatched_offset == end


def test_a_failed_sync_ends_all_writing(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    append(store, ("A", 0, [b"1"]))
    files.sync_fails = True
    with pytest.raises(StoreFailed):
        store.flush_log()
    files.sync_fails = False
    for write in (store.flush_log, store.flush_queues, lambda: append(store, ("A", 0, [b"2"]))):
        with pytest.raises(StoreFailed):
            write()
    assert store.flushed_offset == 0
    assert bodies(store, "A", 0) == [b"1"], "reading goes on"
    with pytest.raises(StoreFailed):
        store.close()
    store = open_store(tmp_path)
    assert not store.clean_start
    assert bodies(store, "A", 0) == [b"1"]
    store.close()


def test_a_clean_close_is_taken_up_without_reading_the_log(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"1"]), ("B", 1, [b"2"]))
    identity, end = store.store_id, store.appended_offset
    store.close()
    assert not (tmp_path / "abort").exists()
    store = open_store(tmp_path)
    assert (store.clean_start, store.epoch, store.store_id) == (True, 2, identity)
    assert store.appended_offset == store.flushed_offset == store.dispatched_offset == end
    append(store, ("A", 0, [b"3"]))
    assert bodies(store, "A", 0) == [b"1", b"3"]
    store.close()


def test_the_folder_tells_that_it_is_open(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert (tmp_path / "abort").read_text().isdigit()
    assert (tmp_path / "lock").read_bytes() == b"lock"
    store.abandon()
    assert (tmp_path / "abort").exists()


def test_every_opening_is_an_epoch_above_all_known(tmp_path: Path) -> None:
    for expected, floor in ((1, 0), (2, 0), (11, 10), (12, 3)):
        store = open_store(tmp_path, epoch_floor=floor)
        assert store.epoch == expected
        append(store, ("A", 0, [b"x"]))
        store.abandon()
    lines = (tmp_path / "cometmq.epochs").read_text().splitlines()
    assert lines[1:-1] == ["1 0", "2 93", "11 186", "12 279"]


def test_an_epoch_without_a_byte_is_not_kept(tmp_path: Path) -> None:
    for _ in range(3):
        open_store(tmp_path).close()
    assert (tmp_path / "cometmq.epochs").read_text().splitlines()[1:-1] == ["3 0"]


def test_a_dropped_topic_counts_from_0_again(store: MessageStore) -> None:
    append(store, ("A", 0, [b"old"]), ("B", 0, [b"other"]))
    store.drop_topic("A")
    assert store.queue_bounds("A", 0) == (0, 0)
    append(store, ("A", 0, [b"new"]))
    assert bodies(store, "A", 0) == [b"new"]
    assert bodies(store, "B", 0) == [b"other"]


class Background:
    """Threads that repeat their work until the block ends; what goes wrong is kept."""

    def __init__(self, *works: Callable[[], None]) -> None:
        self.wrong: list[object] = []
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(work,)) for work in works]

    def _repeat(self, work: Callable[[], None]) -> None:
        try:
            while not self._done.is_set():
                work()
        except BaseException as error:
            self.wrong.append(error)

    def __enter__(self) -> Background:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()


def test_threads_read_and_flush_while_one_appends(tmp_path: Path) -> None:
    store = open_store(tmp_path, replace(SMALL, open_files_max=16))

    def read() -> None:
        for queue in range(3):
            found = bodies(store, "A", queue)
            assert found == [b"%d" % number for number in range(len(found))]

    def flush() -> None:
        before = store.appended_offset
        assert store.flush_log() >= before

    with Background(read, flush, store.flush_queues, store.prepare_next_file) as background:
        for number in range(150):
            append(store, *(("A", queue, [b"%d" % number]) for queue in range(3)))
    store.close()
    assert background.wrong == []

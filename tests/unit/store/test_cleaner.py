from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cometmq.errors import DiskFull, MessageNotFound, StoreFailed
from cometmq.format import queueunit
from cometmq.store.cleaner import Pins
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import (
    LOG_FILE_BYTES,
    START_MS,
    FaultyFiles,
    WallClock,
    append,
    bodies,
    open_store,
    read_queue,
)

BODY = b"." * 1_000
PER_FILE = 14  # messages with that body in a log file


def filled(directory: Path, log_files: int = 5, files: FaultyFiles | None = None) -> MessageStore:
    """Message n of queue A/0 is stored at START_MS + n, so many files full of them; queue B/0 got
    one message at the very beginning, queue C/0 one at the end. All is on the disk.
    """
    clock = WallClock()
    store = open_store(directory, clock=clock, files=files)
    append(store, ("B", 0, [b"early"]))
    while store.appended_offset < (log_files - 1) * LOG_FILE_BYTES + 2_000:
        append(store, ("A", 0, [b"%05d" % (clock.now_ms - START_MS) + BODY]))
        clock.now_ms += 1
    append(store, ("C", 0, [b"late"]))
    on_disk(store)
    return store


def on_disk(store: MessageStore) -> None:
    store.flush_log()
    store.flush_queues()


def remove(store: MessageStore, count: int) -> int:
    """Let ``count`` log files go; where the log begins then."""
    end = store.cleaner.log_files()[count - 1].end
    store.cleaner.forget_before(end)
    for _ in range(count):
        assert store.cleaner.remove_first() == LOG_FILE_BYTES
    store.cleaner.remove_spare_files()
    return end


def queue_files(directory: Path, topic: str) -> list[int]:
    return sorted(int(path.name) for path in (directory / "consumequeue" / topic / "0").iterdir())


def log_files(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in (directory / "commitlog").iterdir())


def test_files_are_as_old_as_what_follows_them(tmp_path: Path) -> None:
    store = filled(tmp_path)
    found = store.cleaner.log_files()
    assert [file.start for file in found] == [0, 1 * 16384, 2 * 16384, 3 * 16384]
    for file in found:
        follows = next(r for r in read_queue(store, "A", 0) if r.log_offset >= file.end)
        assert file.newest_ms == follows.store_time_ms
    assert store.cleaner.oldest_time_ms() == START_MS
    store.abandon()


def test_the_queues_begin_later_before_the_log_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is told of a message in between must find it."""
    store = filled(tmp_path)
    forget, begins = store._dispatcher.forget_before, list[int]()

    def looking(log_start: int) -> None:
        forget(log_start)
        begins.append(store.min_offset)

    monkeypatch.setattr(store._dispatcher, "forget_before", looking)
    remove(store, 1)
    assert (begins, store.min_offset) == ([0], LOG_FILE_BYTES)
    store.abandon()


def test_neither_the_last_file_nor_what_is_in_memory_may_go(tmp_path: Path) -> None:
    store = filled(tmp_path, 3)
    assert [file.start for file in store.cleaner.log_files()] == [0, 16384]
    append(store, ("A", 0, [BODY] * PER_FILE))  # does not fit where the last one lies
    assert [file.start for file in store.cleaner.log_files()] == [0, 16384], "not yet on the disk"
    store.flush_queues()
    assert [file.start for file in store.cleaner.log_files()] == [0, 16384], "its queues alone are"
    store.flush_log()
    assert [file.start for file in store.cleaner.log_files()] == [0, 16384], "nor are its queues"
    store.flush_queues()
    assert [file.start for file in store.cleaner.log_files()] == [0, 16384, 2 * 16384]
    store.abandon()


def test_a_log_that_ends_with_a_file_keeps_that_file(tmp_path: Path) -> None:
    store = filled(tmp_path, 2)
    store._log.end_file()
    store._dispatcher.reached(store._log.end)
    on_disk(store)
    assert store.appended_offset % LOG_FILE_BYTES == 0
    assert [file.start for file in store.cleaner.log_files()] == [0]
    store.abandon()


@pytest.mark.parametrize("clean", [True, False])
def test_log_and_queues_begin_further_up(tmp_path: Path, clean: bool) -> None:
    store = filled(tmp_path)
    before = read_queue(store, "A", 0)
    start = remove(store, 2)
    kept = [found for found in before if found.log_offset >= start]
    low, high = kept[0].queue_offset, before[-1].queue_offset + 1

    def check(now: MessageStore) -> None:
        assert now.min_offset == start
        assert now.queue_bounds("A", 0) == (low, high)
        assert [found.body for found in read_queue(now, "A", 0)] == [found.body for found in kept]
        assert now.read_units("A", 0, low - 1, 1) == b""
        with pytest.raises(MessageNotFound):
            now.read_record(before[low - 1].log_offset)
        with pytest.raises(MessageNotFound):
            now.read_chunk(0, 1_000)
        with pytest.raises(MessageNotFound):
            now.read_raw(0, 1_000)

    check(store)
    assert log_files(tmp_path)[0] == start
    assert queue_files(tmp_path, "A")[0] > 0
    if clean:
        store.close()
    else:
        store.abandon()
    again = open_store(tmp_path)
    check(again)
    again.close()


@pytest.mark.parametrize("clean", [True, False])
def test_a_queue_whose_messages_are_all_gone_goes_on_counting(tmp_path: Path, clean: bool) -> None:
    store = filled(tmp_path)
    remove(store, 3)
    assert store.queue_bounds("B", 0) == (1, 1)
    if clean:
        store.close()
    else:
        store.abandon()
    again = open_store(tmp_path)
    assert again.queue_bounds("B", 0) == (1, 1)
    assert append(again, ("B", 0, [b"next"])).queue_offsets == [1]
    assert bodies(again, "B", 0) == [b"next"]
    again.close()


def test_a_queues_file_goes_when_its_successor_has_begun_to_go(tmp_path: Path) -> None:
    """Recovery takes a queue whose first unit is in the log, and no filler, for one that has lost a
    file.
    """
    store = filled(tmp_path)
    for count in (1, 1, 1):
        remove(store, count)
        low, _ = store.queue_bounds("A", 0)
        first = queue_files(tmp_path, "A")[0] // 20
        assert first <= low - 1 < first + 16
    store.abandon()


def test_bytes_on_disk_are_counted_without_asking_for_each_file(tmp_path: Path) -> None:
    store = filled(tmp_path)
    paths = [path for path in tmp_path.glob("co[nm]*/**/*[0-9]") if path.is_file()]
    allocated = sum(path.stat().st_blocks * 512 for path in paths)
    counted = store.cleaner.store_bytes()
    assert abs(counted - allocated) <= 4096 * len(paths), "a block for each file, at the most"
    remove(store, 2)
    assert store.cleaner.store_bytes() == counted - 2 * LOG_FILE_BYTES
    [disk, of_quota] = store.cleaner.spaces(10 * LOG_FILE_BYTES)
    assert disk.used_bytes > 0
    assert disk.free_bytes > 0
    assert of_quota.used_bytes + of_quota.free_bytes == 10 * LOG_FILE_BYTES
    assert len(store.cleaner.spaces(0)) == 1
    store.abandon()


def test_a_topic_shows_only_what_is_young_enough(tmp_path: Path) -> None:
    store = filled(tmp_path)
    found = read_queue(store, "A", 0)
    wanted = found[20]
    store.cleaner.forget_older("A", wanted.store_time_ms)
    assert store.queue_bounds("A", 0)[0] == 20
    assert store.queue_bounds("B", 0) == (0, 1), "the others stay as they are"
    store.cleaner.forget_older("A", wanted.store_time_ms - 5)
    assert store.queue_bounds("A", 0)[0] == 20, "never back"
    store.cleaner.forget_older("A", found[-1].store_time_ms + 1)
    assert store.queue_bounds("A", 0) == (len(found), len(found))
    store.cleaner.forget_older("nothing", 1)
    store.abandon()


def test_epochs_of_what_is_gone_go_at_the_next_opening(tmp_path: Path) -> None:
    store = filled(tmp_path, 2)
    for _ in range(3):
        store.close()
        store = open_store(tmp_path)
        append(store, ("A", 0, [BODY] * PER_FILE))
    on_disk(store)
    assert [number for number, _ in store.epochs] == [1, 2, 3, 4]
    start = remove(store, 3)
    store.close()
    store = open_store(tmp_path)
    owners = [number for number, begin in store.epochs if begin > start]
    assert [number for number, _ in store.epochs] == [owners[0] - 1, *owners]
    store.close()


# --- readers --------------------------------------------------------------------------------------


def test_the_lowest_pin_counts() -> None:
    pins = Pins()
    assert pins.lowest() is None
    with pins.hold(500) as first, pins.hold(300):
        assert pins.lowest() == 300
        first.offset = 100
        assert pins.lowest() == 100
    assert pins.lowest() is None


def test_readers_and_the_writer_go_on_while_files_go(tmp_path: Path) -> None:
    """Everybody gets the right message, or is told that it is gone; nobody gets another one."""
    store = filled(tmp_path, 12)
    stop = threading.Event()

    def read_on() -> int:
        count = 0
        while not stop.is_set():
            low, _ = store.queue_bounds("A", 0)
            units = store.read_units("A", 0, low, 8)
            if not units:
                continue
            spans = [(at, size) for at, size in _spans(units)]
            try:
                data = store.read_records(spans)
            except MessageNotFound:
                assert store.queue_bounds("A", 0)[0] > low
                continue
            assert data.count(BODY) == len(spans)
            assert b"%05d" % low + BODY in data
            count += 1
        return count

    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(read_on) for _ in range(2)]
        for number in range(9):
            remove(store, 1)
            _, high = store.queue_bounds("A", 0)
            append(store, ("A", 0, [b"%05d" % (high + n) + BODY for n in range(PER_FILE)]))
            on_disk(store)
            assert log_files(tmp_path)[0] == (number + 1) * LOG_FILE_BYTES
        stop.set()
        assert all(reader.result() for reader in readers)
    found = read_queue(store, "A", 0)
    assert [int(r.body[:5]) for r in found] == [r.queue_offset for r in found]
    store.close()


def _spans(units: bytes) -> list[tuple[int, int]]:
    return [(at, size) for at, size, _ in queueunit.iterate(units)]


def test_a_topic_that_is_made_anew_keeps_its_files(tmp_path: Path) -> None:
    """Their names are those of the queue that was dropped."""
    store = filled(tmp_path)
    store.drop_topic("A")
    append(store, ("A", 0, [b"anew"]))
    on_disk(store)
    remove(store, 3)
    assert queue_files(tmp_path, "A") == [0]
    assert bodies(store, "A", 0) == [b"anew"]
    store.close()


def test_a_disk_that_refuses_fails_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    store = filled(tmp_path, files=files)
    store.cleaner.forget_before(store.cleaner.log_files()[0].end)

    def refuse(path: object) -> None:
        raise StoreFailed(f"cannot sync {path}")

    monkeypatch.setattr(files, "sync_directory", refuse)
    with pytest.raises(StoreFailed):
        store.cleaner.remove_first()
    with pytest.raises(StoreFailed):
        append(store, ("A", 0, [b"x"]))
    store.abandon()


def test_a_full_disk_is_writable_again_after_a_file_has_gone(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = filled(tmp_path, files=files)
    files.room = 0
    with pytest.raises(DiskFull):
        append(store, ("A", 0, [BODY] * PER_FILE))
    remove(store, 1)
    files.room = None
    append(store, ("A", 0, [BODY] * PER_FILE))
    store.close()

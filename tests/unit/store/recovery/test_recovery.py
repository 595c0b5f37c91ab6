from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.store.layout import StorePaths, offset_name
from cometmq.store.log.commitlog import CommitLog
from cometmq.store.recovery.recovery import cut_tail
from cometmq.store.repair.repair import Accepted, repair
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import (
    LOG_FILE_BYTES,
    QUEUE_FILE_BYTES,
    SMALL,
    Deletions,
    FaultyFiles,
    WallClock,
    append,
    bodies,
    open_store,
)

pytestmark = pytest.mark.usefixtures("implementation")


def filled(root: Path, count: int, *, clock: WallClock | None = None, clean: bool = False) -> int:
    """``count`` messages of 1 KiB over two queues, nothing flushed; returns the log's end."""
    store = open_store(root, clock=clock)
    for number in range(count):
        append(store, ("A", number % 2, [b"%d " % number + bytes(1000)]))
    end = store.appended_offset
    if clean:
        store.close()
    else:
        store.abandon()
    return end


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def numbers(root: Path, **options: object) -> list[int]:
    store = open_store(root, **options)  # type: ignore[arg-type]
    found = [int(body.split(b" ")[0]) for queue in (0, 1) for body in bodies(store, "A", queue)]
    assert store.flushed_offset == store.appended_offset == store.dispatched_offset
    store.abandon()
    return sorted(found)


@pytest.mark.parametrize("count", [0, 1, 5, 14, 15, 40])
@pytest.mark.parametrize("boot", ["boot-1", "boot-2"])
def test_all_that_reached_the_files_is_back(tmp_path: Path, count: int, boot: str) -> None:
    store = open_store(tmp_path, files=FaultyFiles(boot="boot-1"))
    store.abandon()
    end = filled(tmp_path, count)
    files = FaultyFiles(boot=boot)
    store = open_store(tmp_path, files=files)
    assert not store.clean_start
    assert store.appended_offset == end
    store.abandon()
    assert numbers(tmp_path) == list(range(count))


def test_queues_are_rebuilt_from_nothing(tmp_path: Path) -> None:
    filled(tmp_path, 40)
    shutil.rmtree(tmp_path / "consumequeue")
    # The machine restarted; nothing of the queues was on the disk, as the checkpoint says.
    assert numbers(tmp_path, files=FaultyFiles(boot="another")) == list(range(40))


def test_what_a_restart_of_the_machine_left_is_rebuilt(tmp_path: Path) -> None:
    clock = WallClock()
    store = open_store(tmp_path, clock=clock, files=FaultyFiles())
    ends = []
    for number in range(60):
        clock.now_ms += 1000
        ends.append(append(store, ("A", 0, [b"%d " % number + bytes(1000)])).end_offset)
        if number == 40:
            store.flush_log()
            store.flush_queues()
    store.abandon()
    # Units 41 to 50 never reached the disk, nor did the log behind message 54.
    queue_file = tmp_path / "consumequeue" / "A" / "0" / offset_name(2 * QUEUE_FILE_BYTES)
    overwrite(queue_file, (41 - 32) * 20, bytes((48 - 41) * 20))
    overwrite(queue_file.with_name(offset_name(3 * QUEUE_FILE_BYTES)), 0, bytes(3 * 20))
    newest = tmp_path / "commitlog" / offset_name(ends[54] // LOG_FILE_BYTES * LOG_FILE_BYTES)
    overwrite(newest, ends[54] % LOG_FILE_BYTES, bytes(500))
    assert numbers(tmp_path, files=FaultyFiles(boot="another")) == list(range(55))


def test_progress_is_told(tmp_path: Path) -> None:
    filled(tmp_path, 40)
    told: list[tuple[int, int]] = []
    MessageStore.open(
        tmp_path,
        SMALL,
        clock=WallClock(),
        files=FaultyFiles(boot="another"),
        progress=lambda done, total: told.append((done, total)),
    ).abandon()
    assert told[0][0] < LOG_FILE_BYTES
    assert sorted(told) == told
    assert told[-1] == (3 * LOG_FILE_BYTES, 3 * LOG_FILE_BYTES)


def test_old_records_behind_the_end_never_come_back(tmp_path: Path) -> None:
    """A later batch that ends where an old record starts must not bring that one back to life."""
    end = filled(tmp_path, 6)
    size = end // 6
    log_file = tmp_path / "commitlog" / offset_name(0)
    overwrite(log_file, 3 * size + 200, b"torn")  # 4 and 5 are whole behind it
    assert numbers(tmp_path, files=FaultyFiles(boot="another")) == [0, 1, 2]
    store = open_store(tmp_path)
    append(store, ("A", 1, [b"9 " + bytes(1000)]))
    assert store.appended_offset == 4 * size
    store.abandon()
    assert numbers(tmp_path) == [0, 1, 2, 9]
    assert not any(log_file.read_bytes()[4 * size :])


def test_what_is_behind_the_end_is_off_the_disk_at_once(tmp_path: Path) -> None:
    """Also where the log ends with a file, and nothing else would sync the next one."""
    filled(tmp_path, 40)
    files = FaultyFiles()
    log = CommitLog(StorePaths(tmp_path), files, LOG_FILE_BYTES)
    log.segments.load(files)
    cut_tail(log, files, LOG_FILE_BYTES)
    commit_log = tmp_path / "commitlog"
    assert files.synced == [str(commit_log / offset_name(LOG_FILE_BYTES)), str(commit_log)]
    assert not any((commit_log / offset_name(LOG_FILE_BYTES)).read_bytes())
    log.close()


def test_files_behind_the_end_are_removed(tmp_path: Path) -> None:
    filled(tmp_path, 40)
    overwrite(tmp_path / "commitlog" / offset_name(0), 0, b"\xff" * 8)
    # The first record is gone, and the checkpoint promises nothing: the log is empty.
    assert numbers(tmp_path, files=FaultyFiles(boot="another")) == []
    assert len(list((tmp_path / "commitlog").iterdir())) == 1


def flushed(root: Path, count: int) -> int:
    clock = WallClock()
    store = open_store(root, clock=clock)
    for number in range(count):
        clock.now_ms += 1
        append(store, ("A", number % 2, [b"%d " % number + bytes(1000)]))
    store.flush_log()
    store.flush_queues()
    end = store.appended_offset
    store.abandon()
    return end


def test_what_was_on_the_disk_is_not_cut_silently(tmp_path: Path) -> None:
    """The end of the log is gone although it was on the disk: opening is refused."""
    flushed(tmp_path, 10)
    path = tmp_path / "commitlog" / offset_name(0)
    content = path.read_bytes()
    size = flushed(tmp_path / "other", 1)
    for end in (5 * size, 9 * size, 10 * size - 4):
        path.write_bytes(content[:end].ljust(LOG_FILE_BYTES, b"\0"))
        with pytest.raises((StoreDamaged, StoreForeignFile), match="on the disk") as refused:
            open_store(tmp_path)
        assert "checkpoint" in str(refused.value) or "--accept-end" in str(refused.value)
        assert path.read_bytes()[:end] == content[:end], "the log is left as it is"
    path.write_bytes(content)
    assert numbers(tmp_path) == list(range(10))


def test_a_record_out_of_its_queues_order_is_damage(tmp_path: Path) -> None:
    end = filled(tmp_path, 4)
    queue_offset_at = end // 4 * 3 + 20  # the fourth record's
    overwrite(tmp_path / "commitlog" / offset_name(0), queue_offset_at, (7).to_bytes(8, "big"))
    with pytest.raises(StoreDamaged, match="is message 7 of queue 1 of A, whose next is 1"):
        open_store(tmp_path)


@pytest.mark.parametrize("boot", ["boot-1", "boot-2"])
def test_a_deleted_topic_does_not_come_back(tmp_path: Path, boot: str) -> None:
    store = open_store(tmp_path, files=FaultyFiles())
    append(store, ("A", 0, [b"old", b"older"]), ("B", 0, [b"kept"]), ("C", 0, [b"gone"]))
    append(store, ("S", 0, [b"A", b"C"]))
    for topic in ("A", "C"):
        store.drop_topic(topic)
    append(store, ("A", 0, [b"new"]), ("B", 0, [b"too"]))
    store.abandon()
    observer = Deletions()
    store = open_store(tmp_path, files=FaultyFiles(boot=boot), observer=observer)
    assert observer.seen == [b"A", b"C"]
    assert bodies(store, "A", 0) == [b"new"]
    assert bodies(store, "B", 0) == [b"kept", b"too"]
    assert ("C", 0) not in store.queues()
    store.close()
    store = open_store(tmp_path, observer=observer)
    assert observer.seen == [b"A", b"C"], "after a clean close nothing is dispatched again"
    store.abandon()


def test_a_recreated_queue_restarts_even_unobserved(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"old", b"older"]))
    store.drop_topic("A")
    append(store, ("A", 0, [b"new"]))
    store.abandon()
    store = open_store(tmp_path)
    assert bodies(store, "A", 0) == [b"new"]
    store.abandon()


@pytest.mark.parametrize("clean", [True, False])
def test_a_removed_log_file_is_noticed(tmp_path: Path, clean: bool) -> None:
    filled(tmp_path, 40, clean=clean)
    (tmp_path / "commitlog" / offset_name(LOG_FILE_BYTES)).unlink()
    with pytest.raises(StoreForeignFile, match="does not follow"):
        open_store(tmp_path)


def change_clean(root: Path, field: str, by: int) -> None:
    """As a version that put no checksum over the file could have left it, with a damage."""
    path = root / "cometmq.json"
    fields = json.loads(path.read_bytes())
    fields.pop("crc32", None)
    fields["clean"][field] += by
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("field", ["end", "last_crc32", "last_bytes"])
def test_where_a_clean_mark_does_not_hold_all_is_read(tmp_path: Path, field: str) -> None:
    end = filled(tmp_path, 5, clean=True)
    change_clean(tmp_path, field, -8)
    store = open_store(tmp_path)
    is_another = field == "last_bytes"  # a good record, which is longer than ours was
    assert (store.adoption is not None and store.adoption.log_changed) == is_another
    assert store.appended_offset == end
    store.abandon()
    assert numbers(tmp_path) == list(range(5))


def test_a_clean_mark_that_good_records_run_across_may_be_another_logs(tmp_path: Path) -> None:
    filled(tmp_path, 5, clean=True)
    change_clean(tmp_path, "last_offset", -8)
    with pytest.raises(StoreForeignFile, match="run across that place"):
        open_store(tmp_path)
    assert repair(tmp_path, Accepted()).losses == []
    assert numbers(tmp_path) == list(range(5))


def test_a_clean_mark_behind_its_record_leaves_no_hole(tmp_path: Path) -> None:
    filled(tmp_path, 5, clean=True)
    change_clean(tmp_path, "end", 96)
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="Nothing was cut"):
            open_store(tmp_path)


def test_bytes_of_another_program_that_are_no_record_go(tmp_path: Path) -> None:
    end = filled(tmp_path, 5, clean=True)
    overwrite(tmp_path / "commitlog" / offset_name(0), end, b"more")
    store = open_store(tmp_path)
    assert store.adoption is not None
    assert store.adoption.verified == store.appended_offset == end
    store.abandon()


def test_a_missing_epoch_file_is_damage(tmp_path: Path) -> None:
    filled(tmp_path, 5, clean=True)
    (tmp_path / "cometmq.epochs").unlink()
    with pytest.raises(StoreDamaged, match="epochs"):
        open_store(tmp_path)


def test_recovery_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    filled(tmp_path, 40)
    files = FaultyFiles(boot="another")
    files.sync_fails = True
    with pytest.raises(Exception, match="sync"):
        open_store(tmp_path, files=files)
    kept = json.loads((tmp_path / "cometmq.json").read_bytes())
    assert kept["boot_id"] != "another", "the old boot id makes the next one read it all again"
    assert numbers(tmp_path, files=FaultyFiles(boot="another")) == list(range(40))

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from cometmq.errors import MessageNotFound, StoreDamaged, StoreForeignFile, StoreLocked
from cometmq.store.layout import offset_name
from cometmq.store.restart.replay import Loss
from cometmq.store.tools.repair import Accepted, Repaired, repair
from cometmq.store.tools.verify import Report, verify
from tests.support.stores import (
    INDEX_SIZES,
    LOG_FILE_BYTES,
    QUEUE_FILE_BYTES,
    Deletions,
    FaultyFiles,
    WallClock,
    append,
    bodies,
    open_store,
)

MESSAGES = 40
BODY = bytes(1000)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store that was closed in order, with messages in two queues."""
    clock = WallClock()
    filling = open_store(tmp_path, clock=clock)
    for number in range(MESSAGES):
        clock.now_ms += 5
        append(filling, ("A", number % 2, [b"%d " % number + BODY]), keys=f"k{number}")
    filling.close()
    return tmp_path


def mended(root: Path, **accepted: object) -> Repaired:
    return repair(
        root,
        Accepted(**accepted),  # type: ignore[arg-type]
        observer=Deletions(),
        index_sizes=INDEX_SIZES,
        queue_file_bytes=QUEUE_FILE_BYTES,
    )


def report_of(root: Path) -> Report:
    return verify(root, index_sizes=INDEX_SIZES)


def starts_of(root: Path) -> list[int]:
    row = (root / "consumequeue/A/0", root / "consumequeue/A/1")
    units = [b"".join(p.read_bytes() for p in sorted(folder.iterdir())) for folder in row]
    places = [
        int.from_bytes(of[at : at + 8], "big")
        for of in units
        for at in range(0, len(of), 20)
        if any(of[at : at + 20])
    ]
    return sorted(places)


def damage(root: Path, offset: int, data: bytes = b"\xff" * 8) -> None:
    path = root / "commitlog" / offset_name(offset - offset % LOG_FILE_BYTES)
    with path.open("r+b") as file:
        file.seek(offset % LOG_FILE_BYTES)
        file.write(data)


def numbers(root: Path, queue: int, start: int = 0) -> list[int]:
    store = open_store(root)
    found = [int(body.split(b" ")[0]) for body in bodies(store, "A", queue, start)]
    store.close()
    return found


def test_queues_and_index_are_made_anew(store: Path) -> None:
    before = {p: p.read_bytes() for p in (store / "consumequeue").rglob("0*") if p.is_file()}
    damage_queue = store / "consumequeue/A/0" / offset_name(0)
    damage_queue.write_bytes(damage_queue.read_bytes()[:100].ljust(QUEUE_FILE_BYTES, b"\x07"))
    shutil.rmtree(store / "consumequeue/A/1")
    for path in (store / "index").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    done = mended(store)
    assert done.losses == []
    assert (done.record_count, done.queue_count) == (MESSAGES, 2)
    assert done.index_entry_count == MESSAGES
    assert report_of(store).faults == []
    assert {p: p.read_bytes() for p in before} == before


def test_queue_files_keep_the_size_that_most_of_them_have(store: Path) -> None:
    first = min((store / "consumequeue").glob("*/*/*"))
    first.write_bytes(first.read_bytes()[:-20])
    repair(store, Accepted(), index_sizes=INDEX_SIZES)
    sizes = {path.stat().st_size for path in (store / "consumequeue").glob("*/*/*")}
    assert sizes == {QUEUE_FILE_BYTES}


def test_deleted_topics_stay_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"old"]), ("B", 0, [b"kept"]))
    append(store, ("S", 0, [b"A"]))
    store.drop_topic("A")
    store.close()
    done = mended(tmp_path)
    assert done.losses == []
    assert not (tmp_path / "consumequeue" / "A").exists()
    assert report_of(tmp_path).faults == []


def test_a_damaged_record_is_not_given_up_unless_it_is_named(store: Path) -> None:
    start, end = starts_of(store)[6:8]
    damage(store, start)
    before = {p: p.read_bytes() for p in store.rglob("*") if p.is_file()}
    with pytest.raises(StoreDamaged, match=f"--write-off {start}-{end}") as refused:
        mended(store)
    assert str(refused.value).endswith(": message 3 of queue 0 of A")
    with pytest.raises(StoreDamaged, match="neither damage nor one whole record"):
        mended(store, write_off=[(start, end + 1)])
    del before[store / "lock"]
    assert {p: p.read_bytes() for p in before} == before


def test_what_is_written_off_is_gone_and_all_else_is_whole(store: Path) -> None:
    start, end = starts_of(store)[6:8]
    damage(store, start)
    done = mended(store, write_off=[(start, end)])
    assert done.losses == [Loss("A", 0, 3, 1, start)]
    assert f"wrote off {end - start} bytes of the log at {start}" in done.actions
    report = report_of(store)
    assert report.faults == []
    assert report.lost_bytes == end - start
    opened = open_store(store)
    with pytest.raises(StoreDamaged):
        bodies(opened, "A", 0)
    assert not opened.clean_start, "whoever writes next raises the generations"
    opened.close()
    assert numbers(store, 0, 4) == list(range(8, MESSAGES, 2))
    assert numbers(store, 1) == list(range(1, MESSAGES, 2))


def test_what_was_written_off_stays_so_when_queues_are_made_anew(store: Path) -> None:
    start, end = starts_of(store)[6:8]
    damage(store, start)
    mended(store, write_off=[(start, end)])
    shutil.rmtree(store / "consumequeue")
    assert numbers(store, 0, 4) == list(range(8, MESSAGES, 2))
    assert report_of(store).faults == []


def test_several_places_and_whole_files_can_be_written_off(store: Path) -> None:
    starts = starts_of(store)
    in_second = [s for s in starts if LOG_FILE_BYTES <= s < 2 * LOG_FILE_BYTES]
    in_third = [s for s in starts if s >= 2 * LOG_FILE_BYTES]
    damage(store, starts[2])
    damage(store, LOG_FILE_BYTES, bytes(LOG_FILE_BYTES))
    places = [(starts[2], starts[3]), (LOG_FILE_BYTES, in_third[0])]
    done = mended(store, write_off=places)
    assert sum(loss.message_count for loss in done.losses) == 1 + len(in_second)
    assert report_of(store).faults == []
    kept = (MESSAGES - 1 - len(in_second), MESSAGES)
    assert report_of(store).record_count - 2 == kept[0], "two records of the lost"


def test_a_damaged_end_mark_costs_nothing(store: Path) -> None:
    starts = starts_of(store)
    last = max(s for s in starts if s < LOG_FILE_BYTES)
    content = (store / "commitlog" / offset_name(0)).read_bytes()
    mark = last + int.from_bytes(content[last : last + 4], "big")
    damage(store, mark, b"\x01")
    with pytest.raises(StoreDamaged) as refused:
        mended(store)
    [(start, end)] = re.findall(r"--write-off (\d+)-(\d+)", str(refused.value))
    assert (int(start), int(end)) == (mark, LOG_FILE_BYTES)
    done = mended(store, write_off=[(mark, LOG_FILE_BYTES)])
    assert done.losses == []
    assert report_of(store).faults == []


def test_a_lost_end_has_to_be_accepted(store: Path) -> None:
    starts = starts_of(store)
    at = starts[35]
    damage(store, at, bytes(LOG_FILE_BYTES - at % LOG_FILE_BYTES))
    later = store / "commitlog" / offset_name(at - at % LOG_FILE_BYTES + LOG_FILE_BYTES)
    if later.exists():
        later.write_bytes(bytes(LOG_FILE_BYTES))
    with pytest.raises(StoreDamaged, match=f"--accept-end {at}") as refused:
        mended(store)
    assert "messages 18 to 19 of queue 0 of A, messages 17 to 19 of queue 1" in str(refused.value)
    done = mended(store, end=at)
    assert done.log_end == at
    assert [(loss.queue_id, loss.message_count) for loss in done.losses] == [(0, 2), (1, 3)]
    assert report_of(store).faults == []
    assert sorted(numbers(store, 0) + numbers(store, 1)) == list(range(35))


def test_the_log_can_be_cut_at_a_record(store: Path) -> None:
    at = starts_of(store)[30]
    with pytest.raises(MessageNotFound):
        mended(store, cut_at=at + 1)
    done = mended(store, cut_at=at)
    assert done.log_end == at
    assert sum(loss.message_count for loss in done.losses) == 10
    assert sorted(numbers(store, 0) + numbers(store, 1)) == list(range(30))
    assert report_of(store).faults == []


def test_lost_epochs_are_written_anew_above_all_that_were(store: Path) -> None:
    (store / "cometmq.epochs").unlink()
    with pytest.raises(StoreDamaged, match="--epoch"):
        mended(store)
    mended(store, epoch=41)
    opened = open_store(store)
    assert opened.epoch == 42
    opened.close()
    with pytest.raises(StoreDamaged, match="is there"):
        mended(store, epoch=50)


def test_a_store_in_use_is_left_alone(store: Path) -> None:
    opened = open_store(store)
    with pytest.raises(StoreLocked):
        mended(store)
    opened.close()


def test_only_our_own_whole_folders_are_repaired(store: Path, tmp_path: Path) -> None:
    with pytest.raises(StoreForeignFile, match="no store of CometMQ"):
        mended(tmp_path / "none")
    (store / "commitlog" / "notes.txt").touch()
    with pytest.raises(StoreForeignFile, match=r"notes\.txt does not belong there"):
        mended(store)


def test_a_crash_while_it_is_repaired_does_no_harm(store: Path) -> None:
    """Whatever of it was done, a broker that opens the store then finds all that is left."""
    start, end = starts_of(store)[6:8]
    damage(store, start)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cometmq.store.tools.repair._write_off", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mended(store, write_off=[(start, end)])
    opened = open_store(store, files=FaultyFiles(boot="another"))
    assert opened.queue_bounds("A", 0) == (0, MESSAGES // 2)
    opened.close()


def test_a_record_with_a_wrong_queue_offset_can_be_given_up(store: Path) -> None:
    """No checksum covers the offset: the record looks good and fits nowhere."""
    start = starts_of(store)[20]
    original = (store / "commitlog" / offset_name(start - start % LOG_FILE_BYTES)).read_bytes()
    damage(store, start + 27, bytes([original[start % LOG_FILE_BYTES + 27] ^ 4]))
    with pytest.raises(StoreDamaged, match="is message 14 of queue 0 of A, whose next is 10") as no:
        mended(store)
    option = re.search(r"--write-off (\d+)-(\d+)", str(no.value))
    assert option is not None
    with pytest.raises(StoreDamaged, match="neither damage nor one whole record"):
        mended(store, write_off=[(int(option[1]), int(option[2]) + 1)])
    done = mended(store, write_off=[(int(option[1]), int(option[2]))])
    assert done.losses == [Loss("A", 0, 10, 1, start)]
    assert numbers(store, 1) == list(range(1, MESSAGES, 2))
    assert numbers(store, 0, 11) == list(range(22, MESSAGES, 2))
    assert not report_of(store).faults

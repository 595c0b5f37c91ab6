from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cometmq.errors import MessageNotFound, StoreDamaged, StoreForeignFile, StoreLocked
from cometmq.store.follower import FollowerStore
from cometmq.store.layout import offset_name
from cometmq.store.log.units import LOST_RECORD_BYTES_MIN
from cometmq.store.recovery.replay import Loss
from cometmq.store.repair.repair import Accepted, Repaired, repair
from cometmq.store.repair.verify import Report, verify
from tests.support.stores.small_stores import (
    INDEX_SIZES,
    LOG_FILE_BYTES,
    QUEUE_FILE_BYTES,
    SMALL,
    Deletions,
    FaultyFiles,
    WallClock,
    append,
    bodies,
    let_go,
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


def test_the_sizes_are_those_that_the_store_was_opened_with(store: Path) -> None:
    """Of one file that was cut short nothing else tells how long it should be."""
    for path in sorted((store / "commitlog").iterdir())[1:]:
        path.unlink()
    [only] = (store / "commitlog").iterdir()
    only.write_bytes(only.read_bytes()[: LOG_FILE_BYTES // 2])
    shutil.rmtree(store / "consumequeue")
    with pytest.raises(StoreDamaged) as refused:
        repair(store, Accepted())
    [end] = re.findall(r"--accept-end (\d+)", str(refused.value))
    done = repair(store, Accepted(end=int(end)))
    assert only.stat().st_size == LOG_FILE_BYTES
    assert done.index_entry_count == done.record_count == 7
    assert {p.stat().st_size for p in (store / "index").iterdir()} == {INDEX_SIZES.file_bytes}
    assert {p.stat().st_size for p in (store / "consumequeue").glob("*/*/*")} == {QUEUE_FILE_BYTES}
    opened = open_store(store)
    opened.close()


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
    assert refused.value.message.endswith(": message 3 of queue 0 of A")
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


def test_what_is_told_as_lost_where_a_topic_was_deleted_and_made_anew(tmp_path: Path) -> None:
    """Of the old topic nothing is missed. With its deletion, the messages of its successor are lost
    although the old ones with the same offsets are back.
    """
    store = open_store(tmp_path)
    append(store, ("B", 0, [b"kept"] * 9))
    start = store.appended_offset
    append(store, ("A", 0, [b"old", b"old too"]))
    place = store.appended_offset
    append(store, ("A", 0, [b"old"]))
    deleted = store.appended_offset
    append(store, ("S", 0, [b"A"]))
    store.drop_topic("A")
    append(store, ("A", 0, [b"new", b"new too"]))
    store.close()
    copy = tmp_path.with_name("copy")
    shutil.copytree(tmp_path, copy)
    damage(tmp_path, start, b"\xff" * (place - start))
    assert mended(tmp_path, write_off=[(start, place)]).losses == []
    damage(copy, deleted, bytes(LOG_FILE_BYTES - deleted))
    assert mended(copy, end=deleted).losses == [
        Loss("A", 0, 0, 2, deleted),
        Loss("S", 0, 0, 1, deleted),
    ]
    store = open_store(copy)
    assert bodies(store, "A", 0) == [b"old", b"old too", b"old"]
    store.close()


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
        patched.setattr("cometmq.store.repair.repair.write_off", lambda *_: 1 / 0)
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


@pytest.mark.parametrize(
    ("at", "byte", "where"), [(15, b"\x05", "queue 5 of A"), (-1, b"C", "queue 1 of C")]
)
def test_a_message_that_damage_put_into_another_queue_is_the_one_that_is_given_up(
    store: Path, at: int, byte: bytes, where: str
) -> None:
    """Nor does a checksum cover the queue id and the topic. The next record of the queue fits
    nowhere then, though it is good.
    """
    moved = starts_of(store)[-3]
    topic_at = 88 + 1 + len(b"37 ") + len(BODY)
    damage(store, moved + (at if at > 0 else topic_at), byte)
    with pytest.raises(StoreDamaged, match="is message 19 of queue 1 of A, whose next is 18") as no:
        mended(store)
    assert f"the record at {moved}, which says that it is the first of {where}" in str(no.value)
    option = re.search(r"--write-off (\d+)-(\d+)", str(no.value))
    assert option is not None
    done = mended(store, write_off=[(int(option[1]), int(option[2]))])
    assert done.losses == [Loss("A", 1, 18, 1, moved)]
    assert numbers(store, 1, 19) == [MESSAGES - 1]


def test_a_short_record_is_given_up_with_the_next(tmp_path: Path) -> None:
    """What says so needs the room."""
    filling = open_store(tmp_path)
    append(filling, ("A", 0, [b"", b""]), ("A", 1, [b"", b""]))
    filling.close()
    _, second, third, fourth = starts_of(tmp_path)
    assert third - second < LOST_RECORD_BYTES_MIN
    damage(tmp_path, second + 27, b"\x40")  # of its queue offset
    with pytest.raises(StoreDamaged, match="is message 64 of queue 0 of A, whose next is 1") as no:
        mended(tmp_path)
    option = re.search(r"--write-off (\d+)-(\d+)", str(no.value))
    assert option is not None
    wide = int(option[1]), int(option[2])
    assert wide == (second, fourth)
    lost = mended(tmp_path, write_off=[wide]).losses
    assert lost == [Loss("A", 0, 1, 1, second), Loss("A", 1, 0, 1, second)]


# --- what is told ---------------------------------------------------------------------------------


def told(done: Repaired) -> dict[int, list[int]]:
    """The messages told as lost, by queue of A."""
    found: dict[int, list[int]] = {0: [], 1: []}
    for loss in done.losses:
        first = loss.first_queue_offset
        found[loss.queue_id] += range(first, first + loss.message_count)
    return found


def test_the_lost_first_messages_of_a_queue_are_told_too(store: Path) -> None:
    """The queue then begins late, as behind log files that retention took."""
    starts = starts_of(store)
    damage(store, 0, b"\xff" * starts[4])
    with pytest.raises(StoreDamaged, match="messages 0 to 1 of queue 0 of A, messages 0 to 1"):
        mended(store)
    done = mended(store, write_off=[(0, starts[4])])
    assert done.losses == [Loss("A", 0, 0, 2, 0), Loss("A", 1, 0, 2, 0)]
    assert numbers(store, 0, 2) == list(range(4, MESSAGES, 2))


def test_a_queue_of_which_everything_is_lost_is_told(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"kept"]))
    start = store.appended_offset
    append(store, ("B", 3, [b"lost", b"lost too"]))
    end = store.appended_offset
    append(store, ("A", 0, [b"kept"]))
    store.close()
    damage(tmp_path, start, b"\xff" * (end - start))
    assert mended(tmp_path, write_off=[(start, end)]).losses == [Loss("B", 3, 0, 2, start)]


def test_what_retention_took_is_not_told_as_lost(store: Path) -> None:
    """A queue without its files' beginning, whose first message in the log is damaged."""
    let_go(store)
    shutil.rmtree(store / "consumequeue")
    open_store(store, files=FaultyFiles(boot="another")).close()
    first, second = [start for start in starts_of(store) if start >= LOG_FILE_BYTES][:2]
    damage(store, first)
    done = mended(store, write_off=[(first, second)])
    assert sum(map(len, told(done).values())) == 1


@pytest.mark.parametrize("grown_by", [bytes(QUEUE_FILE_BYTES), b"\x01" * 40, b"\x00\x01" * 200])
def test_a_queue_file_that_grew_tells_of_no_loss(store: Path, grown_by: bytes) -> None:
    last = max((store / "consumequeue/A/0").iterdir())
    content = last.read_bytes().rstrip(b"\0")
    last.write_bytes(content.ljust(-(-len(content) // 20) * 20, b"\0") + grown_by)
    assert mended(store).losses == []


def test_what_a_grown_queue_file_says_is_no_message_behind_an_accepted_end(store: Path) -> None:
    at = starts_of(store)[38]
    damage(store, at, bytes(LOG_FILE_BYTES - at % LOG_FILE_BYTES))
    last = max((store / "consumequeue/A/0").iterdir())
    kept = last.read_bytes()[: 20 * (MESSAGES // 2 % 16)]
    last.write_bytes(kept.ljust(QUEUE_FILE_BYTES, b"\x01"))
    assert told(mended(store, end=at)) == {0: [19], 1: [19]}


def test_what_is_cut_is_told_once(store: Path) -> None:
    starts = starts_of(store)
    damage(store, starts[34])
    done = mended(store, write_off=[(starts[34], starts[35])], cut_at=starts[30])
    assert told(done) == {0: list(range(15, 20)), 1: list(range(15, 20))}


# --- log files that are not whole -----------------------------------------------------------------


def log_path(root: Path, number: int) -> Path:
    return root / "commitlog" / offset_name(number * LOG_FILE_BYTES)


def wanted(root: Path, **accepted: object) -> list[tuple[int, int]]:
    """What a repair wants written off. It has changed nothing."""
    before = {p: p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "lock"}
    with pytest.raises(StoreDamaged) as refused:
        mended(root, **accepted)
    assert {p: p.read_bytes() for p in before} == before
    assert not (root / "cometmq.next").exists()
    found = re.findall(r"--write-off (\d+)-(\d+)", str(refused.value))
    return [(int(start), int(end)) for start, end in found]


def lost_with(starts: list[int], start: int, end: int) -> dict[int, list[int]]:
    lost = [n for n, at in enumerate(starts) if start <= at < end]
    return {queue: [n // 2 for n in lost if n % 2 == queue] for queue in (0, 1)}


@pytest.mark.parametrize("crashed", [False, True])
@pytest.mark.parametrize("left", [None, 0, 5000])
def test_a_log_file_that_is_not_whole_is_made_so_when_it_is_written_off(
    store: Path, left: int | None, crashed: bool
) -> None:
    starts = starts_of(store)
    if crashed:
        opened = open_store(store)
        opened.flush_queues()
        opened.abandon()
    path = log_path(store, 1)
    content = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(content[:left])
    with pytest.raises(StoreForeignFile, match="cometmq store repair"):
        open_store(store)
    [(start, end)] = wanted(store)
    assert start <= LOG_FILE_BYTES + (left or 0) < end == 2 * LOG_FILE_BYTES
    done = mended(store, write_off=[(start, end)])
    assert path.stat().st_size == LOG_FILE_BYTES
    assert any(str(path) in action for action in done.actions)
    lost = lost_with(starts, start, end)
    assert told(done) == lost
    assert report_of(store).faults == []
    for queue in (0, 1):
        kept = [n for n in range(queue, MESSAGES, 2) if n // 2 not in lost[queue]]
        behind = max(lost[queue]) + 1
        assert numbers(store, queue, behind) == [n for n in kept if n // 2 >= behind]


def test_two_log_files_side_by_side_can_be_missing(store: Path) -> None:
    opened = open_store(store)
    for number in range(MESSAGES, 2 * MESSAGES):
        append(opened, ("A", number % 2, [b"%d " % number + BODY]))
    opened.close()
    for number in (1, 2):
        log_path(store, number).unlink()
    assert wanted(store) == [(LOG_FILE_BYTES, 3 * LOG_FILE_BYTES)]
    mended(store, write_off=[(LOG_FILE_BYTES, 3 * LOG_FILE_BYTES)])
    assert report_of(store).faults == []
    assert numbers(store, 0, 39) == [78]


def test_a_missing_file_is_told_though_nothing_says_how_long_the_log_was(store: Path) -> None:
    opened = open_store(store)
    opened.abandon()
    (store / "checkpoint").unlink()
    log_path(store, 1).unlink()
    assert wanted(store) == [(LOG_FILE_BYTES, 2 * LOG_FILE_BYTES)]


def test_a_crash_while_a_missing_file_is_made_leaves_it_missing(store: Path) -> None:
    """Zeros in its place would be taken for the end of the log, and what is behind be cut."""
    log_path(store, 1).unlink()
    place = (LOG_FILE_BYTES, 2 * LOG_FILE_BYTES)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("cometmq.store.repair.holes.lost_record", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mended(store, write_off=[place])
    assert not log_path(store, 1).exists()
    with pytest.raises(StoreForeignFile):
        open_store(store)
    mended(store, write_off=[place])
    assert report_of(store).faults == []


@pytest.mark.parametrize("left", [0, 3000])
def test_a_last_log_file_that_was_cut_short_is_mended_as_at_a_start(store: Path, left: int) -> None:
    """The log had been closed, and made its next file ahead."""
    last = max((store / "commitlog").iterdir())
    following = last.with_name(offset_name(int(last.name) + LOG_FILE_BYTES))
    following.write_bytes(bytes(left))
    done = mended(store)
    assert done.losses == []
    assert not following.exists() or following.stat().st_size == LOG_FILE_BYTES
    assert sorted(numbers(store, 0) + numbers(store, 1)) == list(range(MESSAGES))


def test_a_last_log_file_that_lost_its_end_has_to_be_accepted(store: Path) -> None:
    starts = starts_of(store)
    last = max((store / "commitlog").iterdir())
    at = [s for s in starts if s >= int(last.name)][3]
    last.write_bytes(last.read_bytes()[: at % LOG_FILE_BYTES + 10])
    with pytest.raises(StoreDamaged, match=f"--accept-end {at}"):
        mended(store)
    done = mended(store, end=at)
    assert told(done) == lost_with(starts, at, 2**63)
    assert report_of(store).faults == []


def test_a_log_file_that_is_too_long_is_named(store: Path) -> None:
    path = log_path(store, 1)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(StoreForeignFile, match=f"{path.name} has {LOG_FILE_BYTES + 1} bytes"):
        mended(store)


# --- the small files ------------------------------------------------------------------------------


def test_a_checkpoint_that_does_not_read_is_written_anew(store: Path) -> None:
    (store / "checkpoint").write_bytes(b"short")
    with pytest.raises(StoreDamaged, match=f"cometmq store repair {store}"):
        open_store(store)
    done = mended(store)
    assert "wrote another checkpoint" in done.actions
    assert done.losses == []
    assert sorted(numbers(store, 0) + numbers(store, 1)) == list(range(MESSAGES))


def test_without_a_checkpoint_nothing_behind_a_hole_is_given_up_unasked(store: Path) -> None:
    """A start without one would take the hole for the end."""
    opened = open_store(store)
    opened.abandon()
    (store / "checkpoint").write_bytes(b"short")
    starts = starts_of(store)
    places = [(starts[6], starts[7]), (starts[30], starts[31])]
    for start, end in places:
        damage(store, start, bytes(end - start))
    assert wanted(store) == places
    done = mended(store, write_off=places)
    assert told(done) == {0: [3, 15], 1: []}
    assert numbers(store, 1) == list(range(1, MESSAGES, 2))


def test_epochs_that_do_not_read_are_as_good_as_missing(store: Path) -> None:
    (store / "cometmq.epochs").write_bytes(b"cometmq-epochs 1\n7 0\n12 400\ncrc32 0")
    with pytest.raises(StoreDamaged, match=r"repair /.* --epoch NUMBER"):
        open_store(store)
    with pytest.raises(StoreDamaged, match=r"does not read.* 12 at the least"):
        mended(store)
    with pytest.raises(StoreDamaged, match="--epoch 12 is not above 12"):
        mended(store, epoch=12)
    mended(store, epoch=13)
    opened = open_store(store)
    assert opened.epoch == 14
    opened.close()


def test_snapshots_know_an_epoch_that_was(store: Path) -> None:
    (store / "cometmq.epochs").unlink()
    (store / "config").mkdir(exist_ok=True)
    (store / "config" / "topics.json").write_text('{"cometmq": {"epoch": 9, "position": 3}}')
    with pytest.raises(StoreDamaged, match=r"is missing.* 9 at the least"):
        mended(store)


@pytest.mark.parametrize("spoilt", ["cut", "gone"])
def test_an_identity_can_be_given_back_its_id(store: Path, spoilt: str) -> None:
    path = store / "cometmq.json"
    content = path.read_bytes()
    store_id = json.loads(content)["store_id"]
    path.unlink()
    if spoilt == "cut":
        path.write_bytes(content[:80])
        with pytest.raises(StoreDamaged, match=f"cometmq store repair {store}"):
            open_store(store)
    with pytest.raises(StoreDamaged, match="--store-id ID") as refused:
        mended(store)
    assert ("names " + store_id in str(refused.value)) == (spoilt == "cut")
    done = mended(store, store_id=store_id)
    assert f"wrote cometmq.json: it is store {store_id}" in done.actions
    assert json.loads(path.read_bytes())["former_store_id"] == store_id, "as after a power cut"
    opened = open_store(store)
    assert not opened.clean_start, "whoever writes next raises the generations"
    opened.close()
    with pytest.raises(StoreDamaged, match="is there"):
        mended(store, store_id=store_id)


def names_of(root: Path) -> tuple[str, str]:
    """What the store is called, and was."""
    fields = json.loads((root / "cometmq.json").read_bytes())
    return fields["store_id"], fields["former_store_id"]


@pytest.mark.parametrize("transient_bytes_max", [0, 1 << 20])
@pytest.mark.parametrize("clean", [True, False])
def test_a_store_that_lost_nothing_keeps_its_name(
    store: Path, clean: bool, transient_bytes_max: int, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name a group knows that it has what it had, unless a crash had cost it that."""
    opened = open_store(store, replace(SMALL, transient_bytes_max=transient_bytes_max))
    before = opened.store_id
    if clean:
        opened.close()
    else:
        opened.abandon()
    (store / "checkpoint").write_bytes(b"short")
    shutil.rmtree(store / "consumequeue")
    mended(store)
    has_lost = transient_bytes_max > 0 and not clean
    assert (names_of(store) == (before, "")) == (not has_lost)
    assert ("transient store pool" in caplog.text) == has_lost


def test_a_store_that_lost_power_has_lost_its_name_when_it_is_repaired(store: Path) -> None:
    elsewhere = open_store(store, files=FaultyFiles(boot="another"))
    elsewhere.abandon()
    mended(store)
    assert names_of(store)[1] == elsewhere.store_id != names_of(store)[0]


@pytest.mark.parametrize("taken", ["written off", "end", "cut", "epochs"])
def test_a_store_that_something_is_taken_from_has_another_name(store: Path, taken: str) -> None:
    before, starts = names_of(store)[0], starts_of(store)
    accepted: dict[str, object] = {"cut_at": starts[30]}
    if taken == "written off":
        damage(store, starts[5])
        accepted = {"write_off": [(starts[5], starts[6])]}
    elif taken == "end":
        damage(store, starts[-1])
        accepted = {"end": starts[-1]}
    elif taken == "epochs":
        (store / "cometmq.epochs").unlink()
        accepted = {"epoch": 9}
    mended(store, **accepted)
    after, former = names_of(store)
    assert former == before != after


def test_an_identity_can_be_drawn_anew(store: Path) -> None:
    before = json.loads((store / "cometmq.json").read_bytes())["store_id"]
    (store / "cometmq.json").write_bytes(b"{")
    mended(store, store_id="new")
    after = json.loads((store / "cometmq.json").read_bytes())["store_id"]
    assert re.fullmatch("[0-9a-f]{32}", after)
    assert after != before


@pytest.mark.parametrize("crashed", [False, True])
def test_a_restored_copy_is_another_store(store: Path, crashed: bool) -> None:
    """A lease may name its id as one that has everything. What it has it keeps."""
    if crashed:
        open_store(store).abandon()
    before, _ = names_of(store)
    done = mended(store, restored=True)
    assert any(before in action for action in done.actions)
    assert done.losses == []
    restored = FollowerStore.open(store, SMALL)
    assert (restored.store_id, restored.former_store_id) == names_of(store)
    assert restored.store_id != before
    assert restored.former_store_id == "", "an operator decides that it leads"
    assert len(bodies(restored, "A", 0)) == MESSAGES // 2
    restored.close()


def test_no_two_restored_copies_are_the_same_store(store: Path, tmp_path: Path) -> None:
    copies = [tmp_path / "copies" / name for name in "ab"]
    for copy in copies:
        shutil.copytree(store, copy, ignore=shutil.ignore_patterns("copies"))
        mended(copy, restored=True)
    names = [names_of(copy) for copy in copies]
    assert names[0][0] != names[1][0]
    assert names_of(store) not in names


def test_a_short_damaged_record_is_written_off_with_the_next_one(tmp_path: Path) -> None:
    """It has no room for the record that marks it as lost."""
    filling = open_store(tmp_path)
    append(filling, ("A", 0, [b"", b"1", b"2", b"3"]))
    filling.close()
    content = bytearray((tmp_path / "commitlog" / offset_name(0)).read_bytes())
    first = int.from_bytes(content[:4], "big")
    second = int.from_bytes(content[first : first + 4], "big")
    assert first < LOST_RECORD_BYTES_MIN
    damage(tmp_path, 0)
    with pytest.raises(StoreDamaged, match=f"--write-off 0-{first + second} "):
        mended(tmp_path)
    done = mended(tmp_path, write_off=[(0, first + second)])
    assert sum(loss.message_count for loss in done.losses) == 2
    store = open_store(tmp_path)
    assert bodies(store, "A", 0, 2) == [b"2", b"3"]
    store.close()

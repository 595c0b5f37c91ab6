"""Every state that a stop, or somebody's hands, may leave a store in: recovered, with a line in the
log that says what was done, or refused, with an error that says what to do.

``docs/format/store-layout.md`` §5 has the rules.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import properties, record
from cometmq.store.disk.files import OsFiles
from cometmq.store.layout import offset_name
from cometmq.store.log.units import NO_HOST
from cometmq.store.metadata import checkpoint, identity
from cometmq.store.repair.repair import Accepted, repair
from cometmq.store.repair.verify import verify
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
    let_go,
    open_store,
)

MESSAGES = 40  # over three log files, and three files of each of two queues
PADDING = bytes(1000)


def grown(root: Path, count: int = MESSAGES, *, unmarked: int = 0) -> list[int]:
    """A crashed store with messages 0 to ``count`` - 1 in two queues of topic A, all marked as on
    the disk but the last ``unmarked``. Returns where each record starts, and the log's end.
    """
    clock = WallClock()
    store = open_store(root, clock=clock)
    starts = []
    for number in range(count):
        clock.now_ms += 10
        starts.append(append(store, ("A", number % 2, [b"%d " % number + PADDING])).log_offset)
        if number == count - unmarked - 1:
            marked(store)
    starts.append(store.appended_offset)
    store.abandon()
    return starts


def marked(store: MessageStore) -> None:
    store.flush_log()
    store.flush_queues()


def closed(root: Path, count: int = MESSAGES) -> None:
    grown(root, count)
    open_store(root).close()


def numbers_of(store: MessageStore) -> list[int]:
    found = [int(body.split(b" ")[0]) for queue in (0, 1) for body in bodies(store, "A", queue)]
    return sorted(found)


def recovered(root: Path, **options: object) -> list[int]:
    """What is there after opening; and after opening once more, when nothing is left to mend."""
    store = open_store(root, **options)  # type: ignore[arg-type]
    found = numbers_of(store)
    assert store.flushed_offset == store.appended_offset == store.dispatched_offset
    store.close()
    store = open_store(root)
    assert numbers_of(store) == found
    store.abandon()
    return found


def restarted() -> FaultyFiles:
    return FaultyFiles(boot="another")


def log_file(root: Path, offset: int = 0) -> Path:
    return root / "commitlog" / offset_name(offset - offset % LOG_FILE_BYTES)


def overwrite(root: Path, offset: int, data: bytes) -> None:
    with log_file(root, offset).open("r+b") as file:
        file.seek(offset % LOG_FILE_BYTES)
        file.write(data)


def damage_body(root: Path, start: int) -> None:
    """One bit of the body of the record there."""
    with log_file(root, start).open("r+b") as file:
        file.seek(start % LOG_FILE_BYTES + 300)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


# --- where the log ends ---------------------------------------------------------------------------


def test_nothing_is_read_after_a_clean_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    closed(tmp_path)
    told: list[tuple[int, int]] = []
    with caplog.at_level(logging.INFO):
        store = MessageStore.open(
            tmp_path, SMALL, clock=WallClock(), progress=lambda *step: told.append(step)
        )
    assert numbers_of(store) == list(range(MESSAGES))
    assert store.clean_start
    assert not told
    assert "read from" not in caplog.text
    store.close()


@pytest.mark.parametrize("boot", ["same", "another"])
def test_after_a_crash_only_what_is_behind_the_mark_is_read(
    tmp_path: Path, boot: str, caplog: pytest.LogCaptureFixture
) -> None:
    starts = grown(tmp_path, unmarked=3)
    with caplog.at_level(logging.INFO):
        files = None if boot == "same" else restarted()
        assert recovered(tmp_path, files=files) == list(range(MESSAGES))
    assert f"the log is read from {starts[-4]} on: the checkpoint has a mark there" in caplog.text
    assert f"recovered 3 records; the log ends at {starts[-1]}" in caplog.text


@pytest.mark.parametrize("whole", [0, 1, 2])
def test_of_a_torn_batch_its_whole_records_are_kept(tmp_path: Path, whole: int) -> None:
    """Nobody was told that the batch is stored; what is kept of it is as if it had been sent
    alone.
    """
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"before"]))
    marked(store)
    start = store.appended_offset
    append(store, ("A", 0, [b"0", b"1"]), ("B", 0, [b"2"]))
    size = (store.appended_offset - start) // 3
    store.abandon()
    torn = start + whole * size + size // 2
    overwrite(tmp_path, torn, bytes(start + 3 * size - torn))
    store = open_store(tmp_path, files=restarted())  # its units were on the disk before it
    assert store.appended_offset == start + whole * size
    kept = bodies(store, "A", 0)[1:] + bodies(store, "B", 0)
    assert kept == [b"0", b"1", b"2"][:whole]
    store.close()


def test_store_times_do_not_fall_when_the_clock_does(tmp_path: Path) -> None:
    grown(tmp_path, 3)
    store = open_store(tmp_path, clock=WallClock(1000))
    before = store.last_store_time_ms
    assert append(store, ("A", 1, [b"3 "])).store_time_ms == before > 1000
    store.close()


# --- damage in the middle -------------------------------------------------------------------------


def test_a_crash_of_the_process_leaves_nothing_broken_before_something_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """So that is damage: it is passed over, told, and never served."""
    starts = grown(tmp_path, 10, unmarked=5)
    damage_body(tmp_path, starts[6])
    store = open_store(tmp_path)
    assert f"the log is damaged from {starts[6]} to {starts[7]}" in caplog.text
    assert "lost: 1 messages from offset 3 on of queue 0 of A" in caplog.text
    assert store.appended_offset == starts[10]
    with pytest.raises(StoreDamaged, match=str(starts[6])):
        bodies(store, "A", 0)
    assert [int(b.split()[0]) for b in bodies(store, "A", 0, start=4)] == [8]
    assert [int(b.split()[0]) for b in bodies(store, "A", 1)] == [1, 3, 5, 7, 9]
    store.close()


def test_what_was_on_the_disk_is_passed_over_after_a_restart_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The queues have to be made anew, and the log has a damaged place before its mark."""
    starts = grown(tmp_path)
    damage_body(tmp_path, starts[6])
    shutil.rmtree(tmp_path / "consumequeue")
    store = open_store(tmp_path, files=restarted())
    assert f"the log is damaged from {starts[6]} to {starts[7]}" in caplog.text
    assert store.appended_offset == starts[-1]
    assert store.queue_bounds("A", 0) == (0, MESSAGES // 2)
    assert [int(b.split()[0]) for b in bodies(store, "A", 0, start=4)][:2] == [8, 10]
    store.close()


def test_the_lost_first_messages_of_a_queue_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The queue then begins late, as behind log files that retention took."""
    starts = grown(tmp_path)
    for start in starts[:4]:
        damage_body(tmp_path, start)
    shutil.rmtree(tmp_path / "consumequeue")
    open_store(tmp_path).close()
    for queue_id in (0, 1):
        told = f"lost: 2 messages from offset 0 on of queue {queue_id} of A, damaged at 0"
        assert told in caplog.text


@pytest.mark.parametrize("at", [0, 4, 28])
def test_a_damaged_head_costs_one_message_too(tmp_path: Path, at: int) -> None:
    """Size, magic, log offset: the log goes on at the next good record, found by looking for it."""
    starts = grown(tmp_path, 10, unmarked=5)
    overwrite(tmp_path, starts[6] + at, b"\xff" * 4)
    store = open_store(tmp_path)
    assert store.appended_offset == starts[10]
    assert store.queue_bounds("A", 0) == (0, 5)
    store.close()


def test_a_damaged_end_of_a_file_is_passed_over(tmp_path: Path) -> None:
    starts = grown(tmp_path)
    last_of_file = max(s for s in starts if s < LOG_FILE_BYTES)
    overwrite(tmp_path, last_of_file, b"\xff" * (LOG_FILE_BYTES - last_of_file))
    shutil.rmtree(tmp_path / "consumequeue")
    store = open_store(tmp_path, files=restarted())
    assert store.appended_offset == starts[-1]
    assert sum(store.queue_bounds("A", queue)[1] for queue in (0, 1)) == MESSAGES
    store.close()


def test_the_end_mark_of_another_file_is_no_place_where_the_log_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An end mark does not hold its log offset. As the last file of the log, a copy of the first
    one is a lost end; between others, all of it is damaged.
    """
    starts = grown(tmp_path)
    first, second, third = (log_file(tmp_path, number * LOG_FILE_BYTES) for number in range(3))
    last = third.read_bytes()
    third.write_bytes(first.read_bytes())
    with pytest.raises(StoreDamaged, match=f"ends at {2 * LOG_FILE_BYTES} .*Nothing was cut"):
        open_store(tmp_path)
    third.write_bytes(last)
    second.write_bytes(first.read_bytes())
    shutil.rmtree(tmp_path / "consumequeue")
    store = open_store(tmp_path)
    assert f"the log is damaged from {LOG_FILE_BYTES} to {2 * LOG_FILE_BYTES}" in caplog.text
    assert store.appended_offset == starts[-1]
    store.close()


def test_a_last_record_that_no_queue_can_vouch_for_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process died. The last record may have been acknowledged, or half written: the units that
    would show it went with the queues.
    """
    starts = grown(tmp_path, 10, unmarked=5)
    damage_body(tmp_path, starts[9])
    shutil.rmtree(tmp_path / "consumequeue")
    assert recovered(tmp_path) == list(range(9))
    assert f"the log is damaged from {starts[9]} to {LOG_FILE_BYTES}" in caplog.text


def test_an_end_that_was_on_the_disk_and_is_gone_is_not_cut(tmp_path: Path) -> None:
    """The last flushed record is damaged, and nothing stands behind it."""
    starts = grown(tmp_path, 10)
    damage_body(tmp_path, starts[9])
    for _ in range(2):
        with pytest.raises(StoreDamaged, match="--accept-end"):
            open_store(tmp_path, files=restarted())
    assert log_file(tmp_path).read_bytes()[starts[9] : starts[10]].count(b"\0") > 900


def flip_last(root: Path, last: int, end: int) -> None:
    damage_body(root, last)


def zero_end(root: Path, last: int, end: int) -> None:
    overwrite(root, last - 2000, bytes(end - last + 2000))


def empty_last_file(root: Path, last: int, end: int) -> None:
    max(path for path in (root / "commitlog").iterdir() if any(path.read_bytes())).write_bytes(b"")


def remove_log(root: Path, last: int, end: int) -> None:
    shutil.rmtree(root / "commitlog")


@pytest.mark.parametrize("tables", [False, True])
@pytest.mark.parametrize(
    "damage", [flip_last, zero_end, empty_last_file, remove_log], ids=lambda damage: damage.__name__
)
def test_what_a_clean_close_left_is_not_cut(
    tmp_path: Path, damage: Callable[[Path, int, int], None], tables: bool
) -> None:
    """All of it in one batch, so that no store time tells what is missing."""
    store = open_store(tmp_path)
    end = append(store, ("A", 0, [PADDING] * 10)).end_offset
    end = append(store, ("A", 0, [PADDING] * 10)).end_offset
    last, _ = store.last_record()
    store.close()
    damage(tmp_path, last, end)
    if tables:
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "topics.json").write_text("{}")
    kept = (tmp_path / "cometmq.epochs").read_bytes()
    for _ in range(3):
        with pytest.raises(StoreDamaged, match=f"up to {end}. Nothing was cut"):
            open_store(tmp_path, files=restarted())
        known = identity.load(OsFiles(), tmp_path / "cometmq.json")
        assert known is not None
        assert known.clean is not None
        assert known.clean.end == end
        assert (tmp_path / "cometmq.epochs").read_bytes() == kept


def test_a_damaged_field_of_the_last_record_makes_nobody_its_author(tmp_path: Path) -> None:
    """No checksum covers properties."""
    store = open_store(tmp_path)
    end = append(store, ("A", 0, [b"a", b"b"]), keys="key").end_offset
    store_id, epochs = store.store_id, store.epochs
    store.close()
    content = log_file(tmp_path).read_bytes()
    overwrite(tmp_path, content.rindex(b"key"), b"kez")
    store = open_store(tmp_path)
    assert store.adoption is None
    assert (store.store_id, store.epochs[:-1]) == (store_id, epochs)
    assert store.appended_offset == end
    assert bodies(store, "A", 0) == [b"a", b"b"]
    store.close()


# --- the queues -----------------------------------------------------------------------------------

Remove = Callable[[Path], None]


def remove_all(root: Path) -> None:
    shutil.rmtree(root / "consumequeue")


def remove_topic(root: Path) -> None:
    shutil.rmtree(root / "consumequeue" / "A")


def remove_queue(root: Path) -> None:
    shutil.rmtree(root / "consumequeue" / "A" / "0")


def remove_file(number: int) -> Remove:
    def remove(root: Path) -> None:
        (root / "consumequeue/A/1" / offset_name(number * QUEUE_FILE_BYTES)).unlink()

    remove.__name__ = f"remove_file_{number}"
    return remove


def swap_queues(root: Path) -> None:
    topic = root / "consumequeue" / "A"
    (topic / "0").rename(topic / "x")
    (topic / "1").rename(topic / "0")
    (topic / "x").rename(topic / "1")
    remove_file(1)(root)


@pytest.mark.parametrize(
    "remove",
    [remove_all, remove_topic, remove_queue, *map(remove_file, range(2)), swap_queues],
    ids=lambda remove: remove.__name__,
)
@pytest.mark.parametrize("stop", ["clean", "crash", "restart"])
def test_missing_queues_are_rebuilt(
    tmp_path: Path, remove: Remove, stop: str, caplog: pytest.LogCaptureFixture
) -> None:
    root, whole = tmp_path / "store", tmp_path / "whole"
    closed(root) if stop == "clean" else grown(root, unmarked=2)
    shutil.copytree(root, whole)
    open_store(whole).close()
    remove(root)
    files = restarted() if stop == "restart" else None
    assert recovered(root, files=files) == list(range(MESSAGES))
    assert "all queues are rebuilt from the log, from 0 on" in caplog.text
    for path in (whole / "consumequeue").rglob("0000*"):
        again = root / path.relative_to(whole)
        assert again.read_bytes() == path.read_bytes(), path


def test_queues_of_an_older_log_begin_late_and_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest log file went, as retention lets it go; then the queues are lost."""
    starts = grown(tmp_path)
    let_go(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue")
    first = next(n for n, start in enumerate(starts) if start >= LOG_FILE_BYTES)
    assert recovered(tmp_path, files=restarted()) == list(range(first, MESSAGES))
    assert caplog.text.count("are rebuilt") == 1, "the second opening has nothing to mend"


def test_a_topic_that_was_deleted_a_moment_ago_is_not_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record stands behind the mark, which still counts its queues."""
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"old"]), ("B", 0, [b"kept"]))
    marked(store)
    append(store, ("S", 0, [b"A"]))
    store.drop_topic("A")
    store.abandon()
    observer = Deletions()
    store = open_store(tmp_path, observer=observer)
    assert observer.seen == [b"A"]
    assert "rebuilt" not in caplog.text
    assert bodies(store, "B", 0) == [b"kept"]
    assert store.queue_bounds("A", 0) == (0, 0)
    store.close()


def test_queues_made_anew_do_not_bring_deleted_topics_back(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"old", b"older"]), ("B", 0, [b"kept"]))
    append(store, ("S", 0, [b"A"]))
    store.drop_topic("A")
    append(store, ("A", 0, [b"new"]))
    store.close()
    shutil.rmtree(tmp_path / "consumequeue")
    store = open_store(tmp_path, observer=Deletions())
    assert bodies(store, "A", 0) == [b"new"]
    assert bodies(store, "B", 0) == [b"kept"]
    store.close()


def test_a_crash_while_queues_are_made_anew_makes_them_anew_again(tmp_path: Path) -> None:
    """Even if as many units as were counted are there by then: they were not on the disk."""
    closed(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue")
    files = restarted()
    files.sync_fails_for = "/consumequeue/"
    with pytest.raises(Exception, match="sync"):
        open_store(tmp_path, files=files)
    saved = checkpoint.load(OsFiles(), tmp_path / "checkpoint")
    assert saved.mark is not None
    assert not saved.mark.tally.is_known
    known = identity.load(OsFiles(), tmp_path / "cometmq.json")
    assert known is not None
    assert known.clean is not None, "the log is known to be whole"
    assert not known.clean.tally.is_known
    shutil.rmtree(tmp_path / "consumequeue" / "A" / "0")
    assert recovered(tmp_path, files=restarted()) == list(range(MESSAGES))


# --- the small files ------------------------------------------------------------------------------


def test_without_a_checkpoint_the_whole_log_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grown(tmp_path)
    (tmp_path / "checkpoint").unlink()
    with caplog.at_level(logging.INFO):
        assert recovered(tmp_path) == list(range(MESSAGES))
    assert "the log is read from 0 on: without a checkpoint" in caplog.text


def rewrite_checkpoint(root: Path, **changes: object) -> None:
    path = root / "checkpoint"
    content = checkpoint.decode(path.read_bytes(), path)
    fields = {name: getattr(content, name) for name in content.__slots__} | changes
    path.write_bytes(checkpoint.Checkpoint(**fields).encode())


def test_a_checkpoint_of_the_future_is_refused_and_its_removal_helps(tmp_path: Path) -> None:
    grown(tmp_path)
    rewrite_checkpoint(tmp_path, log_time_ms=2**50, queue_time_ms=2**50, mark=None)
    with pytest.raises(StoreDamaged, match="store time"):
        open_store(tmp_path)
    (tmp_path / "checkpoint").unlink()
    assert recovered(tmp_path) == list(range(MESSAGES))


@pytest.mark.parametrize("field", ["log_time_ms", "queue_time_ms"])
@pytest.mark.parametrize("stop", ["clean", "crash"])
def test_a_time_of_the_future_does_not_outweigh_a_mark(
    tmp_path: Path, stop: str, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One bit of a time, which nothing seals: told, corrected, and no later crash is a loss."""
    closed(tmp_path) if stop == "clean" else grown(tmp_path)
    rewrite_checkpoint(tmp_path, **{field: 2**41})
    store = open_store(tmp_path, files=restarted())
    assert f"{2**41}" in caplog.text
    append(store, ("A", 0, [b"%d " % MESSAGES + PADDING]))
    marked(store)
    saved = checkpoint.load(OsFiles(), tmp_path / "checkpoint")
    assert max(saved.log_time_ms, saved.queue_time_ms) < 2**41
    append(store, ("A", 1, [b"%d " % (MESSAGES + 1) + PADDING]))
    store.flush_log()
    store.abandon()
    assert recovered(tmp_path, files=restarted()) == list(range(MESSAGES + 2))


def test_a_time_counts_where_more_than_the_mark_was_on_the_disk(tmp_path: Path) -> None:
    end = grown(tmp_path)[-1]
    rewrite_checkpoint(tmp_path, log_time_ms=2**41, durable_offset=end + 1)
    with pytest.raises(StoreDamaged, match="store time"):
        open_store(tmp_path)


def other_checkpoint(root: Path, count: int, size: int) -> Path:
    other = open_store(root)
    for _ in range(count):
        append(other, ("Other", 0, [bytes(size)]))
    marked(other)
    other.abandon()
    return root / "checkpoint"


@pytest.mark.parametrize(
    ("count", "size", "complaint"),
    [
        (60, 1000, "is missing, or more"),
        (3, len(PADDING) + len("0 ") + len("A") - len("Other"), "another record"),
    ],
)
def test_a_checkpoint_of_another_store_is_refused(
    tmp_path: Path, count: int, size: int, complaint: str
) -> None:
    grown(tmp_path / "one")
    copied = other_checkpoint(tmp_path / "other", count, size)
    shutil.copy(copied, tmp_path / "one" / "checkpoint")
    with pytest.raises((StoreForeignFile, StoreDamaged), match=complaint) as refused:
        open_store(tmp_path / "one")
    assert "cometmq store repair" in str(refused.value)
    (tmp_path / "one" / "checkpoint").unlink()
    assert recovered(tmp_path / "one") == list(range(MESSAGES))


def test_a_mark_that_good_records_run_across_is_another_stores(tmp_path: Path) -> None:
    """Or that file of the log is: the queues tell, and they fit the log."""
    root = tmp_path / "one"
    grown(root)
    copied = other_checkpoint(tmp_path / "other", 20, 900)
    shutil.copy(copied, root / "checkpoint")
    with pytest.raises(StoreForeignFile, match=r"run across .* let cometmq store repair"):
        open_store(root, files=restarted())
    assert repair(root, Accepted()).losses == []
    assert recovered(root) == list(range(MESSAGES))


def test_a_checkpoint_of_rocketmqs_own_is_enough(tmp_path: Path) -> None:
    """Times alone, without our mark: from a file's start on."""
    grown(tmp_path)
    rewrite_checkpoint(tmp_path, mark=None)
    assert recovered(tmp_path, files=restarted()) == list(range(MESSAGES))


def test_what_rocketmq_5_noted_in_the_checkpoint_is_kept(tmp_path: Path) -> None:
    grown(tmp_path)
    rewrite_checkpoint(tmp_path, master_flushed_offset=11, confirm_offset=12)
    assert recovered(tmp_path) == list(range(MESSAGES))
    kept = checkpoint.load(OsFiles(), tmp_path / "checkpoint")
    assert (kept.master_flushed_offset, kept.confirm_offset) == (11, 12)


# --- the log's files ------------------------------------------------------------------------------


def test_half_made_log_files_are_removed_or_filled_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    starts = grown(tmp_path)
    (tmp_path / "cometmq.next").write_bytes(b"x" * 100)
    last = max((tmp_path / "commitlog").iterdir())
    (tmp_path / "commitlog" / offset_name(int(last.name) + LOG_FILE_BYTES)).touch()
    kept = starts[-1] % LOG_FILE_BYTES
    last.write_bytes(last.read_bytes()[:kept])
    assert recovered(tmp_path) == list(range(MESSAGES))
    assert "filled up with zeros" in caplog.text
    assert not (tmp_path / "cometmq.next").exists()
    assert {p.stat().st_size for p in (tmp_path / "commitlog").iterdir()} == {LOG_FILE_BYTES}


def test_files_of_another_size_are_refused_with_the_option_to_set(tmp_path: Path) -> None:
    closed(tmp_path)
    options = type(SMALL)(
        commit_log_file_bytes=2 * LOG_FILE_BYTES, consume_queue_file_bytes=QUEUE_FILE_BYTES
    )
    with pytest.raises(StoreForeignFile, match=f"mapped_file_size_commit_log={LOG_FILE_BYTES}"):
        open_store(tmp_path, options)
    options = type(SMALL)(
        commit_log_file_bytes=LOG_FILE_BYTES, consume_queue_file_bytes=2 * QUEUE_FILE_BYTES
    )
    with pytest.raises(StoreForeignFile, match=f"consume_queue={QUEUE_FILE_BYTES}"):
        open_store(tmp_path, options)
    assert recovered(tmp_path) == list(range(MESSAGES))


@pytest.mark.parametrize(
    "place", ["commitlog", "consumequeue", "consumequeue/A", "consumequeue/A/0", "."]
)
@pytest.mark.parametrize("name", ["lost+found", ".DS_Store", ".swap.swp"])
def test_what_others_leave_in_folders_does_no_harm(tmp_path: Path, place: str, name: str) -> None:
    grown(tmp_path)
    path = tmp_path / place / name
    path.mkdir() if name == "lost+found" else path.write_bytes(b"x")
    assert recovered(tmp_path) == list(range(MESSAGES))
    assert path.exists()


def test_what_only_rocketmq_5_writes_is_left_alone(tmp_path: Path) -> None:
    grown(tmp_path)
    for name in ("timerwheel", "abort.bak", "timerlog/0", "batchconsumequeue/B/0/0", "lock.bak"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"Java")
    assert recovered(tmp_path) == list(range(MESSAGES))
    assert (tmp_path / "timerlog/0").read_bytes() == b"Java"


def batch_of_rocketmq(log_offset: int) -> bytes:
    return record.encode(
        b"A",
        0,
        b"many messages",
        properties.encode({"INNER_NUM": "3"}),
        born_time_ms=1,
        born_host=NO_HOST,
        store_host=NO_HOST,
        sys_flag=0b11 << 6,
        log_offset=log_offset,
        store_time_ms=2,
    )


@pytest.mark.parametrize("named", ["version 2", "BatchCQ"])
def test_records_that_are_not_read_are_refused_by_name(tmp_path: Path, named: str) -> None:
    starts = grown(tmp_path, 4, unmarked=2)
    if named == "BatchCQ":
        overwrite(tmp_path, starts[3], batch_of_rocketmq(starts[3]))
    else:
        overwrite(tmp_path, starts[2] + 4, b"\xda\xa3\x20\xab")
    with pytest.raises(StoreForeignFile, match=named):
        open_store(tmp_path)
    content = json.loads((tmp_path / "cometmq.json").read_bytes())
    assert content["clean"] is None


@pytest.mark.parametrize("unmarked", [0, 2])
@pytest.mark.parametrize("flag", [64, 128])
def test_a_flipped_bit_of_a_batch_makes_no_foreign_store(
    tmp_path: Path, flag: int, unmarked: int
) -> None:
    starts = grown(tmp_path, 4, unmarked=unmarked)
    overwrite(tmp_path, starts[2] + 39, bytes([flag]))
    assert not verify(tmp_path).faults
    repair(tmp_path, Accepted())
    assert recovered(tmp_path) == [0, 1, 2, 3]


# --- holes in queues ------------------------------------------------------------------------------


@pytest.mark.parametrize("crashed", [False, True])
def test_a_hole_in_a_queue_is_told_and_the_next_start_mends_it(
    tmp_path: Path, crashed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    closed(tmp_path)
    path = tmp_path / "consumequeue/A/0" / offset_name(0)
    content = bytearray(path.read_bytes())
    content[5 * 20 : 7 * 20] = bytes(40)  # not where the end is looked for
    path.write_bytes(content)
    store = open_store(tmp_path)
    assert store.queue_bounds("A", 0) == (0, MESSAGES // 2), "a start does not read all units"
    assert len(store.read_units("A", 0, 0, 32)) <= 5 * 20
    with pytest.raises(StoreDamaged, match="from message 5 on are damaged"):
        store.read_units("A", 0, 5, 32)
    marked(store)
    store.abandon() if crashed else store.close()
    with caplog.at_level(logging.INFO):
        assert recovered(tmp_path) == list(range(MESSAGES))
    assert "rebuilt" in caplog.text

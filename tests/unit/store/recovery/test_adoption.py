from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cometmq.errors import StoreFailed, StoreForeignFile
from cometmq.store.disk.files import OsFiles
from cometmq.store.follower import FollowerStore
from cometmq.store.layout import StorePaths
from cometmq.store.recovery.adoption import remove_leftovers
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import (
    SMALL,
    FaultyFiles,
    WallClock,
    append,
    bodies,
    open_store,
)

TABLE = b'{"offsetTable":{"a@b":{0:1}}}'
OURS = b'{"offsetTable":{},"cometmq": {"epoch": 1, "position": 0}}'


def filled(root: Path, *, clean: bool = True) -> int:
    store = open_store(root)
    for _ in range(4):
        append(store, ("A", 0, [b"a" * 1000] * 10))
    append(store, ("A", 1, [b"b"]))
    store.flush_log()
    store.flush_queues()
    end = store.appended_offset
    if clean:
        store.close()
    else:
        store.abandon()
    return end


def appended_by_another(root: Path) -> None:
    """As if RocketMQ had: a record behind our mark, and an orderly stop."""
    identity = (root / "cometmq.json").read_bytes()
    epochs = (root / "cometmq.epochs").read_bytes()
    store = open_store(root)
    append(store, ("A", 0, [b"theirs"]))
    store.close()
    (root / "cometmq.json").write_bytes(identity)
    (root / "cometmq.epochs").write_bytes(epochs)


def is_taken_over(store: MessageStore, start: int) -> None:
    assert store.adoption is not None
    assert store.adoption.verified == start
    *_, theirs, ours = store.epochs
    assert (theirs[1], ours[1]) == (start, store.appended_offset)
    assert theirs[0] < ours[0] == store.epoch


def test_what_is_appended_behind_a_clean_close_is_taken_over(tmp_path: Path) -> None:
    end = filled(tmp_path)
    appended_by_another(tmp_path)
    store = open_store(tmp_path)
    is_taken_over(store, end)
    assert bodies(store, "A", 0)[-1] == b"theirs"
    assert store.queue_offset_at("A", 0, end) == 40
    assert store.queue_offset_at("A", 1, end) == 1
    assert store.queue_offset_at("B", 0, end) == 0
    store.finish_adoption()
    store.close()
    store = open_store(tmp_path)
    assert store.adoption is None
    assert store.clean_start
    store.abandon()


def test_a_stop_in_order_after_our_crash_was_anothers(tmp_path: Path) -> None:
    end = filled(tmp_path, clean=False)
    (tmp_path / "abort").unlink()
    store = open_store(tmp_path)
    assert store.adoption is not None
    assert store.adoption.verified == end, "the checkpoint's mark"
    assert not store.clean_start
    assert bodies(store, "A", 1) == [b"b"]
    store.abandon()


@pytest.mark.parametrize("with_checkpoint", [True, False])
def test_a_store_without_our_mark_is_taken_over_whole(
    tmp_path: Path, with_checkpoint: bool
) -> None:
    filled(tmp_path)
    for name in ("cometmq.json", "cometmq.epochs"):
        (tmp_path / name).unlink()
    if not with_checkpoint:
        (tmp_path / "checkpoint").unlink()
    store = open_store(tmp_path)
    is_taken_over(store, 0)
    assert len(bodies(store, "A", 0)) == 40
    store.abandon()


def test_an_interrupted_adoption_is_done_again_from_the_same_place(tmp_path: Path) -> None:
    end = filled(tmp_path)
    appended_by_another(tmp_path)
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"ours"]))
    store.flush_log()
    store.flush_queues()
    store.abandon()
    store = open_store(tmp_path)
    assert store.adoption is not None
    assert store.adoption.verified == end
    assert bodies(store, "A", 0)[-2:] == [b"theirs", b"ours"]
    store.abandon()


def test_damage_before_what_another_program_appended_costs_nothing_else(tmp_path: Path) -> None:
    end = filled(tmp_path)
    appended_by_another(tmp_path)
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(checkpoint.read_bytes()[:24].ljust(4096, b"\0"))  # as RocketMQ's own
    log = max(path for path in (tmp_path / "commitlog").iterdir() if any(path.read_bytes()))
    content = bytearray(log.read_bytes())
    content[content.index(b"b\x01A")] ^= 1  # the body of our last record
    log.write_bytes(content)
    store = open_store(tmp_path)
    is_taken_over(store, end)
    assert bodies(store, "A", 0)[-1] == b"theirs"
    assert store.queue_bounds("A", 1) == (0, 0)
    store.abandon()


@pytest.mark.parametrize("step", ["queues", "log"])
def test_an_adoption_that_is_refused_or_cut_short_forgets_no_clean_close(
    tmp_path: Path, step: str
) -> None:
    filled(tmp_path)
    appended_by_another(tmp_path)
    if step == "queues":
        shutil.rmtree(tmp_path / "consumequeue")
    before = json.loads((tmp_path / "cometmq.json").read_bytes())["clean"]["end"]
    files = FaultyFiles()
    files.sync_fails_for = "commitlog"
    with pytest.raises(StoreFailed):
        open_store(tmp_path, files=files)
    assert json.loads((tmp_path / "cometmq.json").read_bytes())["clean"]["end"] == before
    store = open_store(tmp_path)
    is_taken_over(store, before)
    store.abandon()


def test_a_follower_leaves_it_to_the_next_writer(tmp_path: Path) -> None:
    end = filled(tmp_path)
    appended_by_another(tmp_path)
    copy = FollowerStore.open(tmp_path, SMALL)
    assert copy.adoption is not None
    copy.close()
    store = open_store(tmp_path)
    assert store.adoption is not None
    assert store.adoption.verified == end
    store.abandon()


def test_tables_alone_leave_the_log_as_it_is(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "consumerOffset.json").write_bytes(TABLE)
    (tmp_path / "config" / "topics.json").write_bytes(OURS)
    (tmp_path / "config" / "delayOffset.json.bak").write_bytes(TABLE)
    store = open_store(tmp_path)
    assert store.adoption is not None
    assert not store.adoption.log_changed
    assert store.adoption.tables == {"consumerOffset.json": [TABLE]}
    assert len(store.epochs) == 2, "ours"
    store.abandon()


def test_backups_count_where_rocketmq_would_read_them(tmp_path: Path) -> None:
    filled(tmp_path)
    appended_by_another(tmp_path)
    config = tmp_path / "config"
    config.mkdir()
    for name in ("topics.json", "topics.json.bak", "subscriptionGroup.json.bak"):
        (config / name).write_bytes(TABLE)
    (config / "consumerOffset.json").touch()
    (config / "consumerOffset.json.bak").write_bytes(TABLE)
    (config / "delayOffset.json").write_bytes(OURS)
    (config / "delayOffset.json.bak").write_bytes(TABLE)
    store = open_store(tmp_path)
    assert store.adoption is not None
    assert store.adoption.tables == {
        "topics.json": [TABLE, TABLE],
        "subscriptionGroup.json": [TABLE],
        "consumerOffset.json": [TABLE],
    }
    store.abandon()


@pytest.mark.parametrize(
    "folder", ["batchconsumequeue/orders/0", "consumequeue/%LMQ%light/0"], ids=["batch", "light"]
)
def test_queues_that_only_rocketmq_can_read_are_refused(tmp_path: Path, folder: str) -> None:
    filled(tmp_path)
    appended_by_another(tmp_path)
    (tmp_path / folder).mkdir(parents=True)
    before = (tmp_path / "cometmq.json").read_bytes()
    with pytest.raises(StoreForeignFile, match="Nothing was changed"):
        open_store(tmp_path)
    assert (tmp_path / "cometmq.json").read_bytes() == before


@pytest.mark.parametrize("harm", ["none", "another message", "missing", "consumequeue_ext"])
def test_queues_that_are_not_the_logs_are_made_anew(
    tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = WallClock()
    store = open_store(tmp_path, clock=clock)
    for number in range(60):
        clock.now_ms += 1000
        append(store, ("A", 0, [b"%d" % number + bytes(700)]))
    store.close()
    for name in ("cometmq.json", "cometmq.epochs"):
        (tmp_path / name).unlink()
    # RocketMQ's checkpoint, so that the log is read from its last files on only.
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(checkpoint.read_bytes()[:24].ljust(4096, b"\0"))
    queue = tmp_path / "consumequeue" / "A" / "0"
    if harm == "missing":
        shutil.rmtree(queue)
    elif harm == "consumequeue_ext":
        (tmp_path / harm / "A").mkdir(parents=True)
    elif harm == "another message":
        for file in queue.iterdir():
            content = bytearray(file.read_bytes())
            content[8:12] = (9).to_bytes(4, "big")  # a size
            content[:] = content[:20] * (len(content) // 20)
            file.write_bytes(content)
    store = open_store(tmp_path, clock=clock)
    assert ("rebuilt" in caplog.text) == (harm != "none")
    assert len(bodies(store, "A", 0)) == 60
    store.abandon()


def test_leftovers_are_ours_alone(tmp_path: Path) -> None:
    (tmp_path / "cometmq.trash.0" / "0").mkdir(parents=True)
    for name in ("cometmq.next", "lost", "abort.bak"):
        (tmp_path / name).touch()
    remove_leftovers(OsFiles(), StorePaths(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["abort.bak", "lost"]


def test_a_file_under_the_name_of_a_folder_in_deletion_stays(tmp_path: Path) -> None:
    """It was not ours, and must not stop a start for ever."""
    stranger = tmp_path / "cometmq.trash.1"
    stranger.write_bytes(b"")
    open_store(tmp_path).close()
    assert stranger.exists()


@pytest.mark.parametrize("content", [bytes(300), b"\xff{garbage", b'{"dataVersion":'])
@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("name", ["topics.json", "delayOffset.json"])
def test_a_table_that_does_not_read_is_nobodys_sign(
    tmp_path: Path, name: str, content: bytes, clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Ours was damaged; without any other trace of RocketMQ our log's state counts."""
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"a"]))
    store.close() if clean else store.abandon()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / name).write_bytes(content)
    store = open_store(tmp_path)
    assert store.adoption is None
    assert f"{name} does not read: our log's state counts" in caplog.text
    store.close()

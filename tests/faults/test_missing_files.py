"""Log files that are missing: start, ``cometmq store verify`` and ``cometmq store repair`` name
them, and what is told is obeyed word by word until the store is open.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.store.layout import HEADS, offset_name
from cometmq.store.repair.repair import Accepted, repair
from cometmq.store.repair.verify import verify
from tests.support.stores.small_stores import LOG_FILE_BYTES, append, bodies, open_store

MESSAGES = 50
PADDING = bytes(1000)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four log files of messages in one queue."""
    opened = open_store(tmp_path)
    for number in range(MESSAGES):
        append(opened, ("A", 0, [b"%d " % number + PADDING]))
    opened.close()
    return tmp_path


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_the_oldest_file_is_missed(store: Path, *, clean: bool) -> None:
    if not clean:
        open_store(store).abandon()
    missing = store / "commitlog" / offset_name(0)
    missing.unlink()
    with pytest.raises(StoreDamaged, match=offset_name(0) + " is missing"):
        open_store(store)
    assert str(missing) in [fault.path for fault in verify(store).faults]
    with pytest.raises(StoreDamaged, match="messages 0 to 13 of queue 0 of A") as told:
        repair(store, Accepted())
    assert f"--write-off 0-{LOG_FILE_BYTES}" in str(told.value)
    done = repair(store, Accepted(write_off=[(0, LOG_FILE_BYTES)]))
    assert sum(loss.message_count for loss in done.losses) == 14
    again = open_store(store)
    kept = bodies(again, "A", 0, start=14)
    assert [int(body.split(b" ")[0]) for body in kept] == list(range(14, MESSAGES))
    again.close()


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("folder", [False, True])
def test_all_files_are_missed(store: Path, *, clean: bool, folder: bool) -> None:
    if not clean:
        open_store(store).abandon()
    shutil.rmtree(store / "commitlog")
    if not folder:
        (store / "commitlog").mkdir()
    with pytest.raises(StoreDamaged):
        open_store(store)
    assert verify(store).faults
    with pytest.raises(StoreDamaged, match=f"messages 0 to {MESSAGES - 1} of queue 0 of A") as told:
        repair(store, Accepted())
    assert "--accept-end 0" in str(told.value)
    done = repair(store, Accepted(end=0))
    assert sum(loss.message_count for loss in done.losses) == MESSAGES
    again = open_store(store)
    assert bodies(again, "A", 0) == []
    again.close()


def test_a_store_without_its_identity_keeps_its_index_sizes(store: Path) -> None:
    (store / "cometmq.json").write_bytes(b"\0" * 100)
    done = repair(store, Accepted(store_id="new"))
    assert "left to the broker" in done.actions[-1]
    open_store(store).close()


def test_a_file_where_a_deleted_topic_should_go_does_no_harm(store: Path) -> None:
    (store / "cometmq.trash.0").write_bytes(b"x")
    again = open_store(store)
    again.drop_topic("A")
    again.close()
    assert (store / "cometmq.trash.0").read_bytes() == b"x"


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_another_stores_log_file_is_not_served(tmp_path: Path, *, clean: bool) -> None:
    """Of other records, whose topics and queues have the same names. Written by a release that did
    not note what log files begin with.
    """
    for name, size in (("ours", 1000), ("theirs", 700)):
        opened = open_store(tmp_path / name)
        for number in range(10):
            append(opened, ("A", 0, [b"%s %d " % (name.encode(), number) + bytes(size)]))
        opened.flush_log()
        opened.flush_queues()
        opened.close() if clean else opened.abandon()
    ours = tmp_path / "ours"
    first = Path("commitlog", offset_name(0))
    opened = open_store(tmp_path / "theirs")
    for number in range(6):
        append(opened, ("A", 0, [b"theirs %d " % number + bytes(700)]))
    opened.abandon()
    shutil.copy(tmp_path / "theirs" / first, ours / first)
    (ours / HEADS).unlink()
    with pytest.raises(StoreForeignFile, match="good records run across"):
        open_store(ours)
    with pytest.raises(StoreDamaged, match="messages 0 to 9 of queue 0 of A"):
        repair(ours, Accepted())
    done = repair(ours, Accepted(write_off=[(0, LOG_FILE_BYTES)]))
    assert sum(loss.message_count for loss in done.losses) == 10
    opened = open_store(ours)
    assert opened.queue_bounds("A", 0)[1] == 0 or not bodies(opened, "A", 0)
    opened.close()

"""CometMQ takes over what Apache RocketMQ wrote, and back: nothing is lost or read differently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cometmq.format import record
from tests.compat.listing import (
    QUEUE_FILE_BYTES,
    assert_same,
    content_of,
    content_of_folder,
    note_compared,
    open_ours,
    rocketmq,
)
from tests.compat.rocketmq import HALT, RocketMq, batch, put
from tests.compat.scenes import append, everything_of_theirs

pytestmark = pytest.mark.slow

ACKNOWLEDGED_MIN = 300  # before a process that writes on and on is killed


def empty_queue_files(folder: Path) -> list[Path]:
    """What a kill between the making of a file and its first byte leaves; one kill in five does."""
    files = (folder / "consumequeue").glob("*/*/*")
    return [file for file in files if not file.stat().st_size]


def copy_to_read(mq: RocketMq, folder: Path, copy: Path) -> None:
    """A copy that RocketMQ starts with: 4.9 wants such files away, which its operator removes."""
    shutil.copytree(folder, copy)
    for file in empty_queue_files(copy) if mq.version == "v4" else ():
        file.unlink()
        note_compared("folders with empty files that 4.9 would not start with")


@pytest.mark.parametrize("halts", [False, True], ids=["stopped", "halted"])
def test_we_read_what_rocketmq_wrote(mq: RocketMq, tmp_path: Path, halts: bool) -> None:
    folder, copy = tmp_path / "store", tmp_path / "copy"
    commands = everything_of_theirs()
    answers = mq.write(folder, [*commands, *([HALT] if halts else [])])
    assert [answer["status"] for answer in answers] == ["PUT_OK"] * len(commands)
    copy_to_read(mq, folder, copy)
    ours = content_of_folder(folder)
    compared = assert_same(mq.read(copy), ours, whole_index=not halts)
    in_batches = 5 * (30 - 1)
    assert compared == ours.count == len(commands) + in_batches - 2, "two have no units"


def test_nothing_acknowledged_is_lost_when_rocketmq_is_killed(mq: RocketMq, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with mq.writing(folder) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answered = []
        for number in range(ACKNOWLEDGED_MIN):
            process.stdin.write(f"{put('orders', number % 3, b'%d' % number * 100)}\n")
            process.stdin.flush()
            answered.append(json.loads(process.stdout.readline()))
        process.kill()
        process.wait()
    copy_to_read(mq, folder, tmp_path / "copy")
    store = open_ours(folder)
    for number, answer in enumerate(answered):
        found = record.decode(store.read_record(answer["log_offset"]))
        assert (found.body, found.queue_offset) == (b"%d" % number * 100, answer["queue_offset"])
    theirs = mq.read(tmp_path / "copy")
    assert assert_same(theirs, content_of(store), whole_index=False) >= ACKNOWLEDGED_MIN
    store.close()


@pytest.mark.parametrize("we_crash", [False, True], ids=["closed", "crashed"])
@pytest.mark.parametrize("they_halt", [False, True], ids=["stopped", "halted"])
def test_taking_turns(mq: RocketMq, tmp_path: Path, we_crash: bool, they_halt: bool) -> None:
    """It writes, we append, it reads and appends, we read and append, the other version reads."""
    folder = tmp_path / "store"
    theirs = everything_of_theirs()
    counts = []
    for turn in range(2):
        more = [put("orders", 1, b"turn %d" % turn), batch("turns", 0, [b"a", b"b"])]
        mq.write(folder, [*theirs, *more, *([HALT] if they_halt else [])])
        theirs = []
        store = open_ours(folder)
        if store.adoption is None:  # two crashes, and tables that a broker would have left
            assert turn
            assert we_crash
            assert they_halt
        else:
            verified = store.adoption.verified
            assert (verified > 0) == (turn > 0), "from the end of what we wrote"
            epochs = [start for _, start in store.epochs]
            assert epochs[-2:] == [verified, store.appended_offset], "theirs, then ours"
            store.finish_adoption()
        append(store, [("orders", 1, b"ours"), ("turns", 0, b"ours")] * 20, KEYS=f"ours{turn}")
        counts.append(content_of(store).count)
        if we_crash:
            store.flush_queues()
            store.abandon()
        else:
            store.close()
    assert counts[1] - counts[0] == 3 + 40
    other = rocketmq("v5" if mq.version == "v4" else "v4")
    shutil.copytree(folder, tmp_path / "copy")
    ours = content_of_folder(folder)
    compared = assert_same(other.read(tmp_path / "copy"), ours, whole_index=not we_crash)
    assert compared == counts[-1]


def test_an_empty_file_keeps_4_9_from_starting_until_we_were_there(
    mq: RocketMq, tmp_path: Path
) -> None:
    mq.write(tmp_path, [put("orders", 0, b"a"), put("orders", 1, b"b")])
    empty = tmp_path / "consumequeue" / "orders" / "0" / f"{QUEUE_FILE_BYTES:020d}"
    empty.touch()
    assert empty_queue_files(tmp_path) == [empty]
    if mq.version == "v4":
        with pytest.raises(AssertionError, match="cannot load"):
            mq.read(tmp_path)
    ours = content_of_folder(tmp_path)
    assert not empty_queue_files(tmp_path)
    assert assert_same(mq.read(tmp_path), ours) == 2


def test_files_of_another_size_are_refused_by_both(mq: RocketMq, tmp_path: Path) -> None:
    mq.write(tmp_path, [put("orders", 0, b"a")])
    wrong = RocketMq(mq.version, 32 * 1024, 400)
    with pytest.raises(AssertionError, match=r"cannot load|length not matched"):
        wrong.read(tmp_path)

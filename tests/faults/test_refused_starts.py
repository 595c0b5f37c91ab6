"""A start that is refused leaves the folder as it was, byte for byte, ours and Apache RocketMQ's;
so ``cometmq store repair`` tells afterwards what it would have told before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cometmq.clock import SystemClock
from cometmq.errors import (
    CometError,
    StateTooNew,
    StoreDamaged,
    StoreForbidden,
    StoreForeignFile,
)
from cometmq.format.batch import BatchLimits
from cometmq.member.config import MemberConfig
from cometmq.member.state.opening import open_copy, open_writer
from cometmq.messaging.queuechanges import QueueChanges
from cometmq.model import Position
from cometmq.store import layout
from cometmq.store.disk.files import OsFiles
from cometmq.store.metadata import checkpoint
from cometmq.store.queues import dispatch
from cometmq.store.repair.repair import Accepted, repair
from cometmq.store.writer import MessageStore
from tests.compat.golden import GOLDEN, LOG_FILE_BYTES, STORES
from tests.compat.listing import INDEX, QUEUE_FILE_BYTES
from tests.support.cluster.broker import config_for
from tests.support.cluster.members import living_member
from tests.support.stores.refusals import fingerprint
from tests.support.stores.small_stores import HOST, WallClock
from tests.support.waiting import until

FILE_BYTES = 16 * 1024
OPTIONS: dict[str, Any] = {"mapped_file_size_commit_log": FILE_BYTES}
BODY = bytes(1000)
MESSAGES = 60
RECORD_V2 = struct.pack(">i", 200) + bytes.fromhex("daa320ab")


OTHER_USER = 65534


@contextmanager
def as_user(number: int) -> Iterator[None]:
    """Within it this thread's process has the rights of another user."""
    os.setegid(number)
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


async def grown(root: Path, *, clean: bool, topic: str = "orders") -> None:
    """Messages in three queues over five log files, with commits among them."""
    async with living_member(root, clean=clean, store_path=root, **OPTIONS) as member:
        await member.put(topic, 3)
        for number in range(MESSAGES):
            member.append(topic, number % 3, b"%06d" % number + BODY)
            if number % 20 == 19:
                history = member.state.generations.of(topic, 0)
                member.state.offsets.commit("g", (topic, 0), Position(0, 3), history, 9)
                member.keeper.write_offsets()
                await member.on_disk()
        await until(lambda: _is_marked(root, member.store))


def _is_marked(root: Path, store: MessageStore) -> bool:
    mark = checkpoint.load(OsFiles(), root / layout.CHECKPOINT).mark
    return mark is not None and mark.end == store.appended_offset


def log_files(root: Path) -> list[Path]:
    return sorted((root / "commitlog").iterdir())


def last_records(root: Path, count: int) -> int:
    """Where the last ``count`` messages of the queues begin in the log."""
    units = [
        struct.unpack_from(">q", content, at)[0]
        for path in sorted((root / "consumequeue" / "orders").rglob("0*"))
        if path.is_file() and (content := path.read_bytes())
        for at in range(0, len(content), 20)
        if struct.unpack_from(">i", content, at + 8)[0] > 0
    ]
    return int(sorted(units)[-count])


def overwrite(root: Path, start: int, end: int | None = None, filler: bytes = b"\0") -> None:
    """The log from ``start`` to ``end``, or all that follows."""
    for path in log_files(root):
        first, size = int(path.name), path.stat().st_size
        low = max(start, first)
        high = first + size if end is None else min(end, first + size)
        if low < high:
            with path.open("r+b") as file:
                file.seek(low - first)
                file.write((filler * (high - low))[: high - low])


def cut_short(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def edited(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))


def _zero_tail(root: Path) -> None:
    overwrite(root, last_records(root, 10))


def _remove_last(root: Path) -> None:
    for path in log_files(root)[-2:]:
        path.unlink()


def _zero_tail_and_shorten(root: Path) -> None:
    _zero_tail(root)
    cut_short(log_files(root)[-1], 100)


def _shorten_the_middle(root: Path) -> None:
    cut_short(log_files(root)[2], 5_000)


def _empty_the_middle(root: Path) -> None:
    cut_short(log_files(root)[2], 0)


def _wrong_queue_offset(root: Path) -> None:
    at = last_records(root, 5)
    overwrite(root, at + 20, at + 28, b"\0\0\0\0\0\0\xff\xff")
    shutil.rmtree(root / "consumequeue" / "orders" / "0")  # so that all of the log is read


def _version_2(root: Path) -> None:
    at = last_records(root, 1)
    overwrite(root, at, at + 8, RECORD_V2)


def _queue_of_nothing(root: Path) -> None:
    (root / "consumequeue" / "orders" / "notes.txt").write_text("x")


def _light_queue(root: Path) -> None:
    (root / "consumequeue" / "%LMQ%x" / "0").mkdir(parents=True)
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "topics.json").write_text('{"topicConfigTable":{}}')


def _table_of_batches(root: Path) -> None:
    table = {"T": {"attributes": {"queue.type": "BatchCQ"}}}
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": table}))


def _torn_table(root: Path) -> None:
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "topics.json").write_text('{"topicConfigTable":{')


def _no_epochs(root: Path) -> None:
    (root / layout.EPOCHS).unlink()


def _identity_does_not_read(root: Path) -> None:
    (root / layout.IDENTITY).write_text("{")


def _checkpoint_cut(root: Path) -> None:
    cut_short(root / layout.CHECKPOINT, 100)


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _file(path: Path) -> None:
    path.write_bytes(b"4711")


def _foreign_index(root: Path) -> None:
    (root / "index").mkdir(exist_ok=True)
    (root / "index" / "20260101000000000").write_bytes(bytes(100))


OTHER_TYPES: dict[str, Callable[[Path], None]] = {
    "a folder": Path.mkdir,
    "a pipe": os.mkfifo,
    "a loop": _loop,
    "a file": _file,
}
NAMES = [
    *(layout.CHECKPOINT, layout.LOCK, layout.IDENTITY, layout.EPOCHS, layout.RESERVE),
    *(layout.ABORT, layout.NEXT_LOG_FILE, layout.COMMIT_LOG, layout.CONSUME_QUEUE, layout.INDEX),
    *(layout.CONFIG, layout.TIMERS, "config/topics.json", "config/delayOffset.json.bak"),
    *("commitlog/00000000000000016384", "consumequeue/orders", "consumequeue/orders/1"),
    *("consumequeue/orders/1/00000000000000000000", "index/20991231235959999"),
    *("cometmq.timers/runs.json",),
]
FOLDERS = (layout.COMMIT_LOG, layout.CONSUME_QUEUE, layout.INDEX, layout.CONFIG, layout.TIMERS)

DAMAGES = [
    _zero_tail,
    _remove_last,
    _zero_tail_and_shorten,
    _shorten_the_middle,
    _empty_the_middle,
    _wrong_queue_offset,
    _version_2,
    _queue_of_nothing,
    _light_queue,
    _table_of_batches,
    _no_epochs,
    _identity_does_not_read,
    _checkpoint_cut,
    _foreign_index,
]
FOR_THE_WRITER = (_table_of_batches,)  # to refuse: no other looks into tables


def config_of(root: Path) -> MemberConfig:
    return config_for(root, store_path=root, **OPTIONS)


def told_by_repair(root: Path) -> str:
    try:
        done = repair(root, Accepted(), observer=QueueChanges())
    except CometError as error:
        return str(error).replace(str(root), "")
    return str([*done.losses, done.log_end])


# The lock file was never a store's content: one of the two stores has lost it.
@pytest.mark.parametrize(
    ("clean", "lock"), [(True, False), (False, True)], ids=["closed, without its lock", "killed"]
)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__[1:])
async def test_a_refused_start_changes_nothing(
    tmp_path: Path, damage: Callable[[Path], None], *, clean: bool, lock: bool
) -> None:
    root, untouched = tmp_path / "store", tmp_path / "untouched"
    await grown(root, clean=clean)
    damage(root)
    if not lock:
        (root / layout.LOCK).unlink()
    shutil.copytree(root, untouched)
    before = fingerprint(root)
    for _ in range(2):
        with pytest.raises((StoreDamaged, StoreForeignFile, StateTooNew)):
            open_writer(config_of(root), BatchLimits(), HOST, WallClock())
        assert fingerprint(root) == before
    if damage not in FOR_THE_WRITER:
        with pytest.raises((StoreDamaged, StoreForeignFile, StateTooNew)):
            open_copy(config_of(root), WallClock())
        assert fingerprint(root) == before
    assert told_by_repair(root) == told_by_repair(untouched)


@pytest.mark.parametrize("what", OTHER_TYPES)
@pytest.mark.parametrize("name", NAMES)
async def test_what_is_of_another_type_is_named_and_nothing_changes(
    tmp_path: Path, name: str, what: str
) -> None:
    root = tmp_path / "store"
    await grown(root, clean=False)
    path = root / name
    is_folder = name in FOLDERS or (name.startswith("consumequeue/orders") and "0000" not in name)
    if (what == "a folder") if is_folder else (what == "a file"):
        return
    path.parent.mkdir(exist_ok=True)
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    OTHER_TYPES[what](path)
    before = fingerprint(root)
    refusals: list[Callable[[], object]] = [
        lambda: open_writer(config_of(root), BatchLimits(), HOST, WallClock()),
        lambda: open_copy(config_of(root), WallClock()),
        lambda: repair(root, Accepted(), observer=QueueChanges()),
    ]
    for refused in refusals:
        with pytest.raises(StoreForeignFile, match=re.escape(str(path)) + "[ :].*[Mm]ove it out"):
            refused()
        assert fingerprint(root) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="root is missing: it takes another user's rights")
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        (".", 0o555),
        ("consumequeue", 0o555),
        ("consumequeue/orders", 0o500),
        ("commitlog", 0o555),
        ("commitlog/00000000000000016384", 0o444),
        ("checkpoint", 0o444),
        ("cometmq.json", 0o000),
        ("cometmq.epochs", 0o400),
        ("index", 0o555),
        ("config", 0o555),
        ("lock", 0o444),
    ],
)
async def test_what_another_user_owns_is_named_before_anything_changes(
    tmp_path: Path, name: str, mode: int
) -> None:
    root = tmp_path / "store"
    await grown(root, clean=False)
    (root / "config").mkdir(exist_ok=True)
    (root / "index").mkdir(exist_ok=True)
    for path in (root, *root.rglob("*")):
        os.chown(path, OTHER_USER, OTHER_USER)
    os.chown(root / name, 0, 0)
    (root / name).chmod(mode)
    before = fingerprint(root)
    with as_user(OTHER_USER):
        with pytest.raises(StoreForbidden, match="belongs to user 0"):
            open_writer(config_of(root), BatchLimits(), HOST, WallClock())
        with pytest.raises(StoreForbidden, match="belongs to user 0"):
            open_copy(config_of(root), WallClock())
    assert fingerprint(root) == before


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(
    "damage", [_table_of_batches, _torn_table, _version_2], ids=lambda damage: damage.__name__[1:]
)
def test_a_folder_of_rocketmq_that_is_refused_is_still_its_own(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    root = tmp_path / "store"
    damage(root)
    for backup in (root / "config").glob("*.bak"):
        backup.unlink()
    config = MemberConfig(
        store_path=root,
        mapped_file_size_commit_log=LOG_FILE_BYTES,
        mapped_file_size_consume_queue=QUEUE_FILE_BYTES,
        max_hash_slot_num=INDEX.hash_slots,
        max_index_num=INDEX.entries,
    )
    before = fingerprint(root)
    with pytest.raises((StoreDamaged, StoreForeignFile)):
        open_writer(config, BatchLimits(), HOST, SystemClock())
    assert fingerprint(root) == before


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("units_max", [1, 25])
async def test_what_is_too_much_for_memory_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, units_max: int, *, clean: bool
) -> None:
    """The queues are as those that were made from memory."""
    await grown(tmp_path / "one", clean=clean)
    shutil.rmtree(tmp_path / "one" / "consumequeue" / "orders" / "1")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    open_writer(config_of(tmp_path / "one"), BatchLimits(), HOST, WallClock()).store.abandon()
    monkeypatch.setattr(dispatch, "HELD_UNITS_MAX", units_max)
    open_writer(config_of(tmp_path / "other"), BatchLimits(), HOST, WallClock()).store.abandon()
    one, other = (fingerprint(tmp_path / name / "consumequeue") for name in ("one", "other"))
    assert one == other

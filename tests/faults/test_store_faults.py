"""What may happen to a store: torn writes, dead processes, full disks, forged batches."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cometmq.clock import SystemClock
from cometmq.errors import CometError, DiskFull, StoreDamaged, StoreForeignFile, StoreLocked
from cometmq.format import record
from cometmq.store.layout import offset_name
from cometmq.store.writer import MessageStore, StoreOptions
from tests.support.stores.small_stores import (
    HOST,
    LOG_FILE_BYTES,
    SMALL,
    FaultyFiles,
    append,
    bodies,
    encoded,
    open_store,
)

ROOT = Path(__file__).parents[2]


# --- torn writes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rest", ["zeros", "garbage"])
def test_a_record_torn_at_any_byte_is_cut(tmp_path: Path, rest: str) -> None:
    """The machine stopped; the last append reached the disk up to some byte, its queue wholly.
    Behind that byte are zeros or anything else.

    The format has no checksum over properties: only zeros (what a log file is made of) are noticed
    in their place, so garbage is tried up to where they begin.
    """
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"first"]))
    start = store.appended_offset
    append(store, ("A", 0, [b"the last message"]), tag="blue")
    end = store.appended_offset
    store.abandon()
    path = tmp_path / "commitlog" / offset_name(0)
    whole = path.read_bytes()
    garbage = bytes(end - start) if rest == "zeros" else b"\xa5" * (end - start)
    for torn in range(start, end if rest == "zeros" else end - len(b"TAGS\1blue\2")):
        path.write_bytes(whole[:torn] + garbage[: end - torn] + whole[end:])
        store = open_store(tmp_path, files=FaultyFiles(boot=f"boot {torn}"))
        assert store.appended_offset == start, torn - start
        append(store, ("A", 0, [b"next"]))
        assert bodies(store, "A", 0) == [b"first", b"next"]
        store.abandon()
        # The place of the cut: what stands behind the new record are zeros.
        assert not any(path.read_bytes()[start + 95 :])


@pytest.mark.parametrize("kept", range(8))
def test_a_torn_end_mark_is_cut(tmp_path: Path, kept: int) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [bytes(LOG_FILE_BYTES - 1000)]))
    end = store.appended_offset
    append(store, ("A", 0, [bytes(2000)]))
    store.abandon()
    path = tmp_path / "commitlog" / offset_name(0)
    whole = path.read_bytes()
    path.write_bytes(whole[: end + kept] + bytes(8 - kept) + whole[end + 8 :])
    store = open_store(tmp_path, files=FaultyFiles(boot="another"))
    assert store.appended_offset == end
    append(store, ("A", 0, [b"small"]))
    assert [len(body) for body in bodies(store, "A", 0)] == [LOG_FILE_BYTES - 1000, 5]
    store.close()


# --- dead processes -------------------------------------------------------------------------------

CHILD = """
import sys
from pathlib import Path
from cometmq.clock import SystemClock
from cometmq.store.writer import MessageStore
from tests.support.stores.small_stores import SMALL, append
store = MessageStore.open(Path(sys.argv[1]), SMALL, clock=SystemClock())
first = sum(store.queue_bounds("A", queue)[1] for queue in range(3))
print("epoch", store.epoch, flush=True)
for number in range(first, first + 100_000):
    append(store, ("A", number % 3, [b"%d " % number + bytes(number % 700)]))
    print("appended", number, flush=True)
    if number % 7 == 0:
        store.flush_log()
        print("flushed", number, flush=True)
    if number % 50 == 0:
        store.flush_queues()
    if store.next_file_wanted:
        store.prepare_next_file()
"""


def kill_while_appending(root: Path, after: int) -> int:
    """Let a child append ``after`` messages or more and kill it; returns the last it reported."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    reported, count = -1, 0
    with child:
        for line in child.stdout:
            # The kill may fall into the middle of a line.
            if line.startswith("appended ") and line.endswith("\n"):
                reported, count = int(line.split()[1]), count + 1
            if count == after:
                child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    return reported


def test_kill_9_loses_nothing_that_was_reported(tmp_path: Path, seed: int) -> None:
    """The page cache outlives the process, so every reported append is there, flushed or not."""
    for life in range(5):
        reported = kill_while_appending(tmp_path, 30 + (seed >> life) % 120)
        store = open_store(tmp_path)
        assert not store.clean_start
        assert store.epoch == 2 * life + 2
        found = [int(b.split(b" ")[0]) for q in range(3) for b in bodies(store, "A", q)]
        assert len(found) > reported
        assert sorted(found) == list(range(len(found))), "in order, none twice"
        store.close() if life % 2 else store.abandon()


def test_a_data_folder_in_use_is_refused(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"epoch 1\n"
        with pytest.raises(StoreLocked, match=str(tmp_path)):
            open_store(tmp_path)
        child.kill()


# --- forged batches -------------------------------------------------------------------------------


def forgeries() -> Iterator[tuple[str, bytes]]:
    good = encoded("A", 0, b"forged", tag="blue")
    for name, at, value in [
        ("total size", 3, 1),
        ("magic", 4, 1),
        ("body crc", 11, 1),
        ("queue id", 15, 1),
        ("sys flag", 39, 4),
        ("reconsume times", 75, 1),
        ("prepared offset", 83, 1),
        ("body length", 87, 1),
        ("body", 88, 1),
        ("topic length", 94, 1),
        ("topic", 95, 1),
        ("properties length", 97, 1),
        ("properties", 102, 1),
    ]:
        changed = bytearray(good)
        changed[at] ^= value
        yield name, bytes(changed)
    yield "short", good[:-1]
    yield "long", good + b"\0"


@pytest.mark.parametrize(("name", "records"), list(forgeries()))
def test_after_a_forged_batch_and_a_crash_all_is_read_back(
    tmp_path: Path, name: str, records: bytes
) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"before"]))
    if name == "properties":
        records = records.replace(b"\x01", b"\x02")
    with pytest.raises(CometError) as refused:
        store.append(records, [("A", 0, 1)], born_host=HOST, store_host=HOST)
    assert refused.value.status == "INVALID_ARGUMENT"
    append(store, ("A", 0, [b"after"]))
    store.abandon()
    for boot in ("boot-1", "boot-2"):
        store = open_store(tmp_path, files=FaultyFiles(boot=boot))
        assert bodies(store, "A", 0) == [b"before", b"after"]
        store.abandon()


# --- a full disk ----------------------------------------------------------------------------------


@pytest.mark.parametrize("room", range(0, 2200, 100))
def test_a_disk_that_fills_up_at_any_point_loses_nothing(tmp_path: Path, room: int) -> None:
    """Room for the log or for a part of it, for some units, for a part of a new file."""
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    append(store, ("A", 0, [b"0"]))
    files.room = room
    kept = [b"0"]
    with suppress(DiskFull):
        for number in range(1, 20):
            append(store, ("A", number % 2, [b"%d" % number]))
            kept.append(b"%d" % number)
    assert len(kept) < 20
    expected = {queue: [b for b in kept if int(b) % 2 == queue] for queue in (0, 1)}
    assert {queue: bodies(store, "A", queue) for queue in (0, 1)} == expected, "reading goes on"
    with pytest.raises(DiskFull):
        append(store, ("A", 0, [b"100"]))
    files.room = None
    append(store, ("A", 0, [b"100"]))
    assert bodies(store, "A", 0) == [*expected[0], b"100"]
    store.abandon()
    store = open_store(tmp_path)
    assert bodies(store, "A", 0) == [*expected[0], b"100"]
    assert bodies(store, "A", 1) == expected[1]
    store.close()


def test_nothing_is_appended_while_units_wait_for_room(tmp_path: Path) -> None:
    """What waits in memory is bounded by one batch."""
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    files.full_for = "/consumequeue/"
    append(store, ("A", 0, [b"1", b"2"]))
    end = store.appended_offset
    assert store.dispatched_offset == 0
    with pytest.raises(DiskFull):
        append(store, ("A", 0, [b"3"]))
    assert store.appended_offset == end
    assert bodies(store, "A", 0) == [b"1", b"2"]
    files.full_for = None
    store.close()
    store = open_store(tmp_path)
    assert store.clean_start, "closing wrote the units"
    assert bodies(store, "A", 0) == [b"1", b"2"]
    store.close()


def test_closing_on_a_full_disk_is_recovered(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = open_store(tmp_path, files=files)
    files.room = len(encoded("A", 0, b"1"))
    append(store, ("A", 0, [b"1"]))
    with pytest.raises(DiskFull):
        store.close()
    store = open_store(tmp_path)
    assert not store.clean_start
    assert bodies(store, "A", 0) == [b"1"]
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("a small file system can be mounted by root only")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield tmp_path
    # Lazily: a test that failed may have left files open, and must not leave a mount.
    subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def append_until_full(store: MessageStore) -> int:
    for count in range(10_000):
        try:
            append(store, ("A", count % 4, [b"%d " % count + bytes(1000)]))
        except DiskFull:
            return count
    raise AssertionError("the disk never filled up")


def test_a_really_full_disk(small_disk: Path) -> None:
    options = StoreOptions(commit_log_file_bytes=512 * 1024, consume_queue_file_bytes=20_000)
    store = MessageStore.open(small_disk / "store", options, clock=SystemClock())
    count = append_until_full(store)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (small_disk / "ballast").write_bytes(bytes(4 * 1024 * 1024))
    with pytest.raises(DiskFull):
        append(store, ("A", 0, [b"no " + bytes(1000)]))
    found = {int(body.split(b" ")[0]) for queue in range(4) for body in bodies(store, "A", queue)}
    assert found == set(range(count))
    store.abandon()
    (small_disk / "ballast").unlink()
    store = MessageStore.open(small_disk / "store", options, clock=SystemClock())
    found = {int(body.split(b" ")[0]) for queue in range(4) for body in bodies(store, "A", queue)}
    assert found == set(range(count))
    store.close()


# --- foreign and damaged files --------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize(
    ("place", "size"),
    [
        ("commitlog/" + offset_name(0) + "~", 10),
        ("commitlog/" + offset_name(LOG_FILE_BYTES), LOG_FILE_BYTES + 1),
        ("commitlog/" + offset_name(7 * LOG_FILE_BYTES), LOG_FILE_BYTES),
        ("consumequeue/A/0/" + offset_name(320), 321),
        ("consumequeue/A/0/notes.txt", 3),
        ("consumequeue/A/old/x", 3),
        ("consumequeue/README", 3),
        ("checkpoint", 24),
    ],
)
def test_a_foreign_file_is_named_and_nothing_is_lost(
    tmp_path: Path, place: str, size: int, clean: bool
) -> None:
    store = open_store(tmp_path)
    append(store, ("A", 0, [b"kept"]))
    if clean:
        store.close()
    else:
        store.abandon()
    path = tmp_path / place
    saved = path.read_bytes() if path.exists() else None
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(b"x" * size)
    refusal = StoreDamaged if place == "checkpoint" else StoreForeignFile
    with pytest.raises(refusal) as refused:
        open_store(tmp_path)
    assert any(part in str(refused.value) for part in (path.name, path.parent.name))
    path.unlink()
    if saved is not None:
        path.write_bytes(saved)
    if path.parent.name == "old":
        path.parent.rmdir()
    store = open_store(tmp_path)
    assert bodies(store, "A", 0) == [b"kept"]
    store.close()


def test_a_damaged_body_is_served_to_nobody_by_id(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = append(store, ("A", 0, [b"one"]))
    second = append(store, ("A", 0, [b"two"]))
    store.close()
    path = tmp_path / "commitlog" / offset_name(0)
    content = bytearray(path.read_bytes())
    content[first.log_offset + 88] ^= 1
    path.write_bytes(content)
    store = open_store(tmp_path)
    with pytest.raises(CometError):
        store.read_record(first.log_offset)
    assert record.decode(store.read_record(second.log_offset)).body == b"two"
    store.close()


def test_a_store_of_other_file_sizes_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    for options in (
        StoreOptions(2 * LOG_FILE_BYTES, SMALL.consume_queue_file_bytes),
        StoreOptions(LOG_FILE_BYTES // 2, SMALL.consume_queue_file_bytes),
    ):
        with pytest.raises(StoreForeignFile, match=str(LOG_FILE_BYTES)):
            open_store(tmp_path, options)

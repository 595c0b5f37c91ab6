from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from cometmq.errors import StoreDamaged, StoreForeignFile
from cometmq.format import record
from cometmq.member.read.records import read_mended_message
from cometmq.store import layout
from cometmq.store.base import BaseStore
from cometmq.store.disk.files import OsFiles
from cometmq.store.layout import offset_name
from cometmq.store.metadata import heads
from cometmq.store.metadata.epochs import Epoch
from cometmq.store.metadata.heads import Head
from cometmq.store.repair.repair import Accepted, Repaired, repair
from cometmq.store.repair.verify import verify
from tests.support.stores.refusals import fingerprint
from tests.support.stores.small_stores import (
    INDEX_SIZES,
    LOG_FILE_BYTES,
    QUEUE_FILE_BYTES,
    START_MS,
    WallClock,
    append,
    open_store,
)

MESSAGES = 40


def grown(root: Path, *, mark: bytes = b"", began_ms: int = START_MS, clean: bool = True) -> None:
    """Stores of the same sizes, topics and counts: only the bodies and the times differ."""
    clock = WallClock(began_ms)
    store = open_store(root, clock=clock)
    for number in range(MESSAGES):
        clock.now_ms += 5
        append(store, ("A", 0, [b"%s %02d " % (mark or b"mine", number) + bytes(1000)]))
    store.flush_log()
    store.flush_queues()
    store.close() if clean else store.abandon()


def mended(root: Path, **accepted: object) -> Repaired:
    return repair(
        root,
        Accepted(**accepted),  # type: ignore[arg-type]
        index_sizes=INDEX_SIZES,
        queue_file_bytes=QUEUE_FILE_BYTES,
    )


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_log_file_of_another_store_is_named_and_never_served(
    tmp_path: Path, number: int, *, clean: bool
) -> None:
    """Though each of its records is good, and as long as ours, and of the same queue and offset."""
    root, other = tmp_path / "store", tmp_path / "other"
    grown(root, clean=clean)
    grown(other, mark=b"evil", began_ms=START_MS + 100_000)
    name = offset_name(number * LOG_FILE_BYTES)
    shutil.copyfile(other / "commitlog" / name, root / "commitlog" / name)
    before = fingerprint(root)
    with pytest.raises(StoreForeignFile, match=rf"commitlog/{name} is the log file of another sto"):
        open_store(root)
    assert fingerprint(root) == before
    assert any("another store" in fault.what for fault in verify(root).faults)
    start, end = number * LOG_FILE_BYTES, (number + 1) * LOG_FILE_BYTES
    with pytest.raises(StoreDamaged, match=f"--write-off {start}-{end} .*another store"):
        mended(root)
    done = mended(root, write_off=[(start, end)])
    store = open_store(root)
    found = readable(store)
    assert not [body for body in found if body.startswith(b"evil")]
    lost = sum(loss.message_count for loss in done.losses)
    assert (len(found) + lost, lost > 5) == (MESSAGES, True)
    store.close()
    assert not any("another store" in fault.what for fault in verify(root).faults)


def readable(store: BaseStore) -> list[bytes]:
    """The bodies that consumers get."""
    found = []
    for offset in range(*store.queue_bounds("A", 0)):
        with suppress(StoreDamaged):
            found.append(record.decode(read_mended_message(store, ("A", 0), offset)).body)
    return found


def test_a_damaged_first_record_is_not_taken_for_anothers(tmp_path: Path) -> None:
    grown(tmp_path)
    path = tmp_path / "commitlog" / offset_name(LOG_FILE_BYTES)
    content = bytearray(path.read_bytes())
    content[56 + 7] ^= 1  # its store time, which no checksum covers
    path.write_bytes(content)
    open_store(tmp_path).close()


def test_what_another_epoch_wrote_is_no_strangers(tmp_path: Path) -> None:
    """As where a follower cut its log and copied another writer's, by a release without heads."""
    grown(tmp_path)
    known = heads.load(OsFiles(), tmp_path / layout.HEADS)
    assert sorted(known) == [n * LOG_FILE_BYTES for n in range(len(known))]
    assert len(known) > 2
    changed = [head._replace(epoch=head.epoch + 1, size=1) for head in known.values()]
    (tmp_path / layout.HEADS).write_bytes(heads.encode(changed))
    open_store(tmp_path).close()
    assert heads.load(OsFiles(), tmp_path / layout.HEADS) == known


def test_what_does_not_read_says_nothing(tmp_path: Path) -> None:
    one, two = Head(0, 3, 100, 9, -5, 10), Head(4096, 3, 91, 0, 7, 11)
    path = tmp_path / layout.HEADS
    path.write_bytes(heads.encode([one, two]).replace(b"4096", b"8192") + b"\0" * 50 + b"\n7\n")
    assert heads.load(OsFiles(), path) == {0: one}
    assert heads.load(OsFiles(), tmp_path / "none") == {}
    assert heads.epoch_of([Epoch(2, 100), Epoch(4, 200)], 199) == 2
    assert heads.epoch_of([Epoch(2, 100)], 99) == 0


def test_exchanged_queues_make_no_stranger_of_a_log_file(tmp_path: Path) -> None:
    """The mark does not hold, and all units name other records: the file begins as it should."""
    clock = WallClock()
    store = open_store(tmp_path, clock=clock)
    for number in range(8):
        append(store, ("A", 0, [b"%d" % number]), ("B", 0, [b"%d" % number + bytes(90)]))
    store.close()
    one, other = (tmp_path / "consumequeue" / topic / "0" for topic in "AB")
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    log = tmp_path / "commitlog" / offset_name(0)
    content = bytearray(log.read_bytes())
    content[content.rindex(b"7" + bytes(90)) + 5] ^= 1  # of the last body
    log.write_bytes(content)
    with pytest.raises(StoreDamaged, match="--accept-end") as refused:
        mended(tmp_path)
    assert "write-off" not in refused.value.message

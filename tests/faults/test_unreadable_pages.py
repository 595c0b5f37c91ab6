"""A page that the disk cannot read costs what lies in it, and nothing else: it is named, readers
pass it, and ``cometmq store repair`` gives it up when that is asked for.
"""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest

from cometmq.errors import MessageNotFound, StoreDamaged
from cometmq.member.read.records import read_mended_message
from cometmq.store.disk.files import PAGE_BYTES
from cometmq.store.layout import offset_name
from cometmq.store.repair.repair import Accepted, Repaired, repair
from cometmq.store.repair.verify import verify
from cometmq.store.writer import MessageStore
from tests.support.faults.bad_pages import BadPages
from tests.support.stores.small_stores import (
    INDEX_SIZES,
    LOG_FILE_BYTES,
    QUEUE_FILE_BYTES,
    append,
    find_by_key,
    open_store,
)

MESSAGES = 60
BODY = bytes(700)


@pytest.fixture(params=[errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def bad(request: pytest.FixtureRequest) -> BadPages:
    return BadPages(request.param)


def grown(root: Path, *, clean: bool = True) -> None:
    store = open_store(root)
    for number in range(MESSAGES):
        append(store, ("A", 0, [b"%d " % number + BODY]), keys=f"k{number}")
    store.flush_log()
    store.flush_queues()
    while store.index_some():
        pass
    store.close() if clean else store.abandon()


def readable(store: MessageStore) -> set[int]:
    """The messages that a consumer gets; each other one is named as lost."""
    found = set()
    low, high = store.queue_bounds("A", 0)
    assert (low, min(high, MESSAGES)) == (0, MESSAGES)
    for offset in range(MESSAGES):
        try:
            raw = read_mended_message(store, ("A", 0), offset)
        except (StoreDamaged, MessageNotFound):
            continue
        assert b"%d " % offset in raw
        found.add(offset)
    return found


def of_page(root: Path, page: int) -> set[int]:
    """The messages of the first log file that lie in one of its pages, in part or as a whole."""
    content = (root / "commitlog" / offset_name(0)).read_bytes()
    found, at = set(), 0
    for number in range(MESSAGES):
        size = int.from_bytes(content[at : at + 4], "big")
        if size == 0 or at + size > len(content):
            break
        if at < (page + 1) * PAGE_BYTES and at + size > page * PAGE_BYTES:
            found.add(number)
        at += size
    return found


def mended(root: Path, **accepted: object) -> Repaired:
    return repair(
        root,
        Accepted(**accepted),  # type: ignore[arg-type]
        index_sizes=INDEX_SIZES,
        queue_file_bytes=QUEUE_FILE_BYTES,
    )


@pytest.mark.parametrize("rebuilds", [False, True], ids=["", "queues are missing"])
@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_page_of_an_older_log_file_costs_its_messages(
    tmp_path: Path, bad: BadPages, *, clean: bool, rebuilds: bool
) -> None:
    grown(tmp_path, clean=clean)
    lost = of_page(tmp_path, 1)
    assert len(lost) > 3
    if rebuilds:
        shutil.rmtree(tmp_path / "consumequeue")
    bad.spoil(tmp_path / "commitlog" / offset_name(0), 1)
    with bad.met():
        store = open_store(tmp_path)
        assert readable(store) == set(range(MESSAGES)) - lost
        while store.index_some():  # as in the background: it meets the page, and stays alive
            pass
        append(store, ("A", 0, [b"new"]))
        store.close()

        told = " ".join(fault.what for fault in verify(tmp_path).faults)
        assert "the disk cannot read all of it" in told
        with pytest.raises(StoreDamaged, match="--write-off") as refused:
            mended(tmp_path)
        [place] = re.findall(r"--write-off (\d+)-(\d+)", str(refused.value))
        done = mended(tmp_path, write_off=[tuple(map(int, place))])
        counted = {
            offset
            for loss in done.losses
            for offset in range(
                loss.first_queue_offset, loss.first_queue_offset + loss.message_count
            )
        }
        assert counted == lost
        assert not verify(tmp_path).faults
    assert not any(bad.pages.values()), "what was written off can be read again"
    store = open_store(tmp_path)
    assert readable(store) == set(range(MESSAGES)) - lost
    store.close()


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
@pytest.mark.parametrize(
    "name", ["checkpoint", "consumequeue/A/0/" + offset_name(0), "abort", "cometmq.reserve"]
)
def test_what_can_be_done_without_is_done_without(
    tmp_path: Path, bad: BadPages, name: str, *, clean: bool
) -> None:
    grown(tmp_path, clean=clean)
    if not (tmp_path / name).exists():
        (tmp_path / name).write_bytes(b"4711")
    bad.spoil(tmp_path / name, 0)
    with bad.met():
        store = open_store(tmp_path)
        assert readable(store) == set(range(MESSAGES))
        store.close()
        store = open_store(tmp_path)
        assert readable(store) == set(range(MESSAGES))
        store.close()


def test_a_page_of_the_index_is_built_again(tmp_path: Path, bad: BadPages) -> None:
    grown(tmp_path)
    for path in sorted((tmp_path / "index").iterdir())[-2:]:
        bad.spoil(path, 0)
    with bad.met():
        store = open_store(tmp_path)
        append(store, ("A", 0, [b"new"]), keys="new")
        store.flush_log()
        while store.index_some():
            pass
        assert len(list(find_by_key(store, "A", "new"))) == 1
        assert len(list(find_by_key(store, "A", f"k{MESSAGES - 1}"))) == 1
        store.close()


def test_a_page_at_the_end_of_the_log_is_never_taken_for_the_end(
    tmp_path: Path, bad: BadPages
) -> None:
    """A crash tears what was written last. It makes no page that cannot be read. No mark and no
    queue says that something was there.
    """
    grown(tmp_path, clean=False)
    (tmp_path / "checkpoint").unlink()
    shutil.rmtree(tmp_path / "consumequeue")
    last = sorted((tmp_path / "commitlog").iterdir())[-1]
    written = len(last.read_bytes().rstrip(b"\0"))
    bad.spoil(last, *range(written // PAGE_BYTES + 1))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with bad.met():
        with pytest.raises(StoreDamaged, match=f"ends at {int(last.name)} .the disk cannot"):
            open_store(tmp_path)
        assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
        with pytest.raises(StoreDamaged, match=f"--accept-end {int(last.name)}"):
            mended(tmp_path)
        mended(tmp_path, end=int(last.name))
        store = open_store(tmp_path)
        assert store.queue_bounds("A", 0)[1] < MESSAGES
        append(store, ("A", 0, [BODY] * 10))
        store.close()
    assert written < LOG_FILE_BYTES

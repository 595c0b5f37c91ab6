from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import DiskFull, StoreDamaged
from cometmq.format import queueunit
from cometmq.store.consumequeue import ConsumeQueue
from cometmq.store.segment import Segment
from tests.support.stores import FaultyFiles

PER_FILE = 8
FILE_BYTES = PER_FILE * 20
LOG_END = 10**12


def units(*positions: int) -> bytes:
    return b"".join(queueunit.pack(position, 10, 7) for position in positions)


def fresh(directory: Path) -> ConsumeQueue:
    return ConsumeQueue("T", 0, directory / "q", FILE_BYTES)


def filled(directory: Path, count: int, files: FaultyFiles) -> ConsumeQueue:
    """Unit i points to 10 * i."""
    queue = fresh(directory)
    if count:
        queue.append(units(*range(0, 10 * count, 10)))
        queue.write(files, set())
    return queue


def read_all(queue: ConsumeQueue, start: int = 0) -> list[int]:
    found: list[int] = []
    while piece := queue.read_units(start + len(found), 5, nowait=True):
        found += [position for position, _, _ in queueunit.iterate(piece)]
    return found


@pytest.mark.parametrize("count", [0, 1, PER_FILE - 1, PER_FILE, PER_FILE + 1, 3 * PER_FILE])
def test_units_are_read_back_and_found_again(tmp_path: Path, count: int) -> None:
    files = FaultyFiles()
    queue = filled(tmp_path, count, files)
    assert read_all(queue) == list(range(0, 10 * count, 10))
    again = fresh(tmp_path)
    assert not again.load(files, 0, LOG_END)
    assert (again.min_offset, again.next_offset) == (0, count)
    assert read_all(again) == read_all(queue)


def test_files_are_sparse_and_whole(tmp_path: Path) -> None:
    queue = ConsumeQueue("T", 0, tmp_path / "q", 6_000_000)
    queue.append(units(0))
    queue.write(FaultyFiles(), set())
    stat = (tmp_path / "q" / "00000000000000000000").stat()
    assert stat.st_size == 6_000_000
    assert stat.st_blocks * 512 < 100_000


def test_a_read_ends_at_a_files_end(tmp_path: Path) -> None:
    queue = filled(tmp_path, 20, FaultyFiles())
    assert len(queue.read_units(6, 10, nowait=False)) == 2 * 20
    assert queue.read_units(20, 1, nowait=False) == b""
    assert queue.read_units(5, 0, nowait=False) == b""


def test_units_that_the_disk_did_not_take_are_readable(tmp_path: Path) -> None:
    files = FaultyFiles()
    queue = filled(tmp_path, 3, files)
    files.room = 25
    queue.append(units(30, 40, 50))
    dirty: set[Segment] = set()
    with pytest.raises(DiskFull):
        queue.write(files, dirty)
    assert queue.has_unwritten
    assert read_all(queue) == [0, 10, 20, 30, 40, 50]
    assert len(queue.read_units(2, 4, nowait=True)) == 20, "first what is in the file"
    files.room = None
    queue.append(units(60))
    queue.write(files, dirty)
    assert queue.segments.pread(60, 80) == units(30, 40, 50, 60)
    assert len(dirty) == 1
    assert read_all(queue) == [0, 10, 20, 30, 40, 50, 60]


@given(count=st.integers(0, 30), log_end=st.integers(0, 320), start=st.integers(0, 320))
def test_loading_cuts_and_measures_like_a_list(
    tmp_path_factory: pytest.TempPathFactory, count: int, log_end: int, start: int
) -> None:
    log_end -= log_end % 10  # a log ends between records
    directory, files = tmp_path_factory.mktemp("queue"), FaultyFiles()
    filled(directory, count, files)
    queue = fresh(directory)
    cut = queue.load(files, start, log_end)
    kept = [position for position in range(0, 10 * count, 10) if position < log_end]
    assert queue.next_offset == len(kept)
    assert queue.min_offset == sum(position < start for position in kept)
    assert cut == (len(kept) < count)
    again = fresh(directory)
    assert not again.load(files, 0, LOG_END), "what was cut is gone for good"
    assert read_all(again) == kept


def test_what_stands_behind_a_hole_is_cut(tmp_path: Path) -> None:
    files = FaultyFiles()
    queue = filled(tmp_path, 12, files)
    for segment in queue.segments:
        segment.pwrite(segment.start + 40, bytes(20))  # units 2 and 10 never reached the disk
    again = fresh(tmp_path)
    assert again.load(files, 0, 20)
    assert read_all(again) == [0, 10]
    assert again.segments.pread(40, FILE_BYTES - 40) == bytes(FILE_BYTES - 40)


def test_a_unit_across_the_end_of_the_log_is_damage(tmp_path: Path) -> None:
    files = FaultyFiles()
    filled(tmp_path, 3, files)
    with pytest.raises(StoreDamaged, match="unit 2"):
        fresh(tmp_path).load(files, 0, 25)


@pytest.mark.parametrize("offset", [1, PER_FILE, PER_FILE + 3])
def test_a_queue_whose_front_is_gone_is_filled_up(tmp_path: Path, offset: int) -> None:
    files = FaultyFiles()
    queue = fresh(tmp_path)
    queue.start_at(offset)
    queue.append(units(500, 510))
    queue.write(files, set())
    again = fresh(tmp_path)
    again.load(files, 0, LOG_END)
    for each in (queue, again):
        assert (each.min_offset, each.next_offset) == (offset, offset + 2)
        assert read_all(each, offset) == [500, 510]
        assert each.read_units(offset - 1, 1, nowait=False) == b""
    front = offset - offset % PER_FILE
    assert again.segments.start == front * 20
    filler = again.segments.pread(front * 20, (offset - front) * 20)
    assert filler == queueunit.PREFILL * (offset - front)


def test_files_that_start_and_end_below_a_position(tmp_path: Path) -> None:
    queue = filled(tmp_path, 12, FaultyFiles())
    newest = next(reversed(queue.segments))
    assert queue.ends_below(111)
    assert not queue.ends_below(110)
    assert queue.starts_below(newest, 81)
    assert not queue.starts_below(newest, 80)

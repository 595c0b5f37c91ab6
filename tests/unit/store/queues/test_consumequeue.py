from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import DiskFull, StoreDamaged
from cometmq.format import queueunit
from cometmq.store.disk.segments import Segment
from cometmq.store.queues.consumequeue import ConsumeQueue
from tests.support.stores.small_stores import FaultyFiles

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
        queue.write(files, list[Segment]().append)
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
    assert again.load(files)
    assert not again.cut(files, 0, LOG_END)
    assert (again.min_offset, again.next_offset) == (0, count)
    assert read_all(again) == read_all(queue)


def test_files_are_sparse_and_whole(tmp_path: Path) -> None:
    queue = ConsumeQueue("T", 0, tmp_path / "q", 6_000_000)
    queue.append(units(0))
    queue.write(FaultyFiles(), list[Segment]().append)
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
        queue.write(files, dirty.add)
    assert queue.has_unwritten
    assert read_all(queue) == [0, 10, 20, 30, 40, 50]
    assert len(queue.read_units(2, 4, nowait=True)) == 20, "first what is in the file"
    files.room = None
    queue.append(units(60))
    queue.write(files, dirty.add)
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
    assert queue.load(files)
    cut = queue.cut(files, start, log_end)
    kept = [position for position in range(0, 10 * count, 10) if position < log_end]
    assert queue.next_offset == len(kept)
    assert queue.min_offset == sum(position < start for position in kept)
    assert cut == (len(kept) < count)
    again = fresh(directory)
    assert again.load(files)
    assert not again.cut(files, 0, LOG_END), "what was cut is gone for good"
    assert read_all(again) == kept


def test_what_stands_behind_a_hole_is_cut(tmp_path: Path) -> None:
    files = FaultyFiles()
    queue = filled(tmp_path, 12, files)
    for segment in queue.segments:
        segment.pwrite(segment.start + 40, bytes(20))  # units 2 and 10 never reached the disk
    again = fresh(tmp_path)
    assert again.load(files)
    assert again.cut(files, 0, 20)
    assert read_all(again) == [0, 10]
    assert again.segments.pread(40, FILE_BYTES - 40) == bytes(FILE_BYTES - 40)


def test_a_unit_across_the_end_of_the_log_is_damage(tmp_path: Path) -> None:
    files = FaultyFiles()
    filled(tmp_path, 3, files)
    queue = fresh(tmp_path)
    assert queue.load(files)
    with pytest.raises(StoreDamaged, match="unit 2"):
        queue.cut(files, 0, 25)


@pytest.mark.parametrize("offset", [1, PER_FILE, PER_FILE + 3])
def test_a_queue_whose_front_is_gone_is_filled_up(tmp_path: Path, offset: int) -> None:
    files = FaultyFiles()
    queue = fresh(tmp_path)
    queue.start_at(offset)
    queue.append(units(500, 510))
    queue.write(files, list[Segment]().append)
    again = fresh(tmp_path)
    assert again.load(files)
    again.cut(files, 500, LOG_END)
    for each in (queue, again):
        assert (each.min_offset, each.next_offset) == (offset, offset + 2)
        assert read_all(each, offset) == [500, 510]
        assert each.read_units(offset - 1, 1, nowait=False) == b""
    assert not again.missing_in_front(500), "filler stands in front"
    front = (offset - 1) - (offset - 1) % PER_FILE
    assert again.segments.start == front * 20
    filler = again.segments.pread(front * 20, (offset - front) * 20)
    assert filler == queueunit.PREFILL * (offset - front)


@pytest.mark.parametrize(("removed", "complaint"), [(0, "before"), (1, None), (2, "")])
def test_a_missing_file_is_noticed(tmp_path: Path, removed: int, complaint: str | None) -> None:
    """The first one, one between two others; of the last one the tally tells."""
    files = FaultyFiles()
    filled(tmp_path, 3 * PER_FILE - 1, files)
    (tmp_path / "q" / f"{removed * FILE_BYTES:020}").unlink()
    queue = fresh(tmp_path)
    if complaint is None:
        assert not queue.load(files)
        return
    assert queue.load(files)
    queue.cut(files, 0, LOG_END)
    assert complaint in queue.missing_in_front(0)
    assert bool(queue.missing_in_front(0)) == bool(complaint)
    assert not queue.missing_in_front(10 * PER_FILE + 1), "so much may be gone from the log"


def test_files_that_start_and_end_below_a_position(tmp_path: Path) -> None:
    queue = filled(tmp_path, 12, FaultyFiles())
    newest = next(reversed(queue.segments))
    assert queue.ends_below(111)
    assert not queue.ends_below(110)
    assert queue.starts_below(newest, 81)
    assert not queue.starts_below(newest, 80)


# --- removing from the front ----------------------------------------------------------------------


@given(
    count=st.integers(0, 3 * PER_FILE),
    in_memory=st.integers(0, 5),
    starts=st.lists(st.integers(-5, 10 * 40), max_size=4),
)
def test_messages_are_forgotten_from_the_front(
    count: int, in_memory: int, starts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unit i points to 10 * i; the last ones are in memory alone."""
    queue = filled(tmp_path_factory.mktemp("q"), count, FaultyFiles())
    if in_memory:
        queue.append(units(*range(10 * count, 10 * (count + in_memory), 10)))
    positions = [10 * n for n in range(count + in_memory)]
    low = 0
    for start in starts:
        _forget_below(queue, start)
        low = max(low, sum(position < start for position in positions))
        assert queue.min_offset == low
        assert queue.next_offset == count + in_memory


def _forget_below(queue: ConsumeQueue, log_start: int) -> None:
    queue.forget_while(lambda position, _size: position < log_start)


def test_filler_is_gone_whatever_is_asked(tmp_path: Path) -> None:
    queue = fresh(tmp_path)
    queue.start_at(PER_FILE + 3)
    queue.append(units(500))
    queue.write(FaultyFiles(), list[Segment]().append)
    queue.min_offset = 0
    queue.forget_while(lambda position, size: False)
    assert queue.min_offset == PER_FILE + 3


@pytest.mark.parametrize("log_start", [0, 10 * PER_FILE, 10 * PER_FILE + 1, 10 * 2 * PER_FILE + 1])
def test_a_file_goes_when_the_next_one_begins_below_the_logs_start(
    tmp_path: Path, log_start: int
) -> None:
    files = FaultyFiles()
    queue = filled(tmp_path, 3 * PER_FILE, files)
    _forget_below(queue, log_start)
    begun = [n for n in (1, 2) if 10 * PER_FILE * n < log_start]
    assert queue.remove_spare_files(files, log_start) == len(begun)
    assert queue.segments.start == len(begun) * FILE_BYTES
    assert read_all(queue, queue.min_offset) == list(range(10 * queue.min_offset, 240, 10))
    assert queue.written_bytes == (3 - len(begun)) * FILE_BYTES


def test_the_last_file_stays(tmp_path: Path) -> None:
    files = FaultyFiles()
    queue = filled(tmp_path, 2 * PER_FILE + 1, files)
    queue.forget_while(lambda position, _size: True)
    assert queue.remove_spare_files(files, LOG_END) == 2
    again = fresh(tmp_path)
    again.load(files)
    again.cut(files, LOG_END - 1, LOG_END)
    assert (again.min_offset, again.next_offset) == (2 * PER_FILE + 1, 2 * PER_FILE + 1)


def test_a_queue_that_was_closed_meanwhile_keeps_its_files(tmp_path: Path) -> None:
    files = FaultyFiles()
    queue = filled(tmp_path, 3 * PER_FILE, files)
    queue.close()
    assert queue.remove_spare_files(files, LOG_END) == 0
    assert len(queue.segments) == 3


def wipe(directory: Path, first: int, count: int) -> None:
    """Put zeros over units, as a lost page of the disk does."""
    for at in range(first, first + count):
        path = directory / "q" / f"{at // PER_FILE * FILE_BYTES:020d}"
        with path.open("r+b") as file:
            file.seek(at % PER_FILE * 20)
            file.write(bytes(20))


def test_a_hole_is_never_read_as_the_end_or_as_messages(tmp_path: Path) -> None:
    queue = filled(tmp_path, 3 * PER_FILE, FaultyFiles())
    wipe(tmp_path, 10, 2)
    assert len(queue.read_units(8, 8, nowait=True)) == 2 * 20
    for offset in (10, 11):
        with pytest.raises(StoreDamaged, match=f"queue 0 of T from message {offset} on"):
            queue.read_units(offset, 8, nowait=False)
    assert len(queue.read_units(12, 4, nowait=False)) == 4 * 20


@pytest.mark.parametrize("start", range(25))
def test_a_hole_hides_no_message_before_it_from_retention(tmp_path: Path, start: int) -> None:
    """What is in the hole may be there or not: it is not taken for gone before what is behind."""
    queue = filled(tmp_path, 3 * PER_FILE, FaultyFiles())
    wipe(tmp_path, 11, 3)
    queue.forget_while(lambda position, _: position < 10 * start)
    wanted = start if start not in (12, 13, 14) else 11
    assert wanted >= queue.min_offset >= min(wanted, 11)
    again = fresh(tmp_path)
    again.load(FaultyFiles())
    again.measure(10 * start, LOG_END)
    if again.next_offset == 3 * PER_FILE:  # else the start has noticed
        assert queue.min_offset <= max(again.min_offset, 11)
        assert again.min_offset <= start

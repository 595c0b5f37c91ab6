"""The timer index against a sorted list: whatever is added, spilled, merged, damaged and loaded
again.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import DiskFull
from cometmq.format import queueunit
from cometmq.store.disk.files import File, Files, OsFiles, StrPath
from cometmq.store.timers import entries, index
from cometmq.store.timers.catalog import CATALOG, Coverage, read_catalog
from cometmq.store.timers.index import TimerIndex
from cometmq.store.timers.runs import BLOCK_ENTRIES

pytestmark = pytest.mark.usefixtures("implementation")

Timer = tuple[int, int]
DAY_MS = 86_400_000
NOW_MS = 1_800_000_000_000


def packed(timers: list[Timer]) -> bytes:
    return b"".join(entries.ENTRY.pack(*timer) for timer in timers)


def unpacked(data: bytes) -> list[Timer]:
    return list(entries.iterate(data))


def coverage(end: int, after: bytes = index.NOTHING, store_id: str = "s") -> Coverage:
    return Coverage(store_id, 3, 4096, 0, end, after)


class Disk:
    """An index with small limits, and what should be in it."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        self.folder = folder
        self.files = files or OsFiles()
        self.index = TimerIndex(folder, self.files, 1)
        self.pending: list[Timer] = []
        self.end = 0
        self.epoch = 1

    def add(self, dues_ms: list[int]) -> None:
        timers = [(due_ms, self.end + n) for n, due_ms in enumerate(dues_ms)]
        self.end += len(timers)
        timers = [timer for timer in timers if timer > self.after]
        self.index.add(packed(timers))
        self.pending = sorted(self.pending + timers)

    @property
    def after(self) -> Timer:
        return entries.first_of(self.index.after)

    def work(self) -> None:
        while job := self.index.next_job(lambda: coverage(self.end, self.index.after)):
            self.index.finish(job, job.run())

    def take(self, until_ms: int, count: int) -> None:
        due = self.index.peek(until_ms, count)
        wanted = [timer for timer in self.pending if timer[0] <= until_ms]
        found = unpacked(due)
        # A file gives what one of its blocks has: the first ones, perhaps fewer than asked for.
        assert found == wanted[: len(found)]
        assert len(found) <= count
        assert bool(found) == bool(wanted)
        if found:
            self.index.take(due)
            self.pending = self.pending[len(found) :]

    def check(self) -> None:
        assert len(self.index) == len(self.pending)
        assert self.index.next_due_ms == (self.pending[0][0] if self.pending else None)
        assert self.index.between((0, -1), NOW_MS * 2, 50) == self.pending[:50]

    def again(self) -> None:
        """A restart: the files are taken up, the rest of the queue is added again."""
        after = self.after
        self.epoch += 1
        other = TimerIndex(self.folder, self.files, self.epoch)
        start = other.load(after, 0, self.end, lambda _: True)
        other.add(packed([timer for timer in self.pending if timer[1] >= start]))
        self.index = other


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MEMORY_ENTRIES_MAX", 40)
    monkeypatch.setattr(index, "FILES_MAX", 3)
    monkeypatch.setattr(index, "MERGED_AT_ONCE", 2)


@pytest.mark.usefixtures("small")
def test_whatever_happens_the_next_ones_come_in_order(tmp_path: Path, rng: random.Random) -> None:
    for life in range(20):
        disk = Disk(tmp_path / str(life))
        for _ in range(60):
            match rng.randrange(6):
                case 0 | 1:
                    span = rng.choice([5, 1_000, DAY_MS])
                    count = rng.choice([1, 10, 100])
                    disk.add([NOW_MS + rng.randrange(span) for _ in range(count)])
                case 2:
                    disk.work()
                case 3:
                    disk.take(NOW_MS + rng.randrange(DAY_MS), rng.choice([1, 7, 1000]))
                case 4:
                    disk.take(NOW_MS + rng.randrange(1_000), 3)
                case 5:
                    disk.again()
            disk.check()


@pytest.mark.usefixtures("small")
def test_a_block_of_a_file_hides_nothing_of_the_next(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add([NOW_MS + n for n in range(2 * BLOCK_ENTRIES + 10)])
    disk.work()
    assert [name.name for name in tmp_path.iterdir() if name.suffix == ".run"]
    disk.add([NOW_MS + BLOCK_ENTRIES + 3])
    while disk.pending:
        disk.take(NOW_MS * 2, 1_000)
    disk.check()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("harm", ["missing", "cut", "flipped", "longer", "list", "list cut"])
def test_damaged_files_are_made_again(tmp_path: Path, harm: str) -> None:
    disk = Disk(tmp_path)
    disk.add([NOW_MS + 7 * n for n in range(500)])
    disk.work()
    run = next(path for path in tmp_path.iterdir() if path.suffix == ".run")
    victim = tmp_path / CATALOG if "list" in harm else run
    data = bytearray(victim.read_bytes())
    if harm == "missing":
        victim.unlink()
    elif "cut" in harm:
        victim.write_bytes(data[:-1])
    elif harm == "longer":
        victim.write_bytes(data + b"x")
    else:
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    disk.again()
    disk.check()
    assert not list(tmp_path.glob("*.run"))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("of", ["another history", "a later delivery", "a longer queue"])
def test_foreign_files_are_made_again(tmp_path: Path, of: str) -> None:
    disk = Disk(tmp_path)
    disk.add([NOW_MS + 7 * n for n in range(500)])
    if of == "a later delivery":
        disk.take(NOW_MS + 700, 50)
    disk.work()
    other = TimerIndex(tmp_path, disk.files, 2)
    after = (0, 0) if of == "a later delivery" else disk.after
    end = 499 if of == "a longer queue" else disk.end
    assert other.load(after, 0, end, lambda _: of != "another history") == 0
    assert len(other) == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small")
def test_a_restart_reads_what_the_files_do_not_have(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add([NOW_MS + 7 * n for n in range(500)])
    disk.work()
    disk.add([NOW_MS + 3] * 20)
    other = TimerIndex(tmp_path, disk.files, 2)
    assert other.load(disk.after, 0, disk.end, lambda _: True) == 500
    assert len(other) == 500
    found = read_catalog(tmp_path, disk.files)
    assert found is not None
    assert found.coverage.end == 500


class Full(OsFiles):
    """No room for another file."""

    def create(self, path: StrPath, size: int, *, takes_room: bool = False) -> File:
        raise DiskFull("no room")


@pytest.mark.usefixtures("small")
def test_a_full_disk_leaves_all_in_memory(tmp_path: Path) -> None:
    disk = Disk(tmp_path, Full())
    disk.add([NOW_MS + 7 * n for n in range(500)])
    job = disk.index.next_job(lambda: coverage(disk.end))
    assert job is not None
    assert disk.index.next_job(lambda: coverage(disk.end)) is None  # one at a time
    disk.check()
    with pytest.raises(DiskFull):
        job.run()
    disk.index.finish(job, None)
    disk.check()
    while disk.pending:
        disk.take(NOW_MS * 2, 100)


@pytest.mark.usefixtures("small")
def test_taking_goes_on_while_a_file_is_written(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.add([NOW_MS + 7 * n for n in range(500)])
    job = disk.index.next_job(lambda: coverage(disk.end, disk.index.after))
    assert job is not None
    disk.take(NOW_MS + 700, 30)
    disk.add([NOW_MS + 211] * 10)
    done = job.run()
    disk.take(NOW_MS + 700, 30)
    disk.index.finish(job, done)
    disk.check()
    disk.again()
    disk.check()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**62),
            st.integers(0, 2**31 - 1) | st.sampled_from([0, 1, 2, 2**31 - 1]),
            st.integers(-(2**31), 2**40) | st.sampled_from([2**31 - 1, 2**31]),
        )
    )
)
def test_units_become_entries(units: list[tuple[int, int, int]]) -> None:
    data = b"".join(queueunit.UNIT.pack(*unit) for unit in units)
    expected = [
        (due_ms, 7 + n)
        for n, (_, size, due_ms) in enumerate(units)
        if due_ms >= 2**31 and 1 < size < 2**31 - 1
    ]
    assert unpacked(entries.of_units(data, 7)) == expected


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 9))))
def test_entries_are_sorted(timers: list[Timer]) -> None:
    assert unpacked(entries.in_order(packed(timers))) == sorted(timers)


@pytest.mark.parametrize("count", [511, 512, 3_000])
@pytest.mark.parametrize("due_max", [0, 300, 2**40, 2**62])
@pytest.mark.parametrize("order", ["of the queue", "backwards", "any"])
def test_many_entries_are_sorted(rng: random.Random, count: int, due_max: int, order: str) -> None:
    offsets = sorted(rng.randrange(2**40) for _ in range(count))
    if order == "backwards":
        offsets.reverse()
    elif order == "any":
        rng.shuffle(offsets)
    timers = [(rng.randint(0, due_max), offset) for offset in offsets]
    assert unpacked(entries.in_order(packed(timers))) == sorted(timers)

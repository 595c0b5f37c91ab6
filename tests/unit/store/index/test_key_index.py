from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cometmq.errors import DiskFull, StoreForeignFile
from cometmq.format.indexfile import Key, Keys, Sizes
from cometmq.store import layout
from cometmq.store.disk.files import Mapping, OsFiles, StrPath
from cometmq.store.index.key_index import KeyIndex
from tests.support.stores.small_stores import START_MS, FaultyFiles

SIZES = Sizes(hash_slots=4, entries=8)  # seven keys a file


def opened(
    folder: Path, files: OsFiles | None = None, *, trusted_ms: int | None = None, end: int = 10**9
) -> KeyIndex:
    index = KeyIndex(folder / "index", files or OsFiles(64), SIZES)
    index.load()
    index.settle(trusted_ms)
    index.truncate(end)
    return index


@pytest.fixture
def index(tmp_path: Path) -> Iterator[KeyIndex]:
    index = opened(tmp_path)
    yield index
    index.close()


def keys(count: int, first: int = 0, code: int = 0) -> Keys:
    """Records of 100 bytes, one a second."""
    numbers = range(first, first + count)
    return Keys.of(Key(code, at * 100, START_MS + at * 1000) for at in numbers)


def offsets(index: KeyIndex, code: int = 0, first: int = 0, last: int = 10**6) -> list[int]:
    found = index.find(code, START_MS + first * 1000, START_MS + last * 1000)
    return [offset // 100 for offset in found if offset is not None]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "index").iterdir())


def test_without_keys_there_is_no_file(index: KeyIndex, tmp_path: Path) -> None:
    assert index.insert(Keys(b"")) == 0
    assert not (tmp_path / "index").exists()
    assert (index.end_offset, index.durable_time_ms, index.file_count) == (-1, 0, 0)
    assert offsets(index) == []


def test_keys_are_found_across_files_newest_first(index: KeyIndex, tmp_path: Path) -> None:
    assert index.insert(keys(10)) == 10
    assert index.insert(keys(10, first=10)) == 10
    assert offsets(index) == list(range(19, -1, -1))
    assert (index.file_count, index.entry_count, index.end_offset) == (3, 20, 1900)
    assert {path.stat().st_size for path in (tmp_path / "index").iterdir()} == {SIZES.file_bytes}


def test_files_that_lie_outside_of_the_times_are_passed_over(index: KeyIndex) -> None:
    index.insert(keys(21))
    assert offsets(index, first=9, last=10) == [10, 9]
    assert offsets(index, last=2) == [2, 1, 0]
    assert offsets(index, first=21) == []


def test_files_are_named_after_the_local_time_of_their_first_key(
    index: KeyIndex, tmp_path: Path
) -> None:
    index.insert(keys(8))
    assert names(tmp_path) == [layout.index_name(START_MS), layout.index_name(START_MS + 7000)]


def test_names_are_in_order_even_when_files_are_full_within_a_millisecond(
    index: KeyIndex, tmp_path: Path
) -> None:
    index.insert(Keys.of(Key(0, at * 100, START_MS) for at in range(21)))
    first = int(layout.index_name(START_MS))
    assert names(tmp_path) == [str(first), str(first + 1), str(first + 2)]
    assert offsets(index) == list(range(20, -1, -1))


def test_a_clean_stop_goes_on_in_the_same_file(tmp_path: Path) -> None:
    index = opened(tmp_path)
    index.insert(keys(10))
    index.sync()
    index.close()
    index = opened(tmp_path)
    assert (index.end_offset, index.durable_time_ms) == (900, START_MS + 9000)
    index.insert(keys(3, first=10))
    assert offsets(index) == list(range(12, -1, -1))
    assert index.file_count == 2
    index.close()


def test_what_is_durable_is_what_was_sealed_or_synced(index: KeyIndex) -> None:
    index.insert(keys(6))
    assert index.durable_time_ms == 0
    index.insert(keys(1, first=6))
    assert index.durable_time_ms == START_MS + 6000
    index.insert(keys(2, first=7))
    assert index.durable_time_ms == START_MS + 6000
    index.sync()
    assert index.durable_time_ms == START_MS + 8000
    index.insert(keys(1, first=9))
    assert index.durable_time_ms == START_MS + 6000


def test_all_else_is_on_the_disk_before_a_header_says_that_its_file_is_full(
    tmp_path: Path,
) -> None:
    files = Watching()
    index = opened(tmp_path, files)
    index.insert(keys(6))
    index.insert(keys(1, first=6))
    assert files.counts_at_sync == [7, 8]
    index.close()


class Watching(OsFiles):
    """Notes the number of the next entry, as the header tells it, whenever a mapped file is synced;
    entry 7 must be there by then.
    """

    def __init__(self) -> None:
        super().__init__(64)
        self.counts_at_sync: list[int] = []

    def map(self, path: StrPath, size: int) -> Mapping:
        return Watched(super().map(path, size), self.counts_at_sync)


class Watched:
    def __init__(self, mapping: Mapping, counts: list[int]) -> None:
        self.view = mapping.view
        self._mapping = mapping
        self._counts = counts

    def scatter(self, places: Sequence[int], data: bytes) -> None:
        self._mapping.scatter(places, data)

    def sync(self) -> None:
        assert any(self.view[SIZES.entries_at + 7 * 20 :])
        self._counts.append(int.from_bytes(self.view[36:40], "big"))
        self._mapping.sync()

    def close(self) -> None:
        self._mapping.close()


@pytest.mark.parametrize(
    ("trusted", "kept"),
    [(0, 0), (START_MS + 5999, 0), (START_MS + 6000, 7), (START_MS + 13_000, 14), (10**15, 14)],
)
def test_after_a_crash_only_sealed_files_within_the_checkpoint_are_kept(
    tmp_path: Path, trusted: int, kept: int
) -> None:
    index = opened(tmp_path)
    index.insert(keys(20))
    index.close()
    index = opened(tmp_path, trusted_ms=trusted)
    assert offsets(index) == list(range(kept - 1, -1, -1))
    assert len(names(tmp_path)) == kept // 7
    index.insert(keys(20 - kept, first=kept))
    assert offsets(index) == list(range(19, -1, -1))
    index.close()


def test_a_file_that_a_crash_left_without_a_byte_is_removed(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / layout.index_name(START_MS)).touch()
    index = opened(tmp_path, trusted_ms=0)
    assert (names(tmp_path), index.file_count) == ([], 0)
    index.close()


def test_what_desktops_and_file_systems_leave_is_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "index" / "lost+found").mkdir(parents=True)
    (tmp_path / "index" / ".DS_Store").write_text("x")
    index = opened(tmp_path, trusted_ms=0)
    assert index.insert(keys(1)) == 1
    index.close()
    assert len(names(tmp_path)) == 3


def test_a_folder_among_the_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "index" / "20260101000000000").mkdir(parents=True)
    with pytest.raises(StoreForeignFile, match="20260101000000000"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("name", "size"), [("20260101000000000", 215), ("20260101000000000", 217), ("x", 216)]
)
def test_what_is_no_index_file_is_refused_and_left(tmp_path: Path, name: str, size: int) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / name).write_bytes(bytes(size))
    with pytest.raises(StoreForeignFile, match=name):
        opened(tmp_path)
    assert names(tmp_path) == [name]


def test_truncation_removes_whole_files_and_trimming_keeps_the_last(
    index: KeyIndex, tmp_path: Path
) -> None:
    index.insert(keys(20))
    index.truncate(1301)
    assert offsets(index) == list(range(13, -1, -1))
    index.truncate(1300)
    assert (offsets(index), index.end_offset) == (list(range(6, -1, -1)), 600)
    index.insert(keys(10, first=7))
    index.trim(600)
    assert index.file_count == 3
    index.trim(601)
    assert (offsets(index), index.file_count) == (list(range(16, 6, -1)), 2)
    index.trim(10**9)
    assert (index.file_count, len(names(tmp_path))) == (1, 1)


def test_which_keys_are_lacking_behind_the_last_record_of_a_file(index: KeyIndex) -> None:
    assert list(index.lacking(keys(2))) == list(keys(2))
    last, other = Key(4, 600, START_MS), Key(8, 600, START_MS)
    index.insert(Keys.of([*keys(6), last, other]))  # two files have a key each of the record at 600
    lost, behind = Key(5, 600, START_MS), Key(4, 650, START_MS)
    assert list(index.lacking(Keys.of([last, other, lost, behind]))) == [lost, behind]
    assert list(index.lacking(Keys.of([behind]))) == [behind]
    index.insert(keys(10, first=7))
    assert list(index.lacking(keys(2, first=12))) == list(keys(1, first=13))
    assert not index.lacking(Keys(b""))


def test_a_full_disk_takes_no_key_and_keeps_nothing(tmp_path: Path) -> None:
    files = FaultyFiles()
    index = opened(tmp_path, files)
    assert index.insert(keys(4)) == 4
    files.room = 0
    assert index.insert(keys(10, first=4)) == 3  # the file that is there has its room
    assert len(names(tmp_path)) == 1
    assert index.insert(keys(7, first=7)) == 0
    files.room = None
    assert index.insert(keys(7, first=7)) == 7
    assert offsets(index) == list(range(13, -1, -1))
    index.close()


class Unroomy(FaultyFiles):
    """Files can be made, but there are no blocks for them."""

    def map(self, path: StrPath, size: int) -> Mapping:
        raise DiskFull(f"no blocks for {path}")


def test_a_file_without_blocks_is_removed_again(tmp_path: Path) -> None:
    index = opened(tmp_path, Unroomy())
    assert index.insert(keys(1)) == 0
    assert names(tmp_path) == []
    index.close()


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["put", "stop", "crash"]))))
def test_any_keys_any_stops(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str]]
) -> None:
    folder = tmp_path_factory.mktemp("index")
    index = opened(folder)
    put: list[Key] = []
    for code, step in steps:
        if step == "put":
            key = Key(code, len(put) * 100, START_MS + len(put) * 700)
            assert index.insert(Keys.of([key])) == 1
            put.append(key)
            continue
        trusted_ms = None if step == "stop" else index.durable_time_ms
        if step == "stop":
            index.sync()
        else:
            put = put[: len(put) // 7 * 7]  # the files that were sealed
        index.close()
        index = opened(folder, trusted_ms=trusted_ms)
        assert index.end_offset == (put[-1].log_offset if put else -1)
    for code in range(10):
        wanted = [key.log_offset // 100 for key in reversed(put) if key.hash == code]
        assert offsets(index, code) == wanted
    index.close()

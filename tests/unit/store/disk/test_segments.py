from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import StoreForeignFile
from cometmq.store.disk.files import OsFiles
from cometmq.store.disk.segments import Segment, Segments
from cometmq.store.layout import offset_name
from tests.support.stores.small_stores import FaultyFiles

SIZE = 100


def made(directory: Path, *starts: int) -> Segments:
    for start in starts:
        (directory / offset_name(start)).write_bytes(bytes(SIZE))
    return Segments(directory, SIZE)


def test_files_in_a_row_are_found_by_offset(tmp_path: Path) -> None:
    segments = made(tmp_path, 200, 300, 400)
    segments.load(OsFiles())
    assert (segments.start, segments.end, len(segments)) == (200, 500, 3)
    found = {offset: segments.find(offset) for offset in (0, 199, 200, 299, 300, 499, 500)}
    starts = {offset: segment.start for offset, segment in found.items() if segment}
    assert starts == {200: 200, 299: 200, 300: 300, 499: 400}


def test_an_absent_folder_is_an_empty_run(tmp_path: Path) -> None:
    segments = Segments(tmp_path / "none", SIZE)
    segments.load(OsFiles())
    assert (segments.start, segments.end, segments.find(0)) == (0, 0, None)
    assert segments.pread(0, 1) == b""


def test_bytes_are_addressed_in_the_row(tmp_path: Path) -> None:
    segments = made(tmp_path, 200, 300)
    segments.load(OsFiles())
    segment = segments.find(300)
    assert segment is not None
    segment.pwrite(310, b"abc")
    assert segments.pread(309, 5) == b"\0abc\0"
    assert segments.pread(398, 5) == b"", "never across files"


def test_the_oldest_file_goes_and_the_rest_is_found_as_before(tmp_path: Path) -> None:
    files = FaultyFiles()
    segments = made(tmp_path, 200, 300, 400)
    segments.load(files)
    oldest = segments.find(200)
    assert oldest is not None
    assert oldest.pread(200, 1) == b"\0"
    assert segments.remove_first(files) is oldest
    assert (segments.start, segments.end, len(segments)) == (300, 500, 2)
    assert segments.find(200) is None
    assert oldest.pread(200, 1) == b"", "whoever still holds it finds nothing"
    assert files.synced == [str(tmp_path)], "off the disk before the next one goes"
    segments.remove_first(files)
    with pytest.raises(AssertionError, match="the last file"):
        segments.remove_first(files)
    assert [path.name for path in tmp_path.iterdir()] == [offset_name(400)]


def test_an_empty_last_file_is_removed(tmp_path: Path) -> None:
    segments = made(tmp_path, 0)
    (tmp_path / offset_name(100)).touch()
    segments.load(OsFiles())
    assert (len(segments), segments.is_unfinished) == (1, True)
    assert (tmp_path / offset_name(100)).exists(), "looking changes nothing"
    segments.mend(OsFiles())
    assert [path.name for path in tmp_path.iterdir()] == [offset_name(0)]


@pytest.mark.parametrize(
    ("name", "size", "complaint"),
    [
        (offset_name(100), SIZE + 1, "has 101 bytes"),
        (offset_name(100), SIZE + 1, "mapped_file_size_consume_queue=101"),
        (offset_name(150), SIZE, "does not follow"),
        (offset_name(200), SIZE, "does not follow"),
        (offset_name(0) + "~", SIZE, "20 digits"),
        ("notes.txt", 0, "20 digits"),
    ],
)
def test_what_does_not_belong_is_named(
    tmp_path: Path, name: str, size: int, complaint: str
) -> None:
    segments = made(tmp_path, 0)
    (tmp_path / name).write_bytes(bytes(size))
    with pytest.raises(StoreForeignFile, match=complaint) as refused:
        segments.load(OsFiles())
    assert name in str(refused.value)
    assert (tmp_path / name).exists()


def test_what_does_no_harm_is_left_alone(tmp_path: Path) -> None:
    segments = made(tmp_path, 0)
    (tmp_path / "lost+found").mkdir()
    for name in (".DS_Store", f".{offset_name(100)}.swp"):
        (tmp_path / name).write_bytes(b"x")
    assert segments.load(OsFiles())
    assert len(segments) == 1
    assert len(list(tmp_path.iterdir())) == 4


def test_a_short_last_file_is_filled_up(tmp_path: Path) -> None:
    made(tmp_path, 0)
    (tmp_path / offset_name(100)).write_bytes(b"abc")
    segments = Segments(tmp_path, SIZE)
    assert segments.load(OsFiles())
    assert segments.pread(100, SIZE) == b"abc".ljust(SIZE, b"\0")
    assert (tmp_path / offset_name(100)).read_bytes() == b"abc", "looking changes nothing"
    segments.mend(OsFiles())
    assert segments.pread(100, SIZE) == b"abc".ljust(SIZE, b"\0")
    assert (tmp_path / offset_name(100)).stat().st_size == SIZE


def test_a_short_file_alone_may_be_one_of_another_size(tmp_path: Path) -> None:
    (tmp_path / offset_name(0)).write_bytes(bytes(SIZE - 1))
    with pytest.raises(StoreForeignFile, match="set mapped_file_size_consume_queue=99"):
        Segments(tmp_path, SIZE).load(OsFiles())
    assert (tmp_path / offset_name(0)).stat().st_size == SIZE - 1


def test_a_gap_may_be_told_instead_of_refused(tmp_path: Path) -> None:
    segments = made(tmp_path, 0, 200)
    assert not segments.load(OsFiles(), gaps_allowed=True)
    assert not len(segments)


def test_a_folder_among_the_files_is_foreign(tmp_path: Path) -> None:
    segments = made(tmp_path, 0)
    (tmp_path / offset_name(100)).mkdir()
    with pytest.raises(StoreForeignFile, match="folder"):
        segments.load(OsFiles())


def test_removing_from_an_offset_on(tmp_path: Path) -> None:
    files = OsFiles()
    segments = made(tmp_path, 0, 100, 200, 300)
    segments.load(files)
    assert segments.remove_after(files, 150)
    assert [segment.start for segment in reversed(segments)] == [100, 0]
    assert len(list(tmp_path.iterdir())) == 2
    assert not segments.remove_after(files, 150)


def test_a_symbolic_link_is_called_one(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(bytes(SIZE))
    folder = tmp_path / "log"
    folder.mkdir()
    segments = made(folder, 0)
    (folder / offset_name(SIZE)).symlink_to(elsewhere)
    with pytest.raises(StoreForeignFile, match="is a symbolic link"):
        segments.load(OsFiles())


def test_an_empty_file_in_the_middle_is_no_matter_of_the_options(tmp_path: Path) -> None:
    segments = made(tmp_path, 0, SIZE, 2 * SIZE)
    (tmp_path / offset_name(SIZE)).write_bytes(b"")
    with pytest.raises(StoreForeignFile, match="is empty and files follow it") as refused:
        segments.load(OsFiles())
    assert "=0" not in str(refused.value)


# --- one file of the row --------------------------------------------------------------------------


@pytest.fixture
def segment(tmp_path: Path) -> Segment:
    return Segment(OsFiles().create(tmp_path / "x", 100), 300, 100)


def test_offsets_are_those_of_the_row(segment: Segment) -> None:
    segment.pwrite(398, b"ab")
    assert segment.file.pread(2, 98) == b"ab"
    assert segment.pread(397, 3) == b"\0ab"
    assert segment.pread(397, 3, nowait=True) == b"\0ab"


@pytest.mark.parametrize(("offset", "size"), [(299, 1), (398, 3), (400, 1), (350, -1)])
def test_nothing_outside_is_touched(segment: Segment, offset: int, size: int) -> None:
    with pytest.raises(AssertionError):
        segment.pread(offset, size)
    if size > 0:
        with pytest.raises(AssertionError):
            segment.pwrite(offset, bytes(size))


def test_a_start_is_a_multiple_of_the_size(tmp_path: Path) -> None:
    file = OsFiles().create(tmp_path / "x", 100)
    for start, size in ((250, 100), (-100, 100), (0, 0)):
        with pytest.raises(AssertionError):
            Segment(file, start, size)

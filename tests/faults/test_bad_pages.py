"""Pages that the disk cannot read are damage: what can be read is read."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from cometmq.errors import StoreFailed
from cometmq.store.disk.files import PAGE_BYTES, OsFiles, clear
from tests.support.faults.bad_pages import BadPages

PAGES = 5


@pytest.fixture(params=[errno.EIO, errno.ESTALE], ids=["EIO", "ESTALE"])
def bad(request: pytest.FixtureRequest) -> BadPages:
    return BadPages(request.param)


def grown(folder: Path) -> Path:
    path = folder / "f"
    path.write_bytes(b"".join(b"%d" % page * PAGE_BYTES for page in range(1, PAGES + 1)))
    return path


def test_what_can_be_read_is_read(
    tmp_path: Path, bad: BadPages, caplog: pytest.LogCaptureFixture
) -> None:
    path = grown(tmp_path)
    bad.spoil(path, 1, 3)
    files = OsFiles(16)
    file = files.open(path)
    with bad.met():
        assert file.pread(10, PAGE_BYTES - 10) == b"1" * 10
        assert not file.is_unreadable(0, PAGES * PAGE_BYTES), "nothing has met one yet"
        with pytest.raises(BlockingIOError):
            file.pread(100, PAGE_BYTES, nowait=True)
        found = file.pread(2 * PAGE_BYTES + 20, PAGE_BYTES - 10)
        assert found == b"1" * 10 + bytes(PAGE_BYTES) + b"3" * PAGE_BYTES + bytes(10)
        assert files.read(path) == path.read_bytes().replace(b"2", b"\0").replace(b"4", b"\0")
    assert file.is_unreadable(PAGE_BYTES, PAGE_BYTES + 1)
    assert file.is_unreadable(0, PAGES * PAGE_BYTES)
    assert not file.is_unreadable(0, PAGE_BYTES)
    assert not file.is_unreadable(2 * PAGE_BYTES, 3 * PAGE_BYTES)
    assert f"{path}: the disk cannot read 2 pages from {PAGE_BYTES} on" in caplog.text
    assert files.unreadable_count == 4


def test_what_is_written_whole_can_be_read_again(tmp_path: Path, bad: BadPages) -> None:
    path = grown(tmp_path)
    bad.spoil(path, 1)
    file = OsFiles(16).open(path)
    with bad.met():
        file.pread(1, PAGE_BYTES)
        with pytest.raises(StoreFailed):
            file.pwrite(b"x", PAGE_BYTES + 5)
        assert file.is_unreadable(PAGE_BYTES, 2 * PAGE_BYTES)
        file.pwrite(b"x" * (PAGE_BYTES + 20), PAGE_BYTES - 10)
        assert not file.is_unreadable(0, PAGES * PAGE_BYTES)
        assert file.pread(PAGE_BYTES, PAGE_BYTES) == b"x" * PAGE_BYTES


def test_a_page_that_reads_as_zeros_is_cleared_all_the_same(tmp_path: Path, bad: BadPages) -> None:
    """Else the disk could not read it at the next start either."""
    path = grown(tmp_path)
    bad.spoil(path, 2)
    file = OsFiles(16).open(path)
    with bad.met():
        clear(file, PAGE_BYTES, PAGES * PAGE_BYTES)
        assert file.pread(PAGE_BYTES, 2 * PAGE_BYTES) == bytes(PAGE_BYTES)
        assert not file.is_unreadable(0, PAGES * PAGE_BYTES)


def test_a_new_file_is_another_one(tmp_path: Path, bad: BadPages) -> None:
    path = grown(tmp_path)
    bad.spoil(path, 0)
    with bad.met():
        path.unlink()
        files = OsFiles(16)
        files.create(path, 100)
        assert files.read(path) == bytes(100)
    assert not files.unreadable_count

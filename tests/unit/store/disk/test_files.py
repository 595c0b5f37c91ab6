from __future__ import annotations

import errno
import os
import random
import threading
from pathlib import Path

import pytest

from cometmq.errors import CometError, DiskFull, StoreFailed
from cometmq.store.disk import files as module
from cometmq.store.disk.files import (
    CHUNK_BYTES,
    Entry,
    OsFiles,
    clear,
    replace,
    store_error,
)
from tests.support.stores.small_disk import small_disk
from tests.support.stores.small_stores import FaultyFiles


@pytest.fixture
def files() -> OsFiles:
    return OsFiles(16)


def test_what_is_written_is_read(files: OsFiles, tmp_path: Path) -> None:
    file = files.create(tmp_path / "a", 100)
    file.pwrite(b"hello", 90)
    assert file.pread(5, 90) == b"hello"
    assert file.pread(100, 98) == b"\0\0", "a read ends at the end of the file"
    assert file.pread(5, 90, nowait=True) == b"hello"
    file.sync()
    assert files.entries(tmp_path) == [Entry("a", False, 100)]


def test_nothing_replaces_an_existing_file(files: OsFiles, tmp_path: Path) -> None:
    files.create(tmp_path / "a", 1)
    with pytest.raises(StoreFailed):
        files.create(tmp_path / "a", 1)


def test_a_missing_file_names_itself(files: OsFiles, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="nowhere"):
        files.open(tmp_path / "nowhere").pread(1, 0)
    assert files.read(tmp_path / "nowhere") is None
    assert files.entries(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("number", "error"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, StoreFailed)],
)
def test_the_kernels_errors_are_the_catalogues(number: int, error: type[CometError]) -> None:
    assert type(store_error(OSError(number, "x"), "write", "p")) is error


def test_a_short_nowait_read_is_cold(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = files.create(tmp_path / "a", 100)
    monkeypatch.setattr(os, "preadv", lambda *_: 50)
    with pytest.raises(BlockingIOError):
        file.pread(100, 0, nowait=True)
    assert len(file.pread(100, 0)) == 100


def test_a_file_system_without_nowait_is_memory(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "preadv", refuse)
    file = files.create(tmp_path / "a", 100)
    assert file.pread(100, 0, nowait=True) == bytes(100)
    assert file.pread(module.SCRATCH_BYTES + 1, 0, nowait=True) == bytes(100)


def test_no_more_files_are_open_than_allowed(files: OsFiles, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    many = [files.create(tmp_path / str(i), 8) for i in range(50)]
    for i, file in enumerate(many):
        file.pwrite(bytes([i]), 0)
    assert len(os.listdir("/proc/self/fd")) <= before + files.open_files_max
    assert [file.pread(1, 0)[0] for file in many] == list(range(50))
    for file in many:
        file.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_file_is_empty(files: OsFiles, tmp_path: Path) -> None:
    file = files.create(tmp_path / "a", 10)
    file.close()
    assert file.pread(10, 0) == b""
    assert list(file.data_extents(0, 10)) == []
    file.sync()
    with pytest.raises(StoreFailed):
        file.pwrite(b"x", 0)


def test_a_descriptor_in_use_outlives_close(files: OsFiles, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = files.create(tmp_path / "a", 8192)
    file.pwrite(b"x", 8000)
    extents = file.data_extents(0, 8192)
    first = next(extents)
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert [first, *extents][-1][1] == 8192, "the reader goes on with its own descriptor"
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_share_files_under_a_small_cap(tmp_path: Path) -> None:
    files = OsFiles(16)
    many = [files.create(tmp_path / str(i), 64) for i in range(40)]
    wrong: list[object] = []

    def work(start: int) -> None:
        try:
            for turn in range(200):
                number = (start + turn * 7) % len(many)
                many[number].pwrite(bytes([number]), start)
                if many[number].pread(1, start) != bytes([number]):
                    wrong.append(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_clear_leaves_zeros_and_spares_holes(files: OsFiles, tmp_path: Path) -> None:
    file = files.create(tmp_path / "a", 4 * CHUNK_BYTES)
    file.pwrite(b"keep", 0)
    file.pwrite(b"go", 2 * CHUNK_BYTES + 5)
    assert 0 < clear(file, 4, 4 * CHUNK_BYTES) <= CHUNK_BYTES
    assert clear(file, 4, 4 * CHUNK_BYTES) == 0
    assert file.pread(8, 0) == b"keep" + bytes(4)
    assert not any(file.pread(10, 2 * CHUNK_BYTES))
    assert os.stat(tmp_path / "a").st_size == 4 * CHUNK_BYTES


def test_room_is_taken_and_nothing_written(files: OsFiles, tmp_path: Path) -> None:
    size = 4 * CHUNK_BYTES
    file = files.create(tmp_path / "a", size, takes_room=True)
    found = os.stat(tmp_path / "a")
    assert found.st_size == size <= found.st_blocks * 512
    file.sync()
    assert list(file.data_extents(0, size)) == []
    assert file.pread(8, size - 8) == bytes(8)


def test_room_that_is_not_there_leaves_no_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        with pytest.raises(DiskFull):
            OsFiles().create(disk / "a", 2_000_000, takes_room=True)
        assert list(disk.iterdir()) == []


def test_replace_is_all_or_nothing(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    replace(files, path, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StoreFailed):
        replace(files, path, b"new")
    monkeypatch.undo()
    assert files.read(path) == b"old"
    replace(files, path, b"newer")
    assert files.read(path) == b"newer"


def test_a_sync_that_finds_the_disk_full_is_a_failure(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    file = files.create(tmp_path / "a", 1)
    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(StoreFailed):
        file.sync()


# --- mapping --------------------------------------------------------------------------------------


def test_a_mapping_is_the_file_and_its_room_is_taken(files: OsFiles, tmp_path: Path) -> None:
    file = files.create(tmp_path / "a", 100_000)
    assert os.stat(tmp_path / "a").st_blocks == 0
    mapping = files.map(tmp_path / "a", 100_000)
    assert os.stat(tmp_path / "a").st_blocks * 512 >= 100_000
    mapping.view[90_000:90_005] = b"hello"
    assert file.pread(5, 90_000) == b"hello"
    file.pwrite(b"there", 10)
    assert bytes(mapping.view[10:15]) == b"there"
    mapping.sync()
    mapping.close()
    mapping.close()
    assert file.pread(5, 90_000) == b"hello"
    with pytest.raises(ValueError, match="released"):
        mapping.view[0]


def test_pieces_are_scattered(files: OsFiles, tmp_path: Path, rng: random.Random) -> None:
    file = files.create(tmp_path / "a", 100_000)
    mapping = files.map(tmp_path / "a", 100_000)
    wanted = bytearray(100_000)
    places = [4 * at for at in rng.sample(range(25_000), 3000)]
    data = rng.randbytes(4 * len(places))
    for number, place in enumerate(places):
        wanted[place : place + 4] = data[4 * number : 4 * number + 4]
    mapping.scatter(places, data)
    mapping.scatter([8, 8], b"onetwo")  # the later one stays
    wanted[8:11] = b"two"
    mapping.scatter([50_000], data[:1000])
    wanted[50_000:51_000] = data[:1000]
    assert file.pread(100_000, 0) == wanted
    mapping.close()


def test_without_room_nothing_is_taken(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.create(tmp_path / "a", 1_000_000)
    real = os.statvfs(tmp_path)
    few = os.statvfs_result((*real[:4], 10, *real[5:]))  # ten blocks for us
    with monkeypatch.context() as patch:
        patch.setattr("cometmq.store.disk.files.os.fstatvfs", lambda fd: few)
        with pytest.raises(DiskFull, match="map"):
            files.map(tmp_path / "a", 1_000_000)
    assert os.stat(tmp_path / "a").st_blocks == 0

    def refused(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "x")

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("cometmq.store.disk.files.os.posix_fallocate", refused)
    with pytest.raises(DiskFull):  # somebody else took it meanwhile
        files.map(tmp_path / "a", 1_000_000)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_mapping_that_cannot_be_synced_has_failed(
    files: OsFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.create(tmp_path / "a", 4096)
    mapping = files.map(tmp_path / "a", 4096)

    def refused(fd: int) -> None:
        raise OSError(errno.ENOSPC, "x")

    with monkeypatch.context() as patch:
        patch.setattr("cometmq.store.disk.files.os.fdatasync", refused)
        with pytest.raises(StoreFailed, match="sync"):
            mapping.sync()
    mapping.close()


def test_a_missing_file_cannot_be_mapped(files: OsFiles, tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="nowhere"):
        files.map(tmp_path / "nowhere", 10)


@pytest.mark.parametrize("count", [1, 40])
def test_all_are_synced_and_one_that_fails_is_told(tmp_path: Path, count: int) -> None:
    files = FaultyFiles()
    some = [files.create(tmp_path / str(number), 1) for number in range(count)]
    files.sync_all(some, [tmp_path])
    assert sorted(files.synced) == sorted([*(file.path for file in some), str(tmp_path)])
    files.sync_fails_for = some[-1].path
    with pytest.raises(StoreFailed):
        files.sync_all(some, [])


@pytest.mark.parametrize("umask", [0, 0o022, 0o277])
def test_what_is_made_is_for_this_user_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        files = OsFiles(16)
        files.make_directories(tmp_path / "a" / "b")
        files.create(tmp_path / "a" / "b" / "f", 10).close()
        replace(files, tmp_path / "a" / "g", b"x")
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*")}
    assert found == {"a": 0o700, "b": 0o700, "f": 0o600, "g": 0o600}
    assert not files.is_public(tmp_path / "a")
    (tmp_path / "a").chmod(0o755)
    assert files.is_public(tmp_path / "a")


def test_a_spare_gives_its_room_and_takes_the_old_files(tmp_path: Path) -> None:
    files, spare, path = OsFiles(16), tmp_path / "spare", tmp_path / "f"
    assert not files.replace_by(spare, path, b"new")
    spare.write_bytes(bytes(4096))
    room = spare.stat().st_ino
    assert files.replace_by(spare, path, b"first")
    assert (path.read_bytes(), path.stat().st_ino) == (b"first", room)
    assert not spare.exists(), "there was no old file"
    spare.write_bytes(bytes(4096))
    assert files.replace_by(spare, path, b"second")
    assert (path.read_bytes(), spare.stat().st_ino) == (b"second", room)
    assert not files.replace_by(spare, path, bytes(5000)), "it has one block"
    assert path.read_bytes() == b"second"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["f", "spare"]

"""A volume on which this user gets no block any more, whatever it gives back: ext4, where root has
used the blocks that are reserved for it. What has its blocks can be written.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cometmq.errors import DiskFull
from cometmq.store.disk.files import Buffer, File, OsFiles, StrPath, Usage
from tests.support.stores.small_stores import append, bodies, open_store


class NoBlocks(OsFiles):
    """Files that get no block when ``is_full``."""

    def __init__(self) -> None:
        super().__init__(64)
        self.is_full = False

    def open(self, path: StrPath) -> File:
        return NoBlockFile(super().open(path), self)

    def create(self, path: StrPath, size: int, *, takes_room: bool = False) -> File:
        if self.is_full and takes_room:
            raise DiskFull(f"no space left to create {os.fspath(path)}")
        return super().create(path, size, takes_room=takes_room)

    def usage(self, path: StrPath) -> Usage:
        return Usage(10**9, 0) if self.is_full else super().usage(path)


class NoBlockFile:
    def __init__(self, file: File, disk: NoBlocks) -> None:
        self.path = file.path
        self.pread, self.sync, self.close = file.pread, file.sync, file.close
        self.is_unreadable, self.data_extents = file.is_unreadable, file.data_extents
        self.sync_while_wanted = file.sync_while_wanted
        self._file = file
        self._disk = disk

    def pwrite(self, data: Buffer, offset: int) -> None:
        if self._disk.is_full and offset + len(data) > os.stat(self.path).st_blocks * 512:
            raise DiskFull(f"no space left to write {self.path}")
        self._file.pwrite(data, offset)


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_a_store_opens_without_a_block(tmp_path: Path, *, clean: bool) -> None:
    """Several times, too: a process may be started again and again until there is room."""
    files = NoBlocks()
    store = open_store(tmp_path, files=files)
    append(store, ("A", 0, [b"one", b"two"]))
    store.flush_log()
    store.flush_queues()
    store.close() if clean else store.abandon()
    files.is_full = True
    for number in range(5):
        store = open_store(tmp_path, files=files)
        assert bodies(store, "A", 0) == [b"one", b"two"]
        assert store.epoch == number + 2
        if number == 3:
            store.close()
        else:
            store.abandon()
        assert (tmp_path / "abort").exists() == (number != 3)
    files.is_full = False
    store = open_store(tmp_path, files=files)
    append(store, ("A", 0, [b"three"]))
    store.close()
    assert open_and_close(tmp_path) == [b"one", b"two", b"three"]


def open_and_close(root: Path) -> list[bytes]:
    store = open_store(root)
    found = bodies(store, "A", 0)
    store.close()
    return found

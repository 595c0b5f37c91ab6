"""A follower that dies while it cuts its log: at every change that it makes to the disk."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cometmq.store.disk.files import Buffer, File, OsFiles, StrPath
from tests.support.stores.copies import (
    assert_copied,
    copy_all,
    open_copy,
    places,
    two_epochs,
    whole_log,
)
from tests.support.stores.small_stores import bodies


class Crash(Exception):
    pass


class DyingFiles(OsFiles):
    """Files of a process that dies before its n-th change."""

    def __init__(self) -> None:
        super().__init__(64)
        self.left: int | None = None

    def change(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Crash
            self.left -= 1

    def open(self, path: StrPath) -> File:
        return DyingFile(super().open(path), self)

    def rename(self, old: StrPath, new: StrPath) -> None:
        self.change()
        super().rename(old, new)

    def unlink(self, path: StrPath) -> None:
        self.change()
        super().unlink(path)


class DyingFile:
    def __init__(self, file: File, files: DyingFiles) -> None:
        self.path = file.path
        self.pread = file.pread
        self.sync = file.sync
        self.sync_while_wanted = file.sync_while_wanted
        self.is_unreadable = file.is_unreadable
        self.data_extents = file.data_extents
        self.close = file.close
        self._file = file
        self._files = files

    def pwrite(self, data: Buffer, offset: int) -> None:
        self._files.change()
        self._file.pwrite(data, offset)


@pytest.mark.parametrize("anew", [False, True], ids=["cut", "anew"])
def test_a_crash_anywhere_in_a_cut_does_no_harm(
    tmp_path: Path, rng: random.Random, anew: bool
) -> None:
    """Whatever is left is a beginning of the writer's log, with its queues."""
    writer = two_epochs(tmp_path / "writer", rng)
    expected, died = whole_log(writer), 0
    for changes in range(100):
        files = DyingFiles()
        copy = open_copy(tmp_path, files)
        copy_all(writer, copy)
        copy.flush_log()
        copy.flush_queues()
        files.left = changes
        try:
            if anew:
                copy.reset_to(0)
            else:
                copy.truncate(places(writer)[40])
            break
        except Crash:
            died += 1
        finally:
            copy.abandon()
        again = open_copy(tmp_path)
        log = whole_log(again)
        assert log == expected[: len(log)]
        for topic, queue_id in again.queues():
            count = again.queue_bounds(topic, queue_id)[1]
            assert bodies(again, topic, queue_id) == bodies(writer, topic, queue_id)[:count]
        again.abandon()
    assert died >= 5
    copy = open_copy(tmp_path)
    copy_all(writer, copy)
    assert_copied(writer, copy)
    copy.abandon()
    writer.abandon()
    print(f"died in {died} places")

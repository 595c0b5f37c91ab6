from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import StoreForeignFile
from cometmq.store.checkpoint import Checkpoint, CheckpointFile, decode, load
from tests.support.stores import FaultyFiles


def test_the_bytes_are_rocketmqs() -> None:
    content = Checkpoint(1, 2, 3).encode()
    assert content[:24].hex() == "000000000000000100000000000000020000000000000003"
    assert content[24:] == bytes(4096 - 24)
    assert decode(content, Path("c")) == Checkpoint(1, 2, 3)


def test_restart_time_has_a_margin() -> None:
    assert Checkpoint(10_000, 9_000).restart_time_ms == 6_000
    assert Checkpoint(10_000, 0).restart_time_ms == 0


def test_a_checkpoint_of_another_size_is_foreign() -> None:
    with pytest.raises(StoreForeignFile, match="24 bytes"):
        decode(bytes(24), Path("checkpoint"))


def test_the_file_keeps_what_was_written(tmp_path: Path) -> None:
    files, path = FaultyFiles(), tmp_path / "checkpoint"
    assert load(files, path) == Checkpoint()
    file = CheckpointFile(files, path)
    files.synced.clear()
    file.write(Checkpoint(5, 4))
    assert files.synced == [str(path)]
    assert load(files, path) == file.current == Checkpoint(5, 4)
    assert path.stat().st_size == 4096
    with pytest.raises(AssertionError):
        file.write(Checkpoint(4, 4))
    assert CheckpointFile(files, path).current == Checkpoint(5, 4)

from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import StoreDamaged
from cometmq.store.metadata.checkpoint import Checkpoint, CheckpointFile, decode, load
from cometmq.store.metadata.recovery_point import QueueTotals, RecoveryPoint
from tests.support.stores.small_stores import FaultyFiles


def test_the_bytes_are_rocketmqs() -> None:
    content = Checkpoint(1, 2, 3).encode()
    assert content[:24].hex() == "000000000000000100000000000000020000000000000003"
    assert content[24:] == bytes(4096 - 24)
    assert decode(content, Path("c")) == Checkpoint(1, 2, 3)


MARK = RecoveryPoint.of(5000, 4000, b"r" * 900, QueueTotals(3, 12))


def test_a_mark_stands_behind_what_rocketmq_uses(tmp_path: Path) -> None:
    content = Checkpoint(1, 2, 3, 4, 5, 6, MARK).encode()
    assert content[:256] == Checkpoint(1, 2, 3, 4, 5, 6).encode()[:256]
    assert content[256:264] == b"cometmq1"
    assert not any(content[304:]), "all of it lies in one sector"
    assert decode(content, tmp_path) == Checkpoint(1, 2, 3, 4, 5, 6, MARK)


@pytest.mark.parametrize("at", [256, 270, 285, 303])
def test_a_mark_that_does_not_fit_its_seal_is_none(tmp_path: Path, at: int) -> None:
    content = bytearray(Checkpoint(1, 2, mark=MARK).encode())
    content[at] ^= 1
    assert decode(bytes(content), tmp_path) == Checkpoint(1, 2)


@pytest.mark.parametrize("at", [304, 311, 312, 315])
def test_a_reach_that_does_not_fit_its_seal_is_not_known(tmp_path: Path, at: int) -> None:
    content = bytearray(Checkpoint(1, 2, mark=MARK, reach=77).encode())
    assert decode(bytes(content), tmp_path) == Checkpoint(1, 2, mark=MARK, reach=77)
    content[at] ^= 1
    assert decode(bytes(content), tmp_path) == Checkpoint(1, 2, mark=MARK)


def test_restart_time_has_a_margin() -> None:
    assert Checkpoint(10_000, 9_000).restart_time_ms == 6_000
    assert Checkpoint(10_000, 0).restart_time_ms == 0


def test_a_checkpoint_of_another_size_is_refused_with_what_mends_it() -> None:
    with pytest.raises(StoreDamaged, match=r"24 bytes.*cometmq store repair"):
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

from __future__ import annotations

import os
from pathlib import Path

from services.namesrv.run_mark import RunMark


def test_an_end_in_order_leaves_nothing(tmp_path: Path) -> None:
    for _ in range(3):
        mark = RunMark(tmp_path / "kvConfig.json")
        assert not mark.begin()
        assert list(tmp_path.iterdir())
        mark.end()
        assert not list(tmp_path.iterdir())


def test_a_process_that_was_killed_is_seen_by_the_next(tmp_path: Path) -> None:
    killed = RunMark(tmp_path / "kvConfig.json")
    killed.begin()
    assert killed._file is not None
    os.close(killed._file)  # as the kernel does, with its lock
    after = RunMark(tmp_path / "kvConfig.json")
    assert after.begin()
    after.end()
    assert not RunMark(tmp_path / "kvConfig.json").begin()


def test_a_process_that_lives_is_not_taken_for_a_crash(tmp_path: Path) -> None:
    """Two that were given one file by mistake."""
    first, second = (RunMark(tmp_path / "kvConfig.json") for _ in range(2))
    assert not first.begin()
    assert not second.begin()
    second.end()
    assert list(tmp_path.iterdir()), "it is the first one's"


def test_without_a_folder_nothing_is_known_and_none_is_made(tmp_path: Path) -> None:
    mark = RunMark(tmp_path / "absent" / "kvConfig.json")
    assert not mark.begin()
    mark.end()
    assert not list(tmp_path.iterdir())

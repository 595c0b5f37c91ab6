"""The job's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from examples.roundtrip.stage import MARK, Folder


async def test_a_new_folder_is_made_and_marked(tmp_path: Path) -> None:
    await Folder(tmp_path / "a" / "run").renew()
    assert (tmp_path / "a" / "run" / MARK).exists()


async def test_an_earlier_run_is_cleared_away(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    await folder.renew()
    folder.copies.mkdir()
    (folder.copies / "old.py").touch()
    await folder.renew()
    assert os.listdir(tmp_path) == [MARK]


async def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="holds something else"):
        await Folder(tmp_path).renew()
    assert (tmp_path / "thesis.tex").exists()

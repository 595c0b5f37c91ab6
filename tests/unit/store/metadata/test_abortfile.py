from __future__ import annotations

import os
from pathlib import Path

from cometmq.store.disk.files import OsFiles
from cometmq.store.metadata import abortfile


def test_it_holds_the_number_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "abort"
    abortfile.write(OsFiles(), path, failed=False)
    assert path.read_text() == str(os.getpid())
    assert not abortfile.records_failure(OsFiles(), path)


def test_a_failure_is_noted_until_somebody_has_recovered(tmp_path: Path) -> None:
    path, files = tmp_path / "abort", OsFiles()
    abortfile.write(files, path, failed=False)
    abortfile.note_failure(files, path)
    assert path.read_text() == f"failed {os.getpid()}"
    assert abortfile.records_failure(files, path)
    abortfile.write(files, path, failed=True)
    assert abortfile.records_failure(files, path)
    abortfile.write(files, path, failed=False)
    assert not abortfile.records_failure(files, path)


def test_a_disk_that_lets_nothing_be_noted_is_not_asked_again(tmp_path: Path) -> None:
    abortfile.note_failure(OsFiles(), tmp_path / "none" / "abort")
    assert not abortfile.records_failure(OsFiles(), tmp_path / "none" / "abort")

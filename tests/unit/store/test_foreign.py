from __future__ import annotations

from pathlib import Path

import pytest

from cometmq.errors import StoreForeignFile
from cometmq.store.files import OsFiles
from cometmq.store.foreign import refuse_foreign_store, remove_leftovers
from cometmq.store.identity import CleanMark, Identity
from cometmq.store.layout import StorePaths

OPEN = Identity("id", "boot", None)
CLOSED = Identity("id", "boot", CleanMark(0, 0, 0, 0))


def check(root: Path, known: Identity | None) -> None:
    refuse_foreign_store(OsFiles(), StorePaths(root), known)


def test_an_empty_folder_is_anybodys(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"lock")
    (tmp_path / "abort").touch()  # a crash in the first second
    check(tmp_path, None)


@pytest.mark.parametrize("folder", ["commitlog", "consumequeue"])
def test_a_store_without_our_mark_is_rocketmqs(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    check(tmp_path, None)
    (tmp_path / folder / "00000000000000000000").touch()
    with pytest.raises(StoreForeignFile, match="not possible yet"):
        check(tmp_path, None)


def test_a_crash_of_ours_leaves_abort(tmp_path: Path) -> None:
    check(tmp_path, CLOSED)
    with pytest.raises(StoreForeignFile, match="opened and closed"):
        check(tmp_path, OPEN)
    (tmp_path / "abort").touch()
    check(tmp_path, OPEN)
    check(tmp_path, CLOSED)


@pytest.mark.parametrize("content", ["{}", '{"offsetTable":{"a@b":{0:1}}}', "", "[]", "null", "7"])
def test_a_snapshot_without_our_field_is_rocketmqs(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config" / "consumerOffset.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(StoreForeignFile, match="consumerOffset"):
        check(tmp_path, CLOSED)
    path.write_text('{"offsetTable":{"a@b":{0:1}},"cometmq": {"epoch": 1, "position": 0}}')
    check(tmp_path, CLOSED)


def test_leftovers_are_ours_alone(tmp_path: Path) -> None:
    (tmp_path / "cometmq.trash.0" / "0").mkdir(parents=True)
    for name in ("cometmq.next", "lost", "abort.bak"):
        (tmp_path / name).touch()
    remove_leftovers(OsFiles(), StorePaths(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["abort.bak", "lost"]

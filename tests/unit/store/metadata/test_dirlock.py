from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cometmq.errors import StoreFailed, StoreForbidden, StoreLocked
from cometmq.store.metadata.dirlock import DirectoryLock

HOLD = """
import sys
from pathlib import Path
from cometmq.store.metadata.dirlock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_opening_in_this_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = DirectoryLock(path)
    for _ in range(2):  # the refused one must not let the first one's lock go
        with pytest.raises(StoreLocked, match="this process"):
            DirectoryLock(path)
    lock.release()
    DirectoryLock(path).release()
    assert path.read_bytes() == b"lock"


def test_another_process_keeps_us_out_until_it_dies(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreLocked, match="another process"):
            DirectoryLock(path)
        holder.kill()
        holder.wait()
        DirectoryLock(path).release()


def test_a_missing_folder_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed):
        DirectoryLock(tmp_path / "none" / "lock")


def test_a_folder_of_another_user_is_not_called_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    path = tmp_path / "lock"
    with monkeypatch.context() as patch:
        patch.setattr("cometmq.store.metadata.dirlock.os.open", refused)
        for _ in range(2):  # and it is not held
            with pytest.raises(StoreForbidden, match=f"belongs to user {os.getuid()} .*drwx"):
                DirectoryLock(path)
    DirectoryLock(path).release()

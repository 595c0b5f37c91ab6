"""The main job of `make run` on a few small files: real processes, real exit status."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
LINES = 28_000
RATE = 800  # messages a second of a producer: long enough for both changes of the writer
EXTRA = all(importlib.util.find_spec(name) for name in ("pyspark", "pyarrow"))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    contents = {
        "empty.py": b"",
        "no end.txt": "ein\nzwäi".encode(),
        "pkg/dos.bat": b"one\r\n\r\ntwo\r\n",
        "pkg/many.py": b"".join(b"line %d\n" % n for n in range(LINES)),
        "pkg/image.gif": b"GIF89a\xff\xfe",
    }
    for name, data in contents.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "lib"


def roundtrip(library: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    module = ["-m", "examples.roundtrip", "--root", str(library), "--folder", str(folder)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COMETMQ_")}
    return subprocess.run(
        [sys.executable, *module, *more],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)  # of a machine that does other things too
def test_every_file_comes_back(library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    lag = [] if EXTRA else ["--no-lag"]
    result = roundtrip(library, folder, "--rate", str(RATE), *lag)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "all 4 files came back, byte for byte" in result.stdout
    assert "g1: member 0 handed over to member 1" in result.stdout
    assert "g1: member 1, the writer, was killed; member 0 took over: epoch" in result.stdout
    assert "g1: member 1 is back, a slave" in result.stdout
    assert result.stdout.count("the same") >= 4  # members' logs
    assert ("counted by `cometmq group progress` and by Spark" in result.stdout) == EXTRA
    copies = {p.relative_to(folder / "files") for p in (folder / "files").rglob("*") if p.is_file()}
    assert copies == {
        Path("empty.py"),
        Path("no end.txt"),
        Path("pkg/dos.bat"),
        Path("pkg/many.py"),
    }
    for name in copies:
        assert (folder / "files" / name).read_bytes() == (library / name).read_bytes()
    assert not (folder / "cluster" / "local.json").exists()  # nothing is left running


def test_a_folder_with_other_things_is_left_alone(library: Path, tmp_path: Path) -> None:
    result = roundtrip(library, library)
    assert result.returncode == 1
    assert "holds something else" in result.stdout
    assert (library / "empty.py").exists()

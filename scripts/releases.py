"""Earlier releases, as trees with environments of their own in ``build/releases``.

``python -m scripts.releases`` makes them ready and prints where they are. Their commits are in
``tests/releases/releases.toml``; at a release its commit is written there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMED = ROOT / "tests" / "releases" / "releases.toml"
BUILT = ROOT / "build" / "releases"
READY = ".ready"


class ReleaseMissing(Exception):
    """The tree cannot be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Program:
    """A release that can be started: ``python -m services.…`` in ``tree``."""

    name: str
    tree: Path
    python: Path


THIS = Program("this", ROOT, Path(sys.executable))


def earlier(name: str) -> Program:
    """A release of the list, made ready once. ReleaseMissing: its commit is not in this clone, or
    its packages cannot be had.
    """
    commit = tomllib.loads(NAMED.read_text())[name]
    tree = BUILT / commit[:12]
    program = Program(name, tree, tree / ".venv" / "bin" / "python")
    if not (tree / READY).exists():
        _make(commit, tree)
    return program


def _make(commit: str, tree: Path) -> None:
    BUILT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=BUILT) as folder:
        made = Path(folder) / "tree"
        _unpack(commit, made, Path(folder) / "tree.tar")
        shutil.rmtree(tree, ignore_errors=True)  # what an interrupted try has left
        made.rename(tree)
    # Not before: an environment stays where it was made.
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(tree / ".venv")}
    environment.pop("VIRTUAL_ENV", None)
    uv = [str(Path(sys.executable).with_name("uv")), "sync", "--quiet", "--frozen", "--no-dev"]
    command = [*uv, "--no-python-downloads", "--python", sys.executable]
    made_it = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if made_it.returncode:
        raise ReleaseMissing(f"the packages of {commit[:12]} are missing: {made_it.stderr[-300:]}")
    (tree / READY).touch()


def _unpack(commit: str, tree: Path, archive: Path) -> None:
    git = ["git", "-C", str(ROOT), "archive", "--output", str(archive), commit]
    try:
        found = subprocess.run(git, capture_output=True, text=True)
    except FileNotFoundError:
        raise ReleaseMissing("git is missing") from None
    if found.returncode:
        raise ReleaseMissing(
            f"commit {commit[:12]} is not in this clone (git fetch --unshallow): {found.stderr}"
        )
    with tarfile.open(archive) as packed:
        packed.extractall(tree, filter="data")


if __name__ == "__main__":
    for release in tomllib.loads(NAMED.read_text()):
        try:
            print(release, earlier(release).tree)
        except ReleaseMissing as error:
            print(error)

"""Class paths of Java programs that need jars from Maven: fetched and compiled when something
changed, kept under ``build``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

BUILD = Path(__file__).resolve().parents[1] / "build"
TOOLS = ("java", "javac", "mvn")
FETCH_S_MAX = 600


class JavaMissing(Exception):
    """Java or Maven is not here, or Maven cannot fetch the jars."""


def class_path(name: str, pom: Path, sources: Sequence[Path], folder: Path = BUILD) -> str:
    """Of the jars that ``pom`` depends on and the classes of ``sources``. Raises JavaMissing."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise JavaMissing(f"{missing[0]} is missing")
    jars = folder / f"{name}-{_digest([pom])}"
    classes = folder / f"{name}-{_digest([pom, *sources])}.classes"
    _once(jars, lambda draft: _fetch(pom, draft))
    classpath = [str(jar) for jar in sorted(jars.glob("*.jar"))]
    _once(classes, lambda draft: _compile(sources, classpath, draft))
    return os.pathsep.join([*classpath, str(classes)])


def _digest(paths: Sequence[Path]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:12]


def _once(folder: Path, make: Callable[[Path], None]) -> None:
    """Let ``make(draft)`` fill the folder, unless it is there. One process does it, others wait."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}.tmp")
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir()
            make(draft)
            draft.rename(folder)


def _fetch(pom: Path, folder: Path) -> None:
    done = _tool(
        *("mvn", "--quiet", "--batch-mode", "--file", str(pom), "dependency:copy-dependencies"),
        *("-DincludeScope=runtime", f"-DoutputDirectory={folder}"),
    )
    if done.returncode:
        reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), "")
        raise JavaMissing(f"Maven cannot fetch the jars: {reason[:200]}")


def _compile(sources: Sequence[Path], classpath: Sequence[str], folder: Path) -> None:
    command = ["javac", "-nowarn", "-d", str(folder), "-cp", os.pathsep.join(classpath)]
    done = _tool(*command, *map(str, sources))
    assert not done.returncode, done.stderr


def _tool(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S_MAX, check=False)

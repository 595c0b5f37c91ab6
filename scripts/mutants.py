"""``python -m scripts.mutants [WORD…]``: does a test notice when a rule is broken?

``mutants.toml`` lists faults of one line or two in the rules of ``docs/ARCHITECTURE.md``. Each is
made in a copy of the tree, where the tests that are named with it must fail. A fault that they do
not notice *survives*: then a test is missing. WORDs choose the mutants whose rule or file contains
one of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
TIMEOUT_S = 180.0  # a fault may make a test wait; pytest's own limit for one test is lower
TESTS_FAILED = 1  # exit code of pytest; others say that it could not play the tests


@dataclass(frozen=True, slots=True)
class Mutant:
    rule: str
    file: str
    find: str
    put: str
    tests: str  # arguments of pytest

    def apply(self, root: Path) -> str:
        """Make the fault in the tree at ``root``; a word when its text is not there just once."""
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.find) != 1:
            return f"TEXT FOUND {text.count(self.find)} TIMES"
        path.write_text(text.replace(self.find, self.put))
        return ""


def mutants() -> list[Mutant]:
    """All of the list."""
    return [Mutant(**entry) for entry in tomllib.loads(LIST.read_text())["mutant"]]


def copy_tree(target: Path) -> None:
    """The files that git knows, and the built C extension."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("cometmq/native/*.so")]
    for name in filter(lambda name: (ROOT / name).is_file(), names + built):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def play(root: Path, tests: str) -> tuple[int, str]:
    """pytest's exit code and output."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n0",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "60",
    ]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
    try:
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=root, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return TESTS_FAILED, "timeout"
    return done.returncode, done.stdout + done.stderr


def verdict(mutant: Mutant) -> str:
    """What becomes of the mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        root = Path(folder)
        copy_tree(root)
        if complaint := mutant.apply(root):
            return complaint
        code, output = play(root, mutant.tests)
    if code == TESTS_FAILED:
        return "killed"
    return "SURVIVED" if code == 0 else f"NOT PLAYED ({output.strip().splitlines()[-1:]})"


def main(words: list[str]) -> int:
    chosen = [m for m in mutants() if not words or any(w in f"{m.rule} {m.file}" for w in words)]
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_tree(Path(folder))
        code, output = play(Path(folder), " ".join(sorted({mutant.tests for mutant in chosen})))
    if code:
        print(f"the tests fail without a mutant too:\n{output}", file=sys.stderr)
        return 1
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        for mutant, found in zip(chosen, pool.map(verdict, chosen), strict=True):
            counts[found] += 1
            fault = " ".join(mutant.put.split()) or f"without {' '.join(mutant.find.split())}"
            print(f"{found:9} {mutant.rule} | {mutant.file}: {fault}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    return 0 if counts.keys() == {"killed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

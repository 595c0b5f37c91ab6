"""``python -m scripts.mutants [--share K/N] [WORD…]``: does a test notice when a rule is broken?

``mutants.toml`` lists faults of one line or two. A fault breaks a rule of ``docs/ARCHITECTURE.md``,
or a row of ``docs/invariants.md`` or ``docs/features.md``, or both; a row's own tests must fail.
Each fault is made in a copy of the tree. One that the tests do not notice *survives*: then a test
is missing. WORDs choose the mutants whose rule, row or file contains one of them; ``--share``
plays the Kth of N parts. At the end the rows are listed that no mutant breaks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
TIMEOUT_S = 180.0  # a fault may make a test wait; pytest's own limit for one test is lower
TESTS_FAILED = 1  # exit code of pytest; others say that it could not play the tests
DOCUMENTS = ("invariants", "features")
_TEST = re.compile(r"`(tests/[\w/]+(?:\.py)?(?:::\w+)*)`")


@dataclass(frozen=True, slots=True)
class Row:
    """A promise of a document, and the tests that it names."""

    document: str  # of DOCUMENTS
    promise: str  # its first column
    tests: tuple[str, ...]

    def names(self, test: str) -> bool:
        """Whether the row names this test, or the file or folder that it is in."""
        return any(
            test == one or test.startswith((f"{one}::", f"{one}/", f"{one}[")) for one in self.tests
        )


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault. ``row`` is ``document: the beginning of its promise``."""

    file: str
    find: str
    put: str
    tests: str = ""  # arguments of pytest; empty: all tests of the row
    rule: str = ""
    row: str = ""

    @property
    def title(self) -> str:
        return self.row or self.rule

    def apply(self, root: Path) -> str:
        """Make the fault in the tree at ``root``; a word when its text is not there just once."""
        path = root / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.find) != 1:
            return f"TEXT FOUND {text.count(self.find)} TIMES"
        path.write_text(text.replace(self.find, self.put))
        return ""


def mutants() -> list[Mutant]:
    """All of the list; one without tests has those of its row."""
    found = []
    for entry in tomllib.loads(LIST.read_text())["mutant"]:
        mutant = Mutant(**entry)
        if not mutant.tests:
            entry["tests"] = " ".join(row_of(mutant).tests)
        found.append(Mutant(**entry))
    return found


def rows() -> Iterator[Row]:
    """The rows of the documents that name a test."""
    for document in DOCUMENTS:
        for line in (ROOT / "docs" / f"{document}.md").read_text().splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
            if line.startswith("|") and (tests := _TEST.findall(cells[-1])):
                yield Row(document, cells[0], tuple(tests))


def row_of(mutant: Mutant) -> Row:
    """The row that the mutant breaks. ValueError: there is none, or more than one."""
    document, _, beginning = mutant.row.partition(": ")
    found = [
        row for row in rows() if row.document == document and row.promise.startswith(beginning)
    ]
    found = [row for row in found if row.promise == beginning] or found
    if len(found) != 1:
        raise ValueError(f"{len(found)} rows of {document}.md begin with {beginning!r}")
    return found[0]


def without_mutant(played: Sequence[Mutant]) -> list[Row]:
    """The rows that none of these mutants breaks."""
    broken = {row_of(mutant) for mutant in played if mutant.row}
    return [row for row in rows() if row not in broken]


def copy_tree(target: Path) -> None:
    """The files that git knows, and the built C extension."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    built = [str(path.relative_to(ROOT)) for path in ROOT.glob("cometmq/native/*.so")]
    for name in filter(lambda name: (ROOT / name).is_file(), names + built):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)


def play(root: Path, tests: str, timeout_s: float | None = TIMEOUT_S) -> tuple[int, str]:
    """pytest's exit code and output. A run that takes longer than ``timeout_s`` has failed."""
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
    environment = os.environ | {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(root),
        "TEST_PROFILE": "mutants",
    }
    try:
        done = subprocess.run(
            [*command, *tests.split()],
            cwd=root, env=environment, capture_output=True, text=True, timeout=timeout_s,
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


def failures(wanted: Sequence[Mutant]) -> str:
    """What pytest says when the tests of the mutants fail in the tree as it is."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy_tree(Path(folder))
        named = {test for mutant in wanted for test in mutant.tests.split()}
        code, output = play(Path(folder), " ".join(sorted(named)), None)
    return output if code else ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m scripts.mutants")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--share", default="1/1", help="K/N: the Kth of N parts, from 1")
    parser.add_argument(
        "--trust", action="store_true", help="do not play the tests without a mutant first"
    )
    said = parser.parse_args(arguments)
    part, parts = map(int, said.share.split("/"))
    every = mutants()
    wanted = [
        m
        for m in every
        if not said.words or any(w in f"{m.rule} {m.row} {m.file}" for w in said.words)
    ][part % parts :: parts]
    if not said.trust and (output := failures(wanted)):
        print(f"the tests fail without a mutant too:\n{output}", file=sys.stderr)
        return 1
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(int(os.environ.get("JOBS", "2"))) as pool:
        for mutant, found in zip(wanted, pool.map(verdict, wanted), strict=True):
            counts[found] += 1
            fault = " ".join(mutant.put.split()) or f"without {' '.join(mutant.find.split())}"
            print(f"{found:9} {mutant.title} | {mutant.file}: {fault}", flush=True)
    bare = without_mutant(every)
    for row in bare:
        print(f"no mutant breaks {row.document}: {row.promise}")
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    print(f"{len(bare)} of {len(list(rows()))} rows without a mutant")
    return 0 if counts.keys() <= {"killed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

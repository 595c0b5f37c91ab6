"""The source reads itself: facts that no tool checks for us. Each rule says why it is one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ROOT / "cometmq" / "v1"


def modules(*folders: str) -> list[Path]:
    """The hand-written modules below folders of the repository."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(p for p in found if GENERATED not in p.parents or p.name == "__init__.py")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name(path))


def imports(tree: ast.AST) -> Iterator[str]:
    """Names of the modules that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def importers(wanted: str, *folders: str) -> set[str]:
    """Modules in ``folders`` that import ``wanted`` or a part of it."""
    return {
        name(path)
        for path in modules(*folders)
        if any(found == wanted or found.startswith(f"{wanted}.") for found in imports(parse(path)))
    }


LIBRARY = ("cometmq", "services")


def test_the_rules_read_something() -> None:
    assert len(modules(*LIBRARY)) > 20
    assert importers("struct", "cometmq/format")


def test_time_comes_from_the_clock() -> None:
    """A test that hands in a clock must be sure that nobody looks past it."""
    assert importers("time", *LIBRARY) == {"cometmq/clock.py"}


@pytest.mark.parametrize("module", ["os", "mmap", "fcntl"])
def test_the_store_touches_the_machine_in_one_place(module: str) -> None:
    """Fault models live behind cometmq/store/disk/files.py; what goes past it is never tested."""
    allowed = {"cometmq/store/disk/files.py", "cometmq/store/metadata/dirlock.py"}
    assert importers(module, "cometmq/store") <= allowed


def test_mmap_flush_is_banned() -> None:
    """It holds the GIL for the whole msync: 100 ms and more in which nobody is served."""
    users = {ROOT / path for path in importers("mmap", *LIBRARY)}
    calls = {
        f"{name(path)}:{node.lineno}"
        for path in users
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr == "flush"
    }
    assert not calls


def test_the_program_does_not_know_its_tests() -> None:
    assert not importers("tests", *LIBRARY, "bench", "examples")


@pytest.mark.parametrize("service", sorted(p.name for p in (ROOT / "services").glob("*/")))
def test_few_modules_of_a_service_know_grpc(service: str) -> None:
    """The rest can be tested by plain calls, and read without knowing gRPC."""
    assert len(importers("grpc", f"services/{service}")) <= 3


def test_every_module_says_what_it_is() -> None:
    silent = {
        name(path)
        for path in modules(*LIBRARY, "bench", "examples", "scripts")
        if path.stat().st_size and not ast.get_docstring(parse(path))
    }
    assert not silent


def test_annotations_are_not_run() -> None:
    """The types of grpc.aio are generic in its stubs only."""
    needy = [path for path in modules(*LIBRARY) if path.stat().st_size]
    missing = {
        name(path)
        for path in needy
        if len(parse(path).body) > 1 and "__future__" not in set(imports(parse(path)))
    }
    assert not missing


def test_nothing_is_left_to_do_in_silence() -> None:
    """What is missing has an issue, not a comment."""
    mark = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    folders = (*LIBRARY, "bench", "examples", "scripts", "tests", "proto")
    found = {
        f"{name(path)}: {line.strip()}"
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".c", ".h", ".py", ".proto", ".sh"} and GENERATED not in path.parents
        for line in path.read_text(encoding="utf-8").splitlines()
        if mark.search(line)
    }
    assert not found


def test_no_unit_test_without_its_module() -> None:
    """tests/unit/<package>/test_<module>.py mirrors the module: one that moves takes it along.

    A test of several modules of a package is called after the package, one of its public surface
    `exports`, one of a document after that.
    """
    orphans = {
        name(test) for test in (ROOT / "tests/unit").rglob("test_*.py") if not _mirrored(test)
    }
    assert not orphans


def _mirrored(test: Path) -> bool:
    folder = test.parent.relative_to(ROOT / "tests" / "unit")
    subject = test.stem.removeprefix("test_")
    rooms = [ROOT / top / folder for top in ("cometmq", "services", "examples", "")]
    names = f"{subject}.py", f"__{subject}__.py", f"{subject}.c"
    modules = [room / name for room in rooms for name in names]
    document = ROOT / "docs" / f"{subject}.md"
    return subject in {folder.name, "exports"} or any(p.exists() for p in (document, *modules))

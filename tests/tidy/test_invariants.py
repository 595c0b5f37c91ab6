"""docs/invariants.md names modules and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTED = sorted(
    set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs/invariants.md").read_text()))
)


def defined(path: Path) -> set[str]:
    """Names that a test module defines at its top level."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


def test_the_proof_of_an_invariant_exists() -> None:
    assert len(LISTED) > 20
    names = {path: defined(ROOT / path) for path, _ in LISTED}
    assert not [(path, test) for path, test in LISTED if test not in names[path]]

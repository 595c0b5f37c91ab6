"""The index of rules in docs/ARCHITECTURE.md names functions that are there."""

from __future__ import annotations

import ast
import re

from tests.tidy.test_source import ROOT, parse

TITLE = "## Where is it decided?"


def decided() -> list[tuple[str, str]]:
    """Each file of the index with each function that the index names in it."""
    page = (ROOT / "docs/ARCHITECTURE.md").read_text()
    assert page.count(TITLE) == 1
    rows = re.findall(r"^\| [^|]*\? \| (.*) \|$", page.split(TITLE)[1], re.MULTILINE)
    assert len(rows) >= 30, "the index has the thirty rules that matter"
    found = []
    for row in rows:
        path = ""
        for name in re.findall(r"`([^`]+)`", row):
            if name.endswith(".py"):
                path = name
            else:
                found.append((path, name))
    return found


def test_rules_are_decided_where_the_index_says() -> None:
    for path, name in decided():
        body: list[ast.stmt] = parse(ROOT / path).body
        for part in name.split("."):
            named = [
                node
                for node in body
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and node.name == part
            ]
            assert named, f"{path} has no {name}"
            body = named[0].body

"""docs/cli.md promises the fields of every view; the two must not drift apart."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from cometmq.admin import views

DOCUMENT = (Path(__file__).resolve().parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
VIEWS = dict(inspect.getmembers(views, dataclasses.is_dataclass))


@pytest.mark.parametrize("name", sorted(VIEWS))
def test_every_field_is_documented(name: str) -> None:
    row = re.search(rf"^\| {name} \| (.*) \|$", DOCUMENT, re.M)
    chapter = re.search(rf"^### {name}\n(.*?)(?=^#|\Z)", DOCUMENT, re.M | re.S)
    found = row or chapter
    documented = re.findall(r"`(\w+)`", found.group(1)) if found else []
    assert documented == [field.name for field in dataclasses.fields(VIEWS[name])]


def test_no_view_is_documented_that_is_not_there() -> None:
    documented = re.findall(r"^(?:\| |### )(\w+View)\b", DOCUMENT, re.M)
    assert sorted(documented) == sorted(VIEWS)

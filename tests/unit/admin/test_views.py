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
    documented = re.findall(r"`(\w+)`", row.group(1)) if row else []
    assert documented == [field.name for field in dataclasses.fields(VIEWS[name])]


def test_no_view_is_documented_that_is_not_there() -> None:
    rows = set(re.findall(r"^\| (\w+View) \|", DOCUMENT, re.M))
    assert rows == set(VIEWS)

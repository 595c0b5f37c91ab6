"""The chart's dashboards and alert rules as tests see them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]
FILES = ROOT / "deploy/helm/cometmq/files"
RULES = FILES / "alerts.yaml"
DASHBOARDS = sorted((FILES / "dashboards").glob("*.json"))

_LABEL_VALUES = re.compile(r"label_values\((?:(?P<series>.+), )?(?P<label>\w+)\)")


@dataclass(frozen=True)
class Question:
    """A query of a dashboard. ``instant``: only the last value counts."""

    where: str
    expression: str
    instant: bool


@dataclass(frozen=True)
class Variable:
    """A variable that is filled by ``label_values(series, label)``."""

    name: str
    series: str
    label: str


def load(path: Path) -> dict[str, Any]:
    """A dashboard's JSON."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels but the headings of rows; those of collapsed rows too."""
    return [panel for panel in everything(board) if panel["type"] != "row"]


def everything(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Headings of rows, and all panels."""
    return [part for panel in board["panels"] for part in (panel, *panel.get("panels", []))]


def screens(board: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """What lies together: the board as it opens, and each collapsed row as it opens."""
    yield board["panels"]
    for panel in board["panels"]:
        if panel.get("panels"):
            yield panel["panels"]


def questions(board: dict[str, Any]) -> Iterator[Question]:
    """Every query of its panels and annotations."""
    for panel in panels(board):
        for target in panel["targets"]:
            where = f"{panel['title']} {target['refId']}"
            yield Question(where, target["expr"], target["instant"])
    for annotation in board["annotations"]["list"]:
        yield Question(annotation["name"], annotation["expr"], instant=True)


def variables(board: dict[str, Any]) -> Iterator[Variable]:
    """Its variables, but for the data source."""
    for found in board["templating"]["list"]:
        if found["type"] == "query":
            match = _LABEL_VALUES.fullmatch(found["query"]["query"])
            assert match, found["query"]
            yield Variable(found["name"], match["series"], match["label"])


def rules() -> list[dict[str, Any]]:
    """All alert rules."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]
